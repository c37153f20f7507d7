"""Speculative decoding: the draft plan of a step.

The runner verifies every draft token, so a wrong draft costs time, never text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from cllm.backend.base import Batch, Drafter
from cllm.core.drafts import DraftState, NgramDrafter, PredictionDrafter
from cllm.core.sequence import Sequence
from cllm.core.step_cost import StepCostModel
from cllm.types import Request


class DraftPlan(NamedTuple):
    """All drafts of a step are equally long. `padded`: rows without a draft get other tokens to verify."""

    length: int = 0
    padded: bool = False


class SpecDecodePolicy:
    """Which sequences draft in the next step, and how far: what yields the most tokens for its time."""

    NGRAM_ACCEPTANCE = 0.4  # to start with: three tokens that came true, and drafts pay for a lone sequence
    MODEL_ACCEPTANCE = 0.9  # of a draft model's tokens, until it is known better
    LOOKUP_S = 1e-5  # of a sequence's drafter, about
    MAX_LOOKUP = 0.01  # of a step
    LOOK_EVERY = 4  # steps, where it did not pay, on a GPU: after a look no batch is prepared ahead
    REST = 32  # steps; twice as many each time that it did not pay, up to
    MAX_REST = 256
    TRIAL, TRIAL_REST = 8, 1024  # steps with drafts that have not gained so far; and then none for so long
    LEARN_EVERY = REST // 2  # steps, of each sequence in its turn, meanwhile
    MIN_GAIN = 1.05  # that drafts must promise: acceptance is an estimate, and long contexts cost more
    MAX_SHARED_COST = 1.5  # plain steps at most, where a row does not draft and waits for those that do

    def __init__(
        self,
        max_tokens: int,
        new_drafter: Callable[[], Drafter | None] = NgramDrafter,
        *,
        draft_model: Callable[[str | None], Drafter | None] | None = None,
        share_across_tenants: bool = False,
    ) -> None:
        """`draft_model` makes the drafters instead; it gets the tenant whose KV may be used, or None."""
        self.max_tokens = max_tokens  # of a draft; 0 where there are none
        self._rest, self._next_rest = 0, self.REST  # steps left without a look; and after the next one
        self._trial = self.TRIAL  # steps left to prove that they gain
        self._look = 0  # steps until the next one, at least
        self._resting = False  # in the last step that was asked about
        self._steps = 0
        self._new_drafter = new_drafter
        self._draft_model = draft_model
        self._across_tenants = share_across_tenants

    def start(self, request: Request) -> DraftState | None:
        """None where drafts are not wanted, with media, or where a grammar would be asked about each.

        A constraint that sleeps until a trigger allows them up to there.
        """
        if self._rest <= self.MAX_REST:  # not where drafts were tried and lost
            self._rest, self._next_rest = 0, self.REST
        constrained = request.constraint is not None and not request.constraint.triggers
        if not self.max_tokens or not request.speculate or constrained or request.prompt.spans:
            return None
        if self._draft_model is None:
            drafter, rate = self._new_drafter(), self.NGRAM_ACCEPTANCE
        else:
            tenant = "" if self._across_tenants else request.tenant
            drafter, rate = self._draft_model(tenant if request.reuse else None), self.MODEL_ACCEPTANCE
        if request.prediction:
            drafter = PredictionDrafter(request.prediction, len(request.prompt), drafter)
            return DraftState(drafter, acceptance_rate=self.MODEL_ACCEPTANCE)
        if drafter is None:
            return None
        return DraftState(drafter, acceptance_rate=rate, pauses=self._draft_model is not None)

    def learn(self, sequences: Iterable[Sequence]) -> None:
        """Take in what was said. On a GPU that is done while it computes; else when drafts are looked for.

        While drafts rest, several tokens at a time: that takes less.
        """
        self._steps += 1
        for sequence in sequences if self.max_tokens else ():
            due = not self._resting or (sequence.arrival + self._steps) % self.LEARN_EVERY == 0
            if due and sequence.drafts is not None:
                sequence.drafts.learn(sequence.tokens)

    def rests(self, rows: int, cost: StepCostModel) -> bool:
        """Return True where a step of `rows` rows looks for no drafts; to be asked before each.

        Where looking for drafts is a good part of a step, it is not done for a while after it did not pay.
        """
        if not self.max_tokens or not cost.prices_drafts(rows):
            return True
        self._rest -= self._rest > 0
        self._look -= self._look > 0
        costly = rows * self.LOOKUP_S > self.MAX_LOOKUP * cost.plain_step_s(rows)
        self._resting = self._rest > 0 and (costly or self._look > 0)
        return self._resting

    def draft(
        self, sequences: Collection[Sequence], cost: StepCostModel, *, room: int, max_step_s: float
    ) -> dict[int, list[int]]:
        """Draft tokens by seq_id, all equally long, at most `room` in all; none in a step with a prompt.

        llama.cpp splits rows of different length into separate ubatches, which costs more than longer drafts
        win. Rows without a draft are padded where that is cheaper.
        """
        if not (self.max_tokens and sequences) or any(sequence.pending > 1 for sequence in sequences):
            return {}
        rows = len(sequences)
        if self.rests(rows, cost):
            return {}
        self._look = self.LOOK_EVERY if cost.records else 0
        self._rest = self._next_rest  # unless it pays
        self._next_rest = min(2 * self._next_rest, self.MAX_REST)
        proposals = self._proposals(sequences)
        if not proposals:
            return {}
        plan = self._best_plan(sequences, proposals, cost, room=room, max_step_s=max_step_s)
        if not plan.length:
            cost.doubt_drafts(rows)
            return {}
        if not self._goes_on(cost.drafts_gain(rows)):
            return {}
        drafts = {
            seq_id: state.proposal[: plan.length]
            for seq_id, state in proposals.items()
            if len(state.proposal) >= plan.length
        }
        if plan.padded:
            for sequence in sequences:
                if sequence.seq_id not in drafts and sequence.drafts is not None:
                    padding = [sequence.tokens[-1]] * plan.length
                    drafts[sequence.seq_id] = [*sequence.drafts.proposal, *padding][: plan.length]
        return _before_triggers(drafts, sequences)

    def _goes_on(self, gains: bool) -> bool:
        """Drafts are expected to pay. Where they did not, they have some steps to do better, then a rest."""
        if gains:
            self._rest, self._next_rest, self._trial = 0, self.REST, self.TRIAL
        elif self._trial:
            self._rest, self._trial = 0, self._trial - 1
        else:
            self._rest, self._trial = self.TRIAL_REST, self.TRIAL
        return not self._rest

    def _proposals(self, sequences: Collection[Sequence]) -> dict[int, DraftState]:
        longest = self.max_tokens
        if self._draft_model:  # its own time is in no cost: it drafts for few sequences at a time
            longest = longest // len(sequences) if longest >= 2 * len(sequences) else 0
        proposals: dict[int, DraftState] = {}
        for sequence in sequences:
            drafts, room = sequence.drafts, min(longest, sequence.stopping.draft_room)
            if drafts is not None and drafts.propose(sequence.tokens, room):
                proposals[sequence.seq_id] = drafts
        return proposals

    def _best_plan(
        self,
        sequences: Collection[Sequence],
        proposals: Mapping[int, DraftState],
        cost: StepCostModel,
        *,
        room: int,
        max_step_s: float,
    ) -> DraftPlan:
        """The plan that yields the most tokens for its time; of equals the shortest."""
        rows, all_ids = len(sequences), [sequence.seq_id for sequence in sequences]
        max_padding = 0  # with unified KV no row needs padding; nor where one of them must not draft
        if cost.split and all(sequence.drafts is not None for sequence in sequences):
            max_padding = min(sequence.stopping.draft_room for sequence in sequences)
        max_cost = max(2.0, max_step_s / cost.plain_step_s(rows))
        context = max(sequence.num_computed for sequence in sequences)
        best, best_rate = DraftPlan(), self.MIN_GAIN * rows  # tokens for a plain step's time
        for length in range(1, max(len(state.proposal) for state in proposals.values()) + 1):
            able = [seq_id for seq_id, state in proposals.items() if len(state.proposal) >= length]
            tokens = rows + sum(proposals[seq_id].expected(length) for seq_id in able)
            partial = len(able) < rows
            for padded in (False, True) if partial and length <= max_padding else (False,):
                drafting = all_ids if padded else able
                relative = cost.draft_step(rows, drafting, length, context)
                allowed = self.MAX_SHARED_COST if partial else max_cost
                fits = len(drafting) * length <= room and (relative <= allowed or rows == 1)
                if fits and tokens / relative > best_rate:
                    best, best_rate = DraftPlan(length, padded), tokens / relative
        return best


def _before_triggers(drafts: dict[int, list[int]], sequences: Collection[Sequence]) -> dict[int, list[int]]:
    """The drafts, cut before a token that would wake a constraint: what follows that is for the grammar."""
    for sequence in sequences:
        constraint = sequence.stopping.constraint
        if sequence.seq_id in drafts and constraint is not None and constraint.watch:
            draft = drafts.pop(sequence.seq_id)
            if kept := draft[: constraint.watch.count_before(draft)]:
                drafts[sequence.seq_id] = kept
    return drafts


def reject_drafts(batch: Batch, running: Mapping[int, Sequence]) -> bool:
    """There was no room for a batch: True if it held drafts, which are then not made for a while."""
    drafting = [row for row in batch.rows if row.outputs > 1]
    for row in drafting:
        if (drafts := running[row.seq_id].drafts) is not None:
            drafts.reject()
    return bool(drafting)
