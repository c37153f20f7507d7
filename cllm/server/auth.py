"""Who may ask for what: keys, and where operators' routes answer."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cllm.errors import ClientError, Forbidden, Unauthorized
from cllm.server.errors import error_body, status_of
from cllm.server.keys import KeyRing
from cllm.server.schema import SchedulingBody
from cllm.types import Tenant

log = logging.getLogger(__name__)

OPEN = "/health"  # the one path that never needs a key
ADMIN = ("/debug", "/admin", "/metrics", "/slots")
ANYBODY = Tenant(admin=True)  # where no keys are set


def is_loopback(host: str) -> bool:
    """True for an address only this machine can reach."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def tenant_of(connection: HTTPConnection) -> Tenant:
    """Whose request it is; put there by the gate."""
    tenant = connection.scope["state"]["tenant"]
    assert isinstance(tenant, Tenant)
    return tenant


def scheduling_of(connection: HTTPConnection, body: SchedulingBody) -> dict[str, Any]:
    """The fields of a `Request` that say whose it is and when it is computed."""
    return {**body.scheduling(), "tenant": tenant_of(connection).name}


class Gate:
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

    def _admit(self, scope: Scope) -> Tenant:
        path: str = scope["path"]
        operator = path.startswith(ADMIN)
        if not self._keys.closed:
            if operator and not self._loopback:
                raise Forbidden(
                    "this route answers on a loopback address only, unless API keys are set (--api-keys)"
                )
            return ANYBODY
        if path == OPEN:
            return Tenant()
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
