"""History of an engine's metrics: one row a second, encoded, for the last hour."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from cllm.frontend.metrics import DECLARED, EngineMetrics

_encoder = msgspec.json.Encoder()
RATES: dict[str, str] = DECLARED["rates"]
GAUGES: dict[str, str] = DECLARED["gauges"]
QUANTILES: dict[str, str] = DECLARED["quantiles"]
PARTS = {"p50": 0.5, "p99": 0.99}
TOTALS = (*RATES.values(), *GAUGES.values())  # counters and gauges, in the order of the columns
COLUMNS = ("t", *RATES, *GAUGES, *(f"{name}_{part}" for name in QUANTILES for part in PARTS))


class History:
    """The rows of the last hour. A row costs what reading some twenty metrics costs."""

    LENGTH = 3600
    WINDOW = 10  # seconds of which quantiles are taken

    def __init__(self) -> None:
        self.rows: deque[bytes] = deque(maxlen=self.LENGTH)
        self.totals: dict[str, float] = {}  # by metric, as of the last row
        self._at = time.monotonic()  # when the last row was taken
        self._buckets: deque[dict[str, list[float]]] = deque(maxlen=self.WINDOW + 1)

    def sample(self, metrics: EngineMetrics) -> bytes:
        """Take a row: what has happened a second since the last one."""
        now = time.monotonic()
        passed_s, self._at = max(now - self._at, 0.001), now
        last, totals = self.totals, metrics.read(TOTALS)
        buckets = {name: metrics.read_buckets(name) for name in QUANTILES.values()}
        if any(totals[name] < last.get(name, 0.0) for name in RATES.values()):
            last = {}  # metrics of another engine: they begin anew
            self._buckets.clear()
        self.totals = totals
        self._buckets.append(buckets)
        row: list[float | None] = [round(time.time(), 2)]
        rates = ((totals[name] - last.get(name, totals[name])) / passed_s for name in RATES.values())
        row += [round(rate, 4) if rate < 10 else round(rate) for rate in rates]  # never quite a second
        row += [totals[name] for name in GAUGES.values()]
        for name in QUANTILES.values():
            then = self._buckets[0][name]
            grown = [count - before for count, before in zip(buckets[name], then, strict=True)]
            row += [quantile_ms(metrics.bounds, grown, part) for part in PARTS.values()]
        encoded = _encoder.encode([int(x) if x is not None and x == int(x) else x for x in row])
        self.rows.append(encoded)
        return encoded


def quantile_ms(bounds: Sequence[float], cumulative: Sequence[float], part: float) -> float | None:
    """A quantile by linear interpolation in its bucket, as PromQL's `histogram_quantile` has it."""
    if not (rank := part * cumulative[-1]):
        return None
    place = next(index for index, count in enumerate(cumulative) if count >= rank)
    if place == len(bounds):  # beyond every bound
        return 1000.0 * bounds[-1]
    below, low = (cumulative[place - 1], bounds[place - 1]) if place else (0.0, 0.0)
    inside = (rank - below) / (cumulative[place] - below)
    return round(1000 * (low + (bounds[place] - low) * inside), 2)
