"""ASGI middleware: what every request passes before its route, and what its response gets.

Every scope is one of HTTP: the server has neither WebSockets nor a lifespan.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable
from functools import lru_cache, partial

from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.config import ServerConfig, split_list
from cllm.errors import ClientError, CllmError, Forbidden, InvalidRequest, Unauthorized
from cllm.frontend.async_calls import CALLER, Caller
from cllm.frontend.engine_registry import ModelLease
from cllm.limits import MAX_FILE_BYTES
from cllm.server.dialect import DialectTable, HttpError, respond
from cllm.server.keys import KeyRing
from cllm.types import TenantLimits

PAGE_FILES = "/page/"
OPEN = ("/health", "/v1/health", "/ready", "/")  # the paths that never need a key, beside files of the page
ADMIN = ("/debug", "/admin", "/metrics", "/slots", "/live", "/api/pull", "/api/delete", "/api/copy")
CHANGES = ("POST", "DELETE")  # the methods that change something
# That a page may read.
EXPOSED_HEADERS = ("Retry-After", "X-Queue-Position", "X-Stream-Id", "request-id", "x-request-id")
UPLOADS, SOUNDS = "/v1/files", "/v1/audio/transcriptions"
FORM_BYTES = 64 << 10  # of an upload, beside the file
LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
# In the scope: the server's own `send`, the one that adds headers, and the leases of the request's models.
DIRECT_SEND, ROUTE_SEND, LEASES = "cllm.direct_send", "cllm.route_send", "cllm.leases"


def is_loopback(host: str) -> bool:
    """True for an address, or several, that only this machine can reach."""
    if "," in host:
        return all(map(is_loopback, split_list(host)))
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


class RequestMiddleware:
    """Finds dialect and tenant of a request, refuses what no route may see, and releases its models.

    A foreign `Host` header is refused (403), which is how a rebound DNS name shows, and a missing one (400).
    A loopback listener accepts the names of this machine, its own address, and `allowed_hosts`. Any other
    listener accepts every name, unless `allowed_hosts` is set.

    With keys set, every route but `/health`, `/ready` and the page needs one. An operator is an admin's key,
    or any client of a loopback listener without keys. Operators' routes, and what changes the server's state
    on other routes, need one. The request's tenant is left in the scope's state, and in `CALLER`; its role
    says whether it is an operator.

    HEAD is answered as GET; the server leaves the body out. The server's own `send` is left in the scope: a
    stream's body need not pass the layers, which only look at its start.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        keys: KeyRing,
        dialects: DialectTable,
        count_refusal: Callable[[str], None],
    ) -> None:
        """`count_refusal` takes the error code of a request that is refused for its host or its key."""
        self._app = app
        self._keys = keys
        self._dialects = dialects
        self._count_refusal = count_refusal
        names = split_list(f"{config.host},{config.allowed_hosts}")
        self._allowed = {name.lower().rstrip(".") for name in names}
        local = is_loopback(config.host)
        self._checks_host = (local or bool(config.allowed_hosts)) and "*" not in self._allowed
        self._is_allowed = lru_cache(256)(self._parse_allowed)
        self._open = tuple(split_list(config.open_routes))  # of the operators' routes
        self._closed = keys.closed  # a keys file that is read again is never without keys
        self._keyless = TenantLimits(role="admin" if local else "user")
        self._max_bytes, self._max_header_bytes = config.max_body_bytes, config.max_header_kb << 10
        self._inner: ASGIApp = self._admit
        if origins := split_list(config.cors_origins):
            self._inner = CORSMiddleware(
                self._admit,
                allow_origins=origins,
                allow_origin_regex=LOCAL_ORIGIN if "localhost" in origins else None,
                allow_methods=["GET", "HEAD", "POST", "DELETE"],
                allow_headers=["*"],
                allow_private_network=True,
                expose_headers=EXPOSED_HEADERS,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the server's own scope says what it must leave out
        dialect = self._dialects.find(scope["path"])
        state = scope.setdefault("state", {})
        state["dialect"] = dialect
        scope[DIRECT_SEND] = send

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                if state.get("streaming"):
                    return  # the head of the stream was sent while its model was loaded
                state["status"] = message["status"]
                if (position := state.get("queue_position")) is not None:
                    MutableHeaders(scope=message)["X-Queue-Position"] = str(position)
                if dialect.id_header:
                    MutableHeaders(scope=message)[dialect.id_header] = f"req_{secrets.token_hex(12)}"
            await send(message)

        hosts = [value for name, value in scope["headers"] if name == b"host"]
        refusal: ClientError
        if len(hosts) != 1 and scope["http_version"] != "1.0":
            refusal = InvalidRequest("send exactly one Host header")
        elif self._checks_host and any(
            host and not self._is_allowed(host.decode("latin-1")) for host in hosts
        ):
            message = "this server does not accept this Host header: add its name to --allowed-hosts"
            refusal = Forbidden(message)
        else:
            await self._inner(scope, receive, send_with_headers)
            return
        self._count_refusal(refusal.code)
        await respond(scope, refusal)(scope, receive, send_with_headers)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the route for a tenant that may, with a body that is no larger than it may be."""
        path, state = scope["path"], scope["state"]
        try:
            state["tenant"] = self._authenticate(scope) if self._closed else self._keyless
            # A route of operators that is open to all may be read, not changed.
            if path.startswith(ADMIN) and not (path in self._open and scope["method"] == "GET"):
                check_operator(scope, "this route")
            CALLER.set(Caller(state["tenant"].name, partial(wait_for_disconnect, receive)))
            receive = self._limit_body(scope, receive)
        except CllmError as error:
            if isinstance(error, ClientError):
                self._count_refusal(error.code)
            await respond(scope, error)(scope, receive, send)
            return
        leases: list[ModelLease] = []
        scope[LEASES], scope[ROUTE_SEND] = leases, send
        try:
            await self._app(scope, receive, send)
        finally:
            for lease in leases:
                lease.release()

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

    def _limit_body(self, scope: Scope, receive: Receive) -> Receive:
        """Refuse large headers (431), bodies that are not plain JSON (415), and bodies over the limit (413).

        A web page of another origin must name the type (415), also without a body.

        Where the header has a length, it decides: the server reads no more than that. Else a body is counted
        as it streams in, before anything parses it.
        """
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in headers)
        values = dict(headers)
        kind = values.get(b"content-type", b"").partition(b";")[0].strip().lower()
        encoding = values.get(b"content-encoding", b"identity").strip().lower()
        length = values.get(b"content-length", b"")
        if size > self._max_header_bytes:
            message = f"the headers are over the limit of {self._max_header_bytes} bytes"
            raise HttpError(431, "headers_too_large", message)
        posts, typed = scope["method"] == "POST", kind == b"application/json"
        upload = posts and scope["path"] in (UPLOADS, SOUNDS) and kind == b"multipart/form-data"
        stored = upload and scope["path"] == UPLOADS
        max_bytes = MAX_FILE_BYTES + FORM_BYTES if stored else self._max_bytes
        # Any page can send a form, or no type at all, and no browser asks before; for a key it does.
        foreign = scope["method"] in CHANGES and b"authorization" not in values and _is_foreign_page(values)
        if not typed and ((posts and kind and not upload) or foreign):
            message = "the body must be JSON: send it with 'Content-Type: application/json'"
            message += ", or an 'Authorization' header" if upload else ""
            raise HttpError(415, "unsupported_media_type", message)
        if posts and encoding != b"identity":
            message = "the body must not be compressed: send it without 'Content-Encoding'"
            raise HttpError(415, "unsupported_media_type", message)
        if length.isdigit() and b"transfer-encoding" not in values:
            if int(length) > max_bytes:
                raise _too_large(max_bytes)
            return receive
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > max_bytes:
                raise _too_large(max_bytes)
            return message

        return counted


def _too_large(limit: int) -> HttpError:
    setting = "" if limit > MAX_FILE_BYTES else " (--max-body-mb)"
    return HttpError(413, "payload_too_large", f"the body is over the limit of {limit} bytes{setting}")


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected. Its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def check_operator(scope: Scope, what: str) -> None:
    """Raise Forbidden unless a request is an operator's; `what` needs one."""
    if not scope["state"]["tenant"].admin:
        raise Forbidden(f"{what} needs an admin's API key, or, without keys, a server on a loopback address")


def _is_foreign_page(headers: dict[bytes, bytes]) -> bool:
    """True for a request that a browser sends for a page of another origin."""
    if (site := headers.get(b"sec-fetch-site")) is not None:
        return site not in (b"same-origin", b"none")
    # Browsers leave that header out towards plain http:// addresses of other machines.
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")


def _get_key(scope: Scope) -> str | None:
    """The key of a request, as OpenAI's clients send it or as Anthropic's do."""
    headers = dict(reversed(scope["headers"]))  # the first of several counts
    if (given := headers.get(b"authorization")) is not None:
        scheme, _, key = given.decode("utf-8", "surrogateescape").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else None
    if (given := headers.get(b"x-api-key")) is not None:
        return str(given.decode("utf-8", "surrogateescape").strip())
    return None
