"""Metrics: our histogram equals prometheus_client's own, and what is counted by source and replica."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from cllm.frontend.metrics import EngineMetrics, PlainHistogram, RequestLog
from cllm.messages import ClusterReport, ReplicaStatus
from cllm.types import Failure, FinishReason, Prompt, Request, RequestOutput, Usage
from tests.driver.thread_engine import BlockingEngine, BlockingOutputStream
from tests.unit.frontend.test_engine_client import ScriptedExecutor

BOUNDS = (0.005, 0.1, 1, 30)


@given(st.lists(st.sampled_from([0.0, 0.004, 0.005, 0.006, 0.1, 0.5, 1.0, 29.5, 30.0, 31.0]), max_size=30))
def test_the_exposition_is_the_same(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = PlainHistogram("gap_seconds", "A gap", BOUNDS, ours)
    model = Histogram("gap_seconds", "A gap", buckets=BOUNDS, registry=theirs)
    for value in values:
        plain.observe(value)
        model.observe(value)
    expected = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == expected


def test_the_queue_is_read_when_metrics_are_scraped_also_after_a_reload() -> None:
    old, new = BlockingEngine(ScriptedExecutor()), BlockingEngine(ScriptedExecutor())
    new.submit(Request(id="r0", prompt=Prompt((1, 2, 3)), max_tokens=1), BlockingOutputStream)
    assert old.metrics.registry.get_sample_value("cllm_queue_requests") == 0
    new.use_metrics(old.metrics)
    assert new.metrics is old.metrics
    assert new.metrics.registry.get_sample_value("cllm_queue_requests") == 1
    assert new.metrics.registry.get_sample_value("cllm_queue_tokens") == 3
    old.stop()
    new.stop()


def state(**changes: Any) -> Any:
    times = {"arrived": 10.0, "dispatched": 10.5, "first_token": 11.0, "last_token": 12.0}
    return SimpleNamespace(**{**times, "generated": 5, "tenant": SimpleNamespace(name="ann"), **changes})


def output(cached: int = 3, source: str = "", **changes: Any) -> RequestOutput:
    usage = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=cached, cached_from=source)
    fields = {"request_id": "chatcmpl-0123456789", "finish_reason": FinishReason.STOP, "usage": usage}
    return RequestOutput(**{**fields, **changes})


def test_cached_tokens_are_counted_by_their_source() -> None:
    metrics = EngineMetrics()
    for cached, source in ((80, "device"), (70, "ram"), (5, "device"), (40, "ram+checkpoint"), (0, "")):
        metrics.ended(state(), output(cached, source), 12.5)

    def counted(source: str) -> float | None:
        return metrics.registry.get_sample_value("cllm_cached_tokens_total", {"source": source})

    assert [counted(source) for source in ("device", "ram", "ram+checkpoint")] == [85, 70, 40]
    assert counted("") is None


@pytest.mark.parametrize(
    ("cached", "source", "said"),
    [(0, "", "7 prompt tokens (0 cached), "), (80, "disk", "7 prompt tokens (80 cached from disk), ")],
)
def test_the_end_of_a_request_is_logged_with_what_was_cached(
    cached: int, source: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "cllm.frontend.metrics"):
        EngineMetrics().ended(state(), output(cached, source), 12.5)
    assert said in caplog.text


def test_replicas_of_a_cluster_have_their_label() -> None:
    metrics = EngineMetrics()
    assert b"cllm_replica" not in metrics.render()
    metrics.replicas.report = ClusterReport((ReplicaStatus(name="a", ready=True, cells_used=7),), moved=3)
    text = metrics.render().decode()
    assert 'cllm_replica_ready{replica="a"} 1.0' in text
    assert 'cllm_replica_cells_used{replica="a"} 7.0' in text
    assert "cllm_requests_moved_total 3.0" in text


# Request log -----------------------------------------------------------------------------------------


def test_a_record_has_times_and_counts() -> None:
    log = RequestLog()
    log.add(state(), output(), now=12.5)
    (record,) = log.records
    assert (record.number, record.id, record.tenant, record.outcome) == (1, "23456789", "ann", "stop")
    assert (record.queue_ms, record.first_ms, record.gap_ms, record.total_ms) == (500, 1000, 250, 2500)
    assert (record.prompt, record.cached, record.generated) == (7, 3, 5)
    assert log.points[0].figures() == (1000, 1000, 250, 250)


def test_a_request_without_a_token_is_in_the_log_and_not_in_the_curve() -> None:
    log = RequestLog()
    failed = output(finish_reason=FinishReason.ERROR, error=Failure("engine_died", "it died"))
    log.add(state(dispatched=None, first_token=None, last_token=None, generated=0), failed, now=11.0)
    log.add(state(last_token=11.0, generated=1), output(), now=11.0)
    assert [record.outcome for record in log.records] == ["engine_died", "stop"]
    assert (log.records[0].first_ms, log.records[0].queue_ms) == (None, 1000)
    assert log.measured == 1 and log.points[0].figures() == (1000, 1000, None, None)


def test_the_log_is_bounded() -> None:
    log = RequestLog()
    for _ in range(250):
        log.add(state(), output(), now=12.5)
    assert [log.records[0].number, log.records[-1].number, log.count] == [151, 250, 250]


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1024, 1025, 20_000])
def test_the_curve_holds_every_request_in_few_points(count: int) -> None:
    curve = RequestLog()
    for number in range(count):
        times = {"arrived": 0.0, "first_token": number / 1000, "last_token": number / 500}
        curve.add(state(**times, generated=1 + number % 2), output(), now=100.0)
    assert len(curve.points) <= curve.MAX_POINTS and curve.measured == count
    assert len(curve.points) == -(-count // curve.width)
    assert sum(point.first_count for point in curve.points) == count
    assert sum(point.first_sum for point in curve.points) == pytest.approx(sum(range(count)))
    assert curve.points[-1].first_max == pytest.approx(count - 1)
    assert sum(point.gap_count for point in curve.points) == count // 2
    begin = curve.points[0].figures()
    assert begin[0] == pytest.approx((min(curve.width, count) - 1) / 2, abs=0.5)
