"""Server-sent events as bytes, and what to do when the client has gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cllm.errors import from_code
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.errors import respond
from cllm.server.middleware import tell_position
from cllm.types import Failure, RequestOutput

_encoder = msgspec.json.Encoder()
GONE = 499  # the status of an answer that nobody is there to read
DIRECT = "cllm.send"  # in the scope: the server's own `send`, without what middleware wrapped around it


class DirectSend:
    """Outermost around an app: lets streams pass by the middleware, which cares for their start only."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT] = send
        await self._app(scope, receive, send)


def encode(event: Any) -> bytes:
    """One event."""
    return b"data: " + _encoder.encode(event) + b"\n\n"


def encode_named(name: str, event: Any) -> bytes:
    """One event of a kind that clients listen for by name."""
    return b"event: " + name.encode() + b"\n" + encode(event)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(
    engine: EngineClient, streams: Sequence[AsyncOutputStream], receive: Receive
) -> list[list[RequestOutput]] | None:
    """All deltas of each request, or None if the client left: then they are cancelled.

    Raises the first error a request ended with; the others are cancelled too.
    """

    async def read(stream: AsyncOutputStream) -> list[RequestOutput]:
        deltas = [delta async for delta in stream]
        if (failure := deltas[-1].error) is not None:
            raise from_code(failure.code, failure.message)
        return deltas

    tell_position(streams)
    reader = asyncio.gather(*map(read, streams))
    # Cancelled because the client has left, it would complain that nobody looked at its error.
    reader.add_done_callback(lambda done: done.cancelled() or done.exception())
    watcher = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        either: set[asyncio.Future[Any]] = {reader, watcher}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return await reader if reader.done() else None
    finally:
        watcher.cancel()
        reader.cancel()
        for stream in streams:
            engine.cancel(stream.request_id)


async def merged(streams: Sequence[AsyncOutputStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The deltas of several streams as they come, each with its stream's index."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, RequestOutput]] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: AsyncOutputStream) -> None:
        async for delta in stream:
            await queue.put((index, delta))

    pumps = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    left = len(streams)
    try:
        while left:
            index, delta = await queue.get()
            left -= delta.finish_reason is not None
            yield index, delta
    finally:
        for task in pumps:
            task.cancel()


async def first_failure(streams: Sequence[AsyncOutputStream]) -> Failure | None:
    """Wait until one of the streams has something; why it failed, if that is all it has."""
    waiting = [asyncio.ensure_future(stream.begun()) for stream in streams]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    return next((stream.failure for stream in streams if stream.failure is not None), None)


class EventStream(Response):
    """Requests' deltas as events. However it ends, the requests are cancelled if they still run.

    The head is sent with the first event: what fails before that is an answer with its own status, not an
    event. A client that takes nothing for `slow_reader_s` (of the app's state) is left.
    """

    media_type = "text/event-stream"

    def __init__(
        self, engine: EngineClient, streams: Sequence[AsyncOutputStream], events: AsyncIterator[bytes]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._engine = engine
        self._streams = streams
        self._events = events
        self._stuck_since: float | None = None  # the client has taken nothing since then

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tell_position(self._streams)
        sender = asyncio.ensure_future(self._send(scope, receive, send))
        watcher = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            limit_s: float = scope["app"].state.slow_reader_s
            both = {sender, watcher}
            while not (await asyncio.wait(both, timeout=limit_s / 4, return_when=asyncio.FIRST_COMPLETED))[0]:
                if self._stuck_since is not None and time.monotonic() - self._stuck_since > limit_s:
                    self._engine.metrics.slow_readers.inc()
                    break
        finally:
            watcher.cancel()
            sender.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sender
            for stream in self._streams:
                self._engine.cancel(stream.request_id)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (failure := await first_failure(self._streams)) is not None:
            answer = respond(Request(scope), from_code(failure.code, failure.message))
            await answer(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        send = scope.get(DIRECT, send)
        async for chunk in self._events:
            self._stuck_since = time.monotonic()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._stuck_since = None
        self._stuck_since = time.monotonic()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
