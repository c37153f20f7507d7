"""The live feed over HTTP, and the end of a request by an admin."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cllm.errors import CllmError, NotFound
from cllm.server.errors import respond
from cllm.server.live import LiveFeed
from cllm.server.middleware import DIRECT_SEND, wait_for_disconnect
from cllm.server.protocol.admin import CancelledResponse
from cllm.server.protocol.base import StructResponse, documented
from cllm.server.submit import get_registry

router = APIRouter(tags=["operation"])
_NO_REQUEST = (
    "not_found",
    "no request of this id waits or runs: GET /debug/requests lists them",
    "It has ended, or was never here",
)


class LiveStream(Response):
    """The events of the live feed, until the client leaves or the server drains."""

    media_type = "text/event-stream"

    def __init__(self, feed: LiveFeed) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send(scope, receive, send))
        watcher = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sender, watcher):
                task.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sender

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._feed.listen() as events:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                send = scope.get(DIRECT_SEND, send)
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except CllmError as error:
            await respond(HttpRequest(scope), error)(scope, receive, send)


@router.get("/live", include_in_schema=False)
async def live(http: HttpRequest) -> Response:
    """What the server does, once a second, after an hour of history."""
    return LiveStream(http.app.state.live)


@router.post(
    "/admin/requests/{request_id}/cancel",
    **documented(CancelledResponse("chatcmpl-8f0c2d7e"), errors={404: _NO_REQUEST}),
)
async def cancel(request_id: str, http: HttpRequest) -> Response:
    """End a request that waits or runs; its client gets what there is of the answer."""
    if not get_registry(http).cancel(request_id):
        raise NotFound(_NO_REQUEST[1])
    return StructResponse(CancelledResponse(request_id))
