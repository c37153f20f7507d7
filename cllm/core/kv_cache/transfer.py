"""KV memory copied to host RAM and back: timed for the cost model, and done where it pays."""

from __future__ import annotations

import logging
import math
import time

from cllm.backend.base import KVState, ModelRunner
from cllm.core.kv_cache.tiers import Entry, HostKVCache, SlotContent, count_bytes, get_entry_size
from cllm.core.prefill_budget import PrefillBudget
from cllm.core.sequence import Sequence
from cllm.core.step_cost import MILLISECOND

log = logging.getLogger(__name__)


class KVTransfer:
    """The one path for KV memory between slots and host RAM: evicted prefixes and preempted sequences.

    Both share the host cache's byte budget. What does not fit, or cannot be saved, is recomputed.
    """

    DEFAULT_TOKEN_S = MILLISECOND  # to compute a token, until it was measured

    def __init__(self, runner: ModelRunner, budget: PrefillBudget, host: HostKVCache) -> None:
        self.runner = runner
        self._budget = budget
        self.cost = budget.cost
        self.host = host
        host.value_s = self.value_s
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

    def copy_s(self, tokens: int) -> float:
        """Seconds to copy what a slot holds to another: the whole KV stream, or by way of RAM."""
        if self.copies_free:
            return 0.0
        through_ram = self.move_s(self.state_bytes(tokens))
        return min(through_ram, self._stream_s()) if self.cuttable else through_ram

    def _stream_s(self) -> float:
        if (measured := self.runner.stream_copy_s) is not None:
            return measured
        return self.cost.restore_s(self.state_bytes(self.runner.limits.sequence_cells))

    @property
    def _device_copy_s(self) -> float | None:
        """Seconds to copy a slot's KV stream on its device; None where it goes by way of RAM."""
        return self.runner.stream_copy_s if self.cuttable else None

    def relocate_s(self, tokens: int) -> float:
        """Seconds to bring what a slot holds to another; infinite where others would wait too long."""
        if self._device_copy_s is not None:
            return self._device_copy_s
        seconds, budget = self.move_s(self.state_bytes(tokens)), self._budget
        return seconds if seconds <= budget.max_wait_s else math.inf

    def relocate(self, source: int, target: int, position: int) -> bool:
        """Bring what a slot holds to an empty one as well; False if that fails."""
        try:
            if self._device_copy_s is not None:
                return self.runner.copy(source, target, position) == position
            state = self.save(source)
            restored = state is not None and self.restore(target, state)
            return restored and self.runner.next_position(target) == position
        except Exception:
            log.exception("what slot %d holds could not be moved", source)
            return False

    def value_s(self, entry: Entry) -> float:
        """Seconds that a state in RAM will save, by the chance that it returns."""
        saved_s = len(entry.tokens) * self.token_s - self.cost.restore_s(entry.size)
        return self.host.returns.chance(entry.used, len(entry.tokens)) * saved_s

    def loss_s(self, content: SlotContent, keep: int = 0) -> float:
        """Seconds that will be lost when a slot is cut to its first `keep` tokens.

        What is lost takes time only if it returns; it may be saved to RAM for that.
        """
        chance = self.host.returns.chance(content.used, len(content.tokens))
        computing_s = chance * (len(content.tokens) - keep) * self.token_s
        size = self.state_bytes(len(content.tokens))
        if not content.mostly_beyond(keep) or not self.host.could_hold(size):
            return computing_s
        return min(computing_s, self.cost.save_s(size) + chance * self.cost.restore_s(size))

    # Slots and RAM ---------------------------------------------------------------------------------

    def save(self, seq_id: int) -> KVState | None:
        """As `ModelRunner.save`."""
        started = time.perf_counter()
        if (state := self.runner.save(seq_id)) is not None:
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
        if restored := self.runner.restore(seq_id, state):
            self._observe(len(state), time.perf_counter() - started, restore=True)
        return restored

    def _observe(self, size: int, seconds: float, *, restore: bool) -> None:
        self.seconds += seconds
        self.cost.observe_transfer(size, seconds, restore=restore)

    # Prefixes --------------------------------------------------------------------------------------

    def offload(self, content: SlotContent, *, others: bool) -> bool:
        """Keep in RAM what a slot holds, if that pays; the slot is about to be cut or cleared.

        `others` are running and wait meanwhile: never longer than a step may take. False if it is lost.
        """
        length, host = len(content.tokens), self.host
        if not host.cached_limit:
            return False
        known = host.matches(content.tenant, content.tokens, 1)
        cuts = {match.value: match.value.longest_cut(match.length).length for match in known}
        best = max(cuts, key=lambda entry: cuts[entry], default=None)
        new = length - (cuts[best] if best is not None else 0)
        if best is not None and not new:
            host.touch(best)
            return True
        size = get_entry_size(length, self.state_bytes(length) + count_bytes(content.checkpoints))
        replaced = sum(other.size for other in host.covered(content)) if self.cuttable else 0
        if host.could_hold(size) and self._pays(content, size, new, size - replaced, others=others):
            return self.save_entry(content) is not None
        if best is not None:
            host.touch(best)
        return 2 * new < length

    def _pays(self, content: SlotContent, size: int, new: int, more: int, *, others: bool) -> bool:
        """Whether saving a state takes less than it will save, and less than what it pushes out would."""
        seconds, chance = self.cost.save_s(size), self.host.returns.chance(content.used, len(content.tokens))
        spent_s, budget = self.seconds - self.step_began_s, self._budget
        if others and spent_s + seconds > budget.max_wait_s:
            return False
        gained_s = chance * (new * self.token_s - self.cost.restore_s(size) * new / len(content.tokens))
        if seconds >= gained_s:
            self.cost.doubt_transfers()
            return False
        return self.host.loss_s(more) < gained_s - seconds

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
        min_length = 0 if self.cuttable or length <= self.runner.info.sliding_window else length
        held = (content.checkpoints, min_length, content.spans)
        entry = Entry(content.tenant, content.tokens, state, *held)
        entry.used = content.used
        return entry

    def save_entry(self, content: SlotContent) -> Entry | None:
        """Put what a slot holds into RAM, in place of what it covers there. None if it fails."""
        if (entry := self.read_entry(content)) is not None and self.host.could_hold(entry.size):
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
