"""What became of the requests of a round."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


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
    total_s: float = 0.0
    chunks_s: tuple[float, ...] = ()
    generated_tokens: int = 0  # as the server counts; where it does not tell, the chunks
    prompt_tokens: int | None = None  # None where the server does not tell
    cached_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    error: str | None = None

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
    python_share: float = float("nan")  # of the server's steps, where it tells

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
