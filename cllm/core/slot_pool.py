"""The slot pool: which request may use which slot, from its lease to its release; and the cells of slots.

Each slot has cells in a stream of its own (split KV), or all slots share one pool (unified KV). Split KV
confines a sequence to its stream and computes runs of consecutive ids together. In unified KV a copy of a
prefix shares its cells, and every row scans the cells of all slots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from cllm.backend.base import ModelRunner
from cllm.errors import IntegrityError
from cllm.types import Limits

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SlotLease:
    """The right to use one slot until released. Released exactly once, by its holder."""

    seq_id: int
    request_id: str
    leased_at: float = field(default_factory=time.monotonic)


class SlotPool:
    """The slots 0 … size - 1: a seq_id exists only inside a lease.

    A free slot is empty, or holds what the device tier says it does. One that cannot be cleared is retired:
    it is never leased again.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.size = runner.limits.sequences
        self.free = set(range(self.size))  # those that can be leased
        self.held: dict[int, SlotLease] = {}
        self.retired: set[int] = set()
        self.leased_total = self.released_total = self.cleared_cells_total = 0

    def lease(self, request_id: str, seq_id: int | None = None) -> SlotLease | None:
        """This free slot, or the lowest. None if there is none: then wait, slots are never shared."""
        if seq_id is None:
            seq_id = min(self.free, default=None)
        if seq_id is None:
            return None
        self.free.remove(seq_id)
        lease = self.held[seq_id] = SlotLease(seq_id, request_id)
        self.leased_total += 1
        log.debug("leased seq %d for request %s", seq_id, request_id)
        return lease

    def move(self, lease: SlotLease, seq_id: int) -> None:
        """A lease goes over to a free slot, which holds the same; the old slot is free and to be cleared."""
        self.free.remove(seq_id)
        del self.held[lease.seq_id]
        self.free.add(lease.seq_id)
        log.debug("request %s moved from seq %d to seq %d", lease.request_id, lease.seq_id, seq_id)
        lease.seq_id = seq_id
        self.held[seq_id] = lease

    def clear(self, seq_id: int) -> bool:
        """Empty a slot that is not leased; False if that fails, and it is retired."""
        try:
            cells = self._runner.next_position(seq_id)
            self._runner.truncate(seq_id, 0)
            if (left := self._runner.next_position(seq_id)) != 0:
                raise IntegrityError(f"slot {seq_id} still holds {left} cells after it was cleared")
        except Exception:
            # A slot whose memory is in doubt must not be used again.
            self.free.discard(seq_id)
            self.retired.add(seq_id)
            log.exception("slot %d could not be cleared and is retired", seq_id)
            return False
        self.cleared_cells_total += cells
        log.debug("cleared KV of seq %d (%d cells)", seq_id, cells)
        return True

    def release(self, lease: SlotLease, *, keep: int = 0) -> None:
        """Take a slot back, with the cells to keep or cleared. Raises IntegrityError if repeated."""
        seq_id = lease.seq_id
        if self.held.get(seq_id) is not lease:
            raise IntegrityError(f"slot {seq_id} was released twice for request {lease.request_id}")
        del self.held[seq_id]
        self.released_total += 1
        if keep or self.clear(seq_id):
            self.free.add(seq_id)
        log.debug("released seq %d of request %s: %d cells kept", seq_id, lease.request_id, keep)


# Cells ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class CellSegment:
    """KV cells from position `begin` on, computed by one sequence. Copies of its prefix share the first."""

    begin: int
    shared: bool = False


class CellHolder(Protocol):
    """What holds KV cells: a sequence, or a slot that keeps what one left."""

    segments: list[CellSegment]

    @property
    def num_computed(self) -> int: ...


class KVLayout:
    """Counts cells in either layout."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.splits = not limits.unified  # gaps between ids, and rows of unequal length, cost extra ubatches

    def count(self, holders: Iterable[CellHolder]) -> int:
        """The cells that these hold, each counted once."""
        if self.splits:
            return sum(holder.num_computed for holder in holders)
        lengths: dict[CellSegment, int] = {}
        for holder in holders:
            end = holder.num_computed
            for segment in reversed(holder.segments):
                lengths[segment] = max(lengths.get(segment, 0), end - segment.begin)
                end = segment.begin
        return sum(lengths.values())

    def room(self, running: Collection[CellHolder]) -> int:
        """Cells for a state that is restored whole beside these."""
        cells = self._limits.sequence_cells
        return cells if self.splits else min(cells, self._limits.cells - self.count(running))


def share_cells(source: CellHolder, length: int) -> list[CellSegment]:
    """The segments of a sequence whose first `length` cells were copied, in unified KV."""
    shared = [segment for segment in source.segments if segment.begin < length]
    for segment in shared:
        segment.shared = True
    return [*shared, CellSegment(length)]
