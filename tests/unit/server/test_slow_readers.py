"""FAULTS 34 without a kernel's help: what waits for a reader is bounded, in bytes and in time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from cllm.config import EngineConfig
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.dialects.cllm import events
from cllm.server.sse import EventStream
from cllm.types import FinishReason, Prompt, Request, SamplingParams
from tests.driver.fake_runner import FakeRunner, expected_text
from tests.driver.thread_engine import ThreadExecutor

ENDLESS = SamplingParams(ignore_eos=True)


def ask(name: str, max_tokens: int) -> Request:
    return Request(id=name, prompt=Prompt(tuple(name.encode())), max_tokens=max_tokens, sampling=ENDLESS)


def running(**options: Any) -> EngineClient:
    return EngineClient(ThreadExecutor(lambda _: FakeRunner(**options), EngineConfig()))


async def test_too_much_unread_ends_that_stream_alone() -> None:
    engine = running(sequences=2, cells=8192, step_s=0.0005)
    engine.unread_limit = 5000
    engine.start(asyncio.get_running_loop())
    await asyncio.wrap_future(engine.loaded)
    never_read = engine.submit(ask("never read", 4000), AsyncOutputStream)
    other = engine.submit(ask("other", 300), AsyncOutputStream)
    text = "".join([delta.text async for delta in other])
    assert text == expected_text(b"other", 300, ends=False)
    while not never_read.finished:
        await asyncio.sleep(0.01)
    left = [delta async for delta in never_read]
    assert left[-1].error is not None and left[-1].error.code == "slow_reader"
    assert sum(len(delta.text) for delta in left) < 1100, "five bytes for each token"
    assert engine.metrics.slow_readers._value.get() == 1
    snapshot = await asyncio.wrap_future(engine.inspect())
    assert (snapshot.leases, snapshot.cells_used) == ((), 0)
    await asyncio.get_running_loop().run_in_executor(None, engine.stop)


async def test_a_client_that_takes_nothing_is_left_after_the_limit() -> None:
    engine = running(step_s=0.002)
    engine.start(asyncio.get_running_loop())
    await asyncio.wrap_future(engine.loaded)
    stream = engine.submit(ask("stuck", 1000), AsyncOutputStream)
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 3:
            await asyncio.Event().wait()  # as uvicorn does while the socket takes no more

    async def receive() -> Any:
        await asyncio.Event().wait()

    state = SimpleNamespace(state=SimpleNamespace(slow_reader_s=0.3, reconnect_s=0.0))
    response = EventStream(engine, [stream], events(stream))
    async with asyncio.timeout(30):
        await response({"type": "http", "app": state}, receive, send)
    assert len(sent) == 4
    assert engine.metrics.slow_readers._value.get() == 1
    async with asyncio.timeout(30):
        last = [delta async for delta in stream][-1]
    assert last.finish_reason is FinishReason.CANCELLED
    await asyncio.get_running_loop().run_in_executor(None, engine.stop)
