"""KV memory moved to RAM and back, and how fast that is."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from cllm.backend.base import Backend


class MemorySpeed:
    """Seconds for a byte moved between KV memory and RAM: the median of the last moves.

    It begins with a guess, and falls back to it bit by bit while nothing is moved: one bad moment of the
    machine must not switch the cache off for good.
    """

    GUESS = 1 / 4e9

    def __init__(self) -> None:
        self._seen: deque[float] = deque([self.GUESS] * 3, maxlen=7)

    def observe(self, size: int, seconds: float) -> None:
        self._seen.append(seconds / max(1, size))

    def doubt(self) -> None:
        self._seen.append(self.GUESS)

    def seconds(self, size: int) -> float:
        return median(self._seen) * size


class Moves:
    """The one way for KV memory into RAM, back, and from one sequence to another: all of it is timed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.saving = MemorySpeed()
        self.restoring = MemorySpeed()
        self.seconds = 0.0  # in all

    def save(self, sequence_id: int) -> bytes | None:
        """As `Backend.save`."""
        with self._timed() as started:
            state = self._backend.save(sequence_id)
        if state is not None:
            self.saving.observe(len(state), time.perf_counter() - started)
        return state

    def restore(self, sequence_id: int, state: bytes) -> bool:
        """As `Backend.restore`."""
        with self._timed() as started:
            restored = self._backend.restore(sequence_id, state)
        if restored:
            self.restoring.observe(len(state), time.perf_counter() - started)
        return restored

    def copy(self, source: int, target: int, length: int) -> int:
        """As `Backend.copy`. Between streams, the work itself is part of the next step."""
        with self._timed():
            return self._backend.copy(source, target, length)

    @contextmanager
    def _timed(self) -> Iterator[float]:
        started = time.perf_counter()
        try:
            yield started
        finally:
            self.seconds += time.perf_counter() - started
