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
    def costs(self) -> tuple[float, ...]:
        """Each request in units of the probe before it: the machine's own pace divided out."""
        return tuple(request / probe for request, probe in zip(self.requests_s, self.probes_s, strict=True))


def ratio(series: Sequence[Drift]) -> float:
    """Cost at the end of a series over that at its beginning; several series are pooled.

    The end is the last tenth, but at least three requests: of one short series a hiccup would decide.
    """
    return _last_over_first([drift.costs for drift in series])


def raw_ratio(series: Sequence[Drift]) -> float:
    """The same in plain seconds, the machine's own drift included."""
    return _last_over_first([drift.requests_s for drift in series])


def _last_over_first(series: Sequence[Sequence[float]]) -> float:
    first: list[float] = []
    last: list[float] = []
    for values in series:
        window = min(max(len(values) // 10, 3), max(len(values) // 2, 1))
        first += values[:window]
        last += values[-window:]
    return median(last) / median(first)
