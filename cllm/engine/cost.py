"""What a step takes, learnt from the steps that were taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cllm.backend.base import Row

Vector = npt.NDArray[np.float64]


class StepShape(NamedTuple):
    """What a step computes, as far as its time depends on it."""

    ubatches: int  # each reads all weights once
    prefill_tokens: int  # tokens of rows with more than one
    rows: int  # rows with one token
    attended: float  # pairs of a token and a cell before it

    @classmethod
    def of(cls, rows: Iterable[Row], ubatches: int) -> StepShape:
        prefill = single = 0
        attended = 0.0
        for row in rows:
            count = len(row.tokens)
            attended += count * (row.position + count / 2)
            if count == 1:
                single += 1
            else:
                prefill += count
        return cls(ubatches, prefill, single, attended)


class StepCost(NamedTuple):
    """Seconds for each unit of a step's shape: time = the sum of unit × cost. None is negative."""

    ubatch: float
    prefill_token: float
    row: float
    attended: float

    def seconds(self, shape: StepShape) -> float:
        return (
            self.ubatch * shape.ubatches
            + self.prefill_token * shape.prefill_tokens
            + self.row * shape.rows
            + self.attended * shape.attended
        )


class StepClock:
    """Fits `StepCost` to the latest steps.

    Steps with prefill and steps without are remembered apart, so that an hour of plain decoding does not
    wash out what prefill costs. A step that took far longer than it should have (the machine was busy) is
    weighed down, not believed.
    """

    REMEMBERED = 48  # steps of either kind
    REFIT_AFTER = 6  # new steps; fitting takes a fraction of a millisecond
    # Units in which the costs are of similar size; the fit is drawn weakly towards zero in them.
    UNITS: Vector = np.array([1.0, 64.0, 4.0, 65536.0])

    def __init__(self) -> None:
        self._with_prefill: deque[tuple[StepShape, float]] = deque(maxlen=self.REMEMBERED)
        self._without: deque[tuple[StepShape, float]] = deque(maxlen=self.REMEMBERED)
        self._unfitted = 0
        self._cost: StepCost | None = None

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a finished step; one without a time teaches nothing."""
        if seconds <= 0:
            return
        (self._with_prefill if shape.prefill_tokens else self._without).append((shape, seconds))
        self._unfitted += 1

    @property
    def largest_prefill(self) -> int:
        """Of the steps remembered; a guess far beyond it is no more than a guess."""
        return max((shape.prefill_tokens for shape, _ in self._with_prefill), default=0)

    @property
    def cost(self) -> StepCost | None:
        """The present estimate; None before the first step."""
        seen = len(self._with_prefill) + len(self._without)
        if self._unfitted and (self._unfitted >= self.REFIT_AFTER or seen <= 2 * self.REFIT_AFTER):
            self._cost = self._fit()
            self._unfitted = 0
        return self._cost

    def _fit(self) -> StepCost:
        samples = (*self._with_prefill, *self._without)
        shapes = np.array([shape for shape, _ in samples], float) / self.UNITS
        seconds = np.array([time for _, time in samples])
        weights = 1 / seconds  # errors count relative to the step, small steps as much as large ones
        found = np.zeros(len(self.UNITS))
        for _ in range(3):
            found = _non_negative(shapes, seconds, weights)
            error = np.abs(shapes @ found - seconds) / seconds
            usual = max(float(np.median(error)), 0.01)
            weights = np.minimum(1.0, 2 * usual / np.maximum(error, 1e-9)) / seconds
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
