"""Sequence ids and who holds them. Law 2: an id exists only inside a lease."""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable

from cllm.errors import IntegrityError

log = logging.getLogger(__name__)


class SequenceLease:
    """The right to use one sequence id until released. Released exactly once, by its holder."""

    __slots__ = ("_pool", "leased_at", "request_id", "sequence_id")

    def __init__(self, pool: SequencePool, sequence_id: int, request_id: str) -> None:
        self._pool = pool
        self.sequence_id = sequence_id
        self.request_id = request_id
        self.leased_at = time.monotonic()

    def release(self) -> None:
        """Clear the id's KV, then give it back. A second call is a bug and raises."""
        self._pool._release(self)


class SequencePool:
    """The ids 0 … size - 1. Leased lowest-first, so that the active ids stay dense.

    `clear(sequence_id)` empties the id's memory and returns how many cells it held. It runs before the
    id can be leased again; if it fails, the id is retired: it is never leased again.
    """

    def __init__(self, size: int, clear: Callable[[int], int]) -> None:
        self.size = size
        self._clear = clear
        self._free = list(range(size))
        self._held: dict[int, SequenceLease] = {}
        self.retired: set[int] = set()
        self.leased_total = 0
        self.released_total = 0
        self.cleared_cells_total = 0

    def lease(self, request_id: str) -> SequenceLease | None:
        """The lowest free id, or None: then wait, ids are never shared."""
        if not self._free:
            return None
        sequence_id = heapq.heappop(self._free)
        lease = SequenceLease(self, sequence_id, request_id)
        self._held[sequence_id] = lease
        self.leased_total += 1
        log.debug("leased seq %d for request %s", sequence_id, request_id)
        return lease

    @property
    def leases(self) -> tuple[SequenceLease, ...]:
        """Every lease now held, by ascending id."""
        return tuple(self._held[sequence_id] for sequence_id in sorted(self._held))

    def holder(self, sequence_id: int) -> str | None:
        """The request that holds an id now."""
        lease = self._held.get(sequence_id)
        return lease.request_id if lease is not None else None

    @property
    def held_count(self) -> int:
        return len(self._held)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def free_ids(self) -> frozenset[int]:
        """The ids that can be leased; they hold nothing."""
        return frozenset(self._free)

    def _release(self, lease: SequenceLease) -> None:
        if self._held.get(lease.sequence_id) is not lease:
            raise IntegrityError(f"seq {lease.sequence_id} was released twice for request {lease.request_id}")
        try:
            cells = self._clear(lease.sequence_id)
        except Exception:
            # Law 2: an id whose memory is in doubt must not be used again.
            self.retired.add(lease.sequence_id)
            log.exception("seq %d could not be cleared and is retired", lease.sequence_id)
        else:
            heapq.heappush(self._free, lease.sequence_id)
            self.cleared_cells_total += cells
            log.debug("cleared KV of seq %d (%d cells)", lease.sequence_id, cells)
        finally:
            del self._held[lease.sequence_id]
            self.released_total += 1
