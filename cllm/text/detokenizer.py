"""From token bytes to text a client may see: whole characters only, nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class IncrementalDetokenizer:
    """Turns the byte pieces of one answer into text, holding back what may still change.

    Held back: bytes of an unfinished UTF-8 character, and any tail that could be the beginning of a
    stop string. What has been returned never has to be taken back.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, piece: bytes) -> str:
        """Add bytes; returns the text that is now certain. Sets `stopped_by` when a stop string is complete.

        The stop string that is complete first wins (the longest, if several end on the same character);
        the text ends where it begins, and everything after is dropped.
        """
        text = self._decoder.decode(piece)
        if not self._stop:
            return text
        if self.stopped_by is not None or not text:
            return ""
        self._held += text
        found = min(
            (
                (index + len(stop), index, stop)
                for stop in self._stop
                if (index := self._held.find(stop)) >= 0
            ),
            default=None,
        )
        if found is not None:
            _, begin, self.stopped_by = found
            certain, self._held = self._held[:begin], ""
            return certain
        keep = self._possible_stop_length()
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain

    def finish(self) -> str:
        """The answer ended by itself: returns what was held back for a stop string that did not come.

        Bytes of a character that was never completed are dropped: there is nothing to show for them.
        """
        held, self._held = self._held, ""
        return held

    def _possible_stop_length(self) -> int:
        """Length of the longest tail of the held text that is a proper beginning of a stop string."""
        held = self._held
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(held)), 0, -1):
            tail = held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
