"""How fast KV memory is moved to RAM and back."""

from __future__ import annotations

from collections import deque
from statistics import median


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
