"""The following batch: what a GPU computes while the result of the step before is processed.

Where every row just goes on with the token that it got, the next batch is known at once. What else a host
does for a step (append, look for ends, schedule) would take a tenth of a small model's step.
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

    def find(self, batch: Batch, result: StepResult, running: Mapping[int, Sequence]) -> Batch | None:
        """None where something else may be due: an end, a checkpoint, a mask, an inconsistent position."""
        self._steps += 1
        alike = len(batch.rows) == len(running) and not batch.padding
        if not alike or self._steps % self.EVERY == 0 or result.status is not StepStatus.DONE:
            return None
        rows = []
        next_position, vocabulary = self._runner.next_position, self._runner.vocabulary
        for row, outcome in zip(batch.rows, result.rows, strict=True):
            seq_id, position, tokens = row.seq_id, row.position + 1, outcome.tokens
            single = len(tokens) == len(row.tokens) == row.outputs == 1
            if not single or row.mask is not None or row.logprobs:
                return None
            try:
                goes_on = (
                    running[seq_id].continues(tokens[0], vocabulary) and next_position(seq_id) == position
                )
            except Exception:  # `schedule` asks again, and fails this sequence alone
                return None
            if not goes_on:
                return None
            rows.append(Row(seq_id, position, tokens, 1, row.sampler))
        return Batch(tuple(rows)) if self._spec_decode.rests(len(rows), self._cost) else None
