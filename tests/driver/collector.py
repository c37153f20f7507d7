"""An OTLP collector for tests: it keeps the spans that it is sent."""

from __future__ import annotations

from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.driver.server import wait_for

ERROR = 2  # `STATUS_CODE_ERROR`


class Span(NamedTuple):
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9


class Collector:
    """Listens on a free port of this machine. A context manager."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(handler) -> None:
                assert handler.path == "/v1/traces", handler.path
                self._receive(handler.rfile.read(int(handler.headers["content-length"])))
                handler.send_response(200)
                handler.send_header("content-length", "0")
                handler.end_headers()

            def log_message(handler, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _receive(self, body: bytes) -> None:
        self.bodies.append(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            for span in (span for scope in group.scope_spans for span in scope.spans):
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                times = (span.start_time_unix_nano, span.end_time_unix_nano, span.status.code)
                given, resource = read_attributes(span), read_attributes(group.resource)
                self.spans.append(Span(span.name, *ids, *times, given, resource))

    def wait_for_traces(self, count: int) -> list[list[Span]]:
        """Wait until that many roots are here; the spans of each trace, the root first."""

        def find() -> list[list[Span]] | None:
            traces = defaultdict(list)
            for span in [*self.spans]:
                traces[span.trace_id].append(span)
            roots = [span for span in self.spans if span.attributes.get("http.route")]
            return [*map(sort_spans, traces.values())] if len(roots) >= count else None

        return wait_for(find, message=f"{count} traces did not arrive: {self.spans}")


def sort_spans(spans: list[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (not span.attributes.get("http.route"), span.began_ns))


def read_attributes(owner: Any) -> dict[str, Any]:
    """Plain values of the attributes of a span or a resource."""
    found: dict[str, Any] = {}
    for each in owner.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found
