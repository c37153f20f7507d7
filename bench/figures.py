"""What became of the requests of a load, and the figures a workload can yield from them.

Figures count the answered requests only, and are NaN where there is nothing to count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one request. Times in seconds, points in time from the start of the load.

    `started_s` is when it was sent or, in an open loop, when it was due: waiting for the client counts.
    A chunk is a piece of text as it arrived and may hold several tokens.
    """

    index: int
    started_s: float
    group: str = "requests"
    late: bool = False  # of a group that waited for the others to run
    turn: int = 0  # of a conversation; the next completion is its next turn
    total_s: float = 0.0
    chunks_s: tuple[float, ...] = ()
    generated_tokens: int = 0  # as the server counts; where it does not count, the chunks
    prompt_tokens: int | None = None  # None where the server does not say
    cached_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    error: str | None = None

    @property
    def computed_tokens(self) -> int | None:
        """Tokens of the prompt that were computed; None where the server does not say."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens

    @property
    def first_token_s(self) -> float | None:
        return self.chunks_s[0] - self.started_s if self.chunks_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between a chunk and the next."""
        return tuple(later - earlier for earlier, later in pairwise(self.chunks_s))

    @property
    def tokens_per_chunk(self) -> float:
        """Never less than one, whatever the server says."""
        return max(1.0, self.generated_tokens / len(self.chunks_s)) if self.chunks_s else 0.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One run of a plan. `completions` are in the plan's order."""

    workload: str
    wall_s: float
    client_cpu_s: float
    completions: tuple[Completion, ...]
    python_share: float = float("nan")  # of the server's steps, where it is known

    @property
    def answered(self) -> list[Completion]:
        return [each for each in self.completions if each.error is None]

    @property
    def generated_tokens(self) -> int:
        return sum(completion.generated_tokens for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.wall_s

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(
            f"request {completion.index}: {completion.error}"
            for completion in self.completions
            if completion.error is not None
        )


NAN = float("nan")
END_REQUESTS = 3  # at either end of a series: one request alone is too noisy
MIN_CHUNKS = 8  # of each stream in the time in which all generate, or there is no figure


@dataclass(frozen=True, slots=True)
class Figure:
    """How a figure is computed from the loads of one round or, if `pooled`, of all rounds together."""

    label: str
    of: Callable[[Sequence[LoadResult]], float]
    scale: float = 1.0  # from seconds or shares to what is shown
    digits: int = 1
    pooled: bool = False
    more_is_better: bool = False

    def show(self, value: float) -> str:
        return f"{value * self.scale:.{self.digits}f}" if math.isfinite(value) else "–"


def percentile(values: Sequence[float], rank: float) -> float:
    """The `rank`-th percentile, 0 to 100, between neighbours by distance; NaN of nothing."""
    return float(np.percentile(values, rank)) if len(values) else NAN


def first_tokens(loads: Sequence[LoadResult], late: bool = False) -> list[float]:
    return [
        each.first_token_s
        for load in loads
        for each in load.answered
        if each.first_token_s is not None and each.late == late
    ]


def gaps(loads: Sequence[LoadResult]) -> list[float]:
    return [gap for load in loads for each in load.answered for gap in each.gaps_s if not each.late]


def stall_gap(loads: Sequence[LoadResult]) -> float:
    """The worst gap of the others from the moment a late request was sent to its first token."""
    return max((gap for load in loads for gap in _gaps_during_late(load)), default=NAN)


def _gaps_during_late(load: LoadResult) -> Iterator[float]:
    for late in load.answered:
        if not late.late or not late.chunks_s:
            continue
        for each in load.answered:
            for earlier, later in pairwise(() if each.late else each.chunks_s):
                if later > late.started_s and earlier < late.chunks_s[0]:
                    yield later - earlier


def all_generating(completions: Sequence[Completion]) -> tuple[float, float] | None:
    """From the last one's first chunk to the first one's last, or None if they never all generated."""
    if not completions or not all(each.chunks_s for each in completions):
        return None
    begin = max(each.chunks_s[0] for each in completions)
    end = min(each.chunks_s[-1] for each in completions)
    return (begin, end) if begin < end else None


def step_seconds(loads: Sequence[LoadResult]) -> float:
    """Seconds for one token of every stream while all generate; the median over the loads.

    A stream's tokens in that time are its chunks times its own tokens per chunk.
    """
    return median([found for load in loads if math.isfinite(found := _step_seconds(load))] or [NAN])


def _step_seconds(load: LoadResult) -> float:
    window = all_generating(load.answered)
    if window is None:
        return NAN
    paces = []
    for each in load.answered:
        inside = [at for at in each.chunks_s if window[0] <= at <= window[1]]
        if len(inside) < MIN_CHUNKS:
            return NAN
        paces.append((inside[-1] - inside[0]) / ((len(inside) - 1) * each.tokens_per_chunk))
    return float(np.mean(paces))


def decode_rate(loads: Sequence[LoadResult]) -> float:
    """Tokens per second of all streams together while all generate."""
    return median(
        [len(load.answered) / found for load in loads if (found := _step_seconds(load)) > 0] or [NAN]
    )


def streams_rate(loads: Sequence[LoadResult]) -> float:
    """Tokens per second of those that were there before a late request, until the last of them ended."""
    streams = [[each for each in load.answered if not each.late] for load in loads]
    return _mean(
        [
            sum(each.generated_tokens for each in early)
            / (max(each.started_s + each.total_s for each in early) - min(each.started_s for each in early))
            for early in streams
            if early
        ]
    )


def first_token_growth(loads: Sequence[LoadResult]) -> float:
    """Median first-token time of the last requests over that of the first, all loads pooled."""
    times = [
        [each.first_token_s for each in load.answered if each.first_token_s is not None] for load in loads
    ]
    first = [time for series in times for time in series[:END_REQUESTS]]
    last = [time for series in times for time in series[-END_REQUESTS:]]
    return median(last) / median(first) if first else NAN


def cached_share(loads: Sequence[LoadResult]) -> float:
    """The part of all prompt tokens that the servers say they did not compute."""
    known = [each for load in loads for each in load.answered if each.cached_tokens is not None]
    prompts = sum(each.prompt_tokens or 0 for each in known)
    return sum(each.cached_tokens or 0 for each in known) / prompts if prompts else NAN


def computed_tokens(loads: Sequence[LoadResult]) -> float:
    """Prompt tokens computed in a load, of the requests whose server says so."""
    counts = [
        sum(computed)
        for load in loads
        if (computed := [found for each in load.answered if (found := each.computed_tokens) is not None])
    ]
    return _mean(counts)


def recomputed_tokens(loads: Sequence[LoadResult]) -> list[int]:
    """By turn: prompt tokens computed though the turn before had computed or generated them.

    An answer that is tokenized otherwise when it comes back as history counts, too.
    """
    return [
        max(0, known - later.cached_tokens)
        for earlier, later in _turns(loads)
        if later.cached_tokens is not None
        and earlier.prompt_tokens is not None
        and (known := earlier.prompt_tokens + earlier.generated_tokens)
    ]


def last_turns(loads: Sequence[LoadResult]) -> list[float]:
    """Times of the last turns of each conversation."""
    found: list[float] = []
    for load in loads:
        last = max((each.turn for each in load.completions), default=0)
        found += [each.total_s for each in load.answered if last and each.turn > last - END_REQUESTS]
    return found


def _turns(loads: Sequence[LoadResult]) -> Iterator[tuple[Completion, Completion]]:
    """A turn and the next of the same conversation, if both were answered."""
    for load in loads:
        for earlier, later in pairwise(load.completions):
            if later.turn == earlier.turn + 1 and earlier.error is None and later.error is None:
                yield earlier, later


def _totals(loads: Sequence[LoadResult]) -> list[float]:
    return [each.total_s for load in loads for each in load.answered]


def _token_times(loads: Sequence[LoadResult]) -> list[float]:
    """Seconds a token in each request after its first chunk, however its tokens came in chunks."""
    return [
        sum(each.gaps_s) / (len(each.gaps_s) * each.tokens_per_chunk)
        for load in loads
        for each in load.answered
        if not each.late and len(each.chunks_s) > 1
    ]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else NAN


FIGURES: Mapping[str, Figure] = {
    "tokens_per_second": Figure(
        "tokens/s", lambda loads: _mean([load.tokens_per_second for load in loads]), more_is_better=True
    ),
    "wall_s": Figure("wall, s", lambda loads: _mean([load.wall_s for load in loads]), digits=2),
    "first_token_p50_s": Figure(
        "first token p50, ms", lambda loads: percentile(first_tokens(loads), 50), 1e3, 0
    ),
    "first_token_p99_s": Figure(
        "first token p99, ms", lambda loads: percentile(first_tokens(loads), 99), 1e3, 0
    ),
    "token_p50_s": Figure(
        "time per token p50, ms", lambda loads: percentile(_token_times(loads), 50), 1e3, 1
    ),
    "gap_p50_s": Figure("gap p50, ms", lambda loads: percentile(gaps(loads), 50), 1e3, 1),
    "gap_p99_s": Figure("gap p99, ms", lambda loads: percentile(gaps(loads), 99), 1e3, 1),
    "gap_worst_s": Figure("worst gap, ms", lambda loads: percentile(gaps(loads), 100), 1e3, 0),
    "total_p50_s": Figure("request p50, ms", lambda loads: percentile(_totals(loads), 50), 1e3, 0),
    "total_p99_s": Figure("request p99, ms", lambda loads: percentile(_totals(loads), 99), 1e3, 0),
    "stall_gap_s": Figure("worst gap while the late prompt is read, ms", stall_gap, 1e3, 0),
    "streams_tokens_per_second": Figure("tokens/s of the streams", streams_rate, more_is_better=True),
    "late_first_token_s": Figure(
        "late prompt's first token, ms", lambda loads: percentile(first_tokens(loads, late=True), 50), 1e3, 0
    ),
    "step_s": Figure("ms a step, all generating", step_seconds, 1e3, 1),
    "decode_tokens_per_second": Figure("tokens/s, all generating", decode_rate, more_is_better=True),
    "first_token_growth": Figure("first token, last / first", first_token_growth, digits=3, pooled=True),
    "cached_share": Figure("prompt tokens not computed, %", cached_share, 100, 0, more_is_better=True),
    "computed_tokens": Figure("prompt tokens computed", computed_tokens, digits=0),
    "recomputed_tokens": Figure(
        "tokens a turn computed again", lambda loads: _mean(recomputed_tokens(loads)), digits=0
    ),
    "recomputed_worst": Figure(
        "the same, worst turn", lambda loads: float(max(recomputed_tokens(loads), default=NAN)), digits=0
    ),
    "last_turns_s": Figure(
        f"last {END_REQUESTS} turns p50, ms", lambda loads: percentile(last_turns(loads), 50), 1e3, 0
    ),
    "python_share": Figure(
        "Python's share of a step, %", lambda loads: _mean([load.python_share for load in loads]), 100, 2
    ),
}
DEFAULT_FIGURES = (
    "tokens_per_second",
    "first_token_p50_s",
    "first_token_p99_s",
    "token_p50_s",
    "gap_p50_s",
    "gap_p99_s",
    "gap_worst_s",
    "total_p50_s",
    "total_p99_s",
)
