"""Replies in blocks, as `/v1/responses` and `/v1/messages` have them: whole or as named events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cllm.chat.reply import ParsedOutput, ReplyBuilder
from cllm.chat.session import ChatSession
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.protocol.base import StructResponse
from cllm.server.sse import COMMENT, GONE, EventStream, collect, encode_named
from cllm.text.output_parser import OutputEvent
from cllm.types import RequestOutput


class StreamEvent(msgspec.Struct):
    """An event; clients listen for it by its type, which also decides what else it has."""

    type: str


class BlockRenderer(ABC):
    """Renders one reply while it is built. A whole response is what its events add up to."""

    beat: ClassVar[bytes] = COMMENT  # what a stream sends while there is nothing to send

    def __init__(self) -> None:
        self._reply = ReplyBuilder()

    @abstractmethod
    def start(self) -> list[StreamEvent]:
        """The events before any output."""

    @abstractmethod
    def add(self, events: Sequence[OutputEvent], output: RequestOutput) -> list[StreamEvent]:
        """Add a step; returns its events in order."""

    @abstractmethod
    def body(self) -> msgspec.Struct:
        """The response as far as it has come."""

    def whole(self, steps: Sequence[ParsedOutput]) -> Any:
        """The response to a call that does not stream."""
        self._reply = ReplyBuilder(steps)
        return self.body()

    async def chunks(self, session: ChatSession[AsyncOutputStream]) -> AsyncIterator[bytes]:
        """The encoded events, as they arrive."""
        yield encode_events(self.start())
        async for _, events, output in session.events():
            if rendered := self.add(events, output):
                yield encode_events(rendered)

    async def respond(
        self, http: Request, session: ChatSession[AsyncOutputStream], *, stream: bool
    ) -> Response:
        """The HTTP response, whole or streamed."""
        if stream:
            return EventStream(session.engine, session.streams, self.chunks(session), self.beat)
        outputs = await collect(session.engine, session.streams, http)
        if outputs is None:
            return Response(status_code=GONE)
        return StructResponse(self.whole(session.parse(outputs[0])))


def encode_events(events: Sequence[StreamEvent]) -> bytes:
    return b"".join(encode_named(event.type, event) for event in events)
