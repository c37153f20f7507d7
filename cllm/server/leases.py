"""Leases on models that an HTTP request keeps until its response has ended.

While a model is loaded for a request that streams, the head of its stream is sent, and comments. What the
route answers then is a stream that goes on, or an error, which is the stream's last frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.errors import ClientGone
from cllm.frontend.engine_registry import ModelLease
from cllm.server.dialect import COMMENT, EVENTS
from cllm.server.middleware import wait_for_disconnect
from cllm.server.sse import BEAT_S, STREAM_HEADERS

HEAD_AFTER_S = 1.0  # an error that is known by then has a status of its own
_SCOPE = "cllm.leases"


class ModelLeases:
    """The leases of one HTTP request, and its stream where that was begun before the route answered."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state: dict[str, Any] = scope["state"]
        self._receive = receive
        self._send = send
        self._leases: list[ModelLease] = []

    async def wait(self, loading: Coroutine[Any, Any, ModelLease], *, stream: bool) -> ModelLease:
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

    def add(self, lease: ModelLease) -> ModelLease:
        """Keep a lease to the end of the response."""
        self._leases.append(lease)
        return lease

    def release(self) -> None:
        for lease in self._leases:
            lease.release()

    @property
    def _begun(self) -> bool:
        """Whether the head of a stream has been sent."""
        return bool(self._state.get("streaming"))

    async def _beat(self) -> None:
        if not self._begun:
            headers = [(b"content-type", f"{EVENTS}; charset=utf-8".encode()), *STREAM_HEADERS]
            self._state["streaming"] = True
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def send(self, message: Message) -> None:
        """Send what the route answers, without a second head."""
        if message["type"] != "http.response.start" or not self._begun:
            await self._send(message)


def _release(task: asyncio.Task[ModelLease]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().release()


def get_leases(scope: Scope) -> ModelLeases:
    """The leases of a request."""
    leases = scope[_SCOPE]
    assert isinstance(leases, ModelLeases)
    return leases


class LeaseMiddleware:
    """Gives every HTTP request its `ModelLeases`, and releases them after the response. Innermost."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_SCOPE] = leases = ModelLeases(scope, receive, send)
        try:
            await self._app(scope, receive, leases.send)
        finally:
            leases.release()
