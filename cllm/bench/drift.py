"""Does the same request take longer later? The machine's own drift is measured beside it and divided out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np


@dataclass(frozen=True, slots=True)
class Drift:
    """Requests and probes, one probe taken just before each request; seconds."""

    requests_s: tuple[float, ...]
    probes_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median request time of the last tenth over the first tenth, each in units of its probe.

        A tenth is at least three requests, so that one hiccup in a short series decides nothing.
        """
        costs = [request / probe for request, probe in zip(self.requests_s, self.probes_s, strict=True)]
        return _last_over_first(costs)

    @property
    def raw_ratio(self) -> float:
        """The same without the probe."""
        return _last_over_first(self.requests_s)


class Probe:
    """A fixed piece of work on one core, about two milliseconds: what it takes now is the machine's pace.

    An integer product, because that runs in NumPy itself: no BLAS, hence no threads that go on spinning.
    """

    def __init__(self) -> None:
        self._matrix = np.arange(160 * 160, dtype=np.int64).reshape(160, 160)

    def __call__(self) -> float:
        """Seconds for the work; the better of two, so that being scheduled away once does not count."""
        return min(self._time(), self._time())

    def _time(self) -> float:
        start = time.perf_counter()
        self._matrix @ self._matrix
        return time.perf_counter() - start


def _last_over_first(values: Sequence[float]) -> float:
    window = min(max(len(values) // 10, 3), max(len(values) // 2, 1))
    return median(values[-window:]) / median(values[:window])
