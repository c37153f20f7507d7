"""Which free slot a sequence gets, and what is evicted or moved for it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from cllm.backend.base import KVState, ModelRunner
from cllm.core.kv_cache.device_cache import DeviceKVCache, SlotContent
from cllm.core.kv_cache.transfer import KVTransfer
from cllm.core.sequence import Sequence, count_cells
from cllm.core.slot_pool import SlotPool
from cllm.core.step_cost import TILE, RunningMedian, StepCostModel

log = logging.getLogger(__name__)


class SlotChoice:
    """Chooses slots by what they hold, by when that was last used, and so that the running ids are dense."""

    def __init__(
        self,
        runner: ModelRunner,
        pool: SlotPool,
        device: DeviceKVCache,
        transfer: KVTransfer,
        cost: StepCostModel,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._device = device
        self._transfer = transfer
        self._cost = cost
        self.answer_tokens = RunningMedian(TILE)  # of a request

    def continue_slot(
        self, content: SlotContent, length: int, sequence: Sequence, running: Mapping[int, Sequence]
    ) -> int | None:
        """The slot that holds the sequence's first `length` tokens, moved where that pays."""
        slot = self._move_closer(content.seq_id, sequence, running)
        if content.mostly_beyond(length):
            self._transfer.offload(content, others=bool(running))
        self._device.remove(content)
        return slot

    def empty_slot(
        self, sequence: Sequence, running: Mapping[int, Sequence], keep: SlotContent | None
    ) -> int | None:
        """An empty slot; where there is none, that of the least recently used content other than `keep`."""
        while not (empty := self._device.empty_slots()):
            if not self.evict_one(keep, others=bool(running)):
                return None
        return self._move_closer(densest(empty, running), sequence, running)

    def continues(self, content: SlotContent, length: int, sequence: Sequence) -> bool:
        """Whether a slot is cut and continued: what is lost so must be worth less than copying."""
        if not self.loss_s(content, length, sequence):
            return True
        copy_s = self._transfer.copy_s(len(content.tokens))
        if not self._device.empty_slots():
            victim = self._device.next_victim(keep=content)
            if victim is None:
                return True
            copy_s += self._transfer.loss_s(victim)
        return self.loss_s(content, length, sequence) <= copy_s

    def loss_s(self, content: SlotContent, length: int, sequence: Sequence) -> float:
        """Seconds lost by cutting a slot for a sequence; none for the same prompt: it is answered anew."""
        repeated = length == len(sequence.tokens) - 1 and not content.mostly_beyond(length)
        return 0.0 if repeated else self._transfer.loss_s(content, length)

    def evict_one(self, keep: SlotContent | None = None, *, others: bool = True) -> bool:
        """Empty the least recently used slot, offloaded if that pays; False if all free slots are empty."""
        victim = self._device.next_victim(keep)
        if victim is None:
            return False
        self._transfer.offload(victim, others=others)
        self._device.clear(victim)
        self._device.evictions += 1
        return True

    # Unified KV ------------------------------------------------------------------------------------

    def make_room(self, needed: int, running: Collection[Sequence], keep: SlotContent | None) -> None:
        """In unified KV cached cells give way to those that a sequence needs."""
        limit = self._runner.limits.cells - needed
        while count_cells([*running, *self._device.entries]) > limit and self.evict_one(keep):
            pass

    def tidy(self, running: dict[int, Sequence]) -> None:
        """Before a step: it shall not pay for what free slots hold, nor for gaps between the running ones."""
        if self._cost.split:
            self._close_gap(running)
        else:
            self._shed(running.values())

    def _shed(self, running: Collection[Sequence]) -> None:
        """In unified KV every row scans the cells of free slots, too: no more of them than are in use."""
        contents = self._device.entries
        if contents and running and count_cells([*running, *contents]) > 2 * count_cells(running):
            self.evict_one()

    # Gaps ------------------------------------------------------------------------------------------

    def _move_closer(self, slot: int, sequence: Sequence, running: Mapping[int, Sequence]) -> int | None:
        """Where it pays, exchange what a slot holds with that of one which leaves fewer gaps between ids.

        With split KV every gap costs a ubatch, or padding rows, in each step of the answer. None if the slot
        could not be used any more.
        """
        if not self._cost.split or not running:
            return slot
        target = densest(self._pool.free_ids, running)
        saved_s = self._gap_s({*running, slot}, {*running, target}) * self._steps_left(sequence)
        if not self._pays(saved_s, self._cells(slot) + self._cells(target)):
            return slot
        if self._exchange(slot, target):
            return target
        return slot if slot in self._pool.free_ids else None

    def _close_gap(self, running: dict[int, Sequence]) -> None:
        """Where it pays, move a running sequence into a gap that one which ended has left between the ids."""
        ids = running.keys()
        if count_runs(ids) < 2 or not self._pool.free_count:
            return
        moves = ((edge, densest(self._pool.free_ids, ids - {edge})) for edge in (max(ids), min(ids)))
        edge, hole = min(moves, key=lambda move: count_runs((ids - {move[0]}) | {move[1]}))
        saved_s = self._gap_s(ids, (ids - {edge}) | {hole}) * self._steps_left(running[edge])
        if self._pays(saved_s, running[edge].num_computed + self._cells(hole)):
            self._move_running(running, edge, hole)

    def _gap_s(self, ids: Collection[int], dense: Collection[int]) -> float:
        """Seconds a step takes longer with these ids than with those."""
        step = self._cost.step
        if step is None:
            return 0.0
        gap_s = (count_runs(ids) - count_runs(dense)) * step.ubatch
        if self._runner.info.recurrent:
            return gap_s
        return min(gap_s, (max(ids) - min(ids) - max(dense) + min(dense)) * step.row)

    def _steps_left(self, sequence: Sequence) -> float:
        """How long its answer will be, judging by others."""
        return min(sequence.token_limit - len(sequence.tokens), self.answer_tokens.value)

    def _cells(self, slot: int) -> int:
        content = self._device.get(slot)
        return len(content.tokens) if content is not None else 0

    def _pays(self, saved_s: float, cells: int) -> bool:
        size = self._transfer.state_bytes(cells)
        return saved_s > self._transfer.move_s(size) and self._transfer.can_move(size)

    def _move_running(self, running: dict[int, Sequence], edge: int, hole: int) -> None:
        """Exchange a running sequence and what a free slot holds. It stays where it is until it is there."""
        sequence, content = running[edge], self._device.get(hole)
        state = self._save(edge)
        kept = self._save(hole) if content is not None else None
        if state is None or (content is not None and kept is None):
            return
        if content is not None:
            self._device.remove(content)
        if not self._pool.clear(hole) or not self._restore(hole, state, sequence.num_computed):
            return
        assert sequence.lease is not None
        self._pool.move(sequence.lease, hole)
        running[hole] = running.pop(edge)
        if self._pool.clear(edge) and content is not None and kept is not None:
            content.seq_id = edge
            if self._restore(edge, kept, len(content.tokens)):
                content.min_length = self._runner.min_length(edge)  # a state has less of a sliding window
                self._device.insert(content)

    def _save(self, seq_id: int) -> KVState | None:
        try:
            return self._transfer.save(seq_id)
        except Exception:
            log.exception("what slot %d holds could not be saved", seq_id)
            return None

    def _restore(self, seq_id: int, state: KVState, cells: int) -> bool:
        """False if it fails, and the slot is empty."""
        try:
            restored = self._transfer.restore(seq_id, state)
        except Exception:
            log.exception("what slot %d is to hold could not be restored", seq_id)
            restored = False
        if restored:
            log.debug("moved %d cells to seq %d", cells, seq_id)
        else:
            self._pool.clear(seq_id)
        return restored

    def _exchange(self, first: int, second: int) -> bool:
        """Exchange what two free slots hold, by way of RAM; False if it stays where it is, or is lost."""
        contents = [content for place in (first, second) if (content := self._device.get(place)) is not None]
        states = [self._save(content.seq_id) for content in contents]
        if None in states:
            return False
        if not all(self._pool.clear(content.seq_id) for content in contents):
            for content in contents:
                self._device.clear(content)
            return False
        self._device.exchange(first, second)
        for content, state in zip(contents, states, strict=True):
            assert state is not None
            if self._restore(content.seq_id, state, len(content.tokens)):
                content.min_length = self._runner.min_length(content.seq_id)
            else:
                self._device.remove(content)
        return True


def count_runs(ids: Iterable[int]) -> int:
    """Runs of consecutive ids: with split KV, llama.cpp computes each in a ubatch of its own."""
    known = set(ids)
    return sum(seq_id - 1 not in known for seq_id in known)


def densest(ids: Collection[int], running: Collection[int]) -> int:
    """Of these ids the one that leaves the fewest gaps between running ones; the lowest of several."""
    return min(ids, key=lambda seq_id: (count_runs({*running, seq_id}), seq_id))
