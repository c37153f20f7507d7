"""A client's connection with limits: time to send, bytes of header, number of connections."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import deque
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from cllm.config import ServerConfig
from cllm.server.errors import error_body

log = logging.getLogger(__name__)

SPARE_DESCRIPTORS = 32  # for child processes that must be replaced, and for files
READ_AT_ONCE = 1 << 20  # bytes of a body that are read in one turn of the event loop
LINGER_S = 1.0  # closing at once on a client that still sends would reset the response away


class ConnectionLimits(msgspec.Struct, frozen=True):
    """The limits of one connection, and of their number."""

    header_s: float
    body_s: float
    header_bytes: int
    body_bytes: int  # what a body may have is passed on together: each piece wakes the application
    connections: int


def make_limits(config: ServerConfig) -> ConnectionLimits:
    """The configured limits, with no more connections than there are file descriptors for."""
    return ConnectionLimits(
        config.header_timeout_s,
        config.body_timeout_s,
        config.max_header_kb << 10,
        config.max_body_mb << 20,
        min(config.max_connections, _descriptors_left(config.max_connections)),
    )


def _descriptors_left(wanted: int) -> int:
    """How many connections can be open at a time. Raises the soft limit of descriptors where it must."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = sum(1 for _ in Path("/dev/fd").iterdir())
    except OSError:
        used = 64
    needed = used + SPARE_DESCRIPTORS + wanted
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        except (OSError, ValueError):
            pass  # then the limit stays
    left = wanted if soft == resource.RLIM_INFINITY else max(1, soft - used - SPARE_DESCRIPTORS)
    if left < wanted:
        log.warning("file descriptors allow %d connections at a time, not %d (ulimit -n)", left, wanted)
    return left


class ReadTurns:
    """Reads large bodies one after the other, a piece in each turn of the event loop.

    The loop by itself would read all that has arrived before it looks at another client. Only a connection
    with a whole piece at hand waits here, so a slow client holds up no other.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Transport, FlowControl]] = deque()

    def wait(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, flow: FlowControl, *, first: bool
    ) -> None:
        """Pause a connection that has read a piece: its first, or one of the body that is being read."""
        flow.pause_reading()
        if not self._waiting:
            loop.call_soon(self._resume_next, loop)
        (self._waiting.append if first else self._waiting.appendleft)((transport, flow))

    def _resume_next(self, loop: asyncio.AbstractEventLoop) -> None:
        transport, flow = self._waiting.popleft()
        if not transport.is_closing():
            flow.resume_reading()
        if self._waiting:
            loop.call_soon(self._resume_next, loop)


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's connection, with deadlines for what the client sends.

    A header must be complete `header_s` after the connection is made, or after the first byte that follows a
    response; a body `body_s` after its header, however steadily it drips. A late client gets a 408.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        turns: ReadTurns,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._limits = limits
        self._turns = turns
        self._deadline: asyncio.TimerHandle | None = None
        self._in_header = True
        self._header_bytes = 0
        self._hung_up = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            message = f"{self._limits.connections} connections are open, which is the limit; try again"
            transport.write(_make_response("/", 503, "too_many_connections", message))
            transport.close()
            return
        self._set_deadline(self._limits.header_s, "header")

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._hung_up:
            return
        if self._in_header:
            idle = not self.pipeline and (self.cycle is None or self.cycle.response_complete)
            if idle and self._deadline is None:
                self._set_deadline(self._limits.header_s, "header")
            self._header_bytes += len(data)
        super().data_received(data)
        # The application measures a complete header; this one may never be complete.
        if self._in_header and self._header_bytes > self._limits.header_bytes:
            message = f"the headers are over the limit of {self._limits.header_bytes} bytes"
            self._hang_up(431, "headers_too_large", message)

    def on_headers_complete(self) -> None:
        self._in_header = False
        super().on_headers_complete()
        self.headers = []  # of trailers, which follow the body: the scope does not get them
        self._set_deadline(self._limits.body_s, "body")

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if cycle.response_complete or len(cycle.body) + len(body) > self._limits.body_bytes:
            super().on_body(body)
            return
        pieces = len(cycle.body) // READ_AT_ONCE
        cycle.body += body
        if pieces < len(cycle.body) // READ_AT_ONCE and not self.pipeline:
            self._turns.wait(self.loop, self.transport, self.flow, first=not pieces)

    def on_message_complete(self) -> None:
        self._set_deadline(None)
        self._in_header, self._header_bytes = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        begun = self._in_header and self._header_bytes  # the next request is partly here already
        if begun and self.cycle.response_complete and not self.pipeline and self._deadline is None:
            self._set_deadline(self._limits.header_s, "header")

    def _set_deadline(self, seconds: float | None, part: str = "") -> None:
        """Hang up when `part` is not complete in so many seconds. None: there is nothing to wait for."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._on_deadline, seconds, part)

    def _on_deadline(self, seconds: float, part: str) -> None:
        if self.pipeline:
            self._set_deadline(seconds, part)  # nothing is read while the request before it is answered
            return
        self._hang_up(408, "request_timeout", f"the {part} was not complete within {seconds:g} s")

    def _hang_up(self, status: int, code: str, message: str) -> None:
        """Send the error, unless a response has begun, and close. The application sees a disconnect."""
        self._set_deadline(None)
        if self._hung_up or self.transport.is_closing():
            return
        self._hung_up = True
        cycle = self.cycle
        answering = cycle is not None and not cycle.response_complete
        if not (answering and cycle.response_started):
            path = self.scope["path"] if self.scope is not None and "path" in self.scope else "/"
            self.transport.write(_make_response(path, status, code, message))
        if answering:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_S, self.transport.close)


def _make_response(path: str, status: int, code: str, message: str) -> bytes:
    body = msgspec.json.encode(error_body(path, status, code, message))
    head = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(["retry-after: 1"] if status == 503 else []),
        "\r\n",
    ]
    return "\r\n".join(head).encode() + body
