"""The history: rows are what the metrics say, quantiles as PromQL has them, an hour at most."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from cllm.frontend.history import COLUMNS, History, quantile_ms
from cllm.frontend.metrics import EngineMetrics
from cllm.messages import StepStats


def read(row: bytes) -> dict[str, Any]:
    return dict(zip(COLUMNS, msgspec.json.decode(row), strict=True))


def test_a_row_is_what_has_happened_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(100.0, 2.0)
    monkeypatch.setattr("cllm.frontend.history.time.monotonic", lambda: next(clock))
    metrics, history = EngineMetrics(), History()
    metrics.generated_tokens.inc(100)
    metrics.refused.labels("queue_full").inc(2)
    first = read(history.sample(metrics))
    assert (first["generated"], first["refused"]) == (0, 0), "what was before is no rate"
    metrics.generated_tokens.inc(7)
    metrics.refused.labels("queue_full").inc(1)
    metrics.refused.labels("rate_limit_exceeded").inc(3)
    metrics.step(StepStats(steps=2, step_s=0.5, compute_s=0.25, running=3, cells_used=40, preemptions=1))
    metrics.cached_tokens.labels("ram").inc(5)
    second = read(history.sample(metrics))
    expected: dict[str, float | None] = {"generated": 3.5, "refused": 2, "steps": 1, "step_s": 0.25}
    expected |= {"running": 3, "cells_used": 40, "preempted": 0.5, "cached": 2.5, "first_p50": None}
    assert {name: second[name] for name in expected} == expected
    assert history.totals["generated_tokens"] == 107 and history.totals["requests_refused"] == 6


def test_quantiles_are_of_the_last_seconds() -> None:
    metrics, history = EngineMetrics(), History()
    history.sample(metrics)
    for _ in range(10):
        metrics.inter_token.observe(0.02)
    metrics.time_to_first_token.observe(0.3)
    row = read(history.sample(metrics))
    assert 10 < row["gap_p50"] < row["gap_p99"] <= 25
    assert 250 < row["first_p50"] <= 500
    for _ in range(History.WINDOW + 1):
        row = read(history.sample(metrics))
    assert row["gap_p50"] is None


@pytest.mark.parametrize(
    ("counts", "part", "expected"),
    [([0, 0, 0], 0.5, None), ([10, 10, 10], 0.5, 5.0), ([0, 10, 10], 0.5, 55.0), ([0, 0, 4], 0.99, 100.0)],
)
def test_a_quantile_is_interpolated_in_its_bucket(
    counts: list[float], part: float, expected: float | None
) -> None:
    assert quantile_ms((0.01, 0.1), counts, part) == expected


def test_the_history_is_an_hour_at_most() -> None:
    metrics, history = EngineMetrics(), History()
    for _ in range(History.LENGTH + 5):
        row = history.sample(metrics)
    assert len(history.rows) == History.LENGTH and len(row) < 300


def test_metrics_that_begin_anew_are_no_negative_rate() -> None:
    history, old = History(), EngineMetrics()
    old.generated_tokens.inc(50)
    history.sample(old)
    assert read(history.sample(EngineMetrics()))["generated"] == 0
