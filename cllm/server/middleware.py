"""ASGI middleware: response headers, trusted hosts, API keys, and limits on headers and bodies.

Every scope is one of HTTP: the server has neither WebSockets nor a lifespan.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable
from functools import lru_cache, partial

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.errors import ClientError, CllmError, Forbidden, InvalidRequest, Unauthorized
from cllm.frontend.async_calls import CALLER, Caller
from cllm.server.dialect import DialectTable, HttpError, respond
from cllm.server.keys import KeyRing
from cllm.types import TenantLimits

PAGE_FILES = "/page/"
OPEN = ("/health", "/v1/health", "/")  # the paths that never need a key, beside files of the page
ADMIN = ("/debug", "/admin", "/metrics", "/slots", "/live", "/api/pull", "/api/delete", "/api/copy")
DIRECT_SEND = "cllm.send"  # in the scope: the server's own `send`, without the layers around it

CountRefusal = Callable[[str], None]
"""Takes the error code of a request that middleware refused."""


def is_loopback(host: str) -> bool:
    """True for an address, or several, that only this machine can reach."""
    if "," in host:
        return all(map(is_loopback, split_list(host)))
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def split_list(setting: str) -> list[str]:
    """The items of a comma-separated setting."""
    return [item.strip() for item in setting.split(",") if item.strip()]


class HeadersMiddleware:
    """Finds the dialect of a request; adds `X-Queue-Position` and the dialect's own header. Outermost.

    HEAD is answered as GET; the server leaves the body out. The server's own `send` is left in the scope: a
    stream's body need not pass the layers, which only look at its start.
    """

    def __init__(self, app: ASGIApp, dialects: DialectTable) -> None:
        self._app = app
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the server's own scope says what it must leave out
        dialect = self._dialects.find(scope["path"])
        state = scope.setdefault("state", {})
        state["dialect"] = dialect
        scope[DIRECT_SEND] = send

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                position = state.get("queue_position")
                if position is not None:
                    MutableHeaders(scope=message)["X-Queue-Position"] = str(position)
                if dialect.id_header:
                    MutableHeaders(scope=message)[dialect.id_header] = f"req_{secrets.token_hex(12)}"
            await send(message)

        await self._app(scope, receive, send_with_headers)


class TrustedHostMiddleware:
    """Refuses a foreign `Host` header (403), which is how a rebound DNS name shows, and a missing one (400).

    A loopback listener accepts the names of this machine, its own address, and `allowed_hosts`. Any other
    listener accepts every name, unless `allowed_hosts` is set.
    """

    def __init__(self, app: ASGIApp, host: str, allowed_hosts: str, count_refusal: CountRefusal) -> None:
        self._app = app
        self._allowed = {name.lower().rstrip(".") for name in split_list(f"{host},{allowed_hosts}")}
        self._checks = (is_loopback(host) or bool(allowed_hosts)) and "*" not in self._allowed
        self._count_refusal = count_refusal
        self._is_allowed = lru_cache(256)(self._parse_allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 and scope["http_version"] != "1.0":
            await self._refuse(InvalidRequest("send exactly one Host header"), scope, receive, send)
        elif self._checks and any(host and not self._is_allowed(host.decode("latin-1")) for host in hosts):
            message = "this server does not accept this Host header: add its name to --allowed-hosts"
            await self._refuse(Forbidden(message), scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _refuse(self, error: CllmError, scope: Scope, receive: Receive, send: Send) -> None:
        self._count_refusal(error.code)
        await respond(scope, error)(scope, receive, send)

    def _parse_allowed(self, host: str) -> bool:
        if host.startswith("["):
            host, _, port = host[1:].partition("]")
            if port and not port.startswith(":"):
                return False
        elif host.count(":") == 1:
            host = host.rpartition(":")[0]
        name = host.lower().rstrip(".")
        if is_loopback(name) or name in self._allowed:
            return True
        _, _, domain = name.partition(".")
        return bool(domain) and f"*.{domain}" in self._allowed


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected. Its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class AuthMiddleware:
    """Denies by default: with keys set, every route but `/health` and the page needs one.

    An operator is an admin's key, or any client of a loopback listener without keys. Operators' routes, and
    what changes the server's state on other routes, need one. The request's tenant is left in the scope's
    state, and in `CALLER`; its role says whether it is an operator.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing, host: str, open_routes: str, count_refusal: CountRefusal
    ) -> None:
        self._app = app
        self._keys = keys
        self._open = tuple(split_list(open_routes))  # of the operators' routes
        self._closed = keys.closed  # a keys file that is read again is never without keys
        self._keyless = TenantLimits(role="admin" if is_loopback(host) else "user")
        self._count_refusal = count_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            state = scope["state"]
            state["tenant"] = self._authenticate(scope) if self._closed else self._keyless
            if self._for_operators(scope):
                check_operator(scope, "this route")
            CALLER.set(Caller(state["tenant"].name, partial(wait_for_disconnect, receive)))
        except ClientError as error:
            self._count_refusal(error.code)
            await respond(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _authenticate(self, scope: Scope) -> TenantLimits:
        if scope["path"] in OPEN or scope["path"].startswith(PAGE_FILES):
            return TenantLimits()
        key = _get_key(scope)
        tenant = self._keys.find(key or "")
        if key is None:
            raise Unauthorized("an API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
        if tenant is None:
            raise Unauthorized("the API key is wrong")
        return tenant

    def _for_operators(self, scope: Scope) -> bool:
        """True for a route of operators. One that is open to all may be read, not changed."""
        reads = scope["path"] in self._open and scope["method"] == "GET"
        return scope["path"].startswith(ADMIN) and not reads


def check_operator(scope: Scope, what: str) -> None:
    """Raise Forbidden unless a request is an operator's; `what` needs one."""
    if not scope["state"]["tenant"].admin:
        raise Forbidden(f"{what} needs an admin's API key, or, without keys, a server on a loopback address")


def _get_key(scope: Scope) -> str | None:
    """The key of a request, as OpenAI's clients send it or as Anthropic's do."""
    headers = dict(reversed(scope["headers"]))  # the first of several counts
    if (given := headers.get(b"authorization")) is not None:
        scheme, _, key = given.decode("utf-8", "surrogateescape").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else None
    if (given := headers.get(b"x-api-key")) is not None:
        return str(given.decode("utf-8", "surrogateescape").strip())
    return None


class BodyLimitMiddleware:
    """Refuses large headers (431), bodies that are not plain JSON (415), and bodies over the limit (413).

    Where the header has a length, it decides: the server reads no more than that. Else a body is counted as
    it streams in, before anything parses it.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_header_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in headers)
        values = dict(headers)
        kind = values.get(b"content-type", b"").partition(b";")[0].strip().lower()
        encoding = values.get(b"content-encoding", b"identity").strip().lower()
        length = values.get(b"content-length", b"")
        promised = length.isdigit() and b"transfer-encoding" not in values
        if size > self._max_header_bytes:
            message = f"the headers are over the limit of {self._max_header_bytes} bytes"
            refusal = HttpError(431, "headers_too_large", message)
        elif scope["method"] == "POST" and kind not in (b"", b"application/json"):
            # Without a type a body is not parsed at all: any page can send one without a preflight request.
            message = "the body must be JSON: send it with 'Content-Type: application/json'"
            refusal = HttpError(415, "unsupported_media_type", message)
        elif scope["method"] == "POST" and encoding != b"identity":
            message = "the body must not be compressed: send it without 'Content-Encoding'"
            refusal = HttpError(415, "unsupported_media_type", message)
        elif promised and int(length) > self._max_bytes:
            refusal = self._too_large
        else:
            await self._app(scope, receive if promised else self._counting(receive), send)
            return
        await respond(scope, refusal)(scope, receive, send)

    @property
    def _too_large(self) -> HttpError:
        message = f"the body is over the limit of {self._max_bytes} bytes (--max-body-mb)"
        return HttpError(413, "payload_too_large", message)

    def _counting(self, receive: Receive) -> Receive:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise self._too_large
            return message

        return counted
