"""Gathering: the figures and answers of several replicas as those of one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import msgspec

from cllm.messages import CacheDone, ClearCache, Inspect, Inspection, Ready, StepStats
from cllm.types import Limits, SlotInfo, Snapshot

_replace = msgspec.structs.replace
# Fields of StepStats that say how an engine is; all others count what it has done since the last report.
STATES = (
    "running",
    "leases",
    "cells_used",
    "cells_cached",
    "integrity_failures",
    "interrupted",
    "prefix_bytes",
    "disk_bytes",
    "swapped_bytes",
    "draft_bytes",
)
WORK = tuple(name for name in StepStats.__struct_fields__ if name not in STATES)


def add_stats(first: StepStats, *others: StepStats, states: bool = False) -> StepStats:
    """The work of several reports; with `states`, the work of the first and the state of the others."""
    if states:
        return _replace(first, **{name: sum(getattr(each, name) for each in others) for name in STATES})
    work = {name: sum(getattr(each, name) for each in (first, *others)) for name in WORK}
    return _replace(first, **work)


def merge_ready(parts: Sequence[Ready]) -> Ready:
    """What replicas of one model can do together: slots and cells of all, limits of the smallest."""
    limits = [part.limits for part in parts]
    memory: Counter[str] = Counter()
    for part in parts:
        memory.update(part.memory)

    def smallest(name: str) -> int:
        values: list[int] = [getattr(each, name) for each in limits]
        return min(values)

    together = Limits(
        sequences=sum(each.sequences for each in limits),
        parallel=sum(each.parallel or each.sequences for each in limits),
        cells=sum(each.cells for each in limits),
        sequence_cells=smallest("sequence_cells"),
        request_tokens=smallest("request_tokens"),
        batch_tokens=smallest("batch_tokens"),
        rollback_tokens=smallest("rollback_tokens"),
        unified=any(each.unified for each in limits),
        embed=min((each.embed for each in limits), key=lambda each: each.tokens),
    )
    return Ready(parts[0].info, together, dict(memory))


class Gathering:
    """A call to several replicas, until all have answered or are gone."""

    def __init__(self, command: Inspect | ClearCache, asked: Sequence[Hashable], number: int) -> None:
        """`number` of the snapshot that it may become."""
        self._command, self._number = command, number
        self._asked = list(asked)
        self._left = set(asked)
        self._answers: dict[Hashable, Inspection | CacheDone] = {}

    @property
    def complete(self) -> bool:
        return not self._left

    def add(self, replica: Hashable, answer: Inspection | CacheDone) -> None:
        self._left.discard(replica)
        self._answers[replica] = answer

    def drop(self, replica: Hashable) -> None:
        """It will not answer."""
        self._left.discard(replica)

    def answer(self) -> Inspection | CacheDone:
        """All answers as one."""
        answers = [self._answers[replica] for replica in self._asked if replica in self._answers]
        call_id = self._command.call_id
        if isinstance(self._command, Inspect):
            parts = [each.snapshot for each in answers if isinstance(each, Inspection)]
            return Inspection(call_id, merge_snapshots(parts, self._number))
        done = [each for each in answers if isinstance(each, CacheDone)]
        return CacheDone(
            call_id,
            prefixes=sum(each.prefixes for each in done),
            tokens=sum(each.tokens for each in done),
            failure=next((each.failure for each in done if each.failure is not None), None),
        )


def merge_snapshots(parts: Sequence[Snapshot], number: int) -> Snapshot:
    """The slots of all replicas, numbered one replica after the other."""
    leases: list[SlotInfo] = []
    preempted: list[SlotInfo] = []
    waiting: list[str] = []
    cached: dict[int, int] = {}
    first = 0  # slot of a replica
    for part in parts:
        leases += (_rename(info, info.seq_id + first) for info in part.leases)
        preempted += (_rename(info, -1) for info in part.preempted)
        waiting += map(_original, part.waiting)
        cached.update((slot + first, tokens) for slot, tokens in part.cached.items())
        first += part.sequences_total

    def total(name: str) -> int:
        return sum(getattr(part, name) for part in parts)

    return Snapshot(
        number=number,
        sequences_total=first,
        cells_total=total("cells_total"),
        cells_used=total("cells_used"),
        cells_cached=total("cells_cached"),
        slots_cached=total("slots_cached"),
        leases=tuple(leases),
        waiting=tuple(waiting),
        cached=cached,
        preempted=tuple(preempted),
        leased_total=total("leased_total"),
        released_total=total("released_total"),
        cleared_cells_total=total("cleared_cells_total"),
        integrity_failures=total("integrity_failures"),
    )


def _rename(info: SlotInfo, seq_id: int) -> SlotInfo:
    return _replace(info, seq_id=seq_id, request_id=_original(info.request_id))


def _original(request_id: str) -> str:
    """The id of a request, without what its placement added."""
    return request_id.rpartition("~")[0] or request_id
