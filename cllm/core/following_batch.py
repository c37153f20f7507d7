"""The following batch: what a GPU computes while the result of the step before is processed.

Where every row just goes on with the token that it gets, the next batch is known but for these tokens while
the device still computes. What else a host does for a step (append, look for ends, schedule) would take a
tenth of a small model's step.
"""

from __future__ import annotations

from collections.abc import Mapping

from cllm.backend.base import Batch, ModelRunner, Row, StepResult, StepStatus
from cllm.core.sequence import Sequence
from cllm.core.spec_decode import SpecDecodePolicy
from cllm.core.step_cost import StepCostModel


class FollowingBatch:
    """Finds it, in all but one step of `EVERY`: gaps, samplers' turns and the like belong to a schedule."""

    EVERY = 32

    def __init__(self, runner: ModelRunner, spec_decode: SpecDecodePolicy, cost: StepCostModel) -> None:
        self._runner = runner
        self._spec_decode, self._cost = spec_decode, cost
        self._steps = 0
        self._prepared: tuple[Batch, Batch, list[list[int]]] | None = None  # one, the next, and its tokens

    def prepare(self, batch: Batch, running: Mapping[int, Sequence]) -> None:
        """While this batch is computed: the one after it, unless something else may be due."""
        self._steps += 1
        self._prepared = None
        if len(batch.rows) != len(running) or batch.padding or self._steps % self.EVERY == 0:
            return
        next_position = self._runner.next_position
        rows, tokens = [], []
        for row in batch.rows:
            seq_id, position = row.seq_id, row.position + 1
            plain = len(row.tokens) == row.outputs == 1 and row.mask is None and not row.logprobs
            try:
                if not (plain and running[seq_id].continues and next_position(seq_id) == position):
                    return
            except Exception:  # `schedule` asks again, and fails this sequence alone
                return
            tokens.append([0])  # the token that it will get
            rows.append(Row(seq_id, position, tokens[-1], 1, row.sampler))
        if self._spec_decode.rests(len(rows), self._cost):
            self._prepared = batch, Batch(tuple(rows)), tokens

    def complete(self, batch: Batch, result: StepResult) -> Batch | None:
        """The batch after this one, with the tokens of its result; None: it is to be scheduled."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared[0] is not batch or result.status is not StepStatus.DONE:
            return None
        ends = self._runner.vocabulary.ends
        for place, outcome in zip(prepared[2], result.rows, strict=True):
            if len(outcome.tokens) != 1 or outcome.tokens[0] in ends:  # where ends are ignored there is none
                return None
            place[0] = outcome.tokens[0]
        return prepared[1]
