"""KV layout: how cells are shared out. A stream of its own for each slot (split), or one pool (unified).

Split KV confines a sequence to its stream and computes runs of consecutive ids together. In unified KV a copy
of a prefix shares its cells, and every row scans the cells of all slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from cllm.types import Limits


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
