"""The cost model: what steps, drafts and KV transfers take, learned from those that were made."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cllm.backend.base import RECORDED_AFTER, Batch, DraftCost, StepResult

Vector = npt.NDArray[np.float64]

TILE = 64  # tokens that ggml's attention on a CPU takes at once; fewer go one by one

DEFAULT_TRANSFER_S = 2.5e-10  # a byte between KV memory and host RAM, before it was measured
LONG_CONTEXT = 1024  # cells: from here on attention counts in what a lone row's drafts cost
MILLISECOND = 1e-3
TINY = 1e-6  # seconds: no step is shorter, whatever a clock says; and the ridge of the fit


REMEMBERED = 9  # observations of a kind


class StepShape(NamedTuple):
    """What a step computes, as far as its time depends on it."""

    ubatches: int  # each reads all weights once
    prefill_tokens: int  # tokens of rows with more than one
    rows: int  # rows with one token, and draft tokens: each yields output
    attended: float  # pairs of a token and a cell before it, token by token
    tiled: float = 0.0  # such pairs in tiles
    scored: int = 0  # tokens of prompts whose log-probabilities are wanted: each takes a line of logits

    @classmethod
    def of(cls, batch: Batch, ubatches: int, *, split: bool) -> StepShape:
        """The shape of a batch; with `split` KV, rows of unequal length are computed apart."""
        padding = dict(batch.padding)
        prefill = single = 0
        attended = tiled = 0.0
        together = batch.token_count
        if together == len(batch.rows) and (split or together < TILE):  # as most steps are
            cells = sum(row.position for row in batch.rows)
            return cls(ubatches, 0, together + sum(padding.values()), cells + together / 2)
        first = int(len(batch.rows) > 1)  # of a long row: computed along with the others
        for row in batch.rows:
            if (count := len(row.tokens)) == max(1, row.outputs):
                single += count
            else:
                count += padding.pop(row.seq_id, 0)
                prefill += count
            pairs = attended_pairs(count, row.position, count - first if split else together)
            attended += pairs[0]
            tiled += pairs[1]
        scored = sum(len(row.scored) for row in batch.rows)
        return cls(ubatches, prefill, single + sum(padding.values()), attended, tiled, scored)


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
    scored: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        return (
            self.ubatch * shape.ubatches
            + self.prefill_token * shape.prefill_tokens
            + self.row * shape.rows
            + self.attended * shape.attended
            + self.tiled * shape.tiled
            + self.scored * shape.scored
        )


class RunningMedian:
    """The median of the latest observations. It starts at a default and returns to it by `doubt`.

    A median, since the machine is shared; a default to return to, since one bad moment must not switch a
    mechanism off for good.
    """

    def __init__(self, default: float) -> None:
        self._default = default
        self._seen: deque[float] = deque([default], maxlen=REMEMBERED)

    def observe(self, value: float) -> None:
        if len(self._seen) == 1:
            self._seen.append(self._default)  # two of the default: a single observation does not decide
        self._seen.append(value)

    def doubt(self) -> None:
        """The value kept something from being done: look again some time."""
        self._seen.append(self._default)

    @property
    def value(self) -> float:
        return median(self._seen)


class _Sample(NamedTuple):
    shape: StepShape
    seconds: float
    number: int  # of the step


class StepCostModel:
    """Fits `StepCost` to the latest steps of every kind; keeps medians for decode steps and transfers.

    Steps of different kinds (how much prefill, how many rows, how far into the context) are remembered
    apart: an hour of plain decoding, or of one long prompt, must not wash out what the rest costs. Older
    ones count less, and one that took far longer than it should have (the machine was busy) hardly at all.

    `frozen` is the one switch for tests: nothing is learned, `known` stays what is known of steps.
    """

    MAX_KINDS = 40
    HALF_LIFE = 24  # steps after which one counts half
    MIN_WEIGHT = 0.02
    REFIT_AFTER = 16  # steps; fitting takes half a millisecond
    SURPRISE = 0.15  # a step this far off its estimate is reason to fit at once,
    WORTH_FITTING_S = 0.02  # if it took so much longer than fitting does
    # Units in which the costs are of similar size; what cannot be distinguished is shared in them.
    UNITS: Vector = np.array([1, TILE, 2, TILE**2, TILE**2, TILE], float)

    def __init__(
        self,
        *,
        split: bool = True,
        known: StepCost | None = None,
        batch1: DraftCost | None = None,
        records: bool = False,
        frozen: bool = False,
    ) -> None:
        self.split = split  # then rows of unequal length are computed apart
        self.records = records  # as a GPU does: a step that differs makes those after it slower
        self.batch1 = batch1 or DraftCost()
        self.frozen = frozen
        self.steps, self.computed_s = 0, 0.0  # so far
        self._samples: dict[tuple[int, ...], deque[_Sample]] = {}
        self._number = 0
        self._fitted = 0  # the number of the last step that is in the estimate
        self._surprised = False
        self._cost = known
        # The largest so far: far beyond a step no estimate is to be trusted, nor one from a tiny transfer.
        self.largest_prefill, self.largest_attended, self.largest_transfer = 0, 0.0, 0
        # Shapes and seconds of decode steps, by bits of the rows and of the draft tokens; and the ratio of
        # these seconds to the estimate.
        self._decoded: dict[tuple[int, int], deque[list[Any]]] = {}
        self._corrections: dict[tuple[int, int], float] = {}
        # What the first step of a run of drafts and the plain ones after it take longer, in plain steps.
        self.beginning = RunningMedian(self.batch1.begin)
        self._begun_s: float | None = None  # of a run of drafts of one length, so far
        self._last = 0, 0  # rows and draft tokens of the last decode step,
        self._unsettled = 0  # and how many to come are slow, since it was unlike the one before
        self._drafted_s = 0.0  # the head's time before the step that comes
        self._head: dict[int, RunningMedian] = {}  # the head's seconds over those measured at load, by rows
        self._attention: dict[int, float] = {}  # seconds a cell over those of a lone row, by kind of context
        self._saving, self._restoring = RunningMedian(DEFAULT_TRANSFER_S), RunningMedian(DEFAULT_TRANSFER_S)

    # Steps -----------------------------------------------------------------------------------------

    def observe(self, batch: Batch, result: StepResult) -> None:
        """Learn from a finished step."""
        seconds = result.compute_s + result.sample_s
        self.steps += 1
        self.computed_s += seconds
        if seconds > 0 and not self.frozen:
            shape = StepShape.of(batch, result.ubatches, split=self.split)
            sampling_s = sum(row.sample_s for row in result.rows)  # each sequence has its own
            self.observe_shape(shape, seconds - sampling_s)
            self._observe_decode(batch, shape, max(seconds, result.period_s - self._drafted_s))
        self._drafted_s = 0.0

    def observe_shape(self, shape: StepShape, seconds: float) -> None:
        seconds = max(seconds, TINY)
        self._number += 1
        # Steps of one kind are alike in size: each figure is within a factor of two (context: four).
        context = int(shape.attended + shape.tiled) // max(1, shape.prefill_tokens + shape.rows)
        sizes = shape.prefill_tokens, shape.rows, shape.scored
        kind = (*(size.bit_length() for size in sizes), _context_kind(context))
        alike = self._samples.pop(kind, None) or deque(maxlen=REMEMBERED)
        alike.append(_Sample(shape, seconds, self._number))
        self._samples[kind] = alike  # the kind seen last is the last
        if len(self._samples) > self.MAX_KINDS:
            del self._samples[next(iter(self._samples))]
        self.largest_prefill = max(self.largest_prefill, shape.prefill_tokens)
        self.largest_attended = max(self.largest_attended, shape.attended)
        if self._cost is not None and seconds >= self.WORTH_FITTING_S:
            self._surprised |= abs(self._cost.seconds(shape) - seconds) > self.SURPRISE * seconds

    @property
    def step(self) -> StepCost | None:
        """The present estimate; None before the first step."""
        new = self._number - self._fitted
        if new >= self.REFIT_AFTER or (new and (self._surprised or self._cost is None)):
            self._cost = self._fit()
            self._fitted = self._number
            self._surprised = False
            self._corrections.clear()
            for (prefill, rows, _, context), alike in self._samples.items():
                if (prefill, rows) == (0, 1) and len(alike) == REMEMBERED:
                    lone_s = self._cost.ubatch + self._cost.row
                    self._attention.setdefault(context, self._cost.attended / max(lone_s, TINY))
        return self._cost

    @property
    def prefill_token_s(self) -> float | None:
        """Seconds for a token of a prompt, with its share of a ubatch; None before it was measured.

        On a GPU the ubatch is most of it: a few hundred tokens take as long as a few.
        """
        if not self.largest_prefill or (step := self.step) is None:
            return None
        return step.prefill_token + step.ubatch / self.largest_prefill or None

    def _fit(self) -> StepCost:
        samples = [sample for kind in self._samples.values() for sample in kind]
        shapes = np.array([sample.shape for sample in samples], float) / self.UNITS
        seconds = np.array([sample.seconds for sample in samples])
        ages = self._number - np.array([sample.number for sample in samples])
        fresh = np.sqrt(np.maximum(np.exp2(-ages / self.HALF_LIFE), self.MIN_WEIGHT))  # of squares
        weights = fresh / seconds  # errors count relative to the step, small steps as much as large ones
        found = np.zeros(len(self.UNITS))
        for _ in range(1 + 2):  # twice more, with what fits badly counting less
            found = _non_negative(shapes, seconds, weights)
            error = np.abs(shapes @ found - seconds) / seconds
            usual = max(float(np.median(error[ages <= np.median(ages)])), self.MIN_WEIGHT)
            weights = fresh * np.minimum(1.0, 2 * usual / np.maximum(error, usual)) / seconds
        return StepCost(*(found / self.UNITS).tolist())

    # Decode steps, with drafts and without -----------------------------------------------------------

    def decode_step_s(
        self,
        rows: int,
        cells: int,
        drafting: Collection[int] = (),
        length: int = 0,
        *,
        begins: float = 0.0,
        head: bool = False,
        corrected: bool = True,
    ) -> float:
        """Seconds of a step of `rows` rows with `cells` cells in all; these ids have `length` drafts each.

        It bears the part `begins` of the beginning of a run of drafts; with `head` that has to draft them.

        That is the estimate for its shape, corrected by what such steps took. Without `corrected` it is what
        was measured at load, in steps of a lone row.

        For a lone row it is in plain steps, as measured at load: the work of a request depends on its tokens
        alone, and the same request takes the same steps every time. In a long context attention is most of a
        step, and a CPU attends token by token: its share is fixed when it is first known.
        """
        drafted, measured = length * len(drafting), self.batch1
        if rows == 1:
            kinds = range(_context_kind(cells), _context_kind(LONG_CONTEXT) - 1, -1)
            attention = cells * next(
                (self._attention[each] for each in kinds if each in self._attention), 0.0
            )
            token = measured.token + (measured.head if head else 0.0)
            verified = measured.verify + token * length + begins * measured.begin if length else 0.0
            return (1 + verified + attention * (1 + length)) / (1 + attention)
        step = self.step if corrected else None
        if step is None:
            step = StepCost(max(0.0, 1 - measured.token), measured.token, measured.token, 0.0)
        ubatches = 1
        if self.split and len(drafting) < rows:  # rows of another length are computed apart, by runs of ids
            ids = set(drafting)
            ubatches += sum(seq_id - 1 not in ids for seq_id in ids)
        shape = StepShape(ubatches, 0, rows + drafted, cells * (1 + drafted / rows))
        kind = rows.bit_length(), drafted.bit_length()
        seconds = step.seconds(shape) * (self._correction(kind) if corrected else 1.0)
        if drafted and corrected:
            seconds += begins * self.beginning.value * step.seconds(StepShape(1, 0, rows, cells))
        if head and drafted:
            measured_s = self._head.get(len(drafting))  # over those at load
            slower = measured_s.value if measured_s is not None else 1.0
            seconds += length * measured.head * (step.ubatch + step.row) * slower
        return seconds

    def observe_head(self, rows: int, length: int, seconds: float) -> None:
        """Learn from drafts of the model's head."""
        self._drafted_s = seconds
        if rows > 1 and not self._unsettled and not self.frozen and (step := self.step) is not None:
            expected_s = length * self.batch1.head * (step.ubatch + step.row)
            self._head.setdefault(rows, RunningMedian(1.0)).observe(seconds / max(TINY, expected_s))

    def _correction(self, kind: tuple[int, int]) -> float:
        """Median of observed over estimated seconds.

        The first estimate counts for two observations, so that a single one does not decide. It is 1 for
        plain steps, and for drafts what is known of those that are most like them.
        """
        if kind not in self._corrections:
            drafted = [each for each in self._decoded if each[1] and each != kind] if kind[1] else []
            nearest = min(drafted, key=lambda each: math.dist(each, kind), default=None)
            first = median(self._ratios(nearest)) if nearest is not None else 1.0
            self._corrections[kind] = median([*self._ratios(kind), first, first])
        return self._corrections[kind]

    def _ratios(self, kind: tuple[int, int]) -> list[float]:
        step, seen = self._cost, self._decoded.get(kind, ())
        return [seconds / max(TINY, step.seconds(shape)) for shape, seconds in seen] if step else []

    def _observe_decode(self, batch: Batch, shape: StepShape, seconds: float) -> None:
        """Learn from a step without a prompt.

        On a GPU the first ones of a shape are slow, as it is recorded anew: what they take longer is
        the price of a run of drafts and of its end, not of its steps.
        """
        rows, drafted = len(batch.rows), batch.token_count - len(batch.rows)
        if any(len(row.tokens) != row.outputs for row in batch.rows):  # a prompt, which ends a run
            self._last, self._unsettled, self._begun_s = (rows, 0), 0, None
            return
        last, self._last = self._last, (rows, drafted)
        if self._last != last and (drafted or last[1]) and self.records:
            self._unsettled = RECORDED_AFTER
            if drafted:
                self._begun_s = None if last[1] or last[0] != rows else 0.0
        settled, self._unsettled = not self._unsettled, max(0, self._unsettled - 1)
        if rows == 1:
            return
        kind = rows.bit_length(), drafted.bit_length()
        if settled:
            self._decoded.setdefault(kind, deque(maxlen=REMEMBERED)).append([shape, seconds])
            self._corrections.clear() if drafted else self._corrections.pop(kind, None)
        elif self._begun_s is not None and (step := self.step) is not None:
            self._begun_s += seconds - step.seconds(shape) * self._correction(kind)
            if not drafted and not self._unsettled:
                self.beginning.observe(max(0.0, self._begun_s) / max(TINY, step.seconds(shape)))
                self._begun_s = None

    # Transfers -------------------------------------------------------------------------------------

    def observe_transfer(self, size: int, seconds: float, *, restore: bool) -> None:
        """Learn from KV memory copied to host RAM, or back. Of a few bytes, the call takes the time."""
        self.largest_transfer = max(size, self.largest_transfer)
        if not self.frozen and size * TILE >= self.largest_transfer:
            (self._restoring if restore else self._saving).observe(seconds / max(1, size))

    def save_s(self, size: int) -> float:
        return self._saving.value * size

    def restore_s(self, size: int) -> float:
        return self._restoring.value * size

    def doubt_transfers(self) -> None:
        """A transfer seemed too expensive to make."""
        self._saving.doubt()
        self._restoring.doubt()


def _context_kind(cells: int) -> int:
    """Contexts of one kind are within a factor of four."""
    return cells.bit_length() // 2


def _non_negative(shapes: Vector, seconds: Vector, weights: Vector) -> Vector:
    """Weighted least squares; whatever comes out negative is taken to be nothing."""
    left = list(range(shapes.shape[1]))
    found = np.zeros(shapes.shape[1])
    scaled = shapes * weights[:, None]
    target = seconds * weights
    while left:
        part = scaled[:, left]
        # A little ridge: what cannot be distinguished is shared, and nothing is singular.
        ridge = TINY * np.trace(part.T @ part) / len(left) + TINY * TINY * TINY
        solution = np.linalg.solve(part.T @ part + ridge * np.eye(len(left)), part.T @ target)
        if (solution >= 0).all():
            found[left] = solution
            break
        left = [index for index, value in zip(left, solution, strict=True) if value > 0]
    return found
