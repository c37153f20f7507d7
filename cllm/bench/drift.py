"""Does the same request take longer later? The machine's own drift is measured beside it and divided out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


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


def _last_over_first(values: Sequence[float]) -> float:
    window = min(max(len(values) // 10, 3), max(len(values) // 2, 1))
    return median(values[-window:]) / median(values[:window])
