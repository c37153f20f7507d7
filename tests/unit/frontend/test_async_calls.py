"""A tokenizer task of a client: in its tenant's line, and dropped when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, cast

import pytest

from cllm.errors import ClientGone, TokenizerBusy
from cllm.frontend import async_calls
from cllm.frontend.async_calls import CALLER, Caller, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.messages import Text, TokenizerAnswer, TokenizerTask, TokenizeTexts

TASK = TokenizeTexts(("hello",))


class Engine:
    """An engine client whose tokenizer answers when the test says so."""

    def __init__(self) -> None:
        self.tokenizer = self.metrics = self.refused = self
        self.future: Future[TokenizerAnswer] = Future()
        self.tenants: list[str] = []
        self.aborted: list[Future[TokenizerAnswer]] = []
        self.counted: list[str] = []

    def submit(self, task: TokenizerTask, tenant: str = "") -> Future[TokenizerAnswer]:
        self.tenants.append(tenant)
        return self.future

    def abort(self, future: Future[TokenizerAnswer]) -> None:
        self.aborted.append(future)

    def labels(self, code: str) -> Engine:
        self.counted.append(code)
        return self

    def inc(self) -> None:
        pass

    def run(self) -> Coroutine[Any, Any, Text]:
        return run_tokenizer(cast(EngineClient, self), TASK, Text)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(async_calls, "WATCH_AFTER_S", 0.01)
    return Engine()


async def never() -> None:
    await asyncio.Event().wait()


async def at_once() -> None:
    pass


async def test_the_answer_comes_however_late(engine: Engine) -> None:
    CALLER.set(Caller("alice", never))
    asyncio.get_running_loop().call_later(0.05, engine.future.set_result, Text("done"))
    assert await asyncio.wait_for(engine.run(), 10) == Text("done")
    assert engine.tenants == ["alice"] and engine.aborted == []


async def test_a_client_that_leaves_drops_its_task(engine: Engine) -> None:
    CALLER.set(Caller("alice", at_once))
    with pytest.raises(ClientGone):
        await asyncio.wait_for(engine.run(), 10)
    assert engine.aborted == [engine.future]
    assert engine.future.cancelled()


async def test_a_cancelled_caller_drops_its_task(engine: Engine) -> None:
    CALLER.set(Caller())
    running = asyncio.ensure_future(engine.run())
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert engine.aborted == [engine.future]


async def test_a_refusal_is_counted_and_raised(engine: Engine) -> None:
    CALLER.set(Caller("alice", never))
    engine.future.set_exception(TokenizerBusy("later"))
    with pytest.raises(TokenizerBusy):
        await asyncio.wait_for(engine.run(), 10)
    assert engine.counted == ["tokenizer_busy"] and engine.aborted == []
