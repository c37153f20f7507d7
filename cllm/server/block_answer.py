"""An answer told in blocks, whole or as named events: what `/v1/responses` and `/v1/messages` share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cllm.server.blocks import Blocks
from cllm.server.chat import ChatJob, Step
from cllm.server.sse import GONE, EventStream, encode_named
from cllm.text.reply import ReplyEvent
from cllm.types import Delta

Event = dict[str, Any]


class BlockAnswer(ABC):
    """One answer, built while it comes. A whole one is what the events of a streamed one add up to."""

    def __init__(self) -> None:
        self._blocks = Blocks()

    @abstractmethod
    def start(self) -> list[Event]:
        """The events before anything was generated."""

    @abstractmethod
    def add(self, events: Sequence[ReplyEvent], delta: Delta) -> list[Event]:
        """Take in a step; returns its events in order."""

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The answer as far as it has come."""

    def whole(self, steps: Sequence[Step]) -> dict[str, Any]:
        """The answer to a call that does not stream."""
        for events, delta in steps:
            self._blocks.add(events, delta)
        return self.body()

    async def chunks(self, job: ChatJob) -> AsyncIterator[bytes]:
        """The events as bytes, as they come."""
        yield _encoded(self.start())
        async for _, events, delta in job.events():
            if told := self.add(events, delta):
                yield _encoded(told)

    async def to(self, http: Request, job: ChatJob, *, stream: bool) -> Response | dict[str, Any]:
        """The answer to a call, as it asked for it."""
        if stream:
            return EventStream(job.engine, job.streams, self.chunks(job))
        answers = await job.steps(http.receive)
        return Response(status_code=GONE) if answers is None else self.whole(answers[0])


def _encoded(events: Sequence[Event]) -> bytes:
    return b"".join(encode_named(event["type"], event) for event in events)
