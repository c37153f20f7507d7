"""Hold: what an HTTP request keeps until its response has ended: the leases on its models.

While a model is loaded for a request that streams, the head of its stream is sent, and comments. What the
route answers then is a stream that goes on, or an error, which becomes an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.errors import ClientGone
from cllm.frontend.engine_registry import Lease
from cllm.server.middleware import wait_for_disconnect
from cllm.server.protocol.base import EVENTS
from cllm.server.sse import BEAT_S, COMMENT, STREAM_HEADERS, encode, encode_named

HEAD_AFTER_S = 1.0  # an error that is known by then has a status of its own
_SCOPE = "cllm.hold"


class Hold:
    """The leases of one HTTP request, and its stream where that was begun before the route answered."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._path: str = scope["path"]
        self._receive = receive
        self._send = send
        self._leases: list[Lease] = []
        self._begun = False  # the head of a stream has been sent
        self._error: bytearray | None = None  # the body of an error that follows it

    async def wait(self, loading: Coroutine[Any, Any, Lease], *, stream: bool) -> Lease:
        """Wait for a lease; a `stream` shows that it is alive. Raises ClientGone where the client leaves."""
        task = asyncio.ensure_future(loading)
        leaving = asyncio.ensure_future(wait_for_disconnect(self._receive))
        try:
            while not task.done():
                beat_s = BEAT_S if self._begun else HEAD_AFTER_S
                await asyncio.wait(
                    (task, leaving), timeout=beat_s if stream else None, return_when=asyncio.FIRST_COMPLETED
                )
                if leaving.done() and not task.done():
                    raise ClientGone("the client disconnected")
                if stream and not task.done():
                    await self._beat()
            return self.add(task.result())
        except BaseException:
            task.add_done_callback(_release)
            task.cancel()
            raise
        finally:
            leaving.cancel()

    def add(self, lease: Lease) -> Lease:
        """Keep a lease to the end of the response."""
        self._leases.append(lease)
        return lease

    def release(self) -> None:
        for lease in self._leases:
            lease.release()

    async def _beat(self) -> None:
        if not self._begun:
            headers = [(b"content-type", f"{EVENTS}; charset=utf-8".encode()), *STREAM_HEADERS]
            self._begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def send(self, message: Message) -> None:
        """Send what the route answers; after a head that has been sent, the rest of it."""
        if not self._begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._error = None if kind.startswith(EVENTS.encode()) else bytearray()
        elif self._error is None:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send(
                    {"type": "http.response.body", "body": make_event(self._path, bytes(self._error))}
                )


def _release(task: asyncio.Task[Lease]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().release()


def make_event(path: str, body: bytes) -> bytes:
    """The body of an error response as the last event of a route's stream."""
    error = msgspec.json.decode(body)
    if path.startswith("/v1/messages"):
        return encode_named("error", error)
    if path.endswith("/responses"):
        inner = error["error"]
        shown = {name: inner.get(name) for name in ("code", "message", "param")}
        return encode_named("error", {"type": "error", "sequence_number": 0, **shown})
    if path.startswith("/generate"):
        return encode({"id": "", "error": error["error"], "message": error["message"], "done": True})
    return encode(error)


def get_hold(scope: Scope) -> Hold:
    """The hold of a request."""
    hold = scope[_SCOPE]
    assert isinstance(hold, Hold)
    return hold


class HoldMiddleware:
    """Gives every HTTP request its `Hold`, and releases that when the response has ended. Innermost."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_SCOPE] = hold = Hold(scope, receive, send)
        try:
            await self._app(scope, receive, hold.send)
        finally:
            hold.release()
