"""Who has computed this before: beginnings taken over from running sequences and from the RAM tier.

A state in RAM is that of a whole sequence; restoring it and cutting it to the common beginning serves
whoever begins alike. Where memory cannot be cut, it serves those who begin with all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from cllm.backend.base import ModelRunner
from cllm.core.kv_cache.host_cache import Entry, HostKVCache, Match, size_of
from cllm.core.kv_cache.transfer import KVTransfer
from cllm.core.prefill_budget import PrefillBudget
from cllm.core.sequence import Sequence

log = logging.getLogger(__name__)

WORTH_COPYING = 64  # tokens; computing fewer costs no more than copying a stream
WORTH_RESTORING = 16  # tokens; of a state in RAM only what it holds is moved, so a system prompt is worth it
MAX_CANDIDATES = 64  # states looked at, of all that begin alike


class PrefixMatch(NamedTuple):
    """Where the first `length` tokens of a sequence can be had: from a running one, or from RAM."""

    length: int
    donor: Sequence | None = None
    entry: Entry | None = None

    @property
    def ready(self) -> bool:
        """False while a donor is still computing what is wanted of it."""
        return self.donor is None or self.donor.num_computed >= self.length

    @property
    def arrival(self) -> int:
        """When the donor came; what lies in RAM was there before anybody."""
        return self.donor.arrival if self.donor is not None else 0


class PrefixCounts(NamedTuple):
    """What happened."""

    hits: int = 0  # sequences that began with something taken over
    tokens: int = 0  # tokens they did not have to compute
    saves: int = 0  # states put into RAM
    evictions: int = 0  # states pushed out of it


_NOTHING = PrefixCounts()


class PrefixCache:
    """Finds beginnings, takes them over, leaves them behind. What fails is computed instead."""

    NEW_PART = 8  # a full tier takes a state only if one part in so many of it is new
    PAYS = 0.5  # a state is saved if that takes at most this part of the time to compute what is new in it
    TOKEN_S = 1e-3  # to compute a token, until it was measured

    def __init__(
        self,
        runner: ModelRunner,
        moves: KVTransfer,
        budget: PrefillBudget,
        tier: HostKVCache,
        *,
        across_tenants: bool,
    ) -> None:
        self._runner = runner
        self._moves = moves
        self._budget = budget
        self.tier = tier
        self._across_tenants = across_tenants
        # Where memory cannot be cut, a state is good only as a whole, which a running one never is for long.
        self._cuttable = not (runner.info.recurrent or runner.info.sliding_window)
        self._last_saved = (1, 0)  # tokens and bytes of a state: what to expect of the next
        self._moved_before_s = 0.0  # until this step
        self._counts = _NOTHING  # since they were taken last
        self._evictions_told = 0

    def new_step(self) -> None:
        """The time for which saving may keep others waiting is counted by the step."""
        self._moved_before_s = self._moves.seconds

    def take_counts(self) -> PrefixCounts:
        """What happened since the last call."""
        if self._counts is _NOTHING and self._evictions_told == self.tier.evictions:
            return _NOTHING
        evictions, self._evictions_told = self.tier.evictions - self._evictions_told, self.tier.evictions
        counts, self._counts = self._counts._replace(evictions=evictions), _NOTHING
        return counts

    def _tenant(self, sequence: Sequence) -> str:
        return "" if self._across_tenants else sequence.request.tenant

    # Finding ---------------------------------------------------------------------------------------

    def find(self, sequence: Sequence, running: Iterable[Sequence]) -> PrefixMatch | None:
        """The best beginning there is for a sequence, or will be soon: then it is not `ready` yet."""
        if not sequence.request.reuse or len(sequence.tokens) <= WORTH_RESTORING:
            return None
        running = tuple(running)
        donated = self._best_donor(sequence, running)
        cached = self._best_entry(sequence, running)
        if donated is None or cached is None:
            return donated or cached
        assert donated.donor is not None
        if not donated.ready and (
            donated.donor.num_computed < cached.length or donated.length < cached.length + WORTH_COPYING
        ):
            return cached  # waiting pays only if the donor is ahead of what can be had at once, and goes far
        # As good as each other before anything was measured: only a common pool copies for nothing.
        favourite = donated if self._unified else cached
        return max(donated, cached, key=lambda origin: (self._gain_s(origin), origin is favourite))

    def _best_donor(self, sequence: Sequence, running: tuple[Sequence, ...]) -> PrefixMatch | None:
        if not self._cuttable:
            return None
        opening = sequence.tokens[:WORTH_COPYING]
        tenant = self._tenant(sequence)
        donors = (
            PrefixMatch(sequence.shared_with(other), donor=other)
            for other in running
            if other.tokens[:WORTH_COPYING] == opening
            and other.request.reuse
            and self._tenant(other) == tenant
        )
        # It waits for its elders only: those who came later could keep it waiting for ever.
        useful = (donor for donor in donors if donor.ready or donor.arrival < sequence.arrival)
        best = max(useful, key=lambda donor: donor.length, default=None)
        return best if best is not None and best.length >= WORTH_COPYING else None

    def _best_entry(self, sequence: Sequence, running: tuple[Sequence, ...]) -> PrefixMatch | None:
        # A state is restored whole, even where only its beginning is wanted.
        room = self._runner.limits.sequence_cells
        if self._unified:
            room = min(room, self._runner.limits.cells - sum(other.num_computed for other in running))
        best = max(
            (
                PrefixMatch(match.length, entry=match.value)
                # the last token is always computed: what comes after it is wanted
                for match in self._known(sequence, sequence.tokens[:-1], WORTH_RESTORING)[-MAX_CANDIDATES:]
                if len(match.value.tokens) <= room
            ),
            key=lambda origin: (self._gain_s(origin), origin.length),
            default=None,
        )
        if best is not None and self._gain_s(best) < 0:
            self._moves.restoring.doubt()
            return None
        return best

    def _known(self, sequence: Sequence, tokens: list[int], at_least: int) -> list[Match[Entry]]:
        """What RAM holds of these tokens that can be made use of, the longest last."""
        matches = self.tier.matches(self._tenant(sequence), tokens, at_least)
        return [match for match in matches if self._cuttable or match.length == len(match.value.tokens)]

    @property
    def _unified(self) -> bool:
        return self._runner.limits.unified

    def _token_s(self) -> float:
        return self._budget.seconds_per_token or self.TOKEN_S

    def _gain_s(self, origin: PrefixMatch) -> float:
        """Seconds saved by taking over instead of computing."""
        if origin.entry is not None:
            moved = origin.entry.size
        elif self._unified:
            moved = 0
        else:  # the whole stream
            moved = self._state_bytes(self._runner.limits.sequence_cells)
        return origin.length * self._token_s() - self._moves.restoring.seconds(moved)

    def _state_bytes(self, tokens: int) -> int:
        """What a state will take, judging by the last; it does not grow where memory cannot be cut."""
        saved_tokens, saved_bytes = self._last_saved
        return saved_bytes * tokens // saved_tokens if self._cuttable else saved_bytes

    # Taking over -----------------------------------------------------------------------------------

    def take(self, sequence: Sequence, origin: PrefixMatch) -> None:
        """Fill the sequence's own, empty memory with its beginning."""
        assert origin.ready
        first_start = sequence.decoded_tokens == 0
        held = 0
        try:
            entry = origin.entry or self._through_ram(origin)
            if entry is not None:
                held = self._restore(sequence.seq_id, entry, origin.length)
            elif origin.donor is not None:
                held = self._moves.copy(origin.donor.seq_id, sequence.seq_id, origin.length)
        except Exception:
            log.exception("request %s could not take over what is known of it; it is computed", sequence.id)
        if held != origin.length:
            held = self._runner.truncate(sequence.seq_id, 0)
            if origin.entry is not None:
                self.tier.drop(origin.entry)
        sequence.num_computed = held
        if first_start:  # one that was parked has computed this before
            sequence.cached_tokens = held
        counts = self._counts
        self._counts = counts._replace(hits=counts.hits + (held > 0), tokens=counts.tokens + held)

    def _through_ram(self, origin: PrefixMatch) -> Entry | None:
        """The donor's state put into RAM, where that and restoring it are quicker than copying a stream.

        Whoever comes next with the same beginning has only the restoring left to do.
        """
        donor = origin.donor
        if donor is None or self._unified or not self.tier.cached_limit:
            return None
        size = size_of(donor.num_computed, self._state_bytes(donor.num_computed))
        stream = self._state_bytes(self._runner.limits.sequence_cells)
        if self._moves.saving.seconds(size) + self._moves.restoring.seconds(
            size
        ) >= self._moves.restoring.seconds(stream):
            return None
        tokens = donor.tokens[: donor.num_computed]
        return self._keep(donor, tokens, self._known(donor, tokens, WORTH_COPYING))

    def _restore(self, seq_id: int, entry: Entry, length: int) -> int:
        if not self._moves.restore(seq_id, entry.state):
            return 0
        self.tier.touch(entry)
        if self._runner.next_position(seq_id) != len(entry.tokens):
            return 0
        return self._runner.truncate(seq_id, length)

    # Leaving behind --------------------------------------------------------------------------------

    def leave(self, sequence: Sequence, *, others: bool) -> None:
        """Keep in RAM what a sequence has computed, if that pays; its lease is released right after.

        `others` are running and wait meanwhile: never longer than the gap between tokens they must bear.
        """
        tokens = sequence.tokens[: sequence.num_computed]
        if not sequence.request.reuse or len(tokens) < WORTH_COPYING or not self.tier.cached_limit:
            return
        known = self._known(sequence, tokens, WORTH_COPYING)
        best = max(known, key=lambda match: match.length, default=None)
        new = len(tokens) - (best.length if best is not None else 0)
        if best is not None and new < WORTH_COPYING:
            self.tier.touch(best.value)
            return
        size = size_of(len(tokens), self._state_bytes(len(tokens)))
        if not self.tier.could_hold(size) or not self._pays(size, new, others=others):
            return
        if not self._covered(known) and size > self.tier.cache_room and new * self.NEW_PART < len(tokens):
            return
        self._keep(sequence, tokens, known)

    def _covered(self, known: list[Match[Entry]]) -> list[Entry]:
        """What a new state begins with as a whole: not needed beside it, if that can be cut."""
        return [match.value for match in known if self._cuttable and len(match.value.tokens) == match.length]

    def _keep(self, sequence: Sequence, tokens: list[int], known: list[Match[Entry]]) -> Entry | None:
        """Put what a sequence holds, `tokens`, into RAM, in place of what it covers. None if it fails."""
        state = self._save(sequence)
        if state is None:
            return None
        entry = Entry(self._tenant(sequence), tokens, state)
        if self.tier.could_hold(entry.size):
            for other in self._covered(known):
                self.tier.drop(other)
            self.tier.put(entry)
            self._counts = self._counts._replace(saves=self._counts.saves + 1)
        return entry

    def _pays(self, size: int, new: int, *, others: bool) -> bool:
        seconds = self._moves.saving.seconds(size)
        if others and self._moves.seconds - self._moved_before_s + seconds > self._budget.target_s:
            return False
        if seconds > self.PAYS * new * self._token_s():
            self._moves.saving.doubt()
            return False
        return True

    def _save(self, sequence: Sequence) -> bytes | None:
        """The sequence's state, or None where it is in doubt or cannot be had."""
        try:
            if self._runner.next_position(sequence.seq_id) != sequence.num_computed:
                return None
            state = self._moves.save(sequence.seq_id)
        except Exception:
            log.exception("what request %s has computed could not be saved", sequence.id)
            return None
        if state is not None:
            self._last_saved = (sequence.num_computed, len(state))
        return state
