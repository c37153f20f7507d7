"""OpenTelemetry traces of a real server, as a collector gets them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.driver.collector import ERROR, Collector, Span
from tests.driver.same_text import EXACT
from tests.driver.server import Server, cllm, environment, wait_for

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
DELAY = "50"  # ms until spans are sent, instead of five seconds
SECRET = "marigold"
STAGES = ["tokenize", "queue", "prefill", "decode"]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def traced(collector: Collector, tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    arguments = ("--parallel", "2", "--queue-size", "1", "--otlp-endpoint", collector.url, *EXACT)
    with Server(tmp_path / "log", str(tiny_model), *arguments, OTEL_BSP_SCHEDULE_DELAY=DELAY) as server:
        yield server


def complete(server: Server, max_tokens: int = 8, headers: dict[str, str] | None = None, **more: Any) -> Any:
    body = {"model": "tiny", "prompt": f"{SECRET} {SECRET}", "max_tokens": max_tokens, "temperature": 0}
    return server.client.post("/v1/completions", json={**body, **more}, headers=headers)


def check_nesting(spans: list[Span]) -> None:
    """Every span but the root is a child of it, and lies within it."""
    root = spans[0]
    for span in spans[1:]:
        assert (span.trace_id, span.parent_id) == (root.trace_id, root.span_id)
        assert root.began_ns <= span.began_ns <= span.ended_ns <= root.ended_ns, span.name


def test_a_request_is_one_trace_with_its_stages(traced: Server, collector: Collector) -> None:
    answer = complete(traced).json()
    (spans,) = collector.wait_for_traces(1)
    root = spans[0]
    assert [span.name for span in spans] == ["POST /v1/completions", *STAGES]
    check_nesting(spans)
    assert root.parent_id == "" and all(span.status != ERROR for span in spans)
    for before, after in pairwise(spans[2:]):
        assert abs(after.began_ns - before.ended_ns) < 1000
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "cllm",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0,
        "gen_ai.request.top_p": root.attributes["gen_ai.request.top_p"],
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 8,
    }
    assert root.resource["service.name"] == "cllm"


def test_the_clients_traceparent_is_the_parent(traced: Server, collector: Collector) -> None:
    complete(traced, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    complete(traced, headers={"traceparent": f"00-{TRACE[::-1]}-{PARENT}-00"})  # it is not sampled
    complete(traced, headers={"traceparent": "garbage"})
    known, alone = collector.wait_for_traces(2)
    check_nesting(known)
    assert (known[0].trace_id, known[0].parent_id) == (TRACE, PARENT)
    assert alone[0].trace_id != TRACE and alone[0].parent_id == ""


def test_the_times_are_those_of_the_metrics(traced: Server, collector: Collector) -> None:
    for number in range(4):
        complete(traced, 40 + number, stream=number % 2 == 0)
    complete(traced, 20, n=2)
    traces, metrics = collector.wait_for_traces(5), traced.metrics()
    times = dict.fromkeys(STAGES, 0.0)
    for spans in traces:
        check_nesting(spans)
        for span in spans[1:]:
            times[span.name] += span.seconds
    queue, first, whole = (
        metrics[f"cllm_{name}_seconds_sum"] for name in ("queue", "time_to_first_token", "request")
    )
    assert metrics["cllm_request_seconds_count"] == 6
    assert times["queue"] == pytest.approx(queue, rel=0.01)
    assert times["queue"] + times["prefill"] == pytest.approx(first, rel=0.01)
    assert times["queue"] + times["prefill"] + times["decode"] == pytest.approx(whole, rel=0.01)
    tokens = sum(spans[0].attributes["gen_ai.usage.output_tokens"] for spans in traces)
    assert tokens == metrics["cllm_generated_tokens_total"]


def test_every_api_has_traces_and_no_text(traced: Server, collector: Collector) -> None:
    messages = [{"role": "user", "content": SECRET}]
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 4},
        "/v1/messages": {"messages": messages, "max_tokens": 4, "system": SECRET},
        "/v1/responses": {"input": SECRET, "max_output_tokens": 4},
        "/responses": {"input": SECRET, "max_output_tokens": 4, "background": True},
        "/completion": {"prompt": SECRET, "n_predict": 4, "stop": [SECRET]},
        "/generate": {"prompt": SECRET, "max_tokens": 4},
        "/api/chat": {"messages": messages, "options": {"num_predict": 4}},
        "/v1/embeddings": {"input": SECRET},
    }
    for path, body in asked.items():
        assert traced.post(path, {"model": "tiny", **body}).status_code == 200, path
    assert traced.get("/health")  # has no trace
    traces = {spans[0].attributes["http.route"]: spans for spans in collector.wait_for_traces(len(asked))}
    assert traces.keys() == asked.keys()
    for path, spans in traces.items():
        check_nesting(spans)
        stages = STAGES if path != "/v1/embeddings" else STAGES[:-1]
        assert [span.name for span in spans[1:]] == stages, path
        assert spans[0].status != ERROR
    assert traces["/v1/messages"][0].attributes["gen_ai.operation.name"] == "chat"
    assert traces["/v1/embeddings"][0].attributes["gen_ai.operation.name"] == "embeddings"
    assert SECRET.encode() not in b"".join(collector.bodies)


def test_requests_that_fail_have_an_error_status(traced: Server, collector: Collector) -> None:
    assert complete(traced, temperature=-1).status_code == 400  # refused by the route
    assert complete(traced, headers={"host": "elsewhere.example"}).status_code == 403  # by the middleware
    assert complete(traced, prompt="word " * 5000).status_code == 400  # by the tokenizer
    assert complete(traced, 200, timeout=0.001).status_code == 504  # accepted
    with traced.open_stream("a", 400) as events:  # its client leaves
        next(events)
    wait_for(traced.idle)
    failures = {
        spans[0].attributes["error.type"]: spans
        for spans in collector.wait_for_traces(5)
        if spans[0].status == ERROR
    }
    codes = {"invalid_request", "forbidden", "context_length_exceeded", "deadline_exceeded", "cancelled"}
    assert failures.keys() == codes
    for spans in failures.values():
        check_nesting(spans)
    statuses = {code: spans[0].attributes["http.response.status_code"] for code, spans in failures.items()}
    assert statuses["forbidden"] == 403 and statuses["deadline_exceeded"] == 504
    for code in ("deadline_exceeded", "cancelled"):
        assert failures[code][-1].status == ERROR and failures[code][1].status != ERROR


def test_a_killed_engine_leaves_one_whole_trace(traced: Server, collector: Collector) -> None:
    with traced.open_stream("a", 100) as events:
        next(events)
        traced.kill_worker("engine")
        assert [*events]
    (spans,) = collector.wait_for_traces(1)
    check_nesting(spans)
    assert [span.name for span in spans[1:]] == STAGES
    assert spans[0].attributes["gen_ai.usage.output_tokens"] == 100 and spans[0].status != ERROR


def test_a_dead_collector_costs_a_log_line(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("--otlp-endpoint", "http://127.0.0.1:9", *EXACT)
    with Server(tmp_path / "log", str(tiny_model), *arguments, OTEL_BSP_SCHEDULE_DELAY=DELAY) as server:
        texts = set()
        for _ in range(4):
            texts.add(complete(server).json()["choices"][0]["text"])
            time.sleep(0.1)  # a batch for each
        assert len(texts) == 1
        lines = wait_for(lambda: [line for line in server.log_text.splitlines() if "opentelemetry" in line])
    assert len(lines) == 1 and "opentelemetry" not in server.log_text.replace(lines[0], "", 1)


def test_the_packages_are_not_imported_without_the_option(tiny_model: Path, tmp_path: Path) -> None:
    code = (
        "import atexit, sys; from cllm.cli.main import main; "
        "atexit.register(lambda: print('imported:', {*sys.modules} & {'opentelemetry', 'requests'})); main()"
    )
    with Server(tmp_path / "log", str(tiny_model), program=(code, "serve")) as server:
        assert complete(server).status_code == 200
    assert "imported: set()" in server.log_text


def test_missing_packages_are_said_before_anything_is_loaded(tmp_path: Path) -> None:
    package = tmp_path / "opentelemetry"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('no module named opentelemetry')")
    hidden = {"PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"}
    command = [sys.executable, "-c", "from cllm.cli.main import main; main()", "serve", "no-such-model"]
    result = subprocess.run(
        [*command, "--otlp-endpoint", "http://x:1"], capture_output=True, text=True, env=environment(**hidden)
    )
    assert result.returncode == 2 and "(the extra otel)" in result.stderr
    wrong = cllm("serve", "--otlp-endpoint", "collector:4317")
    assert wrong.returncode == 2 and "http://" in wrong.stderr
