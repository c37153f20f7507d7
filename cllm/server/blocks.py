"""Replies in blocks, as `/v1/responses` and `/v1/messages` have them: whole or as named events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request

from cllm.chat.reply import BlockEvent, ReplyBuilder
from cllm.chat.session import ChatSession
from cllm.server.dialect import COMMENT, encode_named
from cllm.server.sse import EventStream, collect
from cllm.types import RequestOutput

StreamEvent = dict[str, Any]  # clients listen for it by its `type`, which also decides what else it has


def make_event(kind: str, /, **fields: Any) -> StreamEvent:
    return {"type": kind, **fields}


class BlockRenderer(ABC):
    """Renders one reply while it is built. A whole response is what its events add up to."""

    beat: ClassVar[bytes] = COMMENT  # what a stream sends while there is nothing to send

    def __init__(self, reply: ReplyBuilder) -> None:
        self._reply = reply

    @abstractmethod
    def start(self) -> list[StreamEvent]:
        """The events before any output."""

    @abstractmethod
    def render(self, changes: Sequence[BlockEvent], output: RequestOutput) -> list[StreamEvent]:
        """The events of a step, in order; the reply has its changes already."""

    @abstractmethod
    def body(self) -> msgspec.Struct:
        """The response as far as it has come."""

    async def chunks(self, session: ChatSession) -> AsyncIterator[bytes]:
        """The encoded events, as they arrive."""
        yield encode_events(self.start())
        async for _, changes, output in session.steps():
            if rendered := self.render(changes, output):
                yield encode_events(rendered)

    async def respond(self, http: Request, session: ChatSession, *, stream: bool) -> Any:
        """The HTTP response, whole or streamed."""
        if stream:
            return EventStream(session.engine, session.streams, self.chunks(session), self.beat)
        outputs = await collect(session.engine, session.streams, http)
        session.finish(outputs)
        return self.whole()

    def whole(self) -> Any:
        """The response to a call that does not stream, its reply finished."""
        return self.body()


def encode_events(events: Sequence[StreamEvent]) -> bytes:
    return b"".join(encode_named(event["type"], event) for event in events)
