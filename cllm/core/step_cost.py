"""What a step takes, learnt from the steps that were taken."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as List
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cllm.backend.base import Batch, Row, count_ubatches

Vector = npt.NDArray[np.float64]


TILE = 64  # tokens: llama.cpp's flash attention on a CPU takes so many at once, and fewer one by one


class StepShape(NamedTuple):
    """What a step computes, as far as its time depends on it."""

    ubatches: int  # each reads all weights once
    prefill_tokens: int  # tokens of rows with more than one
    rows: int  # rows with one token
    attended: float  # pairs of a token and a cell before it, token by token
    tiled: float = 0.0  # such pairs in tiles

    @classmethod
    def of(cls, batch: Batch, ubatches: int, *, split: bool) -> StepShape:
        """The shape of a batch; with `split` streams, rows of unequal length are computed apart."""
        prefill, single = 0, len(batch.padding)
        attended = tiled = 0.0
        together = batch.token_count
        if together == len(batch.rows) and (split or together < TILE):  # as most steps are
            cells = sum(row.position for row in batch.rows)
            return cls(ubatches, 0, single + together, cells + together / 2)
        first = int(len(batch.rows) > 1)  # of a long row: goes along with the others
        for row in batch.rows:
            count = len(row.tokens)
            if count == 1:
                single += 1
            else:
                prefill += count
            pairs = attended_pairs(count, row.position, count - first if split else together)
            attended += pairs[0]
            tiled += pairs[1]
        return cls(ubatches, prefill, single, attended, tiled)

    @property
    def kind(self) -> tuple[int, int, int]:
        """Steps of one kind are alike in size: each figure is within a factor of two (context: four)."""
        context = int(self.attended + self.tiled) // max(1, self.prefill_tokens + self.rows)
        return self.prefill_tokens.bit_length(), self.rows.bit_length(), context.bit_length() // 2


def attended_pairs(count: int, position: int, together: int) -> tuple[float, float]:
    """Pairs of `count` tokens from `position` on: one by one, and in tiles if enough go `together`."""
    context = position + count / 2
    if together < TILE:
        return count * context, 0.0
    return 0.0, max(count, -(-together // TILE) * TILE * (count / together)) * context


class StepCost(NamedTuple):
    """Seconds for each unit of a step's shape: time = the sum of unit × cost. None is negative."""

    ubatch: float
    prefill_token: float
    row: float
    attended: float
    tiled: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        return (
            self.ubatch * shape.ubatches
            + self.prefill_token * shape.prefill_tokens
            + self.row * shape.rows
            + self.attended * shape.attended
            + self.tiled * shape.tiled
        )


class _Sample(NamedTuple):
    shape: StepShape
    seconds: float
    number: int  # of the step


class StepCostModel:
    """Fits `StepCost` to the latest steps of every kind.

    Steps of different kinds (how much prefill, how many rows, how far into the context) are remembered
    apart: an hour of plain decoding, or of one long prompt, must not wash out what the rest costs. Older
    ones count less, and one that took far longer than it should have (the machine was busy) hardly at all.
    """

    REMEMBERED = 12  # steps of a kind
    KINDS = 40
    HALF_LIFE = 48  # steps after which one counts half
    MIN_WEIGHT = 0.02
    SHORTEST_S = 1e-6  # no step is shorter, whatever a clock says
    REFIT_AFTER = 16  # steps; fitting takes half a millisecond
    SURPRISE = 0.15  # a step this far off its estimate is reason to fit at once,
    WORTH_FITTING_S = 0.02  # if it took so much longer than fitting does
    # Units in which the costs are of similar size; what cannot be told apart is shared in them.
    UNITS: Vector = np.array([1.0, 64.0, 4.0, 65536.0, 65536.0])

    def __init__(self) -> None:
        self._samples: dict[tuple[int, int, int], deque[_Sample]] = {}
        self._number = 0
        self._fitted = 0  # the number of the last step that is in the estimate
        self._surprised = False
        self._cost: StepCost | None = None
        # The most of a step so far: a guess far beyond is no more than a guess.
        self.largest_prefill = 0
        self.largest_attended = 0.0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a finished step; one without a time teaches nothing."""
        if seconds <= 0:
            return
        seconds = max(seconds, self.SHORTEST_S)
        self._number += 1
        kind = self._samples.pop(shape.kind, None) or deque(maxlen=self.REMEMBERED)
        kind.append(_Sample(shape, seconds, self._number))
        self._samples[shape.kind] = kind  # the kind seen last is the last
        if len(self._samples) > self.KINDS:
            del self._samples[next(iter(self._samples))]
        self.largest_prefill = max(self.largest_prefill, shape.prefill_tokens)
        self.largest_attended = max(self.largest_attended, shape.attended)
        if self._cost is not None and seconds >= self.WORTH_FITTING_S:
            self._surprised |= abs(self._cost.seconds(shape) - seconds) > self.SURPRISE * seconds

    @property
    def cost(self) -> StepCost | None:
        """The present estimate; None before the first step."""
        new = self._number - self._fitted
        if new >= self.REFIT_AFTER or (new and (self._surprised or self._cost is None)):
            self._cost = self._fit()
            self._fitted = self._number
            self._surprised = False
        return self._cost

    def _fit(self) -> StepCost:
        samples = [sample for kind in self._samples.values() for sample in kind]
        shapes = np.array([sample.shape for sample in samples], float) / self.UNITS
        seconds = np.array([sample.seconds for sample in samples])
        ages = self._number - np.array([sample.number for sample in samples])
        fresh = np.maximum(0.5 ** (ages / self.HALF_LIFE), self.MIN_WEIGHT)
        weights = fresh / seconds  # errors count relative to the step, small steps as much as large ones
        found = np.zeros(len(self.UNITS))
        for _ in range(3):
            found = _non_negative(shapes, seconds, weights)
            error = np.abs(shapes @ found - seconds) / seconds
            usual = max(float(np.median(error[ages <= np.median(ages)])), 0.01)
            weights = fresh * np.minimum(1.0, 2 * usual / np.maximum(error, 1e-9)) / seconds
        return StepCost(*(found / self.UNITS).tolist())


def _non_negative(shapes: Vector, seconds: Vector, weights: Vector) -> Vector:
    """Weighted least squares; whatever comes out negative is taken to be nothing."""
    left = list(range(shapes.shape[1]))
    found = np.zeros(shapes.shape[1])
    scaled = shapes * weights[:, None]
    target = seconds * weights
    while left:
        part = scaled[:, left]
        # The least bit of ridge: what cannot be told apart is shared, and nothing is singular.
        ridge = 1e-6 * np.trace(part.T @ part) / len(left) + 1e-30
        solution = np.linalg.solve(part.T @ part + ridge * np.eye(len(left)), part.T @ target)
        if (solution >= 0).all():
            found[left] = solution
            break
        left = [index for index, value in zip(left, solution, strict=True) if value > 0]
    return found


MAX_PLAIN = 2  # plain steps that one with guesses may take, even if that misses the target
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
        if seconds <= 0 or length < 0 or batch.padding or any(len(row.tokens) != row.outputs for row in rows):
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
        most = max(MAX_PLAIN, self._longest_s / plain_s)
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


def choose_padding(
    rows: List[Row], empty: Collection[int], clock: StepCostModel, most: int
) -> tuple[int, ...]:
    """The empty ids that are worth a row in this step, of at most `most` tokens. Rows ascend by id."""
    ids = [row.seq_id for row in rows]
    if ids[-1] - ids[0] + 1 == len(ids) or (cost := clock.cost) is None:
        return ()
    room = most - sum(len(row.tokens) for row in rows)
    filled = list(rows)
    padding: list[int] = []
    passes = count_ubatches(filled, most, unified=False)
    for before, after in pairwise(ids):
        hole = range(before + 1, after)
        if not hole or len(hole) > room or not all(seq_id in empty for seq_id in hole):
            continue
        tried = [*filled, *(Row(seq_id, 0, (0,), 0, None) for seq_id in hole)]
        passes_then = count_ubatches(tried, most, unified=False)
        if (passes - passes_then) * cost.ubatch > len(hole) * cost.row:
            filled, passes = tried, passes_then
            padding += hole
            room -= len(hole)
    return tuple(padding)
