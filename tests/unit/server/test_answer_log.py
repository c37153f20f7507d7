"""Logs of answers: bounded in bytes, followed from any event, ended without readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from cllm.errors import InvalidRequest, NotFound, QueueFull, SlowReader
from cllm.server import answer_log
from cllm.server.answer_log import AnswerLog, AnswerLogs
from cllm.server.dialects.openai import openai
from cllm.server.middleware import LEASES

EVENT = b"data: %d\n\n"


class Answer:
    """An answer whose events the test gives, in a log."""

    def __init__(self, logs: AnswerLogs, name: str = "a", linger_s: float = 60.0, **more: Any) -> None:
        self.cancelled, self.released = asyncio.Event(), 0
        self._chunks: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        engine: Any = SimpleNamespace(cancel=lambda _: self.cancelled.set())
        streams: Any = [SimpleNamespace(request_id=name)]
        self.log = AnswerLog(logs, name, "t", engine, streams, linger_s, **more)
        scope = {LEASES: [SimpleNamespace(release=self._release)], "state": {"dialect": openai}}
        self.log.start(self._read(), scope)
        assert not scope[LEASES]

    def _release(self) -> None:
        self.released += 1

    async def _read(self) -> AsyncIterator[bytes]:
        while (chunk := await self._chunks.get()) is not None:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def end(self, *chunks: bytes | Exception) -> None:
        for chunk in (*chunks, None):
            self._chunks.put_nowait(chunk)
        await self.log.ended.wait()

    async def read(self, after: int = -1) -> list[bytes]:
        return b"".join([each async for each in self.log.follow(after)]).split(b"\n\n")[:-1]


async def test_readers_follow_from_any_event() -> None:
    answer = Answer(logs := AnswerLogs())
    early = asyncio.ensure_future(answer.read())
    await answer.end(EVENT % 0 + EVENT % 1, b":\n\n", EVENT % 2)
    ids = [b"id: a.%d\ndata: %d" % (number, number) for number in range(3)]
    assert await early == ids == await answer.read()
    log, after = logs.find("t", "", "a.1")
    assert log is answer.log and await answer.read(after) == ids[2:]
    assert answer.released == 1 and await answer.read(7) == []


async def test_only_the_tenant_finds_its_log() -> None:
    answer = Answer(logs := AnswerLogs())
    with pytest.raises(NotFound):
        logs.find("other", "a")
    for last in ("a", "b.1", "a.x", f"a.{10**11}"):
        with pytest.raises(InvalidRequest):
            logs.find("t", "a", last)
    await answer.end()


async def test_old_events_of_a_long_answer_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_log, "MAX_LOG_BYTES", 1000)
    answer = Answer(logs := AnswerLogs())
    await answer.end(*(EVENT % number for number in range(200)))
    assert answer.log.size == logs.size <= 1000
    assert (await answer.read(190))[0] == b"id: a.191\ndata: 191"
    with pytest.raises(SlowReader, match="not kept any more"):
        await answer.read()


async def test_ended_answers_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_log, "MAX_LOGS_BYTES", 1000)
    monkeypatch.setattr(answer_log, "SMALL_BYTES", 100)
    logs = AnswerLogs()
    answers = [Answer(logs, name) for name in "abc"]
    for answer in answers[:2]:
        await answer.end(b"data: %b\n\n" % (b"x" * 400))
    await answers[2].end(*[b"data: %b\n\n" % (b"x" * 400)] * 3)
    assert logs.get("t", "a") is None and logs.get("t", "b") is None and logs.size <= 1000


async def test_a_log_that_was_replaced_does_not_count() -> None:
    logs = AnswerLogs()
    old, new = Answer(logs), Answer(logs)
    await old.end(EVENT % 0)
    assert logs.size == 0
    await new.end(EVENT % 0)
    assert logs.size == new.log.size > 0


async def test_an_answer_without_readers_is_cancelled_then_forgotten() -> None:
    answer = Answer(logs := AnswerLogs(), linger_s=0.01)
    answer.log.enter()
    answer.log.leave()
    await answer.cancelled.wait()
    await answer.end()
    while logs.get("t", "a") is not None:
        await asyncio.sleep(0)
    background = Answer(logs, "b", 0.0, describe=dict)
    await asyncio.sleep(0.01)
    assert not background.cancelled.is_set()
    await background.end()


async def test_an_error_of_the_answer_is_its_last_event() -> None:
    for error in (QueueFull(1, 1, 1.0), RuntimeError("secret")):
        answer = Answer(AnswerLogs())
        await answer.end(EVENT % 0, error)
        first, last = await answer.read()
        assert b"error" in last and b"secret" not in last and first.startswith(b"id: a.0")
        assert answer.cancelled.is_set() and answer.released == 1
