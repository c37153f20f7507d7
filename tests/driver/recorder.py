"""A recording proxy: it stands between a program and the server, and keeps what both say."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

PATIENCE_S = 300.0
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "proxy-connection", "date"}


class PromptTokens(NamedTuple):
    """The size of one prompt, and how much of it came from the prefix cache."""

    total: int
    cached: int


@dataclass(slots=True)
class Exchange:
    """A request and its answer. `status` 0: the answer never came, or the client left before it."""

    method: str
    path: str
    body: bytes
    status: int = 0
    answer: bytes = b""
    began: float = field(default_factory=time.monotonic)

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"null")

    @property
    def prompt_tokens(self) -> PromptTokens | None:
        """From the answer's usage, in the words of any API; None where it has none."""
        found = [tokens for event in parse_answer(self.answer) for tokens in _find_usage(event)]
        return max(found, default=None)


def parse_answer(answer: bytes) -> Iterator[Any]:
    """The JSON values of a body: itself, or the data of its server-sent events."""
    for line in answer.splitlines() if answer.lstrip()[:1] != b"{" else [answer]:
        data = line.removeprefix(b"data:").strip()
        if data.startswith(b"{"):
            yield json.loads(data)


def _find_usage(value: Any) -> Iterator[PromptTokens]:
    """Usage in an event: `usage`, or that of the `message` or `response` it holds."""
    for holder in (value, value.get("message"), value.get("response")):
        usage = holder.get("usage") if isinstance(holder, dict) else None
        if not isinstance(usage, dict):
            continue
        if "prompt_tokens" in usage:
            details = usage.get("prompt_tokens_details") or {}
            yield PromptTokens(usage["prompt_tokens"], details.get("cached_tokens") or 0)
        elif "input_tokens_details" in usage:
            yield PromptTokens(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])
        elif "input_tokens" in usage:  # Anthropic counts the cached ones apart
            cached = usage.get("cache_read_input_tokens") or 0
            new = usage["input_tokens"] + (usage.get("cache_creation_input_tokens") or 0)
            yield PromptTokens(new + cached, cached)


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is nothing to print."""


class Recorder:
    """A proxy on a free port of 127.0.0.1, for a block. It refuses to connect anywhere but to `upstream`."""

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream)
        self.exchanges: list[Exchange] = []
        self.refused: set[str] = set()  # hosts that a program wanted to reach
        self._server = _QuietServer(("127.0.0.1", 0), _make_handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE_S)


def _make_handler(recorder: Recorder) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = PATIENCE_S

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the exchanges are kept."""

        def do_CONNECT(self) -> None:
            self._refuse(self.path)

        def _refuse(self, host: str) -> None:
            recorder.refused.add(host)
            self.close_connection = True
            self.send_error(403)

        def _forward(self) -> None:
            target = urlsplit(self.path)
            if target.netloc and target.port != recorder.upstream.port:
                return self._refuse(target.netloc)
            exchange = Exchange(self.command, self.path, self._read_body())
            recorder.exchanges.append(exchange)
            kept = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            upstream = http.client.HTTPConnection(
                "127.0.0.1", recorder.upstream.port or 80, timeout=PATIENCE_S
            )
            try:
                upstream.request(self.command, self.path, exchange.body or None, kept)
                self._relay(exchange, upstream.getresponse())
            except OSError:
                self.close_connection = True
            finally:
                upstream.close()

        do_GET = do_POST = do_HEAD = do_DELETE = do_OPTIONS = _forward

        def _read_body(self) -> bytes:
            if "chunked" not in self.headers.get("transfer-encoding", ""):
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _relay(self, exchange: Exchange, response: http.client.HTTPResponse) -> None:
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in _HOP_BY_HOP:
                    self.send_header(name, value)
            bare = self.command == "HEAD" or response.status in (204, 304)
            if not bare:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while not bare and (data := response.read1(65536)):
                exchange.answer += data
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()
            if not bare:
                self.wfile.write(b"0\r\n\r\n")
            exchange.status = response.status

    return Handler
