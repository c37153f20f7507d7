"""Which free slot a sequence gets, and what is evicted for it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import pairwise

from cllm.core.kv_cache.layout import KVLayout
from cllm.core.kv_cache.tiers import DeviceKVCache, SlotContent
from cllm.core.kv_cache.transfer import KVTransfer
from cllm.core.sequence import Sequence
from cllm.core.step_cost import TILE, RunningMedian, StepCost


class SlotChoice:
    """Chooses slots by their price: what is lost there, what has to be copied, and the gaps between ids."""

    def __init__(self, device: DeviceKVCache, transfer: KVTransfer, layout: KVLayout) -> None:
        self._runner, self._pool = transfer.runner, device.pool
        self._device = device
        self._transfer = transfer
        self._cost = transfer.cost
        self._layout = layout
        self.answer_tokens = RunningMedian(TILE)  # of a request

    def choose(
        self,
        sequence: Sequence,
        running: Mapping[int, Sequence],
        content: SlotContent | None = None,
        length: int = 0,
        *,
        others: bool = False,
    ) -> int | None:
        """The cheapest free slot, emptied; that of `content`, which holds the first `length` tokens, is cut.

        `running` are in its steps, and `others` wait for what is copied. None if the last free ones could not
        be cleared.
        """
        steps, others = self._steps_left(sequence), others or bool(running)

        def price(slot: int) -> tuple[float, bool, int, int, int]:
            held = self._device.by_slot.get(slot)
            gap_s, runs = self._gap(slot, running)
            cost = gap_s * steps
            if held is not None and held is content:
                return cost + self.loss_s(content, length, sequence), False, runs, 0, slot
            cost += self._transfer.copy_s(len(content.tokens)) if content is not None else 0.0
            if held is None:
                return cost, True, runs, 0, slot
            return cost + self._transfer.loss_s(held), True, runs, held.used, slot

        while self._pool.free:
            slot = min(self._pool.free, key=price)
            held = self._device.by_slot.get(slot)
            if held is not None and held is content:
                if content.mostly_beyond(length):
                    self._transfer.offload(content, others=others)
                self._device.remove(content)
                return slot
            if held is not None:
                self._evict(held, others=others)
            if slot in self._pool.free:
                return slot
        return None

    def loss_s(self, content: SlotContent, length: int, sequence: Sequence) -> float:
        """Seconds lost by cutting a slot for a sequence; none for the same prompt: it is answered anew."""
        repeated = length == len(sequence.tokens) - 1 and not content.mostly_beyond(length)
        return 0.0 if repeated else self._transfer.loss_s(content, length)

    def evict_one(self, keep: SlotContent | None = None, *, others: bool = True) -> bool:
        """Empty the slot whose content is worth the least; False if all free slots are empty."""
        contents = (content for content in self._device.entries if content is not keep)
        victim = min(contents, key=lambda each: (self._transfer.loss_s(each), each.used), default=None)
        if victim is not None:
            self._evict(victim, others=others)
        return victim is not None

    def _evict(self, content: SlotContent, *, others: bool) -> None:
        """Empty a slot; what it holds is offloaded if that pays."""
        if not self._transfer.offload(content, others=others):
            self._device.returns.observe(content.used, returned=False)
        self._device.clear(content)
        self._device.evictions += 1

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

    def _close_gap(self, running: dict[int, Sequence]) -> None:
        """Move the first or the last of the running ids into a gap, where that costs less than the gap."""
        lowest, highest = min(running), max(running)
        free = [slot for slot in self._pool.free if lowest < slot < highest]
        if not free or (step := self._cost.step) is None:
            return
        for edge, hole in ((highest, min(free)), (lowest, max(free))):
            sequence, held = running[edge], self._device.by_slot.get(hole)
            saved_s = self._gaps_s(running, step) - self._gaps_s({*running, hole} - {edge}, step)
            cost_s = self._transfer.relocate_s(sequence.num_computed)
            cost_s += self._transfer.loss_s(held) if held is not None else 0.0
            if saved_s * self._steps_left(sequence) <= cost_s:
                continue
            if held is not None:
                self._evict(held, others=True)
            if hole in self._pool.free and self._transfer.relocate(edge, hole, sequence.position):
                assert sequence.lease is not None
                self._pool.move(sequence.lease, hole)
                running[hole] = running.pop(edge)
                self._pool.clear(edge)
            elif hole in self._pool.free:
                self._pool.clear(hole)
            return

    def _gaps_s(self, ids: Collection[int], step: StepCost) -> float:
        """Seconds that a step takes longer because of the gaps between these ids: ubatches, or padding."""
        each_s = math.inf if self._runner.info.recurrent else step.row
        gaps = (later - earlier - 1 for earlier, later in pairwise(sorted(ids)))
        return sum(min(step.ubatch, gap * each_s) for gap in gaps if gap)

    def _gap(self, slot: int, running: Collection[int]) -> tuple[float, int]:
        """Seconds that a step takes longer with this slot than next to the running ones; ubatches more.

        With split KV every gap between ids costs a ubatch, or padding rows.
        """
        if not running or not self._layout.splits:
            return 0.0, 0
        runs = 1 - (slot - 1 in running) - (slot + 1 in running)
        if (step := self._cost.step) is None:
            return 0.0, runs
        gap_s = runs * step.ubatch
        if self._runner.info.recurrent:  # whose states must not be moved about by padding
            return gap_s, runs
        lowest, highest = min(running), max(running)
        padding = max(lowest - slot, slot - highest, 0) - 1  # inside a gap it takes a padding row's place
        return min(gap_s, padding * step.row), runs

    def _steps_left(self, sequence: Sequence) -> float:
        """How long its answer will go on, judging by others, and by how long it is already."""
        written = len(sequence.tokens) - len(sequence.request.prompt)
        left = sequence.stopping.token_limit - len(sequence.tokens)
        return min(left, max(self.answer_tokens.value, written))
