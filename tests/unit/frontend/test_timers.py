"""Timers: which fire, where the request is then, and that the clock is the monotonic one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from cllm import LLM
from cllm.config import EngineConfig
from cllm.errors import DeadlineExceeded, InvalidRequest
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.frontend.timers import Timers
from cllm.messages import Cancel
from cllm.testing import FakeRunner, expected_text
from cllm.types import FinishReason, Prompt, Request, SamplingParams
from tests.driver.thread_engine import BlockingOutputStream, ThreadExecutor, make_llm
from tests.unit.frontend.test_engine_client import ScriptedExecutor, last, read, token


def request(name: str, timeout_s: float | None = None, max_tokens: int = 8) -> Request:
    sampling = SamplingParams(ignore_eos=True)
    return Request(
        id=name, prompt=Prompt(tuple(b"hello")), max_tokens=max_tokens, timeout_s=timeout_s, sampling=sampling
    )


def code_of(stream: BlockingOutputStream) -> str | None:
    error = read(stream).error
    return error.code if error is not None else None


def test_in_the_queue_and_in_the_engine_the_client_hears_of_it_at_once() -> None:
    executor = ScriptedExecutor()
    engine = EngineClient(executor, queue_size=10)
    engine.start()
    # the one that waits is due first: else it would go to the engine when the others are gone
    streams = [
        engine.submit(request(f"r{n}", 0.05 if n == 4 else 0.3), BlockingOutputStream) for n in range(5)
    ]
    later = engine.submit(request("later"), BlockingOutputStream)
    executor.say(token("r0"))
    assert [code_of(stream) for stream in streams] == ["deadline_exceeded"] * 5
    assert {command.request_id for command in executor.sent if isinstance(command, Cancel)} == {
        "r0", "r1", "r2", "r3",
    }  # fmt: skip
    assert "r4" not in executor.submitted() and executor.submitted()[-1] == "later"
    executor.say(last("r0"), last("later"))  # what the engine says of one that has ended is ignored
    assert read(later).finish_reason is FinishReason.STOP
    assert engine.requests == ()
    engine.stop()


def test_the_servers_limit_holds_for_who_asks_for_more_or_for_nothing() -> None:
    executor = ScriptedExecutor()
    engine = EngineClient(executor, max_timeout_s=0.05)
    engine.start()
    for timeout_s in (None, 3600.0):
        assert (
            code_of(engine.submit(request(f"r{timeout_s}", timeout_s), BlockingOutputStream))
            == "deadline_exceeded"
        )
    engine.stop()


def test_a_long_prefill_is_stopped_by_its_deadline_and_the_neighbour_is_whole() -> None:
    """On the real loop; each step takes half a second unless it is interrupted."""
    engine = EngineClient(ThreadExecutor(lambda _: FakeRunner(sequences=2, step_s=0.5), EngineConfig()))
    engine.start()
    engine.loaded.result(5)
    long = Request(id="long", prompt=Prompt(tuple(b"x" * 60)), max_tokens=4, timeout_s=0.1)
    late = engine.submit(long, BlockingOutputStream)
    neighbour = engine.submit(request("neighbour", max_tokens=3), BlockingOutputStream)
    assert code_of(late) == "deadline_exceeded"
    assert "".join(delta.text for delta in neighbour) == expected_text(b"hello", 3, ends=False)
    snapshot = engine.inspect().result(10)
    assert (snapshot.leases, snapshot.cells_used) == ((), 0)
    engine.stop()


def test_on_an_event_loop_the_end_comes_on_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[int]:
        engine = EngineClient(ScriptedExecutor())
        engine.deliver = asyncio.get_running_loop().call_soon_threadsafe
        engine.start()
        stream = engine.submit(request("r0", 0.05), AsyncOutputStream)
        threads: list[int] = []
        wake = stream._wake

        def noted() -> None:
            threads.append(threading.get_ident())
            wake()

        monkeypatch.setattr(stream, "_wake", noted)
        deltas = [delta async for delta in stream]
        assert deltas[-1].error is not None and deltas[-1].error.code == "deadline_exceeded"
        engine.stop()
        return threads

    assert asyncio.run(run()) == [threading.get_ident()]


def wait_for(fired: list[str], count: int) -> None:
    deadline = time.monotonic() + 10
    while len(fired) < count and time.monotonic() < deadline:
        time.sleep(0.005)


@pytest.fixture
def fired() -> list[str]:
    return []


@pytest.fixture
def timers(fired: list[str]) -> Iterator[Timers[str]]:
    timers = Timers(fired.append)
    yield timers
    timers.stop()


def test_a_request_that_ends_in_time_leaves_nothing_behind(timers: Timers[str], fired: list[str]) -> None:
    for number in range(10_000):
        timers.set(f"r{number}", time.monotonic() + 3600)
        timers.cancel(f"r{number}")
    assert not timers._due and len(timers._heap) <= Timers.SPARE
    due = time.monotonic() + 0.02
    for name, at in (("third", due + 0.02), ("first", due), ("removed", due), ("second", due + 0.01)):
        timers.set(name, at)
    timers.cancel("removed")
    wait_for(fired, 3)
    assert fired == ["first", "second", "third"]
    timers.stop()
    timers.set("after the end", 0.0)
    assert timers._thread is not None
    timers._thread.join(5)
    assert not timers._thread.is_alive() and fired == ["first", "second", "third"]


def test_a_timer_set_again_fires_once_at_its_new_time(timers: Timers[str], fired: list[str]) -> None:
    now = time.monotonic()
    for at in (0.05, 3600.0, 0.01):
        timers.set("moved", now + at)
    timers.set("later", now + 0.1)
    wait_for(fired, 2)
    assert fired == ["moved", "later"]


@pytest.mark.parametrize("far", [float("inf"), float("nan"), 1e300, threading.TIMEOUT_MAX * 2])
def test_a_time_without_end_stops_no_other_timer(timers: Timers[str], fired: list[str], far: float) -> None:
    timers.set("far", time.monotonic() + far)
    time.sleep(0.01)  # it is the earliest, so the thread waits for it
    timers.set("near", time.monotonic() + 0.01)
    wait_for(fired, 1)
    assert fired == ["near"]
    assert timers._thread is not None and timers._thread.is_alive()


def test_a_timer_that_fails_stops_no_other() -> None:
    fired: list[str] = []

    def fire(name: str) -> None:
        fired.append(name)
        raise OSError(name)

    timers = Timers(fire)
    for number in range(3):
        timers.set(f"r{number}", time.monotonic() + 0.01 * number)
    wait_for(fired, 3)
    assert fired == ["r0", "r1", "r2"]
    timers.stop()


def test_an_endless_timeout_ends_no_later_one() -> None:
    engine = EngineClient(ScriptedExecutor(), max_timeout_s=float("inf"))
    engine.start()
    endless = engine.submit(request("endless", float("inf")), BlockingOutputStream)
    late = engine.submit(request("late", 0.05), BlockingOutputStream)
    assert code_of(late) == "deadline_exceeded"
    assert not endless.finished
    engine.stop()


def test_fifty_thousand_timers_cost_no_more_each(timers: Timers[str]) -> None:
    far = time.monotonic() + 3600

    def renew_s(count: int) -> float:
        """Computing time to cancel one of `count` timers and set another, and so on for all of them."""
        for number in range(count):
            timers.set(f"r{number}", far + number % 7)
        started = time.thread_time()
        for number in range(count):
            timers.cancel(f"r{number}")
            timers.set(f"n{number}", far)
        return (time.thread_time() - started) / count

    few = min(renew_s(2000) for _ in range(3))
    assert renew_s(50_000) < 10 * few, "25 times as many; 25 times the work for each if they were searched"
    assert len(timers._heap) <= 2 * len(timers._due) + Timers.SPARE


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_the_python_api_names_a_timeout_that_makes_no_sense(timeout: float) -> None:
    with make_llm(LLM, lambda _: FakeRunner(step_s=0.02)) as llm:
        with pytest.raises(InvalidRequest, match="timeout"):
            llm.generate("x", timeout=timeout)
        with pytest.raises(DeadlineExceeded, match=r"0\.1 s"):
            llm.generate("x", SamplingParams(ignore_eos=True), max_tokens=500, timeout=0.1)
        assert llm.generate("x", SamplingParams(ignore_eos=True), max_tokens=2, timeout=60)[0].tokens
