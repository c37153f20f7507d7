"""Moving what slots hold to other slots: copied on the device where that is quick, else by way of RAM."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from cllm.backend.base import KVState
from cllm.core.kv_cache.tiers import DeviceKVCache, SlotContent
from cllm.core.kv_cache.transfer import KVTransfer
from cllm.core.sequence import Sequence

log = logging.getLogger(__name__)


class SlotMoves:
    """Exchanges what two slots hold. What fails stays where it is, or is lost; never half of it.

    A GPU copies a slot's whole KV stream in a millisecond, while its way through RAM takes a hundred times as
    long. A copy needs an empty slot, which takes what the target holds: one is evicted where there is none.
    """

    def __init__(
        self, device: DeviceKVCache, transfer: KVTransfer, evict_one: Callable[[SlotContent | None], bool]
    ) -> None:
        self._runner, self._pool = transfer.runner, device.pool
        self._device = device
        self._transfer = transfer
        self._evict_one = evict_one

    @property
    def on_device(self) -> bool:
        """Whether copies are made on the device, before the next step."""
        return self._runner.stream_copy_s is not None

    def cost_s(self, cells: int, target: int, keep: SlotContent | None = None) -> float:
        """Seconds to exchange a slot of `cells` with a free one; infinite where others wait too long.

        `keep` is what the first of them holds, unless a sequence runs there.
        """
        content = self._device.by_slot.get(target)
        held = len(content.tokens) if content is not None else 0
        copy_s = self._runner.stream_copy_s
        if copy_s is None:
            size = self._transfer.state_bytes(cells + held)
            return self._transfer.move_s(size) if self._transfer.can_move(size) else math.inf
        cost = ((cells > 0) + (held > 0)) * copy_s
        if held and not self._device.empty_slots():
            victim = self._device.next_victim(keep)
            cost += self._transfer.loss_s(victim) if victim is not None else math.inf
        return cost

    def exchange(self, first: int, second: int) -> bool:
        """Free slots: what the first holds is in the second afterwards; False if not, or if it is lost."""
        if not self.on_device:
            return self._exchange_in_ram(first, second)
        content = self._device.by_slot.get(first)
        if content is None:
            return self._copy_content(second, first)
        return self._empty(second, keep=content) and self._copy_content(first, second)

    def move_running(self, running: dict[int, Sequence], edge: int, hole: int) -> None:
        """Exchange a running sequence and what a free slot holds. It stays where it is until it is there."""
        sequence = running[edge]
        if not self.on_device:
            self._move_in_ram(running, edge, hole)
        elif self._empty(hole) and self._copy(edge, hole, sequence.position):
            self._change_lease(running, edge, hole)
            self._pool.clear(edge)

    def _change_lease(self, running: dict[int, Sequence], edge: int, hole: int) -> None:
        lease = running[edge].lease
        assert lease is not None
        self._pool.move(lease, hole)
        running[hole] = running.pop(edge)

    # On the device ---------------------------------------------------------------------------------

    def _empty(self, slot: int, keep: SlotContent | None = None) -> bool:
        """Empty a free slot; what it holds goes to an empty one. False if it still holds it."""
        if not self._device.empty_slots():
            self._evict_one(keep)
        if self._device.by_slot.get(slot) is None:
            return slot in self._pool.free  # one that could not be cleared is retired
        empty = self._device.empty_slots()
        return bool(empty) and self._copy_content(slot, empty[0])

    def _copy_content(self, source: int, target: int) -> bool:
        """What a free slot holds goes to an empty one; False if not, or if it is lost."""
        content = self._device.by_slot.get(source)
        if content is None:
            return True
        if not self._copy(source, target, content.position):
            return False
        self._device.exchange(source, target)
        if not self._pool.clear(source):
            self._device.clear(content)
            return False
        return True

    def _copy(self, source: int, target: int, cells: int) -> bool:
        """Carried out before the next step; False if it fails, and the target is empty."""
        try:
            copied = self._runner.copy(source, target, cells) == cells
        except Exception:
            log.exception("what slot %d holds could not be copied", source)
            copied = False
        if copied:
            log.debug("copied %d cells from seq %d to seq %d", cells, source, target)
        else:
            self._pool.clear(target)
        return copied

    # By way of RAM ---------------------------------------------------------------------------------

    def _move_in_ram(self, running: dict[int, Sequence], edge: int, hole: int) -> None:
        sequence, content = running[edge], self._device.by_slot.get(hole)
        state = self._save(edge)
        kept = self._save(hole) if content is not None else None
        if state is None or (content is not None and kept is None):
            return
        if content is not None:
            self._device.remove(content)
        if not self._pool.clear(hole) or not self._restore(hole, state, sequence.position):
            return
        self._change_lease(running, edge, hole)
        if self._pool.clear(edge) and content is not None and kept is not None:
            content.seq_id = edge
            if self._restore(edge, kept, content.position):
                content.min_length = self._runner.min_length(edge)  # a state has less of a sliding window
                self._device.insert(content)

    def _exchange_in_ram(self, first: int, second: int) -> bool:
        found = (self._device.by_slot.get(place) for place in (first, second))
        contents = [content for content in found if content is not None]
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
            if self._restore(content.seq_id, state, content.position):
                content.min_length = self._runner.min_length(content.seq_id)
            else:
                self._device.remove(content)
        return True

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
