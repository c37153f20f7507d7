"""What the memory itself says, beside what the scheduler believes: leases, leftovers, and their removal."""

from __future__ import annotations

import time
from collections.abc import Mapping

from cllm.backend.base import Backend
from cllm.engine.pool import SequencePool
from cllm.engine.sequence import Sequence
from cllm.types import LeaseFacts


def lease_facts(
    backend: Backend, pool: SequencePool, running: Mapping[int, Sequence]
) -> tuple[LeaseFacts, ...]:
    """Every lease; positions are read from the memory, so drift would show."""
    now = time.monotonic()
    return tuple(
        LeaseFacts(
            seq_id=lease.sequence_id,
            request_id=lease.request_id,
            tokens=len(running[lease.sequence_id].tokens),
            position=backend.next_position(lease.sequence_id),
            state=running[lease.sequence_id].state.value,
            age_s=round(now - lease.leased_at, 3),
        )
        for lease in pool.leases
    )


def left_over(backend: Backend, pool: SequencePool) -> list[str]:
    """What is held though nobody runs; nothing, by law 7."""
    left = [f"lease of seq {lease.sequence_id}" for lease in pool.leases]
    return left + [
        f"{cells} cells in seq {sequence_id}"
        for sequence_id in range(pool.size)
        if sequence_id not in pool.retired and (cells := backend.next_position(sequence_id)) != 0
    ]


def empty_all(backend: Backend, pool: SequencePool) -> None:
    """Empty every sequence, so that the next request starts clean."""
    for sequence_id in range(pool.size):
        if sequence_id not in pool.retired:
            backend.truncate(sequence_id, 0)
