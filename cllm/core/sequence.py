"""One request inside the engine: its tokens, how many of them are computed, and where it stands."""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from concurrent.futures import Future
from enum import Enum
from typing import NamedTuple

from cllm.backend.base import Row, Sampler
from cllm.core.spec_decode import DraftState
from cllm.errors import IntegrityError
from cllm.text.detokenizer import IncrementalDetokenizer
from cllm.text.structured_output import Constraint
from cllm.types import FinishReason, Request, TokenMask, Usage, Vocabulary


class State(Enum):
    """WAITING → RUNNING → FINISHED, with RUNNING → PREEMPTED → RUNNING under KV pressure."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "parked"
    FINISHED = "finished"


_ALLOWED = {
    State.WAITING: {State.RUNNING, State.FINISHED},
    State.RUNNING: {State.PREEMPTED, State.FINISHED},
    State.PREEMPTED: {State.RUNNING, State.FINISHED},
    State.FINISHED: set[State](),
}


class Taken(NamedTuple):
    """What a sequence made of the tokens chosen for it."""

    tokens: tuple[int, ...]
    text: str
    reason: FinishReason | None  # set when it is over


class Sequence:
    """A request's tokens catching up with the model: there is no prefill mode and no decode mode.

    `tokens` is the prompt and what was generated; the first `computed` of them are in KV memory under
    the lease. Whatever is beyond is pending. A token is wanted whenever nothing would stay pending.
    """

    def __init__(self, request: Request, capacity: int, arrival: int = 0) -> None:
        self.request = request
        self.id = request.id
        self.arrival = arrival  # its number: a lower one was here before
        self.tokens: list[int] = list(request.prompt)
        self.num_computed = 0
        self.state = State.WAITING
        self.lease: SlotLease | None = None
        self.sampler: Sampler | None = None
        self.detokenizer = IncrementalDetokenizer(request.stop)
        self._markers: dict[int, bytes] | None = None if request.markers else {}
        self.constraint: Constraint | None = None
        self.compiling: Future[Constraint] | None = None  # done before it may start
        self.saved: bytes | None = None  # KV memory while parked
        # Never more than fits: a full context ends with `length`.
        self.token_limit = min(len(request.prompt) + request.max_tokens, capacity)
        self.cached_tokens = 0  # taken from somebody else's KV instead of being computed
        self.speculation: DraftState | None = None
        self.decoded_tokens = 0
        self.steps = 0
        self.ubatches = 0

    @property
    def seq_id(self) -> int:
        assert self.lease is not None, "a sequence id exists only inside a lease"
        return self.lease.seq_id

    @property
    def pending(self) -> int:
        """How many tokens are known but not computed; at least 1 while running."""
        return len(self.tokens) - self.num_computed

    @property
    def answering(self) -> bool:
        """Its prompt is computed: what is pending was chosen, or forced by a grammar."""
        return self.num_computed >= len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def move_to(self, state: State) -> None:
        """Change state; a transition that is not drawn in `State` is a bug."""
        assert state in _ALLOWED[self.state], f"request {self.id}: {self.state} -> {state}"
        self.state = state

    @property
    def startable(self) -> bool:
        """False while its grammar is still being compiled."""
        return self.compiling is None or self.compiling.done()

    def needs_mask(self, count: int) -> bool:
        """Whether a step with `count` of its tokens ends with a choice that a grammar restricts."""
        return self.constraint is not None and count == self.pending

    def row(self, count: int, drafts: Tokens[int] = (), mask: TokenMask | None = None) -> Row:
        """Its part of a step: the next `count` pending tokens, and what is wanted after the last of them.

        `drafts` are guesses of what follows, to be verified: only where a token is wanted.
        """
        wants_output = count == self.pending
        assert wants_output or not drafts
        return Row(
            seq_id=self.seq_id,
            position=self.num_computed,
            tokens=[*self.tokens[self.num_computed : self.num_computed + count], *drafts],
            outputs=wants_output + len(drafts),
            sampler=self.sampler,
            mask=mask,
            logprobs=self.request.logprobs,
        )

    def take(self, chosen: Tokens[int], vocabulary: Vocabulary) -> Taken:
        """Append chosen tokens, and those the grammar then forces, until something ends the answer."""
        taken: list[int] = []
        texts: list[str] = []
        reason: FinishReason | None = None
        left = list(chosen)
        while left and reason is None:
            token = left.pop(0)
            if vocabulary.is_end(token) and not self.request.sampling.ignore_eos:
                reason = FinishReason.STOP
                break
            self.tokens.append(token)
            taken.append(token)
            texts.append(self.detokenizer.push(self._piece(token, vocabulary)))
            if self.constraint is not None:
                self.constraint.accept(token)
            reason = self._reason_to_end()
            if reason is None and not left and self.constraint is not None:
                left = self._forced()
        if reason is not None:
            texts.append(self.detokenizer.finish())
        return Taken(tuple(taken), "".join(texts), reason)

    def _piece(self, token: int, vocabulary: Vocabulary) -> bytes:
        """The token's bytes; those of a control token only where the client asked to see its spelling."""
        if self._markers is None:
            spelled = {
                marker: vocabulary.tokenize(marker, add_special=False, parse_special=True)
                for marker in self.request.markers
            }
            self._markers = {
                tokens[0]: marker.encode()
                for marker, tokens in spelled.items()
                if len(tokens) == 1 and vocabulary.is_control(tokens[0])
            }
        return self._markers.get(token) or vocabulary.piece(token)

    def _reason_to_end(self) -> FinishReason | None:
        if self.detokenizer.stopped_by is not None:
            return FinishReason.STOP
        if self.constraint is not None and self.constraint.complete:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.token_limit else None

    def _forced(self) -> list[int]:
        """Tokens that need no sampling; none where the client wants to see every token's probability."""
        assert self.constraint is not None
        if self.request.logprobs:
            return []
        forced = list(self.constraint.forced())
        if forced and self.sampler is not None:
            self.sampler.accept(forced)
        return forced

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
            cells=self.num_computed,
            drafted_tokens=self.speculation.drafted if self.speculation is not None else 0,
            accepted_tokens=self.speculation.accepted if self.speculation is not None else 0,
        )


log = logging.getLogger(__name__)


class SlotLease:
    """The right to use one sequence id until released. Released exactly once, by its holder."""

    __slots__ = ("_pool", "leased_at", "request_id", "seq_id")

    def __init__(self, pool: SlotPool, seq_id: int, request_id: str) -> None:
        self._pool = pool
        self.seq_id = seq_id
        self.request_id = request_id
        self.leased_at = time.monotonic()

    def release(self) -> None:
        """Clear the id's KV, then give it back. A second call is a bug and raises."""
        self._pool._release(self)


class SlotPool:
    """The ids 0 … size - 1. Leased lowest-first, so that the active ids stay dense.

    `clear(seq_id)` empties the id's memory and returns how many cells it held. It runs before the
    id can be leased again; if it fails, the id is retired: it is never leased again.
    """

    def __init__(self, size: int, clear: Callable[[int], int]) -> None:
        self.size = size
        self._clear = clear
        self._free = list(range(size))
        self._held: dict[int, SlotLease] = {}
        self.retired: set[int] = set()
        self.leased_total = 0
        self.released_total = 0
        self.cleared_cells_total = 0

    def lease(self, request_id: str) -> SlotLease | None:
        """The lowest free id, or None: then wait, ids are never shared."""
        if not self._free:
            return None
        seq_id = heapq.heappop(self._free)
        lease = SlotLease(self, seq_id, request_id)
        self._held[seq_id] = lease
        self.leased_total += 1
        log.debug("leased seq %d for request %s", seq_id, request_id)
        return lease

    @property
    def leases(self) -> tuple[SlotLease, ...]:
        """Every lease now held, by ascending id."""
        return tuple(self._held[seq_id] for seq_id in sorted(self._held))

    def holder(self, seq_id: int) -> str | None:
        """The request that holds an id now."""
        lease = self._held.get(seq_id)
        return lease.request_id if lease is not None else None

    @property
    def held_count(self) -> int:
        return len(self._held)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def free_ids(self) -> frozenset[int]:
        """The ids that can be leased; they hold nothing."""
        return frozenset(self._free)

    def _release(self, lease: SlotLease) -> None:
        if self._held.get(lease.seq_id) is not lease:
            raise IntegrityError(f"seq {lease.seq_id} was released twice for request {lease.request_id}")
        try:
            cells = self._clear(lease.seq_id)
        except Exception:
            # Law 2: an id whose memory is in doubt must not be used again.
            self.retired.add(lease.seq_id)
            log.exception("seq %d could not be cleared and is retired", lease.seq_id)
        else:
            heapq.heappush(self._free, lease.seq_id)
            self.cleared_cells_total += cells
            log.debug("cleared KV of seq %d (%d cells)", lease.seq_id, cells)
        finally:
            del self._held[lease.seq_id]
            self.released_total += 1
