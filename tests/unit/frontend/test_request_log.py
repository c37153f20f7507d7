"""The request log: figures of each request, and latency by number in a bounded curve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cllm.frontend.request_log import LatencyCurve, RequestLog
from cllm.types import Failure, FinishReason, RequestOutput, Usage


def state(**changes: Any) -> Any:
    times = {"arrived": 10.0, "dispatched": 10.5, "first_token": 11.0, "last_token": 12.0}
    return SimpleNamespace(**{**times, "generated": 5, "tenant": SimpleNamespace(name="ann"), **changes})


def output(**changes: Any) -> RequestOutput:
    usage = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3)
    fields = {"request_id": "chatcmpl-0123456789", "finish_reason": FinishReason.STOP, "usage": usage}
    return RequestOutput(**{**fields, **changes})


def test_a_record_has_times_and_counts() -> None:
    log = RequestLog()
    log.add(state(), output(), now=12.5)
    (record,) = log.records
    assert (record.number, record.id, record.tenant, record.outcome) == (1, "23456789", "ann", "stop")
    assert (record.queue_ms, record.first_ms, record.gap_ms, record.total_ms) == (500, 1000, 250, 2500)
    assert (record.prompt, record.cached, record.generated) == (7, 3, 5)
    assert log.curve.points[0].figures() == (1000, 1000, 250, 250)


def test_a_request_without_a_token_is_in_the_log_and_not_in_the_curve() -> None:
    log = RequestLog()
    failed = output(finish_reason=FinishReason.ERROR, error=Failure("engine_died", "it died"))
    log.add(state(dispatched=None, first_token=None, last_token=None, generated=0), failed, now=11.0)
    log.add(state(last_token=11.0, generated=1), output(), now=11.0)
    assert [record.outcome for record in log.records] == ["engine_died", "stop"]
    assert (log.records[0].first_ms, log.records[0].queue_ms) == (None, 1000)
    assert log.curve.count == 1 and log.curve.points[0].figures() == (1000, 1000, None, None)


def test_the_log_is_bounded() -> None:
    log = RequestLog()
    for _ in range(250):
        log.add(state(), output(), now=12.5)
    assert [log.records[0].number, log.records[-1].number, log.count] == [151, 250, 250]


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1024, 1025, 20_000])
def test_the_curve_holds_every_request_in_few_points(count: int) -> None:
    curve = LatencyCurve()
    for number in range(count):
        curve.add(float(number), float(number) if number % 2 else None)
    assert len(curve.points) <= curve.MAX_POINTS and curve.count == count
    assert len(curve.points) == -(-count // curve.width)
    assert sum(point.first_count for point in curve.points) == count
    assert sum(point.first_sum for point in curve.points) == sum(range(count))
    assert curve.points[-1].first_max == count - 1
    assert sum(point.gap_count for point in curve.points) == count // 2
    begin = curve.points[0].figures()
    assert begin[0] == pytest.approx((min(curve.width, count) - 1) / 2, abs=0.5)
