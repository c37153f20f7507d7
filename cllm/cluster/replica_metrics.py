"""Metrics of replicas: the figures and answers of several as those of one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import msgspec

from cllm.messages import CacheDone, ClearCache, Inspect, Inspection, Ready, StepStats
from cllm.types import Limits, SlotInfo, Snapshot

_replace = msgspec.structs.replace
# Fields of StepStats that say how an engine is; all others count what it has done since the last report.
STATES = (
    *("running", "leases", "cells_used", "cells_cached", "integrity_failures", "interrupted"),
    *("prefix_bytes", "disk_bytes", "swapped_bytes", "draft_bytes"),
)
WORK = tuple(name for name in StepStats.__struct_fields__ if name not in STATES)
# Fields of Limits and Snapshot, of which replicas together have the least, or the sum.
LEAST = (
    *("sequence_cells", "request_tokens", "batch_tokens", "rollback_tokens"),
    *("target_itl_ms", "max_itl_ms"),
)
TOTALS = (
    *("sequences_total", "cells_total", "cells_used", "cells_cached", "slots_cached", "leased_total"),
    *("released_total", "cleared_cells_total", "integrity_failures"),
)


def _sum_up(parts: Sequence[object], names: Sequence[str]) -> dict[str, Any]:
    return {name: sum(getattr(part, name) for part in parts) for name in names}


def add_work(first: StepStats, second: StepStats) -> StepStats:
    """Add up the work of two reports."""
    return _replace(first, **_sum_up((first, second), WORK))


def add_states(work: StepStats, replicas: Sequence[StepStats]) -> StepStats:
    """Complete the work of all replicas with the sum of their states."""
    return _replace(work, **_sum_up(replicas, STATES))


def merge_ready(parts: Sequence[Ready]) -> Ready:
    """Merge replicas of one model: slots and cells of all, limits of the smallest."""
    limits = [part.limits for part in parts]
    memory: Counter[str] = Counter()
    for part in parts:
        memory.update(part.memory)
    least: dict[str, Any] = {name: min(getattr(each, name) for each in limits) for name in LEAST}
    together = Limits(
        sequences=sum(each.sequences for each in limits),
        parallel=sum(each.parallel or each.sequences for each in limits),
        cells=sum(each.cells for each in limits),
        **least,
        unified=any(each.unified for each in limits),
        embed=min((each.embed for each in limits), key=lambda each: each.tokens),
    )
    return Ready(parts[0].info, together, dict(memory))


class ReplicaMetrics:
    """The answers of several replicas to one call, until all have answered or are gone."""

    def __init__(self, command: Inspect | ClearCache, asked: Sequence[Hashable], number: int) -> None:
        """`number` is that of the snapshot which the answers may become."""
        self._command, self._number = command, number
        self.left = set(asked)
        self._answers: dict[Hashable, Inspection | CacheDone | None] = dict.fromkeys(asked)

    def settle(self, replica: Hashable, answer: Inspection | CacheDone | None = None) -> None:
        """Take the answer of a replica; one that is gone has none."""
        if replica in self.left:
            self.left.remove(replica)
            self._answers[replica] = answer

    def answer(self) -> Inspection | CacheDone:
        """Merge all answers into one."""
        call_id, answers = self._command.call_id, self._answers.values()
        if isinstance(self._command, Inspect):
            parts = [each.snapshot for each in answers if isinstance(each, Inspection)]
            return Inspection(call_id, merge_snapshots(parts, self._number))
        done = [each for each in answers if isinstance(each, CacheDone)]
        failure = next((each.failure for each in done if each.failure is not None), None)
        return CacheDone(call_id, failure=failure, **_sum_up(done, ("prefixes", "tokens")))


def merge_snapshots(parts: Sequence[Snapshot], number: int) -> Snapshot:
    """Merge the slots of all replicas, numbered one replica after the other."""
    leases, preempted = list[SlotInfo](), list[SlotInfo]()
    waiting, cached = list[str](), dict[int, int]()
    first = 0  # slot of a replica
    for part in parts:
        leases += (_rename(info, info.seq_id + first) for info in part.leases)
        preempted += (_rename(info, -1) for info in part.preempted)
        waiting += map(_original, part.waiting)
        cached.update((slot + first, tokens) for slot, tokens in part.cached.items())
        first += part.sequences_total
    return Snapshot(
        number=number,
        leases=tuple(leases),
        waiting=tuple(waiting),
        cached=cached,
        preempted=tuple(preempted),
        **_sum_up(parts, TOTALS),
    )


def _rename(info: SlotInfo, seq_id: int) -> SlotInfo:
    return _replace(info, seq_id=seq_id, request_id=_original(info.request_id))


def _original(request_id: str) -> str:
    """Return the id of a request without what its placement added."""
    return request_id.rpartition("~")[0] or request_id
