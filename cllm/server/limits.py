"""Limits on what is read from a client, kept while it is read."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.server.errors import error_body


class RequestLimits:
    """Refuses large headers (431), bodies that are not JSON (415), and bodies over the limit (413).

    A body is counted as it streams in, before anything parses it.
    """

    def __init__(self, app: ASGIApp, most_bytes: int, most_header_bytes: int) -> None:
        self._app = app
        self._most = most_bytes
        self._most_header = most_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (refusal := _refusal(scope, self._most_header)) is not None:
            await refusal(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._most:
                    # No error of ours: FastAPI makes a 400 of any other that reading a body raises.
                    raise HTTPException(
                        413, f"the body is over the limit of {self._most} bytes (--max-body-mb); send less"
                    )
            return message

        await self._app(scope, counted, send)


def _refusal(scope: Scope, most_header_bytes: int) -> JSONResponse | None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    target = len(scope.get("raw_path", b"")) + len(scope["query_string"])
    if target + sum(len(name) + len(value) for name, value in headers) > most_header_bytes:
        message = f"the headers are over the limit of {most_header_bytes} bytes"
        return JSONResponse(error_body(scope["path"], 431, "headers_too_large", message), 431)
    kind = dict(headers).get(b"content-type", b"").partition(b";")[0].strip().lower()
    # Without a type a body is not parsed at all: a page of any origin may send one, no browser asks first.
    if scope["method"] == "POST" and kind not in (b"", b"application/json"):
        message = "the body must be JSON: send it with 'Content-Type: application/json'"
        return JSONResponse(error_body(scope["path"], 415, "unsupported_media_type", message), 415)
    return None
