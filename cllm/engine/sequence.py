"""One request inside the engine: its tokens, how many of them are computed, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from enum import Enum

from cllm.backend.base import Sampler
from cllm.engine.pool import SequenceLease
from cllm.text.assembler import TextAssembler
from cllm.types import FinishReason, Request, Usage


class State(Enum):
    """WAITING → RUNNING → FINISHED, with RUNNING → PARKED → RUNNING under KV pressure."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"


_ALLOWED = {
    State.WAITING: {State.RUNNING, State.FINISHED},
    State.RUNNING: {State.PARKED, State.FINISHED},
    State.PARKED: {State.RUNNING, State.FINISHED},
    State.FINISHED: set[State](),
}


class Sequence:
    """A request's tokens catching up with the model: there is no prefill mode and no decode mode.

    `tokens` is the prompt and what was generated; the first `computed` of them are in KV memory under
    the lease. Whatever is beyond is pending. A token is wanted whenever nothing would stay pending.
    """

    def __init__(self, request: Request, capacity: int) -> None:
        self.request = request
        self.tokens: list[int] = list(request.prompt)
        self.computed = 0
        self.state = State.WAITING
        self.lease: SequenceLease | None = None
        self.sampler: Sampler | None = None
        self.assembler = TextAssembler(request.stop)
        self.saved: bytes | None = None  # KV memory while parked
        self.finish_reason: FinishReason | None = None
        # Never more than fits: a full context ends with `length`.
        self.token_limit = min(len(request.prompt) + request.max_tokens, capacity)
        self.cached_tokens = 0  # taken from somebody else's KV instead of being computed
        self.decoded_tokens = 0
        self.steps = 0
        self.ubatches = 0

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def sequence_id(self) -> int:
        assert self.lease is not None, "a sequence id exists only inside a lease"
        return self.lease.sequence_id

    @property
    def pending(self) -> int:
        """How many tokens are known but not computed; at least 1 while running."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def move_to(self, state: State) -> None:
        """Change state; a transition that is not drawn in `State` is a bug."""
        assert state in _ALLOWED[self.state], f"request {self.id}: {self.state} -> {state}"
        self.state = state

    def next_tokens(self, count: int) -> Tokens[int]:
        """The next `count` pending tokens."""
        return self.tokens[self.computed : self.computed + count]

    def shared_with(self, other: Sequence) -> int:
        """How many first tokens both have, at most all but this one's last (that must be computed)."""
        mine, theirs = self.tokens, other.tokens
        low, high = 0, min(len(mine) - 1, len(theirs))
        if mine[:high] == theirs[:high]:
            return max(0, high)
        while high - low > 1:
            middle = (low + high) // 2
            if mine[low:middle] == theirs[low:middle]:
                low = middle
            else:
                high = middle
        return low

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.generated,
            cached_tokens=self.cached_tokens,
            decoded_tokens=self.decoded_tokens,
            steps=self.steps,
            ubatches=self.ubatches,
            cells=self.computed,
        )
