"""Incremental detokenizer: token bytes to text, by whole characters, without stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import AnyStr


class IncrementalDetokenizer:
    """Incremental detokenizer of one answer. Returned text is final.

    Held back: the bytes of an incomplete UTF-8 character, and any suffix that may start a stop string.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, piece: bytes) -> str:
        """Add bytes; returns the text that is now final. Sets `stopped_by` when a stop string is complete.

        The stop string that completes first wins (the longest, if several end on the same character). The
        text ends before it; what follows is dropped.
        """
        text = self._decoder.decode(piece)
        if not self._stop:
            return text
        if self.stopped_by is not None or not text:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            _, begin, self.stopped_by = min(found)
            certain, self._held = self._held[:begin], ""
            return certain
        cut = len(self._held) - count_possible(self._held, self._stop)
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain

    def finish(self) -> str:
        """The answer has ended: returns the text held back for a stop string that never completed.

        The bytes of an incomplete character are dropped.
        """
        held, self._held = self._held, ""
        return held


def count_possible(text: AnyStr, marks: Sequence[AnyStr]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a mark, so may become one."""
    for length in range(min(max(map(len, marks), default=1) - 1, len(text)), 0, -1):
        if any(len(mark) > length and mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def count_common(first: str, second: str) -> int:
    """Length of the common beginning of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))
