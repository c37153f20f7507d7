"""Request log: the last requests as figures, and latency by request number since the start."""

from __future__ import annotations

import time
from collections import deque

import msgspec

from cllm.frontend.request_state import RequestState
from cllm.types import RequestOutput


class RequestRecord(msgspec.Struct, frozen=True, array_like=True):
    """An ended request: times and counts, never its text."""

    number: int  # in the order of their ends, from 1
    id: str
    tenant: str
    outcome: str
    ended: float  # seconds since 1970
    queue_ms: float
    first_ms: float | None  # from arrival to the first token; None: there was none
    gap_ms: float | None  # between two tokens, on average
    total_ms: float
    prompt: int
    cached: int
    generated: int


class LatencyPoint:
    """Requests with neighbouring numbers: sums and maxima of what they took."""

    __slots__ = ("first_count", "first_max", "first_sum", "gap_count", "gap_max", "gap_sum")

    def __init__(self) -> None:
        self.first_count = self.gap_count = 0
        self.first_sum = self.first_max = self.gap_sum = self.gap_max = 0.0

    def add(self, first_ms: float, gap_ms: float | None) -> None:
        self.first_count += 1
        self.first_sum += first_ms
        self.first_max = max(self.first_max, first_ms)
        if gap_ms is not None:
            self.gap_count += 1
            self.gap_sum += gap_ms
            self.gap_max = max(self.gap_max, gap_ms)

    def merge(self, other: LatencyPoint) -> None:
        self.first_count += other.first_count
        self.first_sum += other.first_sum
        self.first_max = max(self.first_max, other.first_max)
        self.gap_count += other.gap_count
        self.gap_sum += other.gap_sum
        self.gap_max = max(self.gap_max, other.gap_max)

    def figures(self) -> tuple[float, float, float | None, float | None]:
        """Mean and maximum in milliseconds: to the first token, then between two tokens."""
        gap_mean = gap_max = None
        if self.gap_count:
            gap_mean, gap_max = shorten(self.gap_sum / self.gap_count), shorten(self.gap_max)
        return shorten(self.first_sum / self.first_count), shorten(self.first_max), gap_mean, gap_max


class LatencyCurve:
    """Latency by request number in at most `MAX_POINTS` points: when these are full, each two become one."""

    MAX_POINTS = 512

    def __init__(self) -> None:
        self.width = 1  # requests of a point
        self.count = 0
        self.points: list[LatencyPoint] = []

    def add(self, first_ms: float, gap_ms: float | None) -> None:
        if self.count == self.width * self.MAX_POINTS:
            for left, right in zip(self.points[::2], self.points[1::2], strict=True):
                left.merge(right)
            self.points = self.points[::2]
            self.width *= 2
        if self.count == self.width * len(self.points):
            self.points.append(LatencyPoint())
        self.points[-1].add(first_ms, gap_ms)
        self.count += 1


class RequestLog:
    """The last `KEPT` requests, and the latency curve of all of them."""

    KEPT = 100

    def __init__(self) -> None:
        self.count = 0
        self.records: deque[RequestRecord] = deque(maxlen=self.KEPT)
        self.curve = LatencyCurve()

    def add(self, state: RequestState, output: RequestOutput, now: float) -> None:
        assert output.finish_reason is not None and output.usage is not None
        self.count += 1
        first_ms = gap_ms = None
        if state.first_token is not None and state.last_token is not None:
            first_ms = 1000 * (state.first_token - state.arrived)
            if state.generated > 1:
                gap_ms = 1000 * (state.last_token - state.first_token) / (state.generated - 1)
            self.curve.add(first_ms, gap_ms)
        usage, ended_at = output.usage, time.time()
        record = RequestRecord(
            self.count,
            output.request_id[-8:],  # as much as finds it in the log
            state.tenant.name,
            output.error.code if output.error is not None else output.finish_reason.value,
            round(ended_at, 1),
            shorten(1000 * ((state.dispatched or now) - state.arrived)),
            None if first_ms is None else shorten(first_ms),
            None if gap_ms is None else shorten(gap_ms),
            shorten(1000 * (now - state.arrived)),
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
        )
        self.records.append(record)


def shorten(value: float) -> float:
    """Enough digits to read, few to send."""
    return round(value, 2) if value < 100 else float(round(value))
