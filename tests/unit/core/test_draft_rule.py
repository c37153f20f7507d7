"""The draft rule on recorded machines, in simulated time: drafts never cost more than their exploration."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Tokens

import pytest

from bench.costs import MachineCosts, read_costs, split_shape
from cllm.backend.base import RECORDED_AFTER, Batch, DraftCost, Row, StepResult, StepStatus
from cllm.core.drafts import DraftState
from cllm.core.sequence import Sequence
from cllm.core.slot_pool import SlotLease
from cllm.core.spec_decode import DecodeStep, SpecDecodePolicy
from cllm.core.step_cost import StepCostModel
from cllm.types import Prompt, Request

COSTS = read_costs()
CONTEXT = 60  # cells of a sequence at its start
NEW_RECORDING = 0.5  # of a plain step: what a step that differs costs a GPU, and each of those after it
WRONG = 99


class RandomDrafter:
    """Its tokens are right with a certain probability each."""

    def __init__(self, rate: float, source: random.Random) -> None:
        self._rate, self._source = rate, source

    def propose(self, tokens: Tokens[int], max_tokens: int) -> list[int]:
        rights = range(len(tokens), len(tokens) + max_tokens)
        return [right % 50 if self._source.random() < self._rate else WRONG for right in rights]


class SimulatedMachine:
    """Decodes in the time that a recorded machine takes. The next token is a function of the length."""

    def __init__(self, costs: MachineCosts) -> None:
        self._step, self._gpu = costs.step, costs.asynchronous
        lone_s = self._step.ubatch + self._step.row
        token = (self._step.row + CONTEXT * self._step.attended) / lone_s
        batch1 = DraftCost(0.0, token)
        if self._gpu:
            batch1 = DraftCost(NEW_RECORDING, token, NEW_RECORDING * RECORDED_AFTER)
        self.cost = StepCostModel(batch1=batch1, records=self._gpu)
        self.policy = SpecDecodePolicy(8)
        self._slowed = 0
        for length in (1, 40, 65):  # the first requests
            self._compute(Batch((Row(0, 0, [1] * length, 1, None),)))

    def decode(self, rows: int, rate: float, steps: int, seed: int) -> float:
        """Tokens per second over those of plain steps."""
        source = random.Random(seed)
        sequences = [self._start(number, rate, source) for number in range(rows)]
        seconds = plain_s = 0.0
        for _ in range(steps):
            drafts = self.policy.draft(sequences, self.cost, room=2048, max_step_s=0.25)
            each_s = self._step.seconds(split_shape(Batch(tuple(one.row(1) for one in sequences)), 2048))
            batch = Batch(tuple(one.row(1, drafts.get(one.seq_id, ())) for one in sequences))
            seconds += self._compute(batch)
            accepted = [self._accept(*each) for each in zip(sequences, batch.rows, strict=True)]
            plain_s += each_s * sum(accepted) / rows
        return plain_s / seconds

    def _start(self, number: int, rate: float, source: random.Random) -> Sequence:
        request = Request(id=str(number), prompt=Prompt(tuple(range(CONTEXT + 1))), max_tokens=10_000)
        sequence = Sequence(request, capacity=20_000)
        sequence.lease, sequence.num_computed = SlotLease(number, request.id), CONTEXT
        drafter = RandomDrafter(rate, source)
        sequence.drafts = DraftState(drafter, acceptance_rate=SpecDecodePolicy.NGRAM_ACCEPTANCE)
        return sequence

    def _compute(self, batch: Batch) -> float:
        shape = split_shape(batch, 2048)
        seconds = self._step.seconds(shape)
        if any(row.outputs > 1 for row in batch.rows):
            self._slowed = self._gpu * (1 + RECORDED_AFTER)
        if self._slowed:
            self._slowed -= 1
            seconds += NEW_RECORDING * (self._step.ubatch + self._step.row * len(batch.rows))
        self.cost.observe(batch, StepResult(StepStatus.DONE, ubatches=shape.ubatches, compute_s=seconds))
        return seconds

    @staticmethod
    def _accept(sequence: Sequence, row: Row) -> int:
        count = 0
        for draft in (*row.tokens[1:], WRONG):
            sequence.tokens.append(len(sequence.tokens) % 50)
            count += 1
            if draft != sequence.tokens[-1]:
                break
        sequence.num_computed += count
        return count


@pytest.mark.parametrize("rows", [1, 8, 32, 64])
@pytest.mark.parametrize("name", COSTS)
def test_drafts_never_slow_a_machine_by_more_than_exploration(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of texts whose drafts come true never, seldom, mostly and nearly always.

    Beside that, new sequences try drafts, and where these are just worth their time, errors of the rates cost
    some. A lone row is not explored.
    """
    monkeypatch.setattr("cllm.core.spec_decode.time.perf_counter", lambda: 0.0)
    allowed = 0.02 if rows == 1 else SpecDecodePolicy.EXPLORE_SHARE + 0.015
    for rate in (0.0, 0.3, 0.6, 0.9):
        machine = SimulatedMachine(COSTS[name])
        for seed in range(6 if COSTS[name].asynchronous else 1):
            machine.decode(rows, rate, 40, seed)  # what drafts cost here is learned once
        found = machine.decode(rows, rate, 200 if rows == 1 else 120, 9)
        assert found >= 1 - allowed, f"{rate}: {found:.3f}"


@pytest.mark.parametrize(
    ("name", "rows", "gain"), [("h200-8b", 8, 1.5), ("x86-amx", 1, 1.2), ("h200-8b", 1, 2.0)]
)
def test_drafts_that_come_true_gain_where_verifying_is_cheap(
    name: str, rows: int, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cllm.core.spec_decode.time.perf_counter", lambda: 0.0)
    assert SimulatedMachine(COSTS[name]).decode(rows, 0.95, 100, 1) >= gain


@pytest.mark.parametrize("name", COSTS)
def test_a_plan_is_the_best_of_all_lengths(name: str) -> None:
    machine = SimulatedMachine(COSTS[name])
    machine.decode(8, 0.9, 40, 1)
    source = random.Random(3)
    sequences = [machine._start(number, 1.0, source) for number in range(8)]
    for rate in (0.0, 0.2, 0.5, 0.8, 1.0):
        lengths = {}
        for sequence in sequences:
            assert sequence.drafts is not None
            sequence.drafts.acceptance_rate = rate
            lengths[sequence.seq_id] = 8
        step = DecodeStep(sequences, machine.cost, room=512, max_step_s=100.0)
        plan = step.best(lengths)
        expected = [0.0, *sequences[0].drafts.expected(8)] if sequences[0].drafts else []
        speeds = [8 * (1 + more) / step.seconds(range(8), length) for length, more in enumerate(expected)]
        speeds[0] *= DecodeStep.MIN_GAIN
        assert plan.length == speeds.index(max(speeds))


FIRST, NEXT = 4.9, 1.5  # plain steps: a GPU's first step of a run of drafts, and those after it
# Of an H200 with 36 layers of 4,096, ms: steps by rows and draft tokens, the head's for each, and what the
# first and the second step of another shape take longer.
H200_STEPS = {1: (4.11, 0.48), 2: (4.44, 0.52)}
H200_HEAD, H200_ANEW = 0.9, (1.8, 3.8)


class Recording:
    """A GPU that records its steps, of 1 ms, and a head that is right with a certain probability."""

    def __init__(self, right: float, rows: int) -> None:
        self._source, self._right, self._drafted = random.Random(1), right, False
        self.drafted = 0
        begin = FIRST - NEXT if rows == 1 else 0.0  # of more rows nothing is known beforehand
        self.cost = StepCostModel(batch1=DraftCost(NEXT - 1, 0.0, begin, 0.1), records=True)
        self.policy = SpecDecodePolicy(8, head=self._draft)
        for length in (1, 40, 65):
            self._compute(Batch((Row(0, 0, [1] * length, 1, None),)), 1.0)
        self.sequences = []
        for number in range(rows):
            request = Request(id=str(number), prompt=Prompt(tuple(range(CONTEXT + 1))), max_tokens=10_000)
            sequence = Sequence(request, capacity=20_000)
            sequence.lease, sequence.num_computed = SlotLease(number, request.id), CONTEXT
            sequence.drafts = self.policy.start(request)
            self.sequences.append(sequence)

    def _draft(self, newest: Mapping[int, int], length: int) -> dict[int, list[int]]:
        size = {each.seq_id: len(each.tokens) for each in self.sequences}
        return {
            seq_id: [n % 50 if self._source.random() < self._right else WRONG for n in range(at, at + length)]
            for seq_id, at in size.items()
            if seq_id in newest
        }

    def _seconds(self, length: int) -> float:
        """Of a step, in plain steps, without the head's time."""
        seconds = (NEXT if self._drafted else FIRST) if length else 1.0
        self._drafted = length > 0
        return seconds

    head = 0.1  # plain steps for a token of the head's

    def _compute(self, batch: Batch, milliseconds: float, drafted: float = 0.0) -> None:
        period_s = (milliseconds + drafted) / 1000
        result = StepResult(StepStatus.DONE, ubatches=1, compute_s=milliseconds / 1000, period_s=period_s)
        self.cost.observe(batch, result)

    def decode(self, steps: int) -> float:
        """Tokens for each plain step's time."""
        tokens, taken = 0.0, 0.0
        for _ in range(steps):
            drafts = self.policy.draft(self.sequences, self.cost, room=512, max_step_s=1.0)
            length = len(next(iter(drafts.values()), []))
            batch = Batch(tuple(one.row(1, drafts.get(one.seq_id, ())) for one in self.sequences))
            seconds = self._seconds(length)
            self.drafted += bool(drafts)
            if length:
                self.cost.observe_head(len(batch.rows), length, self.head * length / 1000)
            self._compute(batch, seconds, self.head * length)
            taken += seconds + self.head * length
            accepted = [
                SimulatedMachine._accept(*each) for each in zip(self.sequences, batch.rows, strict=True)
            ]
            tokens += sum(accepted) / len(accepted)
        return tokens / taken


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("right", "gain"), [(0.8, 1.25), (0.2, 0.98)])
def test_a_run_of_drafts_is_priced_as_a_run(rows: int, right: float, gain: float) -> None:
    """A single step with drafts never pays here, a run of them does: the head goes on once it has begun."""
    machine = Recording(right, rows)
    machine.decode(100)  # what drafts cost here, and how good the head is, is learned once
    machine.drafted = 0
    assert machine.decode(400) >= gain
    assert machine.drafted > 350 if right > 0.5 else machine.drafted < 10


class H200(Recording):
    """What was recorded on one: each other length of drafts is a shape that is recorded anew."""

    def __init__(self, right: float, rows: int) -> None:
        self._rows, self._last, self._alike, self.changes = rows, 0, 9, 0
        super().__init__(right, rows)
        self._plain, self._more = H200_STEPS[rows]
        self.head = H200_HEAD / self._plain
        token, head = H200_STEPS[1][1] / H200_STEPS[1][0], 0.55 / H200_STEPS[1][0]
        self.cost = StepCostModel(batch1=DraftCost(0.0, token, 3.1, head), records=True)

    def _seconds(self, length: int) -> float:
        self._alike = self._alike + 1 if length == self._last else 0
        self.changes += self._last not in (0, length)
        self._last = length
        anew = H200_ANEW[self._alike] if self._alike < len(H200_ANEW) else 0.0
        return 1 + (anew + self._more * length * self._rows) / self._plain


@pytest.mark.parametrize(("rows", "right", "gain"), [(1, 0.8, 1.4), (1, 0.6, 1.1), (2, 0.8, 1.15)])
def test_another_length_is_priced_as_a_beginning(rows: int, right: float, gain: float) -> None:
    machine = H200(right, rows)
    machine.decode(100)
    machine.changes = 0
    found = [machine.decode(256) for _ in range(8)]
    assert sum(found) / len(found) >= gain, found
    assert machine.changes < 100
