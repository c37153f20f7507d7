"""Which free slot a sequence gets, and what is evicted or moved for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from itertools import islice

from cllm.core.kv_cache.layout import KVLayout
from cllm.core.kv_cache.slot_moves import SlotMoves
from cllm.core.kv_cache.tiers import DeviceKVCache, SlotContent
from cllm.core.kv_cache.transfer import KVTransfer
from cllm.core.sequence import Sequence
from cllm.core.step_cost import TILE, RunningMedian, StepShape


class SlotChoice:
    """Chooses slots by what they hold, by when that was last used, and so that the running ids are dense."""

    def __init__(self, device: DeviceKVCache, transfer: KVTransfer, layout: KVLayout) -> None:
        self._runner, self._pool = transfer.runner, device.pool
        self._device = device
        self._transfer = transfer
        self._cost = transfer.cost
        self._layout = layout
        self._moves = SlotMoves(device, transfer, self.evict_one)
        self.answer_tokens = RunningMedian(TILE)  # of a request

    def continue_slot(
        self, content: SlotContent, length: int, sequence: Sequence, running: Mapping[int, Sequence]
    ) -> int | None:
        """The slot that holds the sequence's first `length` tokens, moved where that pays."""
        if content.mostly_beyond(length):  # before it is moved: what is being copied cannot be saved
            self._transfer.offload(content, others=bool(running))
        slot = self._move_closer(content.seq_id, sequence, running)
        self._device.remove(content)
        return slot

    def empty_slot(
        self,
        sequence: Sequence,
        running: Mapping[int, Sequence],
        keep: SlotContent | None,
        *,
        restores: bool,
    ) -> int | None:
        """An empty slot; where there is none, that of the least recently used content other than `keep`.

        `restores`: a state is put into it at once, which a slot that is being copied does not take.
        """
        while not (empty := self._device.empty_slots()):
            if not self.evict_one(keep, others=bool(running)):
                return None
        if not running:
            return empty[0]
        nearest = densest(empty, running)
        if restores and self._moves.on_device:
            return nearest
        return self._move_closer(nearest, sequence, running)

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

    def make_room(self, needed: int, running: Collection[Sequence], keep: SlotContent | None) -> None:
        """Unified KV: cached cells give way to those that a sequence needs."""
        cells = self._runner.limits.cells - needed
        while self._layout.count([*running, *self._device.entries]) > cells and self.evict_one(keep):
            pass

    def tidy(self, running: dict[int, Sequence]) -> None:
        """Before a step of several, or in unified KV: it shall not pay for free slots, nor for gaps."""
        if self._layout.splits:
            self._close_gap(running)
        elif running and self._device.entries:
            used, count = running.values(), self._layout.count
            if count([*used, *self._device.entries]) > 2 * count(used):
                self.evict_one()

    # Gaps ------------------------------------------------------------------------------------------

    def _move_closer(self, slot: int, sequence: Sequence, running: Mapping[int, Sequence]) -> int | None:
        """Where it pays, exchange what a slot holds with that of one which leaves fewer gaps between ids.

        With split KV every gap costs a ubatch, or padding rows, in each step of the answer. None if the slot
        could not be used any more.
        """
        if not self._layout.splits or not running:
            return slot
        target = densest(self._pool.free, running)
        saved_s = self._gap_s({*running, slot}, {*running, target}, running) * self._steps_left(sequence)
        content = self._device.by_slot.get(slot)
        cells = len(content.tokens) if content is not None else 0
        if saved_s <= self._moves.cost_s(cells, target, keep=content):
            return slot
        if self._moves.exchange(slot, target):
            return target
        return slot if slot in self._pool.free else None

    def _close_gap(self, running: dict[int, Sequence]) -> None:
        """Where it pays, move a running sequence towards the others; one a step, until a gap is closed."""
        ids = running.keys()
        if count_runs(ids) < 2 or not self._pool.free:
            return
        edge, hole, moves, dense = min(
            (self._plan(ids, top) for top in (True, False)), key=lambda plan: plan[2]
        )
        saved_s = self._gap_s(ids, dense, running) * self._steps_left(running[edge])
        if hole not in ids and saved_s > moves * self._moves.cost_s(running[edge].num_computed, hole):
            self._moves.move_running(running, edge, hole)

    def _plan(self, ids: Set[int], top: bool) -> tuple[int, int, int, Set[int]]:
        """The top or bottom run goes to the others: the first id and its place, all moves, the ids then."""
        edge, inwards = (max(ids), -1) if top else (min(ids), 1)
        length = next(count for count in range(1, len(ids) + 1) if edge + inwards * count not in ids)
        run = {edge + inwards * place for place in range(length)}
        rest = ids - run
        usable = (self._pool.free | run) - rest
        order = range(min(rest), self._pool.size) if top else range(max(rest), -1, -1)
        places = list(islice((seq_id for seq_id in order if seq_id in usable), length))
        return edge, places[0], len(run.difference(places)), rest | set(places)

    def _gap_s(self, ids: Collection[int], dense: Collection[int], running: Mapping[int, Sequence]) -> float:
        """Seconds a step takes longer with these ids than with those."""
        step = self._cost.step
        if step is None:
            return 0.0
        gaps = count_runs(ids) - count_runs(dense)
        if self._cost.records:  # padded or apart, and not followed at once: each gap costs another such step
            cells = sum(sequence.num_computed for sequence in running.values())
            return gaps * step.seconds(StepShape(1, 0, len(running), cells))
        gap_s = gaps * step.ubatch
        if self._runner.info.recurrent:
            return gap_s
        return min(gap_s, (max(ids) - min(ids) - max(dense) + min(dense)) * step.row)

    def _steps_left(self, sequence: Sequence) -> float:
        """How long its answer will go on, judging by others, and by how long it is already."""
        written = len(sequence.tokens) - len(sequence.request.prompt)
        left = sequence.stopping.token_limit - len(sequence.tokens)
        return min(left, max(self.answer_tokens.value, written))


def count_runs(ids: Iterable[int]) -> int:
    """Runs of consecutive ids: with split KV, llama.cpp computes each in a ubatch of its own."""
    known = set(ids)
    return sum(seq_id - 1 not in known for seq_id in known)


def densest(ids: Collection[int], running: Collection[int]) -> int:
    """Of these ids the one that leaves the fewest gaps between running ones; the lowest of several."""
    return min(ids, key=lambda seq_id: (count_runs({*running, seq_id}), seq_id))
