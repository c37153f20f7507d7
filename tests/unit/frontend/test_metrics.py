"""Our histogram says exactly what prometheus_client's own would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from cllm.frontend.metrics import PlainHistogram

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
