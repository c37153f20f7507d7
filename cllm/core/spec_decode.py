"""Speculative decoding: the draft plan of a step.

The runner verifies every draft token, so a wrong draft costs time, never text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from statistics import fmean
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

    gain = MIN_GAIN
    begins = 1.0  # the part of a run's beginning that the step bears, if it is unlike the last one
    standing = 0  # the length of the last step's drafts
    head = False  # drafts first, and takes its time for that

    def __init__(
        self, sequences: Collection[Sequence], cost: StepCostModel, *, room: int, max_step_s: float
    ) -> None:
        self._ids = [sequence.seq_id for sequence in sequences]
        self._states = {each.seq_id: each.drafts for each in sequences if each.drafts is not None}
        self.cost, self._room, self._max_step_s = cost, room, max_step_s
        self._cells = sum(sequence.num_computed for sequence in sequences)
        self._max_padding = 0  # with unified KV no row needs padding; nor where one of them must not draft
        if cost.split and len(self._states) == len(self._ids):
            self._max_padding = min(sequence.stopping.draft_room for sequence in sequences)
        self.plain_s = self.seconds()

    def seconds(self, drafting: Collection[int] = (), length: int = 0, *, corrected: bool = True) -> float:
        begins, head, rows = self.begins * (length != self.standing), self.head, len(self._ids)
        return self.cost.decode_step_s(
            rows, self._cells, drafting, length, begins=begins, head=head, corrected=corrected
        )

    def best(self, lengths: Mapping[int, int], *, corrected: bool = True) -> DraftPlan:
        """The plan that yields the most tokens for its time; of equals the shortest.

        `lengths` are those of the proposals. A row that does not draft waits for those that do: its one token
        counts, and so does the time.
        """
        rows, plain_s = len(self._ids), self.seconds(corrected=corrected)
        best, max_s = DraftPlan(0, (), self.gain * rows, plain_s), max(self._max_step_s, 2 * plain_s)
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
    again now and then. Where drafts do not pay, they are looked for less often. On a GPU the first step of a
    run of drafts is the most expensive one: its price is shared by the steps that the run is to have.
    """

    NGRAM_ACCEPTANCE = 0.4  # to start with: two tokens that came true, and drafts pay for a lone sequence
    EXPLORE_SHARE = 1 / 128  # of the time: for measuring again what drafts cost, and for asking a draft model
    HEAD_REMEMBERS = TILE // 2  # tokens: a head is about as good throughout a text, which n-grams are not
    LOOK_SHARE = 0.005  # of the time: for looking for drafts that do not pay

    def __init__(
        self,
        max_tokens: int,
        new_drafter: Callable[[], Drafter | None] = NgramDrafter,
        *,
        draft_model: Callable[[str | None], Drafter | None] | None = None,
        head: Callable[[Mapping[int, int], int], dict[int, list[int]]] | None = None,
        share_across_tenants: bool = False,
    ) -> None:
        """`draft_model` makes the drafters instead; it gets the tenant whose KV may be used, or None.

        `head` drafts instead, for all sequences at once: see `ModelRunner.draft`.
        """
        self.max_tokens = max_tokens  # of a draft; 0 where there are none
        self._wait = 0  # steps until drafts are looked for
        self._look_s = RunningMedian(0.0)
        self._refused_s = 0.0  # steps that could have measured what drafts cost, since one did
        self._steps = 0
        self._new_drafter = new_drafter
        self._draft_model, self._head = draft_model, head
        self._head_rate = 1.0  # acceptance of the head's drafts, of late; until it is wrong
        self._streak = 0  # looks in a row at which drafts would pay in a run; a head's goes on for long
        self._length = 0  # of the last step's drafts
        self._exploring = 0  # steps left of a run that measures what drafts cost
        self._across_tenants = share_across_tenants

    def start(self, request: Request) -> DraftState | None:
        """None where drafts are not wanted, with media, or where a grammar would be asked about each.

        A constraint that sleeps until a trigger allows them up to there.
        """
        self._wait = self._streak = self._length = 0  # what is new may repeat itself
        constrained = request.constraint is not None and not request.constraint.triggers
        if not self.max_tokens or not request.speculate or constrained or request.prompt.spans:
            return None
        if self._head is not None and not request.prediction:
            return DraftState(None, acceptance_rate=self._head_rate, remembers=self.HEAD_REMEMBERS)
        if self._draft_model is None:
            drafter, rate = self._new_drafter(), self.NGRAM_ACCEPTANCE
        else:
            tenant = "" if self._across_tenants else request.tenant
            drafter, rate = self._draft_model(tenant if request.reuse else None), 1.0  # until it is wrong
        if request.prediction:
            drafter = PredictionDrafter(request.prediction, len(request.prompt), drafter)
            return DraftState(drafter, acceptance_rate=1.0)
        return None if drafter is None else DraftState(drafter, acceptance_rate=rate)

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
        step.head = self._head is not None
        step.begins = 1 / (self._streak + (TILE if step.head else 1))
        if cost.records and self._length:  # to end a run is a loss, too, and so is another length
            step.standing, step.gain, step.begins = self._length, 1.0, 1 / TILE
        lengths = self._propose(sequences, step)
        plan = step.best(lengths)
        step.begins = 0.0
        self._streak = self._streak + 1 if plan.length or step.best(lengths).length else 0
        if not plan.length and len(sequences) > 1:  # a lone sequence takes the same steps every time
            plan = self._explore(step, lengths, plan)
        self._length = plan.length
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
                draft = [*sequence.drafts.proposal, *padding][: plan.length]
                constraint = sequence.stopping.constraint
                if constraint is not None and constraint.watch:  # what follows a trigger is for the grammar
                    draft = draft[: constraint.watch.count_before(draft)]
                if draft:
                    drafts[sequence.seq_id] = draft
        return drafts

    def _propose(self, sequences: Collection[Sequence], step: DecodeStep) -> dict[int, int]:
        """The lengths of the proposals."""
        longest = self.max_tokens
        if self._draft_model is not None:  # its time is in no price: it drafts for few sequences at a time
            longest = longest // len(sequences) if longest >= 2 * len(sequences) else 0
        states = {each: each.drafts for each in sequences if each.drafts is not None}
        rooms = {each.seq_id: max(0, min(longest, each.stopping.draft_room)) for each in states}
        plan = None
        if self._draft_model is not None or self._head is not None:
            # Where their drafts would not pay, these are not asked, but now and then.
            plan = step.best(rooms)
            skips = not plan.length and not self._exploring
            asking = 1.0 if self._head is None else step.cost.batch1.head  # in plain steps
            every = max(1, round(asking / self.EXPLORE_SHARE))
            for sequence, state in states.items():
                state.skipped = (state.skipped + 1) % every if skips else 0
                rooms[sequence.seq_id] *= not state.skipped
        given = self._ask_head(states, rooms, plan, step) if plan is not None else {}
        for sequence, state in states.items():
            proposal = state.propose(sequence.tokens, rooms[sequence.seq_id], given.get(sequence.seq_id, []))
            rooms[sequence.seq_id] = len(proposal)
        return rooms

    def _ask_head(
        self,
        states: Mapping[Sequence, DraftState],
        rooms: Mapping[int, int],
        plan: DraftPlan,
        step: DecodeStep,
    ) -> dict[int, list[int]]:
        """Its drafts for the sequences of the plan, or a token for those that may be asked without one."""
        own = {sequence: state for sequence, state in states.items() if state.drafter == "mtp"}
        if not own or self._head is None:
            return {}
        self._head_rate = fmean(state.acceptance_rate for state in own.values())
        wanted = {
            each.seq_id: each.tokens[-1]
            for each in own
            if rooms[each.seq_id] and (each.seq_id in plan.drafting or not plan.length)
        }
        if not wanted:
            return {}
        started, length = time.perf_counter(), max(1, plan.length)
        drafts = self._head(wanted, length)
        step.cost.observe_head(len(wanted), length, time.perf_counter() - started)
        return drafts

    def _explore(self, step: DecodeStep, lengths: Mapping[int, int], plan: DraftPlan) -> DraftPlan:
        """Draft nevertheless, for a share of the time, where only the measured time speaks against it.

        On a GPU for some steps: what a run costs shows after its beginning.
        """
        wanted = step.best(lengths, corrected=False)
        if not wanted.length:
            return plan
        if self._exploring:
            self._exploring -= 1
            return wanted
        run = 1 + (RECORDED_AFTER if step.cost.records else 0)
        lost_s = run * (step.seconds(wanted.drafting, wanted.length) - step.plain_s)
        lost_s += step.cost.beginning.value * step.plain_s
        if lost_s > self.EXPLORE_SHARE * self._refused_s:
            return plan
        self._refused_s, self._exploring = 0.0, run - 1
        return wanted


def reject_drafts(batch: Batch, running: Mapping[int, Sequence]) -> bool:
    """There was no room for a batch: True if it held drafts, which are then not made for a while."""
    drafting = [row for row in batch.rows if row.outputs > 1]
    for row in drafting:
        if (drafts := running[row.seq_id].drafts) is not None:
            drafts.reject()
    return bool(drafting)
