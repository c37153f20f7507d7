"""Sequences that had to make room: their KV in RAM, within a byte budget, until they run again."""

from __future__ import annotations

import logging

from cllm.backend.base import Backend
from cllm.engine.sequence import Sequence
from cllm.engine.speed import Moves
from cllm.engine.tier import RamTier

log = logging.getLogger(__name__)


class Parking:
    """Saves and restores KV. What does not fit the budget, or cannot be saved, is recomputed instead."""

    def __init__(self, backend: Backend, moves: Moves, tier: RamTier) -> None:
        self._backend = backend
        self._moves = moves
        self._tier = tier
        self._parks = self._resumes = 0  # since they were taken last

    @property
    def bytes_left(self) -> int:
        return self._tier.parked_limit - self._tier.parked_bytes

    def save(self, sequence: Sequence) -> None:
        """Keep the KV of a sequence that is about to lose its lease."""
        self._parks += 1
        state = None
        try:
            state = self._moves.save(sequence.sequence_id)
        except Exception:
            log.exception("the state of request %s could not be saved; it will be recomputed", sequence.id)
        if state is not None and self._tier.reserve(len(state)):
            sequence.saved = state
        else:
            sequence.computed = 0

    def restore(self, sequence: Sequence) -> None:
        """Put what was kept back under the sequence's new lease."""
        state = sequence.saved
        assert state is not None
        self.forget(sequence)
        restored = False
        try:
            restored = self._moves.restore(sequence.sequence_id, state)
        except Exception:
            log.exception("the state of request %s could not be restored; it is recomputed", sequence.id)
        self._resumes += restored
        if not restored:
            self._backend.truncate(sequence.sequence_id, 0)
            sequence.computed = 0

    def take_counts(self) -> tuple[int, int]:
        """Since the last call: how many were parked, and how many resumed from RAM."""
        counts = self._parks, self._resumes
        self._parks = self._resumes = 0
        return counts

    def forget(self, sequence: Sequence) -> None:
        """Give back the RAM of a sequence; nothing happens if it holds none."""
        if sequence.saved is not None:
            self._tier.give_back(len(sequence.saved))
            sequence.saved = None
