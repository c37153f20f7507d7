"""Traces for OpenTelemetry: the spans of a request are made after its end, from what is known by then."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from cllm import __version__
from cllm.errors import ConfigError
from cllm.frontend.request_queue import TRACE, Trace
from cllm.server.dialects import DIALECTS
from cllm.types import FinishReason

PACKAGES = "'opentelemetry-sdk>=1.45,<2' 'opentelemetry-exporter-otlp-proto-http>=1.45,<2' (the extra otel)"
FLUSH_S = 2.0  # at exit, for spans that are not sent yet
LOG_EVERY_S = 3600.0  # a collector that cannot be reached
_SDK_LOGS = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")


def import_exporter() -> Any:
    """The module of the exporter, which needs all other packages. Raises ConfigError where one is missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
    except ImportError as error:
        raise ConfigError(f"--otlp-endpoint: {error}; pip install {PACKAGES}") from None
    return trace_exporter


class Tracer:
    """Makes spans, which a thread of the SDK sends to a collector. `OTEL_*` variables set all else."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry import propagate, trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.version": __version__})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "cllm"}))
        exporter = import_exporter().OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces")
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(exporter)
        self._provider.add_span_processor(self._processor)
        self._tracer: Any = self._provider.get_tracer("cllm", __version__)
        self._api, self._make_span, self._read_context = trace, ReadableSpan, propagate.extract
        routes = [route for dialect in DIALECTS for route in dialect.routes]
        self._operations = {route.path: route.computes for route in routes if route.computes}
        self._log_at = 0.0
        for name in _SDK_LOGS:
            logging.getLogger(name).addFilter(self._is_due)

    def _is_due(self, record: logging.LogRecord) -> bool:
        """Let one line through in a while: the SDK logs every attempt."""
        if (now := time.monotonic()) < self._log_at:
            return False
        self._log_at = now + LOG_EVERY_S
        return True

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """The app, with a trace in `TRACE` for each request of a route that computes."""
        return partial(self._call, app)

    async def _call(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        operation = self._operations.get(scope["path"]) if scope["method"] == "POST" else None
        if operation is None:
            await app(scope, receive, send)
            return
        attributes = {
            "http.request.method": scope["method"],
            "http.route": scope["path"],
            "url.path": scope["path"],
            "url.scheme": scope["scheme"],
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "cllm",
        }
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        state = scope.setdefault("state", {})
        export = partial(self._export, self._read_context(headers), attributes, state)
        trace = Trace(partial(asyncio.get_running_loop().call_soon, export))
        TRACE.set(trace)
        try:
            await app(scope, receive, send)
        except Exception:
            state["error"] = "internal_error"
            raise
        finally:
            trace.close()

    def _export(self, context: Any, attributes: dict[str, Any], state: dict[str, Any], trace: Trace) -> None:
        """Make the spans of a trace; `context` is the client's, `state` the HTTP request's."""
        api, offset_ns = self._api, time.time_ns() - time.monotonic_ns()

        def to_ns(at: float) -> int:
            return int(1e9 * at) + offset_ns

        name = f"{attributes['http.request.method']} {attributes['http.route']}"
        attributes |= describe(trace, state)
        root = self._tracer.start_span(
            name, context, api.SpanKind.SERVER, attributes, None, to_ns(trace.began)
        )
        failure, parent = state.get("error", ""), root.get_span_context()
        # Started one by one as the root is, they would cost five times as much.
        for name, began, ended, more, error in list_stages(trace) if root.is_recording() else ():
            span_id, flags = self._provider.id_generator.generate_span_id(), parent.trace_flags
            span = self._make_span(
                name,
                api.SpanContext(parent.trace_id, span_id, is_remote=False, trace_flags=flags),
                parent,
                root.resource,
                {**more, "error.type": error} if error else more,
                status=api.Status(api.StatusCode.ERROR if error else api.StatusCode.UNSET),
                start_time=to_ns(began),
                end_time=to_ns(ended),
                instrumentation_scope=root.instrumentation_scope,
            )
            self._processor.on_end(span)
            failure = failure or error
        if failure:
            root.set_attribute("error.type", failure)
            root.set_status(api.StatusCode.ERROR)
        root.end(to_ns(trace.ended))

    def close(self) -> None:
        """Send what is left, within a limit."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH_S)


def list_stages(trace: Trace) -> Iterator[tuple[str, float, float, dict[str, str], str]]:
    """Name, begin, end, attributes and error of each stage, as `/metrics` and the log have its times."""
    for name, began, ended in trace.calls:
        yield name, began, ended, {}, ""
    for state, output, now in trace.requests:
        error = output.error.code if output.error is not None else ""
        if output.finish_reason is FinishReason.CANCELLED:
            error = output.finish_reason.value
        begins = (("queue", state.arrived), ("prefill", state.dispatched), ("decode", state.first_token))
        known = [(name, at) for name, at in begins if at is not None]
        for (name, began), (after, ended) in pairwise([*known, ("", now)]):
            yield name, began, ended, {"cllm.request.id": state.request.id}, "" if after else error


def describe(trace: Trace, state: dict[str, Any]) -> dict[str, Any]:
    """Attributes by the GenAI conventions, which texts are not among. Tokens are those of all choices."""
    found = {"http.response.status_code": state.get("status"), "gen_ai.request.model": state.get("model")}
    if trace.requests:
        outputs = [output for _, output, _ in trace.requests]
        usages = [output.usage for output in outputs if output.usage is not None]
        request = min((state.request for state, *_ in trace.requests), key=lambda each: each.id)
        found["gen_ai.response.id"] = request.id.removesuffix("-0-0")
        found["gen_ai.usage.input_tokens"] = sum(usage.prompt_tokens for usage in usages)
        found["gen_ai.usage.cache_read.input_tokens"] = sum(usage.cached_tokens for usage in usages)
        if not request.embed:
            reasons = [output.finish_reason.value for output in outputs if output.finish_reason]
            found["gen_ai.response.finish_reasons"] = reasons
            found["gen_ai.usage.output_tokens"] = sum(usage.completion_tokens for usage in usages)
            found["gen_ai.request.max_tokens"] = request.max_tokens
            found["gen_ai.request.temperature"] = request.sampling.temperature
            found["gen_ai.request.top_p"] = request.sampling.top_p
    return {name: value for name, value in found.items() if value is not None}
