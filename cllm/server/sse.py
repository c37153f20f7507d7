"""Server-sent events as bytes, and what to do when the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cllm.engine.engine import Engine
from cllm.engine.stream import AsyncStream
from cllm.errors import from_code
from cllm.types import Delta, FinishReason

_encoder = msgspec.json.Encoder()


def encode(event: Any) -> bytes:
    """One event."""
    return b"data: " + _encoder.encode(event) + b"\n\n"


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(engine: Engine, stream: AsyncStream, receive: Receive) -> list[Delta]:
    """All deltas of a request, cancelling it if the client leaves. Raises the error it ended with."""

    async def read() -> list[Delta]:
        return [delta async for delta in stream]

    reader = asyncio.ensure_future(read())
    watcher = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({reader, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not reader.done():
            engine.cancel(stream.request_id)
        deltas = await reader
    finally:
        engine.cancel(stream.request_id)
        for task in (reader, watcher):
            task.cancel()
    last = deltas[-1]
    if last.finish_reason is FinishReason.ERROR:
        assert last.error is not None
        raise from_code(last.error.code, last.error.message)
    return deltas


class EventStream(Response):
    """A request's deltas as events. However it ends, the request is cancelled if it still runs."""

    media_type = "text/event-stream"

    def __init__(
        self, engine: Engine, stream: AsyncStream, render: Callable[[AsyncStream], AsyncIterator[bytes]]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._engine = engine
        self._stream = stream
        self._render = render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            sender = asyncio.ensure_future(self._send_events(send))
            watcher = asyncio.ensure_future(wait_for_disconnect(receive))
            try:
                await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                sender.cancel()
                watcher.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await sender
        finally:
            self._engine.cancel(self._stream.request_id)

    async def _send_events(self, send: Send) -> None:
        async for chunk in self._render(self._stream):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
