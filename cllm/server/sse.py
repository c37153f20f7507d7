"""Server-sent events, and the end of requests whose client has disconnected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cllm.errors import from_code
from cllm.frontend.async_calls import merged
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.errors import respond
from cllm.server.middleware import DIRECT_SEND, wait_for_disconnect
from cllm.types import Failure, RequestOutput

_encoder = msgspec.json.Encoder()
GONE = 499  # the status of a response whose client has disconnected
DONE = b"data: [DONE]\n\n"


def encode(event: Any) -> bytes:
    """One event."""
    return b"data: " + _encoder.encode(event) + b"\n\n"


def encode_named(name: str, event: Any) -> bytes:
    """One event with a name, which clients listen for."""
    return b"event: " + name.encode() + b"\n" + encode(event)


async def cancel_on_disconnect(
    engine: EngineClient, streams: Sequence[AsyncOutputStream], receive: Receive
) -> None:
    """Wait until the client has disconnected, then cancel its requests."""
    await wait_for_disconnect(receive)
    for stream in streams:
        engine.cancel(stream.request_id)


async def collect(
    engine: EngineClient, streams: Sequence[AsyncOutputStream], http: Request
) -> list[list[RequestOutput]] | None:
    """All outputs of each request, or None if the client disconnected: then the requests are cancelled.

    Raises the first error a request ended with; the others are cancelled too.
    """
    http.scope["state"]["queue_position"] = max(stream.queue_position for stream in streams)
    outputs: list[list[RequestOutput]] = [[] for _ in streams]
    watcher = asyncio.ensure_future(cancel_on_disconnect(engine, streams, http.receive))
    try:
        async for index, output in merged(streams):
            if output.error is not None:
                raise from_code(output.error.code, output.error.message)
            outputs[index].append(output)
        return None if watcher.done() else outputs
    except BaseException:
        for stream in streams:
            engine.cancel(stream.request_id)
        raise
    finally:
        watcher.cancel()


async def first_failure(streams: Sequence[AsyncOutputStream]) -> Failure | None:
    """Wait for the first output of any stream; returns its failure, if it is one."""
    waiting = [asyncio.ensure_future(stream.begun()) for stream in streams]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    return next((stream.failure for stream in streams if stream.failure is not None), None)


class EventStream(Response):
    """The outputs of requests as server-sent events. When it ends, requests that still run are cancelled.

    The head is sent with the first event: a failure before that is a response with its own status, not an
    event. A client that reads nothing for `slow_reader_s` (of the app's state) is disconnected.
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
        self._stuck_since: float | None = None  # the client has read nothing since then

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        position = max(stream.queue_position for stream in self._streams)
        scope.setdefault("state", {})["queue_position"] = position
        sender = asyncio.ensure_future(self._send(scope, receive, send))
        watcher = asyncio.ensure_future(cancel_on_disconnect(self._engine, self._streams, receive))
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
        send = scope.get(DIRECT_SEND, send)
        async for chunk in self._events:
            self._stuck_since = time.monotonic()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._stuck_since = None
        self._stuck_since = time.monotonic()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
