"""Deadlines of requests: where the request is then, and that the others go on."""

from __future__ import annotations

import asyncio

from cllm.config import EngineConfig
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.messages import Cancel
from cllm.types import FinishReason, Prompt, Request, SamplingParams
from tests.driver.fake_runner import FakeRunner, expected_text
from tests.driver.thread_engine import BlockingEngine, BlockingOutputStream, ThreadExecutor
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
    engine = BlockingEngine(executor, queue_size=10)
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
    engine = BlockingEngine(executor, max_timeout_s=0.05)
    engine.start()
    for timeout_s in (None, 3600.0):
        assert (
            code_of(engine.submit(request(f"r{timeout_s}", timeout_s), BlockingOutputStream))
            == "deadline_exceeded"
        )
    engine.stop()


def test_a_long_prefill_is_stopped_by_its_deadline_and_the_neighbour_is_whole() -> None:
    """On the real loop; each step takes half a second unless it is interrupted."""
    engine = BlockingEngine(ThreadExecutor(lambda _: FakeRunner(sequences=2, step_s=0.5), EngineConfig()))
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


async def test_on_an_event_loop_a_deadline_leaves_no_timer_behind() -> None:
    executor = ScriptedExecutor()
    engine = EngineClient(executor)
    engine.start(asyncio.get_running_loop())
    await asyncio.sleep(0)
    stream = engine.submit(request("late", 0.05), AsyncOutputStream)
    in_time = engine.submit(request("in time", 3600.0), AsyncOutputStream)
    handle = engine._queue.states["in time"].deadline
    executor.say(last("in time"))
    outputs = [output async for output in stream]
    assert outputs[-1].error is not None and outputs[-1].error.code == "deadline_exceeded"
    assert handle is not None and handle.cancelled() and in_time.finished
    engine.stop()


def test_an_endless_timeout_ends_no_later_one() -> None:
    engine = BlockingEngine(ScriptedExecutor(), max_timeout_s=float("inf"))
    engine.start()
    endless = engine.submit(request("endless", float("inf")), BlockingOutputStream)
    late = engine.submit(request("late", 0.05), BlockingOutputStream)
    assert code_of(late) == "deadline_exceeded"
    assert not endless.finished
    engine.stop()
