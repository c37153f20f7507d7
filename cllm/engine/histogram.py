"""A histogram for what happens once a token: prometheus_client's own costs several microseconds each time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class PlainHistogram(Collector):
    """Counts by upper bound. No lock: one thread at a time observes."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)  # the last is beyond every bound
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Cumulative, as the exposition format has it."""
        buckets: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(float, self._bounds), float("inf")), tuple(self._counts), strict=True):
            seen += count
            buckets.append((str(bound) if bound < float("inf") else "+Inf", seen))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
