"""A client's connection with limits: time to send, bytes of header, number of connections."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import deque
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cllm.config import ServerConfig
from cllm.limits import MAX_FILE_BYTES
from cllm.server.dialect import COMMENT, HttpError
from cllm.server.dialects import TABLE
from cllm.server.middleware import UPLOADS

log = logging.getLogger(__name__)

SPARE_DESCRIPTORS = 32  # for child processes that must be replaced, and for files
READ_AT_ONCE = 1 << 20  # bytes of a body that are read in one turn of the event loop
LINGER_S = 1.0  # closing at once on a client that still sends would reset the response away
PROBE_S = 0.01  # from a client's last byte to the first look at whether it still reads
MAX_PROBE_S = 0.5
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def limit_connections(config: ServerConfig) -> ServerConfig:
    """The settings, with no more connections than there are file descriptors for.

    Raises the soft limit of descriptors if need be.
    """
    wanted = config.max_connections
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
    return msgspec.structs.replace(config, max_connections=min(wanted, left))


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


def make_plain_send(cycle: RequestResponseCycle, *, chunks: bool) -> Any:
    """Make the `send` of a cycle whose client is of HTTP/1.0, or waits for `100 Continue`.

    A response of unknown length goes to HTTP/1.0 without chunks; the end of the connection is its end. A
    response that comes before the client was asked to continue closes the connection: whether the body
    follows it is not known.
    """
    send = cycle.send

    async def send_plain(message: Any) -> None:
        if message["type"] == "http.response.start":
            cycle.keep_alive = cycle.keep_alive and not cycle.waiting_for_100_continue
            if not chunks and b"content-length" not in {name.lower() for name, _ in message["headers"]}:
                cycle.chunked_encoding = False
        elif not chunks and not cycle.expected_content_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's connection, with deadlines for what the client sends.

    A header must be complete `header_timeout_s` after the connection is made, or after the first byte that
    follows a response; a body `body_timeout_s` after its header, however steadily it drips. A late client
    gets a 408.

    A client may close its sending side and wait for its response. One that has disconnected looks the same,
    but resets the connection when something is sent to it: so it is sent something without a meaning.

    No upgrade of the protocol is taken. A request that offers one is served as if it did not.
    """

    def __init__(self, settings: ServerConfig, turns: ReadTurns, *arguments: Any) -> None:
        """Other `arguments` are those of uvicorn's connection."""
        super().__init__(*arguments)
        self._settings = settings
        self._header_limit = settings.max_header_kb << 10
        self._body_limit = settings.max_body_bytes  # what a body may have is passed on together
        self._turns = turns
        self._deadline: asyncio.TimerHandle | None = None
        self._in_header = True
        self._header_bytes = 0
        self._hung_up = False
        self._offers_upgrade = False  # the request that is parsed now
        self._half_closed = False
        self._answered: RequestResponseCycle | None = None  # now; `cycle` is the last of pipelined requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._settings.max_connections:
            message = f"{self._settings.max_connections} connections are open, which is the limit; try again"
            transport.write(_make_response("/", 503, "too_many_connections", message))
            transport.close()
            return
        self._set_deadline(self._settings.header_timeout_s, "header")

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self._unset_keepalive_if_required()
        self._disconnect()
        super().connection_lost(exc)

    def _disconnect(self) -> None:
        """The application sees a disconnect: of the last request, and of the one that is answered now."""
        for cycle in (self._answered, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, and what follows it; not in the middle of another response."""
        answered = self._answered
        begun = answered is not None and answered.response_started and not answered.response_complete
        self._disconnect()
        if begun:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def data_received(self, data: bytes) -> None:
        if self._hung_up:
            return
        if self._in_header:
            idle = not self.pipeline and (self.cycle is None or self.cycle.response_complete)
            if idle and self._deadline is None:
                self._set_deadline(self._settings.header_timeout_s, "header")
            self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        # The application measures a complete header; this one may never be complete.
        if self._in_header and self._header_bytes > self._header_limit:
            message = f"the headers are over the limit of {self._header_limit} bytes"
            self._hang_up(431, "headers_too_large", message)

    def _parse(self, data: bytes) -> None:
        """Parse what was received. The parser ends at an offered upgrade: another reads on without it."""
        while True:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as upgrade:
                if self._offers_upgrade:  # else it is CONNECT, which is answered, and nothing follows it
                    data = self._make_plain_head() + data[upgrade.args[0] :]
                    self.parser = HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                    continue
            except HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
            return

    def _make_plain_head(self) -> bytes:
        """The head of the parsed request without its upgrade."""
        version = self.parser.get_http_version().encode()
        first = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)
        fields = [b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"]
        return b"\r\n".join((first, *fields, b"", b""))

    def on_headers_complete(self) -> None:
        self._offers_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._offers_upgrade:
            return
        self._in_header = False
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle
        self.headers = []  # of trailers, which follow the body: the scope does not get them
        old = self.scope["http_version"] == "1.0"
        if old or self.cycle.waiting_for_100_continue:
            self.cycle.waiting_for_100_continue = not old
            self.cycle.send = make_plain_send(self.cycle, chunks=not old)  # type: ignore[method-assign]
        # A file may be larger than a body: it has time for each part of that size.
        bodies = 1 + MAX_FILE_BYTES // self._body_limit if self.scope["path"] == UPLOADS else 1
        self._set_deadline(self._settings.body_timeout_s * bodies, "body")

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if cycle.response_complete or len(cycle.body) + len(body) > self._body_limit:
            super().on_body(body)
            return
        pieces = len(cycle.body) // READ_AT_ONCE
        cycle.body += body
        if pieces < len(cycle.body) // READ_AT_ONCE and not self.pipeline:
            self._turns.wait(self.loop, self.transport, self.flow, first=not pieces)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._set_deadline(None)
        self._in_header, self._header_bytes = True, 0
        super().on_message_complete()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        cycle = self.cycle
        waits = cycle is not None and not cycle.response_complete and not cycle.more_body
        # TLS has no half-closed connections, and of pipelined requests another may be answered now.
        if self._hung_up or not waits or self.pipeline or self.scheme == "https":
            return None
        self._half_closed = True
        self.loop.call_later(PROBE_S, self._probe, PROBE_S)
        return True

    def _probe(self, waited_s: float) -> None:
        """Close the connection if its client has disconnected."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if not self.cycle.response_started and self.scope["http_version"] == "1.0":
            gone = waited_s > LINGER_S  # there is nothing that could be sent before the response
        else:
            if waited_s == PROBE_S:
                self.transport.write(self._make_probe())
            gone = self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if gone:
            self._disconnect()
            self.transport.abort()
        else:
            pause_s = min(waited_s, MAX_PROBE_S)
            self.loop.call_later(pause_s, self._probe, waited_s + pause_s)

    def _make_probe(self) -> bytes:
        """Bytes without a meaning for the client. Only event streams are of unknown length."""
        cycle = self.cycle
        if not cycle.response_started:
            return _CONTINUE
        if cycle.chunked_encoding:
            return b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT)
        return b"" if cycle.expected_content_length else COMMENT

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        elif self._half_closed:
            self.transport.close()
        super().on_response_complete()
        begun = self._in_header and self._header_bytes  # the next request is partly here already
        if begun and self.cycle.response_complete and not self.pipeline and self._deadline is None:
            self._set_deadline(self._settings.header_timeout_s, "header")

    def _set_deadline(self, seconds: float | None, part: str = "") -> None:
        """Hang up unless `part` is complete in time. None disables the deadline."""
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
        cycle = self._answered
        if cycle is None or cycle.response_complete or not cycle.response_started:
            path = self.scope["path"] if self.scope is not None and "path" in self.scope else "/"
            self.transport.write(_make_response(path, status, code, message))
        self._disconnect()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_S, self.transport.close)


def _make_response(path: str, status: int, code: str, message: str) -> bytes:
    body = msgspec.json.encode(TABLE.find(path).make_error(HttpError(status, code, message)))
    head = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(["retry-after: 1"] if status == 503 else []),
        "\r\n",
    ]
    return "\r\n".join(head).encode() + body
