"""Who of the waiting starts now, and with what KV memory there is for them already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Line

from cllm.backend.base import Backend
from cllm.engine.parking import Parking
from cllm.engine.pool import SequencePool
from cllm.engine.prefix import Origin, Prefixes
from cllm.engine.sequence import Sequence


class Joining:
    """Looks at the line, oldest first, and prepares whoever gets a lease."""

    def __init__(self, backend: Backend, pool: SequencePool, parking: Parking, prefixes: Prefixes) -> None:
        self._backend = backend
        self._pool = pool
        self._parking = parking
        self._prefixes = prefixes
        self._awaited: dict[str, int] = {}  # id of who is waited for -> tokens of the shortest who waits

    def next(
        self, waiting: Line[Sequence], running: Mapping[int, Sequence]
    ) -> Iterator[tuple[Sequence, Origin | None]]:
        """Those who can start now, and from what; each is to be started before the next is asked for."""
        self._awaited.clear()
        for sequence in tuple(waiting):
            if not self._pool.free_count or not self._fits(sequence, running):
                return
            if not sequence.startable:
                continue
            origin = None
            if sequence.saved is None:
                origin = self._prefixes.find(sequence, running.values())
            if origin is not None and not origin.ready:
                # What both begin with is being computed: wait for it, then copy.
                assert origin.donor is not None
                shortest = self._awaited.get(origin.donor.id, sequence.pending)
                self._awaited[origin.donor.id] = min(shortest, sequence.pending)
                continue
            yield sequence, origin

    def urgency(self, sequence: Sequence) -> int:
        """Tokens of the shortest prompt that waits for this one, itself included."""
        return min(sequence.pending, self._awaited.get(sequence.id, sequence.pending))

    def prepare(self, sequence: Sequence, origin: Origin | None) -> None:
        """Everything a sequence needs under its new lease. Raises what its own grammar or sampler raises."""
        if sequence.compiling is not None:
            sequence.constraint, sequence.compiling = sequence.compiling.result(), None
        if sequence.sampler is None:
            sequence.sampler = self._backend.create_sampler(sequence.request.sampling)
            sequence.sampler.accept(sequence.tokens)
        if sequence.saved is not None:
            self._parking.restore(sequence)
        elif origin is not None:
            self._prefixes.take(sequence, origin)

    def _fits(self, sequence: Sequence, running: Mapping[int, Sequence]) -> bool:
        """With one common pool of cells, do not start what would evict somebody at once."""
        if not self._backend.limits.unified or not running:
            return True
        taken = sum(len(other.tokens) for other in running.values())
        return taken + len(sequence.tokens) < self._backend.limits.cells
