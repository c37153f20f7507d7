"""KV memory moved to RAM and back, and how fast that is."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from cllm.backend.base import ModelRunner
from cllm.core.kv_cache.host_cache import HostKVCache
from cllm.core.sequence import Sequence


class BandwidthEstimate:
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


class KVTransfer:
    """The one way for KV memory into RAM, back, and from one sequence to another: all of it is timed."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.saving = BandwidthEstimate()
        self.restoring = BandwidthEstimate()
        self.seconds = 0.0  # in all

    def save(self, seq_id: int) -> bytes | None:
        """As `ModelRunner.save`."""
        with self._timed() as started:
            state = self._runner.save(seq_id)
        if state is not None:
            self.saving.observe(len(state), time.perf_counter() - started)
        return state

    def restore(self, seq_id: int, state: bytes) -> bool:
        """As `ModelRunner.restore`."""
        with self._timed() as started:
            restored = self._runner.restore(seq_id, state)
        if restored:
            self.restoring.observe(len(state), time.perf_counter() - started)
        return restored

    def copy(self, source: int, target: int, length: int) -> int:
        """As `ModelRunner.copy`. Between streams, the work itself is part of the next step."""
        with self._timed():
            return self._runner.copy(source, target, length)

    @contextmanager
    def _timed(self) -> Iterator[float]:
        started = time.perf_counter()
        try:
            yield started
        finally:
            self.seconds += time.perf_counter() - started


log = logging.getLogger(__name__)


class SwapSpace:
    """Saves and restores KV. What does not fit the budget, or cannot be saved, is recomputed instead."""

    def __init__(self, runner: ModelRunner, moves: KVTransfer, tier: HostKVCache) -> None:
        self._runner = runner
        self._moves = moves
        self._tier = tier
        self._preemptions = self._swap_ins = 0  # since they were taken last

    @property
    def bytes_left(self) -> int:
        return self._tier.swap_limit - self._tier.swapped_bytes

    def save(self, sequence: Sequence) -> None:
        """Keep the KV of a sequence that is about to lose its lease."""
        self._preemptions += 1
        state = None
        try:
            state = self._moves.save(sequence.seq_id)
        except Exception:
            log.exception("the state of request %s could not be saved; it will be recomputed", sequence.id)
        if state is not None and self._tier.reserve(len(state)):
            sequence.saved = state
        else:
            sequence.num_computed = 0

    def restore(self, sequence: Sequence) -> None:
        """Put what was kept back under the sequence's new lease."""
        state = sequence.saved
        assert state is not None
        self.forget(sequence)
        restored = False
        try:
            restored = self._moves.restore(sequence.seq_id, state)
        except Exception:
            log.exception("the state of request %s could not be restored; it is recomputed", sequence.id)
        self._swap_ins += restored
        if not restored:
            self._runner.truncate(sequence.seq_id, 0)
            sequence.num_computed = 0

    def take_counts(self) -> tuple[int, int]:
        """Since the last call: how many were parked, and how many resumed from RAM."""
        counts = self._preemptions, self._swap_ins
        self._preemptions = self._swap_ins = 0
        return counts

    def forget(self, sequence: Sequence) -> None:
        """Give back the RAM of a sequence; nothing happens if it holds none."""
        if sequence.saved is not None:
            self._tier.give_back(len(sequence.saved))
            sequence.saved = None
