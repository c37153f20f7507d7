"""By which name the server was called: a page that a browser shows must not reach it under another."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cllm.errors import Forbidden
from cllm.server.auth import is_loopback
from cllm.server.errors import error_body


def listed(setting: str) -> list[str]:
    """The items of a setting with commas between."""
    return [item.strip() for item in setting.split(",") if item.strip()]


class HostCheck:
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
