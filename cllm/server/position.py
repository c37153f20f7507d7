"""`X-Queue-Position`: how many went before an accepted request, itself included; 0 when it need not wait."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.engine.stream import Stream

HEADER = "X-Queue-Position"
_positions: ContextVar[list[int]] = ContextVar("positions")  # of the HTTP request that is being handled


def tell_position(streams: Sequence[Stream]) -> None:
    """The requests of this HTTP request were accepted: the last of them says how long the wait is."""
    if (positions := _positions.get(None)) is not None:
        positions[:] = [max(stream.queue_position for stream in streams)]


class QueuePosition:
    """Adds the header to answers whose route has told a position. Innermost of the middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        positions: list[int] = []
        _positions.set(positions)

        async def with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and positions:
                MutableHeaders(scope=message)[HEADER] = str(positions[0])
            await send(message)

        await self._app(scope, receive, with_header)
