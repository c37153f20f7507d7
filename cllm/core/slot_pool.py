"""The slot pool: which request may use which slot, from its lease to its release."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from cllm.backend.base import ModelRunner
from cllm.errors import IntegrityError

log = logging.getLogger(__name__)


class SlotLease:
    """The right to use one slot until released. Released exactly once, by its holder."""

    __slots__ = ("_pool", "leased_at", "request_id", "seq_id")

    def __init__(self, pool: SlotPool, seq_id: int, request_id: str) -> None:
        self._pool = pool
        self.seq_id = seq_id
        self.request_id = request_id
        self.leased_at = time.monotonic()

    def release(self, *, keep: int = 0) -> None:
        """Give the slot back, with the cells to keep or cleared. Raises IntegrityError if repeated."""
        self._pool._release(self, keep)


class SlotPool:
    """The slots 0 … size - 1: a seq_id exists only inside a lease.

    A free slot is empty, or holds what the device tier says it does. One that cannot be cleared is retired:
    it is never leased again.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.size = runner.limits.sequences
        self._free = set(range(self.size))
        self._held: dict[int, SlotLease] = {}
        self.retired: set[int] = set()
        self.leased_total = 0
        self.released_total = 0
        self.cleared_cells_total = 0

    def lease(self, request_id: str, seq_id: int | None = None) -> SlotLease | None:
        """This free slot, or the lowest. None if there is none: then wait, slots are never shared."""
        if seq_id is None:
            seq_id = min(self._free, default=None)
        if seq_id is None:
            return None
        self._free.remove(seq_id)
        lease = self._held[seq_id] = SlotLease(self, seq_id, request_id)
        self.leased_total += 1
        log.debug("leased seq %d for request %s", seq_id, request_id)
        return lease

    def move(self, lease: SlotLease, seq_id: int) -> None:
        """A lease goes over to a free slot, which holds the same; the old slot is free and to be cleared."""
        self._free.remove(seq_id)
        del self._held[lease.seq_id]
        self._free.add(lease.seq_id)
        log.debug("request %s moved from seq %d to seq %d", lease.request_id, lease.seq_id, seq_id)
        lease.seq_id = seq_id
        self._held[seq_id] = lease

    @property
    def leases(self) -> tuple[SlotLease, ...]:
        """Every lease now held, by ascending id."""
        return tuple(self._held[seq_id] for seq_id in sorted(self._held))

    def holder(self, seq_id: int) -> str | None:
        """The request that holds a slot now."""
        lease = self._held.get(seq_id)
        return lease.request_id if lease is not None else None

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def free_ids(self) -> frozenset[int]:
        """The slots that can be leased."""
        return frozenset(self._free)

    def leftovers(self, cached: Mapping[int, int]) -> list[str]:
        """Integrity check: what is held although no sequence runs, beside the cached cells by slot."""
        left = [f"lease of slot {seq_id}" for seq_id in sorted(self._held)]
        for seq_id in range(self.size):
            cells, known = self._runner.next_position(seq_id), cached.get(seq_id, 0)
            if seq_id not in self.retired and cells != known:
                left.append(f"{cells} cells in slot {seq_id}" + (f" instead of {known}" if known else ""))
        return left

    def clear(self, seq_id: int) -> bool:
        """Empty a slot that is not leased; False if that fails, and it is retired."""
        try:
            cells = self._runner.next_position(seq_id)
            self._runner.truncate(seq_id, 0)
            if (left := self._runner.next_position(seq_id)) != 0:
                raise IntegrityError(f"slot {seq_id} still holds {left} cells after it was cleared")
        except Exception:
            # A slot whose memory is in doubt must not be used again.
            self._free.discard(seq_id)
            self.retired.add(seq_id)
            log.exception("slot %d could not be cleared and is retired", seq_id)
            return False
        self.cleared_cells_total += cells
        log.debug("cleared KV of seq %d (%d cells)", seq_id, cells)
        return True

    def _release(self, lease: SlotLease, keep: int) -> None:
        seq_id = lease.seq_id
        if self._held.get(seq_id) is not lease:
            raise IntegrityError(f"slot {seq_id} was released twice for request {lease.request_id}")
        del self._held[seq_id]
        self.released_total += 1
        if keep or self.clear(seq_id):
            self._free.add(seq_id)
        log.debug("released seq %d of request %s: %d cells kept", seq_id, lease.request_id, keep)
