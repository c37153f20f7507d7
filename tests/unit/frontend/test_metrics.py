"""Metrics: our histogram equals prometheus_client's own, and what is counted by source and replica."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from cllm.frontend.engine_client import EngineClient
from cllm.frontend.metrics import EngineMetrics, PlainHistogram, describe_end
from cllm.messages import ClusterReport, ReplicaStatus
from cllm.types import FinishReason, Prompt, Request, RequestOutput, Usage
from tests.driver.thread_engine import BlockingOutputStream
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
    old, new = EngineClient(ScriptedExecutor()), EngineClient(ScriptedExecutor())
    new.submit(Request(id="r0", prompt=Prompt((1, 2, 3)), max_tokens=1), BlockingOutputStream)
    assert old.metrics.registry.get_sample_value("cllm_queue_requests") == 0
    new.use_metrics(old.metrics)
    assert new.metrics is old.metrics
    assert new.metrics.registry.get_sample_value("cllm_queue_requests") == 1
    assert new.metrics.registry.get_sample_value("cllm_queue_tokens") == 3
    old.stop()
    new.stop()


def ended(cached: int, source: str) -> tuple[Any, RequestOutput, float]:
    """A request that has ended: its state, its last output, and when that was."""
    state = SimpleNamespace(
        arrived=1.0,
        dispatched=1.5,
        first_token=2.0,
        last_token=2.5,
        generated=2,
        tenant=SimpleNamespace(name=""),
    )
    usage = Usage(prompt_tokens=90, completion_tokens=4, cached_tokens=cached, cached_from=source)
    return state, RequestOutput(request_id="r1", finish_reason=FinishReason.STOP, usage=usage), 3.0


def test_cached_tokens_are_counted_by_their_source() -> None:
    metrics = EngineMetrics()
    for cached, source in ((80, "device"), (70, "ram"), (5, "device"), (40, "ram+checkpoint"), (0, "")):
        metrics.ended(*ended(cached, source))

    def counted(source: str) -> float | None:
        return metrics.registry.get_sample_value("cllm_cached_tokens_total", {"source": source})

    assert [counted(source) for source in ("device", "ram", "ram+checkpoint")] == [85, 70, 40]
    assert counted("") is None


@pytest.mark.parametrize(
    ("cached", "source", "said"),
    [(0, "", "90 prompt tokens (0 cached), "), (80, "disk", "90 prompt tokens (80 cached from disk), ")],
)
def test_the_end_of_a_request_says_what_was_cached(cached: int, source: str, said: str) -> None:
    assert said in describe_end(*ended(cached, source))


def test_replicas_of_a_cluster_have_their_label() -> None:
    metrics = EngineMetrics()
    assert b"cllm_replica" not in metrics.render()
    metrics.replicas.report = ClusterReport((ReplicaStatus(name="a", ready=True, cells_used=7),), moved=3)
    text = metrics.render().decode()
    assert 'cllm_replica_ready{replica="a"} 1.0' in text
    assert 'cllm_replica_cells_used{replica="a"} 7.0' in text
    assert "cllm_requests_moved_total 3.0" in text
