"""Speculative decoding: the draft plan of a step.

The runner verifies every draft token, so a wrong draft costs time, never text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from cllm.backend.base import RECORDED_AFTER, Batch, Drafter
from cllm.core.drafts import DraftState, NgramDrafter, PredictionDrafter
from cllm.core.sequence import Sequence
from cllm.core.step_cost import TILE, TINY, RunningMedian, StepCostModel
from cllm.types import Request


class DraftPlan(NamedTuple):
    """A step: drafts of one length for some ids, the tokens to be expected of it, and its time."""

    length: int
    drafting: Collection[int]
    tokens: float
    seconds: float


class DecodeStep:
    """The step to be planned."""

    MIN_GAIN = 1.05  # that drafts must promise: acceptance is an estimate, and its errors are chosen

    def __init__(
        self, sequences: Collection[Sequence], cost: StepCostModel, *, room: int, max_step_s: float
    ) -> None:
        self._ids = [sequence.seq_id for sequence in sequences]
        self._states = {each.seq_id: each.drafts for each in sequences if each.drafts is not None}
        self._cost, self._room, self._max_step_s = cost, room, max_step_s
        self._cells = sum(sequence.num_computed for sequence in sequences)
        self._max_padding = 0  # with unified KV no row needs padding; nor where one of them must not draft
        if cost.split and len(self._states) == len(self._ids):
            self._max_padding = min(sequence.stopping.draft_room for sequence in sequences)
        self.plain_s = self.seconds()

    def seconds(self, drafting: Collection[int] = (), length: int = 0, *, corrected: bool = True) -> float:
        return self._cost.decode_step_s(len(self._ids), self._cells, drafting, length, corrected=corrected)

    def best(self, lengths: Mapping[int, int], *, corrected: bool = True) -> DraftPlan:
        """The plan that yields the most tokens for its time; of equals the shortest.

        `lengths` are those of the proposals. A row that does not draft waits for those that do: its one token
        counts, and so does the time.
        """
        rows, plain_s = len(self._ids), self.seconds(corrected=corrected)
        best, max_s = DraftPlan(0, (), self.MIN_GAIN * rows, plain_s), max(self._max_step_s, 2 * plain_s)
        expected = {seq_id: self._states[seq_id].expected(length) for seq_id, length in lengths.items()}
        for length in range(1, max(lengths.values(), default=0) + 1):
            able = [seq_id for seq_id, longest in lengths.items() if longest >= length]
            tokens = rows + sum(expected[seq_id][length - 1] for seq_id in able)
            padded = (self._ids,) if len(able) < rows and length <= self._max_padding else ()
            for drafting in (able, *padded):
                seconds = self.seconds(drafting, length, corrected=corrected)
                fits = len(drafting) * length <= self._room and (seconds <= max_s or rows == 1)
                if fits and tokens * best.seconds > best.tokens * seconds:
                    best = DraftPlan(length, drafting, tokens, seconds)
        return best


class SpecDecodePolicy:
    """Which sequences draft in the next step, and how far: what yields the most tokens for its time.

    No draft is a length like any other. Where only the measured time speaks against drafts, that is measured
    again now and then. Where drafts do not pay, they are looked for less often.
    """

    NGRAM_ACCEPTANCE = 0.4  # to start with: two tokens that came true, and drafts pay for a lone sequence
    EXPLORE_SHARE = 1 / 128  # of the time: for measuring again what drafts cost, and for asking a draft model
    LOOK_SHARE = 0.005  # of the time: for looking for drafts that do not pay

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
        self._wait = 0  # steps until drafts are looked for
        self._look_s = RunningMedian(0.0)
        self._refused_s = 0.0  # steps that could have measured what drafts cost, since one did
        self._steps = 0
        self._new_drafter = new_drafter
        self._draft_model = draft_model
        self._across_tenants = share_across_tenants

    def start(self, request: Request) -> DraftState | None:
        """None where drafts are not wanted, with media, or where a grammar would be asked about each.

        A constraint that sleeps until a trigger allows them up to there.
        """
        self._wait = 0  # what is new may repeat itself
        constrained = request.constraint is not None and not request.constraint.triggers
        if not self.max_tokens or not request.speculate or constrained or request.prompt.spans:
            return None
        if self._draft_model is None:
            drafter, rate = self._new_drafter(), self.NGRAM_ACCEPTANCE
        else:
            tenant = "" if self._across_tenants else request.tenant
            drafter, rate = self._draft_model(tenant if request.reuse else None), 1.0  # until it is wrong
        if request.prediction:
            drafter = PredictionDrafter(request.prediction, len(request.prompt), drafter)
            return DraftState(drafter, acceptance_rate=1.0)
        if drafter is None:
            return None
        return DraftState(drafter, acceptance_rate=rate)

    def learn(self, sequences: Iterable[Sequence]) -> None:
        """Take in what was said. On a GPU that is done while it computes; else when drafts are looked for.

        While they are not, several tokens at a time: that takes less.
        """
        self._steps += 1
        for sequence in sequences if self.max_tokens else ():
            due = not self._wait or (sequence.arrival + self._steps) % (TILE // 4) == 0
            if due and sequence.drafts is not None:
                sequence.drafts.learn(sequence.tokens)

    def looks(self) -> bool:
        """Return True where the next step looks for drafts; to be asked before each."""
        waits = self._wait > 0
        self._wait -= waits
        return self.max_tokens > 0 and not waits

    def draft(
        self,
        sequences: Collection[Sequence],
        cost: StepCostModel,
        *,
        room: int,
        max_step_s: float,
        began: float | None = None,
    ) -> dict[int, list[int]]:
        """Draft tokens by seq_id, all equally long, at most `room` in all; none in a step with a prompt.

        llama.cpp splits rows of different length into separate ubatches, which costs more than longer drafts
        win. Rows without a draft are padded where that is cheaper. `began` is when the host began to prepare
        a step that would have been prepared while the GPU computed, but for this look.
        """
        if not sequences or any(sequence.pending > 1 for sequence in sequences) or not self.looks():
            return {}
        began = time.perf_counter() if began is None else began
        step = DecodeStep(sequences, cost, room=room, max_step_s=max_step_s)
        lengths = self._propose(sequences, step)
        plan = step.best(lengths)
        if not plan.length and len(sequences) > 1:  # a lone sequence takes the same steps every time
            plan = self._explore(step, lengths, plan)
        self._look_s.observe(time.perf_counter() - began)
        if not plan.length:
            self._wait = RECORDED_AFTER if cost.records else 0
            if len(sequences) > 1:
                self._wait = int(self._look_s.value / max(TINY, self.LOOK_SHARE * step.plain_s))
            self._refused_s += (1 + self._wait) * step.plain_s
        drafts = {}
        for sequence in sequences:
            if sequence.seq_id in plan.drafting and sequence.drafts is not None:
                padding = [sequence.tokens[-1]] * plan.length
                drafts[sequence.seq_id] = [*sequence.drafts.proposal, *padding][: plan.length]
        return _before_triggers(drafts, sequences)

    def _propose(self, sequences: Collection[Sequence], step: DecodeStep) -> dict[int, int]:
        """The lengths of the proposals."""
        longest, skips = self.max_tokens, False
        if (
            self._draft_model is not None
        ):  # its own time is in no price: it drafts for few sequences at a time
            longest = longest // len(sequences) if longest >= 2 * len(sequences) else 0
        rooms = {
            each.seq_id: max(0, min(longest, each.stopping.draft_room)) for each in sequences if each.drafts
        }
        if self._draft_model is not None:  # nor is it asked where its drafts would not pay, but now and then
            skips = not step.best(rooms).length
        for sequence in sequences:
            if (state := sequence.drafts) is not None:
                state.skipped = (state.skipped + 1) % round(1 / self.EXPLORE_SHARE) if skips else 0
                room = 0 if state.skipped else rooms[sequence.seq_id]
                rooms[sequence.seq_id] = len(state.propose(sequence.tokens, room))
        return rooms

    def _explore(self, step: DecodeStep, lengths: Mapping[int, int], plan: DraftPlan) -> DraftPlan:
        """Draft nevertheless, for a share of the time, where only the measured time speaks against it."""
        wanted = step.best(lengths, corrected=False)
        lost_s = step.seconds(wanted.drafting, wanted.length) - step.plain_s
        if not wanted.length or lost_s > self.EXPLORE_SHARE * self._refused_s:
            return plan
        self._refused_s = 0.0
        return wanted


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
