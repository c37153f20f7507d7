"""Who may ask for what: keys, and where operators' routes answer."""

from __future__ import annotations

import ipaddress
import logging
import secrets
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.errors import ClientError, Forbidden, Unauthorized
from cllm.frontend.output_stream import OutputStream
from cllm.server.errors import error_body, status_of
from cllm.server.keys import KeyRing
from cllm.server.protocol.base import SchedulingBody
from cllm.types import TenantLimits

log = logging.getLogger(__name__)

OPEN = "/health"  # the one path that never needs a key
ADMIN = ("/debug", "/admin", "/metrics", "/slots")
ANYBODY = TenantLimits(role="admin")  # where no keys are set


def is_loopback(host: str) -> bool:
    """True for an address only this machine can reach."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def tenant_of(connection: HTTPConnection) -> TenantLimits:
    """Whose request it is; put there by the gate."""
    tenant = connection.scope["state"]["tenant"]
    assert isinstance(tenant, TenantLimits)
    return tenant


def scheduling_of(connection: HTTPConnection, body: SchedulingBody) -> dict[str, Any]:
    """The fields of a `Request` that say whose it is and when it is computed."""
    return {**body.scheduling(), "tenant": tenant_of(connection).name}


class AuthMiddleware:
    """Deny by default: with keys set, everything but `/health` needs one, operators' routes an admin's.

    Without keys, operators' routes answer on a loopback listener only.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, host: str, refused: Callable[[str], None]) -> None:
        self._app = app
        self._keys = keys
        self._loopback = is_loopback(host)
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope.setdefault("state", {})["tenant"] = self._admit(scope)
            except ClientError as error:
                self._refused(error.code)
                status = status_of(error)
                headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
                body = error_body(scope["path"], status, error.code, error.message)
                await JSONResponse(body, status, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> TenantLimits:
        path: str = scope["path"]
        operator = path.startswith(ADMIN)
        if not self._keys.closed:
            if operator and not self._loopback:
                raise Forbidden(
                    "this route answers on a loopback address only, unless API keys are set (--api-keys)"
                )
            return ANYBODY
        if path == OPEN:
            return TenantLimits()
        key = _key(scope)
        tenant = self._keys.find(key or "")
        if key is None:
            raise Unauthorized("an API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
        if tenant is None:
            raise Unauthorized("the API key is wrong")
        if operator and not tenant.admin:
            raise Forbidden("this route needs an admin's API key")
        return tenant


def _key(scope: Scope) -> str | None:
    """The key a client sent: OpenAI's way, or Anthropic's."""
    headers = dict(reversed(scope["headers"]))  # the first of several counts
    if (given := headers.get(b"authorization")) is not None:
        scheme, _, key = given.decode("utf-8", "surrogateescape").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else None
    if (given := headers.get(b"x-api-key")) is not None:
        return str(given.decode("utf-8", "surrogateescape").strip())
    return None


class BodyLimitMiddleware:
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


HEADER = "X-Queue-Position"
_positions: ContextVar[list[int]] = ContextVar("positions")  # of the HTTP request that is being handled


def tell_position(streams: Sequence[OutputStream]) -> None:
    """The requests of this HTTP request were accepted: the last of them says how long the wait is."""
    if (positions := _positions.get(None)) is not None:
        positions[:] = [max(stream.queue_position for stream in streams)]


class QueuePositionMiddleware:
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


def listed(setting: str) -> list[str]:
    """The items of a setting with commas between."""
    return [item.strip() for item in setting.split(",") if item.strip()]


class TrustedHostMiddleware:
    """Refuses a foreign `Host` (403): by it a rebound DNS name is known.

    A loopback listener knows the names of this machine, its own address, and `allowed_hosts`. Any other
    listener may be called by any name, unless `allowed_hosts` says by which.
    """

    def __init__(self, app: ASGIApp, host: str, allowed_hosts: str, refused: Callable[[str], None]) -> None:
        self._app = app
        self._allowed = {name.lower().rstrip(".") for name in (host, *listed(allowed_hosts))}
        self._checks = (is_loopback(host) or bool(allowed_hosts)) and "*" not in self._allowed
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._checks:
            # No browser leaves the header out; a plain program may.
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host" and value]
            if not all(map(self._knows, given)):
                self._refused(Forbidden.code)
                message = "this server does not answer to that Host; --allowed-hosts says to which it does"
                body = error_body(scope["path"], 403, Forbidden.code, message)
                await JSONResponse(body, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, given: str) -> bool:
        name = _without_port(given).lower().rstrip(".")
        if is_loopback(name) or name in self._allowed:
            return True
        _, _, domain = name.partition(".")
        return bool(domain) and f"*.{domain}" in self._allowed


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


class RequestIDMiddleware:
    """Adds the header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/messages"):
            await self._app(scope, receive, send)
            return

        async def with_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["request-id"] = f"req_{secrets.token_hex(12)}"
            await send(message)

        await self._app(scope, receive, with_header)
