"""Which free slot a sequence gets, and what is evicted for it."""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Steps
from dataclasses import dataclass
from itertools import accumulate, pairwise

from cllm.core.kv_cache.tiers import DeviceKVCache, SlotContent
from cllm.core.kv_cache.transfer import KVTransfer
from cllm.core.sequence import Sequence
from cllm.core.slot_pool import KVLayout
from cllm.core.step_cost import TILE, TINY, RunningMedian


@dataclass(frozen=True, slots=True)
class Gaps:
    """What the gaps between the ids of steps cost: with split KV each takes a ubatch, or padding rows.

    A gap lasts until one comes that runs there. A slot that has been free for some steps is expected to be
    free for as many more: so a gap is suffered until it has cost as much as closing it would.
    """

    ubatch_s: float = 0.0
    row_s: float = 0.0
    free: Steps[float] = ()  # steps that the slots before each will be free, in all

    def gap_s(self, lower: int, upper: int) -> float:
        """Seconds that the gap between two running ids costs."""
        count = upper - lower - 1
        if count <= 0 or not self.free:
            return 0.0
        steps = (self.free[upper] - self.free[lower + 1]) / count
        return steps * min(self.ubatch_s, count * self.row_s)

    def total_s(self, ids: Collection[int]) -> float:
        return sum(self.gap_s(lower, upper) for lower, upper in pairwise(sorted(ids)))

    def added_s(self, slot: int, ids: list[int]) -> tuple[float, int]:
        """Seconds that a slot costs more beside the ids, which are in order; and runs of ids more."""
        if not ids:
            return 0.0, 0
        place = bisect(ids, slot)
        lower, upper = ids[place - 1] if place else slot, ids[place] if place < len(ids) else slot
        added_s = self.gap_s(lower, slot) + self.gap_s(slot, upper)
        if lower < slot < upper:  # the gap was there before
            added_s -= self.gap_s(lower, upper)
        return added_s, 1 - (slot - lower == 1) - (upper - slot == 1)


class SlotChoice:
    """Chooses slots by their price: what is lost there, what has to be copied, and the gaps between ids."""

    def __init__(self, device: DeviceKVCache, transfer: KVTransfer, layout: KVLayout) -> None:
        self._runner, self._pool = transfer.runner, device.pool
        self._device = device
        self._transfer = transfer
        self._cost = transfer.cost
        self._layout = layout
        self.answer_tokens = RunningMedian(TILE)  # of a request
        self._free_since = dict.fromkeys(self._pool.free, (0, -math.inf))  # steps, and seconds of idleness

    def choose(
        self,
        sequence: Sequence,
        running: Mapping[int, Sequence],
        content: SlotContent | None = None,
        length: int = 0,
        *,
        others: bool = False,
        shares: Callable[[SlotContent], bool] = lambda _: False,
    ) -> tuple[int, SlotContent | None] | None:
        """The cheapest free slot, emptied; that of `content`, which holds the first `length` tokens, is cut.

        One that `shares` a beginning with the sequence is left as it is, and its content returned.
        `running` are in its steps, and `others` wait for what is copied. None if the last free ones could not
        be cleared.
        """
        self._note_free()
        gaps = self._gaps(self._steps_left(sequence), len(running) + 1)
        others = others or bool(running)
        ids = sorted(running)

        def price(slot: int) -> tuple[float, bool, int, int, int]:
            held = self._device.by_slot.get(slot)
            cost, runs = gaps.added_s(slot, ids)
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
                return slot, None
            left = held if held is not None and shares(held) else None
            if held is not None:
                self._evict(held, others=others, empties=left is None)
            if slot in self._pool.free:
                return slot, left
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

    def _evict(self, content: SlotContent, *, others: bool, empties: bool = True) -> None:
        """Empty a slot, or leave that to be done; what it holds is offloaded if that pays."""
        if not self._transfer.offload(content, others=others):
            self._device.returns.observe(content.used, len(content.tokens), returned=False)
        (self._device.clear if empties else self._device.remove)(content)
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
        self._note_free()
        if not free:
            return
        for edge, hole in ((highest, min(free)), (lowest, max(free))):
            sequence, held = running[edge], self._device.by_slot.get(hole)
            gaps = self._gaps(self._steps_left(sequence), len(running))
            cost_s = self._transfer.relocate_s(sequence.num_computed)
            cost_s += self._transfer.loss_s(held) if held is not None else 0.0
            if gaps.total_s(running) - gaps.total_s({*running, hole} - {edge}) <= cost_s:
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

    def _now(self) -> tuple[int, float]:
        return self._cost.steps, time.monotonic() - self._cost.computed_s

    def _note_free(self) -> None:
        now = self._now()
        self._free_since = {slot: self._free_since.get(slot, now) for slot in self._pool.free}

    def _gaps(self, steps: float, rows: int) -> Gaps:
        """The price of gaps for a sequence that runs for this many steps, each of this many rows.

        A slot was free for the steps that were made, and for those that would have been, were there work.
        """
        if not self._layout.splits or (step := self._cost.step) is None:
            return Gaps()
        step_s = max(TINY, step.ubatch + rows * step.row)
        made, idle_s = self._now()
        free = [steps] * self._pool.size  # where others run, it is not
        for slot, (then, idle_then_s) in self._free_since.items():
            free[slot] = min(steps, made - then + max(0.0, idle_s - idle_then_s) / step_s)
        row_s = math.inf if self._runner.info.recurrent else step.row  # states must not be moved about
        return Gaps(step.ubatch, row_s, [0.0, *accumulate(free)])

    def _steps_left(self, sequence: Sequence) -> float:
        """How long its answer will go on, judging by others, and by how long it is already."""
        written = len(sequence.tokens) - len(sequence.request.prompt)
        left = sequence.stopping.token_limit - len(sequence.tokens)
        return min(left, max(self.answer_tokens.value, written))
