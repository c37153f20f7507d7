"""What a step takes, learnt from the steps that were taken."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cllm.backend.base import Batch

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
        prefill, single = 0, len(batch.fillers)
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


class StepClock:
    """Fits `StepCost` to the latest steps of every kind.

    Steps of different kinds (how much prefill, how many rows, how far into the context) are remembered
    apart: an hour of plain decoding, or of one long prompt, must not wash out what the rest costs. Older
    ones count less, and one that took far longer than it should have (the machine was busy) hardly at all.
    """

    REMEMBERED = 12  # steps of a kind
    KINDS = 40
    HALF_LIFE = 48  # steps after which one counts half
    LEAST_WEIGHT = 0.02
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
        fresh = np.maximum(0.5 ** (ages / self.HALF_LIFE), self.LEAST_WEIGHT)
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
