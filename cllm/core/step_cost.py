"""The cost model: what steps, drafts and KV transfers take, learned from those that were made."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cllm.backend.base import RECORDED_AFTER, Batch, DraftCost, Row, StepResult

Vector = npt.NDArray[np.float64]

TILE = 64  # tokens that llama.cpp's flash attention on a CPU takes at once; fewer go one by one

# Costs relative to a decode step without drafts. That of a lone row is measured at load and fixed from then
# on: the work of a request depends on its tokens alone, and the same request takes the same steps every time.
# In a long context attention is most of a step, and a CPU attends token by token: what drafts cost there is
# measured by the first of them, and fixed as well.
BATCH1_DRAFT_COST = DraftCost(verify=0.75, token=0.2)  # where it was not measured
DEFAULT_DRAFT_COST = 0.5  # one draft token for each row, before it was measured
EXTRA_UBATCH_COST = 0.6  # split KV computes rows of another length in a ubatch of their own
DEFAULT_TRANSFER_S = 2.5e-10  # a byte between KV memory and host RAM, before it was measured
LONG_CONTEXT = 1024  # cells
MILLISECOND = 1e-3
TINY = 1e-6  # seconds: no step is shorter, whatever a clock says; and the ridge of the fit


REMEMBERED = 9  # observations of a kind


class StepShape(NamedTuple):
    """What a step computes, as far as its time depends on it."""

    ubatches: int  # each reads all weights once
    prefill_tokens: int  # tokens of rows with more than one
    rows: int  # rows with one token
    attended: float  # pairs of a token and a cell before it, token by token
    tiled: float = 0.0  # such pairs in tiles
    scored: int = 0  # tokens of prompts whose log-probabilities are wanted: each takes a line of logits

    @classmethod
    def of(cls, batch: Batch, ubatches: int, *, split: bool) -> StepShape:
        """The shape of a batch; with `split` KV, rows of unequal length are computed apart."""
        prefill, single = 0, len(batch.padding)
        attended = tiled = 0.0
        together = batch.token_count
        if together == len(batch.rows) and (split or together < TILE):  # as most steps are
            cells = sum(row.position for row in batch.rows)
            return cls(ubatches, 0, single + together, cells + together / 2)
        first = int(len(batch.rows) > 1)  # of a long row: computed along with the others
        for row in batch.rows:
            count = len(row.tokens)
            if count == 1:
                single += 1
            else:
                prefill += count
            pairs = attended_pairs(count, row.position, count - first if split else together)
            attended += pairs[0]
            tiled += pairs[1]
        scored = sum(len(row.scored) for row in batch.rows)
        return cls(ubatches, prefill, single, attended, tiled, scored)


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


class _Drafted(NamedTuple):
    """A step with drafts, of more than one row."""

    rows: int
    average: float  # draft tokens a row
    seconds: float
    after: list[float]  # seconds of plain steps that followed


class StepCostModel:
    """Fits `StepCost` to the latest steps of every kind; keeps medians for drafts and transfers.

    Steps of different kinds (how much prefill, how many rows, how far into the context) are remembered
    apart: an hour of plain decoding, or of one long prompt, must not wash out what the rest costs. Older
    ones count less, and one that took far longer than it should have (the machine was busy) hardly at all.

    `frozen` is the one switch for tests: nothing is learned, `known` stays what is known of steps.
    """

    MAX_KINDS = 40
    HALF_LIFE = 48  # steps after which one counts half
    MIN_WEIGHT = 0.02
    REFIT_AFTER = 16  # steps; fitting takes half a millisecond
    SURPRISE = 0.15  # a step this far off its estimate is reason to fit at once,
    WORTH_FITTING_S = 0.02  # if it took so much longer than fitting does
    # Units in which the costs are of similar size; what cannot be distinguished is shared in them.
    UNITS: Vector = np.array([1, TILE, 2, TILE**2, TILE**2, TILE], float)
    DOUBT_AFTER = REMEMBERED  # times that drafts seemed too expensive
    GAIN_WEIGHT, WORST_GAIN = 0.1, -2.0  # of one more step

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
        self._batch1 = batch1 or BATCH1_DRAFT_COST
        self.frozen = frozen
        self.steps = 0  # so far
        self._samples: dict[tuple[int, ...], deque[_Sample]] = {}
        self._number = 0
        self._fitted = 0  # the number of the last step that is in the estimate
        self._surprised = False
        self._cost = known
        # The largest step so far: an estimate far beyond it is not to be trusted.
        self.largest_prefill = 0
        self.largest_attended = 0.0
        self._plain_s: dict[int, deque[float]] = {}  # by rows: steps in which each row decodes one token
        self._draft_cost: dict[int, dict[int, RunningMedian]] = {}  # by rows and draft tokens a row
        self._drafted: _Drafted | None = None  # a step whose cost is not yet known
        self._gains: dict[int, float] = {}  # by bits of the rows: tokens a row and step, beyond plain steps
        self._slowed = 0  # steps left that a step with drafts slows down
        self._refused_drafts = 0
        self._lone_plain = (0, 0.0)  # the latest plain step of a lone row, after another: context and seconds
        self._after_plain = False
        self._long_drafts: dict[int, list[float]] = {}  # of a lone row, a token; by bits of the context
        self._saving, self._restoring = RunningMedian(DEFAULT_TRANSFER_S), RunningMedian(DEFAULT_TRANSFER_S)

    # Steps -----------------------------------------------------------------------------------------

    def observe(self, batch: Batch, result: StepResult) -> None:
        """Learn from a finished step."""
        self.steps += 1
        seconds = result.compute_s + result.sample_s
        if seconds > 0 and not self.frozen:
            if len(batch.rows) == 1:
                self._observe_lone(batch.rows[0], max(seconds, result.period_s))
            else:
                self._observe_drafts(batch, max(seconds, result.period_s), result)
            sampling_s = sum(row.sample_s for row in result.rows)  # each sequence has its own
            self.observe_shape(StepShape.of(batch, result.ubatches, split=self.split), seconds - sampling_s)

    def observe_shape(self, shape: StepShape, seconds: float) -> None:
        seconds = max(seconds, TINY)
        self._number += 1
        # Steps of one kind are alike in size: each figure is within a factor of two (context: four).
        context = int(shape.attended + shape.tiled) // max(1, shape.prefill_tokens + shape.rows)
        sizes = shape.prefill_tokens, shape.rows, shape.scored
        kind = (*(size.bit_length() for size in sizes), context.bit_length() // 2)
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
        fresh = np.maximum(np.exp2(-ages / self.HALF_LIFE), self.MIN_WEIGHT)
        weights = fresh / seconds  # errors count relative to the step, small steps as much as large ones
        found = np.zeros(len(self.UNITS))
        for _ in range(1 + 2):  # twice more, with what fits badly counting less
            found = _non_negative(shapes, seconds, weights)
            error = np.abs(shapes @ found - seconds) / seconds
            usual = max(float(np.median(error[ages <= np.median(ages)])), self.MIN_WEIGHT)
            weights = fresh * np.minimum(1.0, 2 * usual / np.maximum(error, usual)) / seconds
        return StepCost(*(found / self.UNITS).tolist())

    # Drafts ----------------------------------------------------------------------------------------

    def draft_step(self, rows: int, drafting: Collection[int], length: int, context: int = 0) -> float:
        """Relative cost of a step in which these ids of `rows` have `length` draft tokens each.

        `context` is that of a lone row.
        """
        if rows == 1:
            measured = (self._long_drafts.get(bits, ()) for bits in range(context.bit_length(), 0, -1))
            each = next((median(costs) for costs in measured if len(costs) == REMEMBERED), 0.0)
            return 1 + max(self._batch1.verify + self._batch1.token * length, each * length)
        share = len(drafting) / rows
        known = self._draft_cost.get(rows, {})
        nearest = min(known, key=lambda seen: abs(seen - length * share), default=None)
        each = DEFAULT_DRAFT_COST if nearest is None else known[nearest].value
        cost = 1 + each * length * share
        if self.split and share < 1:
            ids = set(drafting)
            cost += EXTRA_UBATCH_COST * sum(seq_id - 1 not in ids for seq_id in ids)  # runs of ids
        return cost

    def plain_step_s(self, rows: int) -> float:
        """Seconds of a decode step without drafts; infinite before it was measured."""
        return median(self._plain_s[rows]) if rows in self._plain_s else math.inf

    def prices_drafts(self, rows: int) -> bool:
        """False where drafts cannot be compared with plain steps, since none of these was measured.

        On a GPU only, where a step that differs costs most: rows with padding between them have no price.
        """
        return not self.records or rows == 1 or rows in self._plain_s

    def doubt_drafts(self, rows: int) -> None:
        """Drafts seemed too expensive. That may change, and is found out by trying now and then."""
        self._refused_drafts += 1
        if self._refused_drafts % self.DOUBT_AFTER == 0:
            for cost in self._draft_cost.get(rows, {}).values():
                cost.doubt()

    def drafts_gain(self, rows: int) -> bool:
        """False where steps with drafts, and those that they slowed down, brought less than plain ones.

        On a GPU only, where a step that differs slows those after it: no sum of prices has all of that.
        """
        return not self.records or self._gains.get(rows.bit_length(), 0.0) >= 0.0

    def _observe_gain(self, batch: Batch, result: StepResult, seconds: float) -> bool:
        """What drafts brought in this step beyond what plain ones would have; False if it is one of those."""
        rows = len(batch.rows)
        if any(len(row.tokens) != row.outputs for row in batch.rows) or rows not in self._plain_s:
            self._slowed = 0
            return False
        if any(row.outputs > 1 for row in batch.rows):
            self._slowed = RECORDED_AFTER
        elif self._slowed:
            self._slowed -= 1
        else:
            return False
        gained = sum(len(row.tokens) for row in result.rows) / rows - seconds / self.plain_step_s(rows)
        known = self._gains.get(rows.bit_length(), 0.0)
        change = max(gained, self.WORST_GAIN) - known  # a busy moment does not decide
        self._gains[rows.bit_length()] = known + self.GAIN_WEIGHT * change
        return True

    def _observe_drafts(self, batch: Batch, seconds: float, result: StepResult) -> None:
        """Learn from a decode step; one with a prompt, or with rows computed apart, says nothing."""
        rows = len(batch.rows)
        longest = max(row.outputs for row in batch.rows) - 1
        slowed = self.records and self._observe_gain(batch, result, seconds) and not longest
        if longest < 0 or batch.padding or any(len(row.tokens) != row.outputs for row in batch.rows):
            self._learn_drafted()
            return
        if not longest and self._drafted is not None and rows == self._drafted.rows:
            self._drafted.after.append(seconds)
            if len(self._drafted.after) == RECORDED_AFTER:
                self._learn_drafted()
            return
        self._learn_drafted()
        if slowed:
            return
        if not longest:
            plain = self._plain_s.get(rows) or deque(maxlen=REMEMBERED)
            plain.append(seconds)
            self._plain_s[rows] = plain
            return
        average = sum(row.outputs - 1 for row in batch.rows) / rows
        if rows in self._plain_s and (average == longest or not self.split):
            self._drafted = _Drafted(rows, average, seconds, [])
            if not self.records:
                self._learn_drafted()

    def _learn_drafted(self) -> None:
        """What the last step with drafts cost, with what it cost those after it."""
        drafted, self._drafted = self._drafted, None
        if drafted is not None:
            known = self._draft_cost.setdefault(drafted.rows, {})
            cost = known.setdefault(max(1, round(drafted.average)), RunningMedian(DEFAULT_DRAFT_COST))
            plain_s = self.plain_step_s(drafted.rows)
            seconds = drafted.seconds + sum(drafted.after) - len(drafted.after) * plain_s
            cost.observe(max(0.0, seconds / plain_s - 1) / drafted.average)

    def _observe_lone(self, row: Row, seconds: float) -> None:
        """In a long context, compare a step with drafts with a plain one near it, until that is known."""
        if self._drafted is not None:
            self._learn_drafted()
        context, drafted = row.position, row.outputs - 1
        after_plain, self._after_plain = self._after_plain, not drafted
        if context < LONG_CONTEXT or len(row.tokens) != row.outputs:
            return
        if not drafted:
            self._lone_plain = (context, seconds) if after_plain else self._lone_plain
            return
        costs, (near, plain_s) = self._long_drafts.setdefault(context.bit_length(), []), self._lone_plain
        if len(costs) < REMEMBERED and 0 < context - near <= TILE:
            costs.append(max(0.0, seconds / plain_s - 1) / drafted)

    # Transfers -------------------------------------------------------------------------------------

    def observe_transfer(self, size: int, seconds: float, *, restore: bool) -> None:
        """Learn from KV memory copied to host RAM, or back."""
        if not self.frozen:
            (self._restoring if restore else self._saving).observe(seconds / max(1, size))

    def save_s(self, size: int) -> float:
        return self._saving.value * size

    def restore_s(self, size: int) -> float:
        return self._restoring.value * size

    def doubt_transfers(self) -> None:
        """A transfer seemed too expensive to make."""
        self._saving.doubt()
        self._restoring.doubt()


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
