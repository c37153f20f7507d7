"""What guesses add to a step, learnt from the steps in which everybody generated."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from statistics import median
from typing import NamedTuple

from cllm.backend.base import Batch

MOST_PLAIN = 2  # plain steps that one with guesses may take, even if that misses the target
USUAL = 0.5  # of a plain step, before it is known better: one more token for each row
LEAST = 0.01
SHORTER = 0.75  # of the price: fewer tokens fit into what is multiplied at once
ALONE = 0.2  # the same for a lone row,
DETOUR = 0.75  # and once for all of its guesses: on a CPU, several tokens take another way than a single one
PASS = 0.6  # of a plain step: rows of unequal length, in streams of their own, are computed apart


class GuessPrice(NamedTuple):
    """Of the next step, in which `rows` sequences generate."""

    rows: int
    guesses: Mapping[float, float]  # by length, as far as known: one token for each row, as a part of that
    most: float  # plain steps that it may take
    room: int  # tokens in the batch
    split: bool

    def parts(self, guessing: Collection[int], length: int) -> float | None:
        """Plain steps that it takes if these ids guess so far; None for one that is too large."""
        if len(guessing) * length > self.room:
            return None
        share = len(guessing) / self.rows
        parts = 1 + self.guess(length * share) * length * share
        if self.rows == 1:
            parts += DETOUR
        elif self.split and len(guessing) < self.rows:
            parts += PASS * _runs(guessing)
        return parts if parts <= self.most else None

    def guess(self, length: float) -> float:
        """One of so many for each row, as a part of a plain step: as those of nearest length that were seen.

        What is not known yet is taken to be cheap, so that it is found out.
        """
        if not self.guesses:
            return USUAL
        nearest = min(self.guesses, key=lambda known: abs(known - length))
        return self.guesses[nearest] * (SHORTER if length < nearest else 1.0)


class GuessClock:
    """A clock of its own: a prompt's tokens, hundreds in a step, tell little of one token more in each row.

    For each number of rows it remembers the latest plain steps, and by length the latest in which all
    guessed. Medians, since the machine has other things to do, too.
    """

    REMEMBERED = 9
    PATIENCE = 8  # guesses that did not seem worth it, and the oldest steps that say so are forgotten

    def __init__(self, batch_tokens: int, longest_s: float, *, split: bool) -> None:
        self._batch_tokens = batch_tokens
        self._longest_s = longest_s
        self._split = split
        self._plain: dict[int, deque[float]] = {}
        self._guessed: dict[int, dict[float, deque[float]]] = {}
        self._refused = 0

    def observe(self, batch: Batch, seconds: float) -> None:
        """Learn from a finished step; one with a prompt, or of rows computed apart, says nothing."""
        rows = batch.rows
        length = max(row.outputs for row in rows) - 1
        if seconds <= 0 or length < 0 or batch.fillers or any(len(row.tokens) != row.outputs for row in rows):
            return
        if not length:
            self._plain.setdefault(len(rows), deque(maxlen=self.REMEMBERED)).append(seconds)
            return
        guesses = sum(row.outputs - 1 for row in rows)
        if guesses == length * len(rows) or not self._split:
            guessed = self._guessed.setdefault(len(rows), {})
            average = (
                max(1, round(4 * guesses / len(rows))) / 4
            )  # in quarters: few, as each is priced every step
            guessed.setdefault(average, deque(maxlen=self.REMEMBERED)).append(seconds)

    def price(self, rows: int) -> GuessPrice | None:
        """For a step of so many; None before a plain one was seen.

        The lone row's is fixed: then the work of a request depends on its tokens, not on the clock, and the
        same request takes the same steps every time.
        """
        if rows == 1:
            return GuessPrice(1, {1.0: ALONE}, math.inf, self._batch_tokens - 1, self._split)
        if not (plain := self._plain.get(rows)):
            return None
        plain_s = median(plain)
        guesses = {
            length: max(LEAST, (median(seconds) / plain_s - 1) / length)
            for length, seconds in self._guessed.get(rows, {}).items()
        }
        most = max(MOST_PLAIN, self._longest_s / plain_s)
        return GuessPrice(rows, guesses, most, self._batch_tokens - rows, self._split)

    def refused(self, rows: int) -> None:
        """Guesses did not seem worth their price. That may change, and is found out by trying."""
        self._refused += 1
        if self._refused % self.PATIENCE == 0:
            guessed = self._guessed.get(rows, {})
            for length in list(guessed):
                guessed[length].popleft()
                if not guessed[length]:
                    del guessed[length]


def _runs(ids: Collection[int]) -> int:
    """How many groups of consecutive ids there are."""
    known = set(ids)
    return sum(number - 1 not in known for number in known)
