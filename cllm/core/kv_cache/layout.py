"""KV layout: how cells are shared out. A stream of its own for each slot (split), or one pool (unified).

Split KV confines a sequence to its stream and computes runs of consecutive ids together. In unified KV a copy
of a prefix shares its cells, and every row scans the cells of all slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from cllm.types import Limits


class CellSegment:
    """KV cells from position `begin` on, computed by one sequence. Copies of its prefix share the first."""

    __slots__ = ("begin", "shared")

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.shared = False


class CellHolder(Protocol):
    """What holds KV cells: a sequence, or a slot that keeps what one left."""

    segments: list[CellSegment]

    @property
    def num_computed(self) -> int: ...


class KVLayout:
    """Split KV: a stream for each slot."""

    splits = True  # gaps between ids, and rows of unequal length, cost extra ubatches

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    @staticmethod
    def of(limits: Limits) -> KVLayout:
        return UnifiedLayout(limits) if limits.unified else KVLayout(limits)

    def count(self, holders: Iterable[CellHolder]) -> int:
        """The cells that these hold, each counted once."""
        return sum(holder.num_computed for holder in holders)

    def room(self, running: Collection[CellHolder]) -> int:
        """Cells for a state that is restored whole beside these."""
        return self._limits.sequence_cells

    def missing(self, needed: int, running: Collection[CellHolder], cached: Collection[CellHolder]) -> int:
        """Cells that cached contents must give up before `needed` more are there beside all these."""
        return 0

    def admits(self, tokens: int, known: int) -> bool:
        """Whether a prompt may start beside sequences of `known` tokens without preempting one at once."""
        return True

    def excess(self, running: Collection[CellHolder], cached: Collection[CellHolder]) -> bool:
        """Whether cached contents cost the running rows more than they may."""
        return False

    def share(self, source: CellHolder, length: int) -> list[CellSegment] | None:
        """The segments of a sequence whose first `length` cells were copied; None where they are its own."""
        return None


class UnifiedLayout(KVLayout):
    """Unified KV: one pool of cells."""

    splits = False

    def count(self, holders: Iterable[CellHolder]) -> int:
        lengths: dict[CellSegment, int] = {}
        for holder in holders:
            end = holder.num_computed
            for segment in reversed(holder.segments):
                lengths[segment] = max(lengths.get(segment, 0), end - segment.begin)
                end = segment.begin
        return sum(lengths.values())

    def room(self, running: Collection[CellHolder]) -> int:
        return min(self._limits.sequence_cells, self._limits.cells - self.count(running))

    def missing(self, needed: int, running: Collection[CellHolder], cached: Collection[CellHolder]) -> int:
        return max(0, self.count([*running, *cached]) + needed - self._limits.cells)

    def admits(self, tokens: int, known: int) -> bool:
        return not known or known + tokens < self._limits.cells

    def excess(self, running: Collection[CellHolder], cached: Collection[CellHolder]) -> bool:
        return bool(cached and running) and self.count([*running, *cached]) > 2 * self.count(running)

    def share(self, source: CellHolder, length: int) -> list[CellSegment]:
        shared = [segment for segment in source.segments if segment.begin < length]
        for segment in shared:
            segment.shared = True
        return [*shared, CellSegment(length)]
