"""The prefix cache: finds a computed prefix of a prompt, applies it, stores what a sequence leaves.

A match comes from a running sequence or from host RAM. A state in RAM is that of a whole sequence: it is
restored and then cut to the common prefix. Where memory cannot be cut, it matches only as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from cllm.backend.base import ModelRunner
from cllm.core.kv_cache.host_cache import Entry, HostKVCache, Match, get_entry_size
from cllm.core.kv_cache.transfer import KVTransfer
from cllm.core.prefill_budget import PrefillBudget
from cllm.core.sequence import Sequence, count_cells
from cllm.core.step_cost import MILLISECOND, TILE

log = logging.getLogger(__name__)

MIN_COPY_TOKENS = TILE  # computing fewer costs no more than copying a KV stream
MIN_RESTORE_TOKENS = 16  # of a state in RAM only what it holds is moved, so a system prompt is worth it
MAX_CANDIDATES = 64  # states looked at, of all with a common prefix


class PrefixMatch(NamedTuple):
    """The first `length` tokens of a sequence are those of a running sequence, or of a state in RAM."""

    length: int
    source: Sequence | None = None
    entry: Entry | None = None

    @property
    def ready(self) -> bool:
        """False while the source is still computing what is wanted of it."""
        return self.source is None or self.source.num_computed >= self.length


class PrefixCache:
    """Finds prefix matches, applies them, stores states. What fails is computed instead."""

    MIN_NEW_SHARE = 8  # a full cache takes a state only if one part in so many of it is new
    MAX_SAVE_COST = 0.5  # of the time to compute what is new in a state
    DEFAULT_TOKEN_S = MILLISECOND  # to compute a token, until it was measured

    def __init__(
        self,
        runner: ModelRunner,
        transfer: KVTransfer,
        budget: PrefillBudget,
        host: HostKVCache,
        *,
        across_tenants: bool,
    ) -> None:
        self._runner = runner
        self._transfer = transfer
        self._budget = budget
        self._cost = budget.cost
        self.host = host
        self._across_tenants = across_tenants
        # Where memory cannot be cut, a state is good only as a whole, which a running one never is for long.
        self._cuttable = not (runner.info.recurrent or runner.info.sliding_window)
        self._unified = runner.limits.unified
        self._last_saved = (1, 0)  # tokens and bytes of a state: what to expect of the next
        self.transferred_before_s = 0.0  # until this step: saving may keep others waiting for a bounded time
        self.hits = self.hit_tokens = self.saves = 0  # in all

    def _tenant(self, sequence: Sequence) -> str:
        return "" if self._across_tenants else sequence.request.tenant

    # Finding ---------------------------------------------------------------------------------------

    def find(self, sequence: Sequence, running: Iterable[Sequence]) -> PrefixMatch | None:
        """The best match there is for a sequence, or will be soon: then it is not `ready` yet."""
        if not sequence.request.reuse or len(sequence.tokens) <= MIN_RESTORE_TOKENS:
            return None
        running = tuple(running)
        shared = self._best_source(sequence, running)
        cached = self._best_entry(sequence, running)
        if shared is None or cached is None:
            return shared or cached
        assert shared.source is not None
        if not shared.ready and (
            shared.source.num_computed < cached.length or shared.length < cached.length + MIN_COPY_TOKENS
        ):
            return cached  # waiting pays only if the source is ahead of what can be had at once, and goes far
        # As good as each other before anything was measured: only in unified KV a copy is free.
        favourite = shared if self._unified else cached
        return max(shared, cached, key=lambda match: (self._gain_s(match), match is favourite))

    def _best_source(self, sequence: Sequence, running: tuple[Sequence, ...]) -> PrefixMatch | None:
        if not self._cuttable:
            return None
        opening = sequence.tokens[:MIN_COPY_TOKENS]
        tenant = self._tenant(sequence)
        matches = (
            PrefixMatch(sequence.shared_with(other), source=other)
            for other in running
            if other.tokens[:MIN_COPY_TOKENS] == opening
            and other.request.reuse
            and self._tenant(other) == tenant
        )
        # It waits for its elders only: those that came later could keep it waiting for ever.
        useful = (
            match
            for match in matches
            if match.ready or (match.source is not None and match.source.arrival < sequence.arrival)
        )
        best = max(useful, key=lambda match: match.length, default=None)
        return best if best is not None and best.length >= MIN_COPY_TOKENS else None

    def _best_entry(self, sequence: Sequence, running: tuple[Sequence, ...]) -> PrefixMatch | None:
        # A state is restored whole, even where only its prefix is wanted.
        room = self._runner.limits.sequence_cells
        if self._unified:
            room = min(room, self._runner.limits.cells - count_cells(running))
        best = max(
            (
                PrefixMatch(match.length, entry=match.value)
                # the last token is always computed: what comes after it is wanted
                for match in self._known(sequence, sequence.tokens[:-1], MIN_RESTORE_TOKENS)[-MAX_CANDIDATES:]
                if len(match.value.tokens) <= room
            ),
            key=lambda match: (self._gain_s(match), match.length),
            default=None,
        )
        if best is not None and self._gain_s(best) < 0:
            self._cost.doubt_transfers()
            return None
        return best

    def _known(self, sequence: Sequence, tokens: list[int], min_length: int) -> list[Match[Entry]]:
        """Usable states in RAM that share a prefix with these tokens, the longest last."""
        matches = self.host.matches(self._tenant(sequence), tokens, min_length)
        return [match for match in matches if self._cuttable or match.length == len(match.value.tokens)]

    def _token_s(self) -> float:
        return self._cost.prefill_token_s or self.DEFAULT_TOKEN_S

    def _gain_s(self, match: PrefixMatch) -> float:
        """Seconds saved by applying a match instead of computing."""
        if match.entry is not None:
            moved = match.entry.size
        elif self._unified:
            moved = 0
        else:  # the whole KV stream
            moved = self._state_bytes(self._runner.limits.sequence_cells)
        return match.length * self._token_s() - self._cost.restore_s(moved)

    def _state_bytes(self, tokens: int) -> int:
        """What a state will take, judging by the last; it does not grow where memory cannot be cut."""
        saved_tokens, saved_bytes = self._last_saved
        return saved_bytes * tokens // saved_tokens if self._cuttable else saved_bytes

    # Applying --------------------------------------------------------------------------------------

    def apply_match(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Fill the sequence's own, empty slot with its prefix."""
        assert match.ready
        first_start = sequence.decoded_tokens == 0
        held = 0
        copied: Sequence | None = None
        try:
            entry = match.entry or self._through_ram(match)
            if entry is not None:
                held = self._restore(sequence.seq_id, entry, match.length)
            elif (copied := match.source) is not None:
                held = self._runner.copy(copied.seq_id, sequence.seq_id, match.length)
        except Exception:
            log.exception("the cached prefix of request %s could not be applied; it is computed", sequence.id)
            if match.entry is not None:
                self.host.drop(match.entry)
        if held != match.length:
            held = self._runner.truncate(sequence.seq_id, 0)
        sequence.cut_to(held)
        if copied is not None and self._unified:
            sequence.share_cells(copied)
        if first_start:  # a preempted one has computed this before
            sequence.cached_tokens = held
        self.hits += held > 0
        self.hit_tokens += held

    def _through_ram(self, match: PrefixMatch) -> Entry | None:
        """The source's state saved to RAM, where that and restoring it are quicker than copying a KV stream.

        The next request with the same prefix has only the restoring left to do.
        """
        source = match.source
        if source is None or self._unified or not self.host.cached_limit:
            return None
        size = get_entry_size(source.num_computed, self._state_bytes(source.num_computed))
        stream = self._state_bytes(self._runner.limits.sequence_cells)
        if self._cost.save_s(size) + self._cost.restore_s(size) >= self._cost.restore_s(stream):
            return None
        tokens = source.tokens[: source.num_computed]
        return self._save(source, tokens, self._known(source, tokens, MIN_COPY_TOKENS))

    def _restore(self, seq_id: int, entry: Entry, length: int) -> int:
        """Restore a state and cut it; 0 if that fails. One that only finds no room now is kept."""
        runner = self._runner
        held = 0
        if self._transfer.restore(seq_id, entry.state):
            self.host.touch(entry)
            if runner.next_position(seq_id) == len(entry.tokens):
                held = runner.truncate(seq_id, length)
        elif any(runner.next_position(other) for other in range(runner.limits.sequences) if other != seq_id):
            return 0  # other sequences are in its way
        if held != length:
            self.host.drop(entry)
        return held

    # Storing ---------------------------------------------------------------------------------------

    def store(self, sequence: Sequence, *, others: bool) -> None:
        """Keep in RAM what a sequence has computed, if that pays; its slot is released right after.

        `others` are running and wait meanwhile: never longer than the inter-token target.
        """
        tokens = sequence.tokens[: sequence.num_computed]
        if not sequence.request.reuse or len(tokens) < MIN_COPY_TOKENS or not self.host.cached_limit:
            return
        known = self._known(sequence, tokens, MIN_COPY_TOKENS)
        best = max(known, key=lambda match: match.length, default=None)
        new = len(tokens) - (best.length if best is not None else 0)
        if best is not None and new < MIN_COPY_TOKENS:
            self.host.touch(best.value)
            return
        size = get_entry_size(len(tokens), self._state_bytes(len(tokens)))
        if not self.host.could_hold(size) or not self._pays(size, new, others=others):
            return
        crowded = size > self.host.room and new * self.MIN_NEW_SHARE < len(tokens)
        if self._covered(known) or not crowded:
            self._save(sequence, tokens, known)

    def _covered(self, known: list[Match[Entry]]) -> list[Entry]:
        """What a new state contains as a whole: not needed beside it, if that can be cut."""
        return [match.value for match in known if self._cuttable and len(match.value.tokens) == match.length]

    def _pays(self, size: int, new: int, *, others: bool) -> bool:
        seconds = self._cost.save_s(size)
        spent = self._transfer.seconds - self.transferred_before_s
        if others and spent + seconds > self._budget.target_s:
            return False
        if seconds > self.MAX_SAVE_COST * new * self._token_s():
            self._cost.doubt_transfers()
            return False
        return True

    def _save(self, sequence: Sequence, tokens: list[int], known: list[Match[Entry]]) -> Entry | None:
        """Put what a sequence holds, `tokens`, into RAM, in place of what it covers. None if it fails."""
        try:
            if self._runner.next_position(sequence.seq_id) != sequence.num_computed:
                return None
            state = self._transfer.save(sequence.seq_id)
        except Exception:
            log.exception("the KV of request %s could not be saved", sequence.id)
            return None
        if state is None:
            return None
        self._last_saved = (sequence.num_computed, len(state))
        entry = Entry(self._tenant(sequence), tokens, state)
        if self.host.could_hold(entry.size):
            for other in self._covered(known):
                self.host.drop(other)
            self.host.put(entry)
            self.saves += 1
        return entry
