"""KV memory copied to host RAM and back: timed for the cost model, and done where it pays."""

from __future__ import annotations

import logging
import time

from cllm.backend.base import KVState, ModelRunner
from cllm.core.kv_cache.tiers import (
    MIN_NEW_SHARE,
    Entry,
    HostKVCache,
    SlotContent,
    count_bytes,
    get_entry_size,
)
from cllm.core.prefill_budget import PrefillBudget
from cllm.core.sequence import Sequence
from cllm.core.step_cost import MILLISECOND, TILE

log = logging.getLogger(__name__)

MIN_COPY_TOKENS = TILE  # computing fewer costs no more than copying a KV stream


class KVTransfer:
    """The one path for KV memory between slots and host RAM: evicted prefixes and preempted sequences.

    Both share the host cache's byte budget. What does not fit, or cannot be saved, is recomputed.
    """

    MAX_SAVE_COST = 0.5  # of the time to compute what is new in a state
    DEFAULT_TOKEN_S = MILLISECOND  # to compute a token, until it was measured

    def __init__(self, runner: ModelRunner, budget: PrefillBudget, host: HostKVCache) -> None:
        self.runner = runner
        self._budget = budget
        self.cost = budget.cost
        self.host = host
        self.cuttable = not (runner.info.recurrent or runner.info.sliding_window)
        # Where a copy from slot to slot only names the same cells once more.
        self.copies_free = self.cuttable and runner.limits.unified
        self._last_state = (1, 0)  # tokens and bytes of a state: what to expect of the next
        self.step_began_s = 0.0  # `seconds` then: what saving may take of a step is bounded
        self.seconds = 0.0  # in all
        self.saves = self.swap_outs = self.swap_ins = 0  # in all

    # Costs -----------------------------------------------------------------------------------------

    @property
    def token_s(self) -> float:
        """Seconds to compute a token of a prompt."""
        return self.cost.prefill_token_s or self.DEFAULT_TOKEN_S

    def observe_slot(self, seq_id: int, tokens: int) -> None:
        """Learn what a state takes before the first is saved."""
        if not self._last_state[1]:
            self._last_state = (tokens, self.runner.state_bytes(seq_id))

    def state_bytes(self, tokens: int) -> int:
        """What a state will take, judging by the last; it does not grow in a recurrent model."""
        last_tokens, last_bytes = self._last_state
        return last_bytes if self.runner.info.recurrent else last_bytes * tokens // last_tokens

    def move_s(self, size: int) -> float:
        """Seconds to save a state and to restore it."""
        return self.cost.save_s(size) + self.cost.restore_s(size)

    def can_move(self, size: int) -> bool:
        """Whether a state may be moved while others wait: in RAM, and within the inter-token target."""
        return size <= self.host.limit and self.move_s(size) <= self._budget.target_s

    def copy_s(self, tokens: int) -> float:
        """Seconds to copy what a slot holds to another: the whole KV stream, or by way of RAM."""
        if self.copies_free:
            return 0.0
        through_ram = self.move_s(self.state_bytes(tokens))
        return min(through_ram, self._stream_s()) if self.cuttable else through_ram

    def _stream_s(self) -> float:
        measured = self.runner.stream_copy_s
        if measured is not None:
            return measured
        return self.cost.restore_s(self.state_bytes(self.runner.limits.sequence_cells))

    def loss_s(self, content: SlotContent, keep: int = 0) -> float:
        """Seconds it will take to have again what is lost when a slot is cut to its first `keep` tokens."""
        computing = (len(content.tokens) - keep) * self.token_s
        size = self.state_bytes(len(content.tokens))
        stored = content.mostly_beyond(keep) and self.host.could_hold(size)
        return min(computing, self.move_s(size)) if stored else computing

    # Slots and RAM ---------------------------------------------------------------------------------

    def save(self, seq_id: int) -> KVState | None:
        """As `ModelRunner.save`."""
        started = time.perf_counter()
        state = self.runner.save(seq_id)
        if state is not None:
            self._observe(len(state), time.perf_counter() - started, restore=False)
        return state

    def checkpoint(self, seq_id: int) -> KVState | None:
        """As `ModelRunner.checkpoint`."""
        started = time.perf_counter()
        state = self.runner.checkpoint(seq_id)
        self.seconds += time.perf_counter() - started
        return state

    def restore(self, seq_id: int, state: KVState) -> bool:
        """As `ModelRunner.restore`."""
        started = time.perf_counter()
        restored = self.runner.restore(seq_id, state)
        if restored:
            self._observe(len(state), time.perf_counter() - started, restore=True)
        return restored

    def _observe(self, size: int, seconds: float, *, restore: bool) -> None:
        self.seconds += seconds
        self.cost.observe_transfer(size, seconds, restore=restore)

    # Prefixes --------------------------------------------------------------------------------------

    def offload(self, content: SlotContent, *, others: bool) -> None:
        """Keep in RAM what a slot holds, if that pays; the slot is about to be cut or cleared.

        `others` are running and wait meanwhile: never longer than the inter-token target.
        """
        length, host = len(content.tokens), self.host
        if length < MIN_COPY_TOKENS or not host.cached_limit:
            return
        known = host.matches(content.tenant, content.tokens, MIN_COPY_TOKENS)
        cuts = {match.value: match.value.longest_cut(match.length).length for match in known}
        best = max(cuts, key=lambda entry: cuts[entry], default=None)
        new = length - (cuts[best] if best is not None else 0)
        if best is not None and new < MIN_COPY_TOKENS:
            host.touch(best)
            return
        size = get_entry_size(length, self.state_bytes(length) + count_bytes(content.checkpoints))
        if not host.could_hold(size) or not self._pays(size, new, others=others):
            return
        crowded = size > host.room and new * MIN_NEW_SHARE < length
        if (self.cuttable and host.covered(content)) or not crowded:
            self.save_entry(content)

    def _pays(self, size: int, new: int, *, others: bool) -> bool:
        seconds = self.cost.save_s(size)
        spent = self.seconds - self.step_began_s
        if others and spent + seconds > self._budget.target_s:
            return False
        if seconds > self.MAX_SAVE_COST * new * self.token_s:
            self.cost.doubt_transfers()
            return False
        return True

    def copies_through_ram(self, tokens: int) -> bool:
        """Whether saving and restoring a state are quicker than copying a KV stream, or the only way.

        The next request with the same prefix then has only the restoring left to do.
        """
        size = self.state_bytes(tokens)
        if self.copies_free or not self.host.could_hold(get_entry_size(tokens, size)):
            return False
        return not self.cuttable or self.move_s(size) < self._stream_s()

    def read_entry(self, content: SlotContent) -> Entry | None:
        """What a slot holds, as an entry that is in no tier. None if it fails."""
        length = len(content.tokens)
        try:
            if self.runner.next_position(content.seq_id) != content.position:
                return None
            state = self.save(content.seq_id)
        except Exception:
            log.exception("the KV of slot %d could not be saved", content.seq_id)
            return None
        if state is None:
            return None
        self._last_state = (length, len(state))
        # Of a sliding window, the state has only what the next token looks back on.
        cuttable = self.cuttable or length <= self.runner.info.sliding_window
        min_length = 0 if cuttable else length
        return Entry(content.tenant, content.tokens, state, content.checkpoints, min_length, content.position)

    def save_entry(self, content: SlotContent) -> Entry | None:
        """Put what a slot holds into RAM, in place of what it covers there. None if it fails."""
        entry = self.read_entry(content)
        if entry is not None and self.host.could_hold(entry.size):
            for other in self.host.covered(entry) if self.cuttable else ():
                self.host.drop(other)
            self.host.put(entry)
            self.saves += 1
        return entry

    # Preempted sequences ---------------------------------------------------------------------------

    def swap_out(self, sequence: Sequence) -> None:
        """Keep the KV of a sequence that is about to lose its slot."""
        self.swap_outs += 1
        state = None
        try:
            state = self.save(sequence.seq_id)
        except Exception:
            log.exception("the KV of request %s could not be saved; it will be recomputed", sequence.id)
        length = 0
        if state is not None and self.host.reserve(len(state)):
            sequence.swapped, length = state, sequence.num_computed
        sequence.cut_to(0)
        sequence.num_computed = length  # of cells that it will have for itself

    def swap_in(self, sequence: Sequence) -> None:
        """Put what was kept into the sequence's new slot."""
        state = sequence.swapped
        assert state is not None
        self.discard(sequence)
        restored = False
        try:
            restored = self.restore(sequence.seq_id, state)
        except Exception:
            log.exception("the KV of request %s could not be restored; it is recomputed", sequence.id)
        self.swap_ins += restored
        if not restored:
            self.runner.truncate(sequence.seq_id, 0)
            sequence.cut_to(0)

    def discard(self, sequence: Sequence) -> None:
        """Give back the swap space of a sequence that holds some."""
        assert sequence.swapped is not None
        self.host.give_back(len(sequence.swapped))
        sequence.swapped = None
