"""Prefill is sized so that decoding sequences do not wait longer than the target."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cllm.backend.base import Batch, Row, RowResult, StepResult, StepStatus
from cllm.core.prefill_budget import ChunkCost, PrefillBudget, PromptPart, TenantShares, divide
from cllm.core.sequence import Sequence
from cllm.core.step_cost import TILE, StepCost, StepCostModel, StepShape, attended_pairs
from cllm.types import Prompt, Request

TARGET = 0.25
# A small model on two cores: 4 ms to read the weights, 1.2 ms a prompt token, 1.5 ms a row, attention.
SMALL = StepCost(ubatch=4e-3, prefill_token=6e-4, row=1.5e-3, attended=2e-6, tiled=5e-7)
FAST = StepCost(ubatch=1e-3, prefill_token=2e-5, row=5e-5, attended=1e-9, tiled=1e-9)
SLOW = StepCost(ubatch=4e-2, prefill_token=1e-2, row=5e-3, attended=1e-6, tiled=1e-6)


# Two small cores that gain nothing by computing tokens together, but for reading the weights once.
LINEAR = StepCost(ubatch=2e-2, prefill_token=8e-3, row=8.8e-3, attended=5.8e-6)


def make_budget(*, split: bool = True, max_overrun: float = 1.0) -> PrefillBudget:
    """A budget that learns; its target is kept as one that a user has set."""
    return PrefillBudget(512, TARGET, StepCostModel(split=split), max_overrun=max_overrun)


class Machine:
    """Takes steps that cost what `cost` says, give or take some noise; now and then one takes thrice that."""

    def __init__(self, cost: StepCost, noise: float = 0.05, hiccups: float = 0.0) -> None:
        self.cost = cost
        self.noise = noise
        self.hiccups = hiccups
        self.random = random.Random(4)

    def step(self, budget: PrefillBudget, shape: StepShape) -> float:
        """One step: its time as it would be without a hiccup."""
        seconds = self.cost.seconds(shape) * self.random.uniform(1 - self.noise, 1 + self.noise)
        hiccup = 3 if self.random.random() < self.hiccups else 1
        budget.cost.observe_shape(shape, seconds * hiccup)
        return seconds


def arrival(
    machine: Machine, prompt: int, streams: int = 6, budget: PrefillBudget | None = None
) -> list[float]:
    """The times of the steps in which a long prompt is computed while `streams` generate."""
    budget = budget or make_budget()
    machine.step(budget, StepShape(1, 20, 0, 200.0))  # their own prompts, on an empty server
    context = 20 * streams
    for _ in range(40):
        machine.step(budget, StepShape(1, 0, streams, context))
        context += streams
    times = []
    position = 0
    while position < prompt:
        chunk = budget.prefill_tokens(streams, context=context, prompts=[(position, prompt - position)])
        attended, tiled = attended_pairs(chunk, position, chunk - 1)
        times.append(machine.step(budget, StepShape(2, chunk, streams, context + attended, tiled)))
        position += chunk
        context += streams
    return times


def known(cost: StepCost, *, target_s: float = TARGET, max_overrun: float = 4.0) -> PrefillBudget:
    """A budget that knows what steps cost, however large they are."""
    model = StepCostModel(known=cost, frozen=True)
    model.largest_prefill, model.largest_attended = 512, 1e9
    return PrefillBudget(512, target_s, model, max_overrun=max_overrun)


# Two cores each: x86 without AMX or VNNI, ARM without a tile of its own, x86 with VNNI, x86 with AMX.
X86 = StepCost(ubatch=7.5e-3, prefill_token=4.6e-3, row=7.6e-3, attended=3e-6, tiled=1e-6)
N1 = StepCost(ubatch=4e-3, prefill_token=7e-3, row=7.5e-3, attended=4.2e-6, tiled=4.2e-6)
VNNI = StepCost(ubatch=9e-3, prefill_token=5.5e-3, row=8e-3, attended=6e-6, tiled=2e-6)


AMX = StepCost(ubatch=4e-3, prefill_token=8e-4, row=2e-3, attended=2e-6, tiled=5e-7)
GPU = StepCost(ubatch=6.1e-3, prefill_token=8.5e-5, row=2.1e-4, attended=2e-9, tiled=2e-9)


@pytest.mark.parametrize("cost", [X86, N1, VNNI, AMX, GPU], ids=["x86", "n1", "vnni", "amx", "gpu"])
@pytest.mark.parametrize("position", [0, 500, 1600])
def test_keeping_the_target_costs_at_most_three_percent(cost: StepCost, position: int) -> None:
    target_s = 0.05 if cost is GPU else TARGET
    budget = known(cost, target_s=target_s)
    rows, prompts = StepShape(1, 0, 7, 7 * 300), [(position, 2000)]
    chunk = budget.prefill_tokens(7, context=7 * 300, prompts=prompts)
    price = ChunkCost(cost, rows, prompts, split=True)
    best = min(
        price.price(size)
        for size in range(TILE // 4, 505)
        if price.seconds(size) <= budget.max_overrun * target_s
    )
    assert price.price(chunk) <= 1.05 * best
    assert price.seconds(chunk) <= budget.max_overrun * target_s
    smaller = [size for size in range(65, chunk, TILE) if price.price(size) <= 1.02 * best]
    assert not smaller or price.seconds(chunk) <= target_s, "no larger than it has to be"


@pytest.mark.parametrize("cost", [X86, N1, VNNI], ids=["x86", "n1", "vnni"])
def test_a_target_that_is_set_is_kept_at_any_price(cost: StepCost) -> None:
    budget = known(cost, max_overrun=1.0)
    prompts = [(1600, 2000)]
    chunk = budget.prefill_tokens(7, context=7 * 300, prompts=prompts)
    seconds = ChunkCost(cost, StepShape(1, 0, 7, 7 * 300), prompts, split=True).seconds(chunk)
    assert seconds <= TARGET < ChunkCost(cost, StepShape(1, 0, 7, 7 * 300), prompts, split=True).seconds(500)


def test_answers_that_nobody_reads_as_streams_have_no_target() -> None:
    budget = known(X86)
    assert budget.prefill_tokens(7, prompts=[(0, 2000)], streamed=False) == 505
    assert budget.prefill_tokens(7, prompts=[(0, 2000)]) < 505


def test_a_burst_of_short_prompts_goes_into_few_steps() -> None:
    """One prompt of 65 tokens takes a ubatch, and so do many of them together."""
    budget = known(GPU, target_s=0.05)
    many = [(0, 65)] * 7
    assert budget.prefill_tokens(20, context=1300, prompts=many) == sum(left for _, left in many)


def test_unequal_prompts_take_a_ubatch_for_each_length() -> None:
    rows = StepShape(1, 0, 4, 400)
    equal = ChunkCost(GPU, rows, [(0, 50)] * 4, split=True).shape(200)
    unequal = ChunkCost(GPU, rows, [(0, 47), (0, 49), (0, 51), (0, 53)], split=True).shape(200)
    assert (equal.ubatches, unequal.ubatches) == (2, 5)
    assert ChunkCost(GPU, rows, [(0, 47), (0, 53)], split=False).shape(100).ubatches == 1


def test_a_prompt_is_ended_where_there_is_time_and_a_rest_would_cost_more() -> None:
    """A few tokens beyond a tile would wait for a step of their own, with a ubatch of its own."""
    even = StepCost(ubatch=0.012, prefill_token=0.002, row=0.0025, attended=1e-6, tiled=1e-6)
    tiled = even._replace(ubatch=0.0, tiled=4e-6)  # another tile for four tokens costs more than a step
    for cost, wanted, expected in ((even, 69, 69), (tiled, 69, 65)):
        assert known(cost).prefill_tokens(7, context=700, prompts=[(100, wanted)]) == expected


@pytest.mark.parametrize("cost", [SMALL, FAST], ids=["small", "fast"])
@pytest.mark.parametrize("hiccups", [0.0, 0.05])
def test_no_step_of_a_long_prompt_is_far_over_the_target(cost: StepCost, hiccups: float) -> None:
    times = arrival(Machine(cost, hiccups=hiccups), 30_000)
    assert max(times) <= 1.4 * TARGET and sorted(times)[-len(times) // 100] <= 1.3 * TARGET
    # And what may be used of it, is used: the prompt is not starved either.
    full = cost.seconds(StepShape(2, 512, 6, 6 * 200))
    assert sorted(times)[len(times) // 2] >= min(0.6 * TARGET, 0.8 * full)


def test_where_one_token_is_expensive_the_chunks_are_the_smallest_that_get_on() -> None:
    machine = Machine(SLOW)
    times = arrival(machine, 400)
    assert max(times[1:]) <= 1.3 * TARGET
    assert len(times) <= 400 / PrefillBudget.MIN_CHUNK + 1


def test_an_idle_engine_prefills_as_fast_as_it_can() -> None:
    budget = make_budget()
    assert budget.prefill_tokens(0) == 512
    arrival(Machine(SLOW), 100, budget=budget)
    assert budget.prefill_tokens(0) == 512


def test_an_idle_engine_beside_one_that_computes_keeps_the_target_of_its_streams() -> None:
    budget = PrefillBudget(512, TARGET, StepCostModel(known=LINEAR, frozen=True), max_overrun=1.0)
    budget.cost.largest_prefill = 512
    budget.cost.largest_attended = 1e6
    assert budget.prefill_tokens(0) == 512
    budget.alternates = budget.contended = True
    chunk = budget.prefill_tokens(0, prompts=[(0, 2000)])
    cost = ChunkCost(LINEAR, StepShape(1, 0, 0, 0), [(0, 2000)], split=True)
    assert 0 < cost.seconds(chunk) <= TARGET / 2


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    budget = make_budget()
    machine = Machine(SMALL)
    arrival(machine, 3000, budget=budget)
    before = budget.prefill_tokens(6)
    machine.cost = StepCost(*(3 * part for part in SMALL))
    for position in range(0, 12_000, 100):
        machine.step(budget, StepShape(2, budget.prefill_tokens(6), 6, 100.0 * position))
    after = budget.prefill_tokens(6)
    assert after < before / 2
    assert machine.cost.seconds(StepShape(2, after, 6, 0)) <= 1.3 * TARGET


def test_the_costs_are_found_among_outliers() -> None:
    machine, clock = Machine(SMALL, noise=0.03, hiccups=0.08), make_budget()
    for number in range(60):
        rows, position = number % 8, 37 * number
        chunk = (0, 40, 150)[number % 3]
        if rows or chunk:
            attended, tiled = attended_pairs(chunk, position, chunk)
            passes = 1 + bool(chunk and rows)
            machine.step(clock, StepShape(passes, chunk, rows, rows * 500.0 + attended, tiled))
    found = clock.cost.step
    assert found is not None
    for one, other in zip(found, SMALL, strict=True):
        assert one == pytest.approx(other, rel=0.35)


def test_an_hour_of_decoding_does_not_wash_out_what_prefill_costs() -> None:
    budget = make_budget()
    machine = Machine(SMALL)
    arrival(machine, 3000, budget=budget)
    before = budget.cost.prefill_token_s
    for _ in range(1000):
        machine.step(budget, StepShape(1, 0, 8, 4000.0))
    after = budget.cost.prefill_token_s
    assert before is not None and after is not None
    assert after == pytest.approx(before, rel=0.3)


@given(
    samples=st.lists(
        st.tuples(
            st.integers(1, 4), st.integers(0, 512), st.integers(0, 64), st.floats(0, 1e9), st.floats(0, 1e3)
        ),
        max_size=30,
    )
)
def test_no_cost_is_ever_negative_or_lost(samples: list[tuple[int, int, int, float, float]]) -> None:
    clock = StepCostModel()
    for *shape, seconds in samples:
        if seconds > 0:
            clock.observe_shape(StepShape(*shape), seconds)  # type: ignore[arg-type]
        cost = clock.step
        assert cost is None or all(0 <= part < float("inf") for part in cost)


@given(
    batch=st.integers(32, 4096),
    generating=st.integers(0, 32),
    seen=st.lists(st.tuples(st.integers(0, 512), st.floats(0, 10)), max_size=20),
)
def test_no_step_is_ever_over_the_batch(batch: int, generating: int, seen: list[tuple[int, float]]) -> None:
    budget = PrefillBudget(batch, TARGET, StepCostModel())
    for tokens, seconds in seen:
        budget.cost.observe_shape(StepShape(1, tokens, 1, 0.0), seconds)
    assert 0 <= budget.prefill_tokens(generating) <= batch - generating
    assert generating == batch or budget.prefill_tokens(generating) >= 1


def test_the_shape_of_a_step() -> None:
    rows = (Row(0, 100, (1,), 1, None), Row(1, 50, (1, 2, 3, 4), 0, None))
    assert StepShape.of(Batch(rows), 2, split=True) == StepShape(2, 4, 1, 100.5 + 4 * 52)
    padded = Batch(rows, padding={1: 2, 2: 1, 3: 1})
    assert StepShape.of(padded, 2, split=True) == StepShape(2, 6, 3, 100.5 + 6 * 53)


def test_a_chunk_of_whole_tiles_is_distinguished_from_one_that_is_not() -> None:
    decode = Row(0, 100, (1,), 1, None)
    for count, tiled in ((64, 0), (65, 65), (66, 66 / 65 * 128), (129, 129)):
        shape = StepShape.of(Batch((decode, Row(1, 1000, (1,) * count, 0, None))), 2, split=True)
        assert shape.tiled == pytest.approx(tiled * (1000 + count / 2))
    alone = StepShape.of(Batch((Row(1, 1000, (1,) * 64, 0, None),)), 1, split=True)
    assert (alone.attended, alone.tiled) == (0, 64 * 1032)
    together = StepShape.of(Batch((decode, Row(1, 1000, (1,) * 63, 0, None))), 1, split=False)
    assert (together.attended, together.tiled) == (0, 100.5 + 63 * 1031.5)


@pytest.mark.parametrize("split", [True, False])
def test_chunks_are_whole_tiles_where_there_is_time_for_one(split: bool) -> None:
    budget = make_budget(split=split)
    arrival(Machine(SMALL), 2000, budget=budget)
    for generating in (1, 6, 30):
        chunk = budget.prefill_tokens(generating, context=100 * generating)
        assert chunk > TILE
        assert ((chunk - 1) if split else (chunk + generating)) % TILE == 0


def test_a_prompt_is_ended_or_gets_whole_tiles() -> None:
    assert divide(512, [300, 400, 20]) == [300, 192, 20]
    assert divide(193, [100_000, 50], 1) == [193]
    assert divide(200, [100_000, 7], 1) == [193, 7]
    assert divide(40, [100_000, 90_000]) == [40], "no room for a tile: the first gets what there is"
    assert divide(512, [563]) == [448], "what is left shall be a tile as well"
    assert divide(512, [576]) == [512]


class PendingPrompt:
    """What the budget looks at of a sequence."""

    def __init__(self, name: str, arrival: int, pending: int, *, answering: bool = False) -> None:
        self.id, self.arrival, self.pending, self.num_computed = name, arrival, pending, 0
        self.known, self.sample_s, self.unscored = int(not answering), 0.0, 0
        self.request = Request(id=name, max_tokens=1)

    @property
    def computable(self) -> int:
        return self.pending


def test_a_short_prompt_does_not_wait_for_a_long_one_and_the_long_one_gets_on() -> None:
    budget = make_budget()
    long = PendingPrompt("long", 0, 100_000)
    given = 0
    for number in range(40):
        short = PendingPrompt("short", 1 + number, 700)
        steps = 0
        while short.pending > 1:
            shares = budget.schedule_tokens([long, short], lambda prompt: prompt.pending)  # type: ignore[list-item]
            assert sum(shares.values()) <= 512
            short.pending -= shares.get("short", 0)
            given += shares.get("long", 0)
            steps += 1
        assert steps <= 4
    assert given >= 40 * 700 / 2


def test_a_prompt_that_others_wait_for_counts_as_the_shortest_of_them() -> None:
    prompts = [PendingPrompt("a", 0, 5000), PendingPrompt("b", 1, 600), PendingPrompt("awaited", 2, 9000)]
    urgency = {"a": 5000, "b": 600, "awaited": 20}
    shares = make_budget().schedule_tokens(prompts, lambda prompt: urgency[prompt.id])  # type: ignore[arg-type]
    assert shares == {"awaited": 512}


@pytest.mark.parametrize("split", [True, False])
def test_a_forced_token_or_two_go_one_by_one_where_a_pass_over_the_weights_costs_more(split: bool) -> None:
    budget = make_budget(split=split)
    machine = Machine(SMALL, noise=0.0)
    for rows in (1, 4, 8):
        for chunk in (0, 60, 200):
            machine.step(budget, StepShape(1 + (chunk > 0), chunk, rows, 0.0))
    others = [PendingPrompt(f"other{number}", number, 1, answering=True) for number in range(7)]

    def share_of(pending: int, company: list[PendingPrompt], *, answering: bool = True) -> int:
        forced = PendingPrompt("forced", 7, pending, answering=answering)
        running = [*company, forced]
        return budget.schedule_tokens(running, lambda prompt: prompt.pending)["forced"]  # type: ignore[arg-type]

    assert share_of(2, others) == (1 if split else 2)
    assert share_of(12, others) == 12  # a key, say: one by one it would take longer than the others lose
    assert share_of(2, []) == 2  # no other row waits
    assert share_of(2, others, answering=False) == 2  # the end of a prompt


@given(
    room=st.integers(1, 2000),
    wanted=st.lists(st.integers(1, 100_000), min_size=1, max_size=10),
    offset=st.integers(-8, 1),
)
def test_shares_are_within_the_room_and_one_gets_on(room: int, wanted: list[int], offset: int) -> None:
    shares = divide(room, wanted, offset)
    assert 0 < sum(shares) <= room
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=False))
    assert shares[0] >= min(wanted[0], room, TILE // 2)


# Costly samplers -------------------------------------------------------------------------------------


def decoding(*sample_s: float) -> list[Sequence]:
    """Sequences that decode, each with the time that its sampler takes."""
    found = []
    for number, seconds in enumerate(sample_s):
        request = Request(id=str(number), prompt=Prompt(tuple(b"prompt")), max_tokens=1000)
        sequence = Sequence(request, 4096, number)
        sequence.num_computed = len(sequence.tokens) - 1
        sequence.sample_s = seconds
        found.append(sequence)
    return found


def turns(sequences: list[Sequence], steps: int, *, defers: bool = True) -> tuple[list[int], list[float]]:
    """How often each takes part, and what each step takes."""
    budget = PrefillBudget(512, TARGET, StepCostModel(known=SMALL, frozen=True), defers=defers)
    counts = [0] * len(sequences)
    seconds = []
    for _ in range(steps):
        shares = budget.schedule_tokens(sequences, lambda sequence: sequence.pending)
        assert set(shares.values()) == {1}
        for number in map(int, shares):
            counts[number] += 1
        sampling_s = sum(sequences[int(name)].sample_s for name in shares)
        seconds.append(plain_step_s(len(shares)) + sampling_s)
    return counts, seconds


def plain_step_s(rows: int) -> float:
    return SMALL.seconds(StepShape(1, 0, rows, 5 * rows))


@given(
    st.lists(st.floats(0, 1e-5), min_size=1, max_size=4),
    st.lists(st.floats(3e-3, 0.05), min_size=1, max_size=7),
)
def test_cheap_rows_miss_no_step_and_wait_little_for_costly_samplers(
    cheap: list[float], costly: list[float]
) -> None:
    steps = 400
    counts, seconds = turns(decoding(*cheap, *costly), steps)
    assert counts[: len(cheap)] == [steps] * len(cheap)
    # A costly one goes as soon as there is any credit, so that of one may be owed at the end.
    limit = (1 + PrefillBudget.SAMPLING_SHARE) * plain_step_s(len(cheap) + len(costly)) * steps
    assert sum(seconds) <= limit + max(costly) + plain_step_s(1)
    behind = counts[len(cheap) :]
    assert min(behind) >= max(1, max(behind) // 2), "they go in turn"


def test_where_all_samplers_are_costly_or_cheap_none_is_deferred() -> None:
    assert turns(decoding(*[0.02] * 8), 20)[0] == [20] * 8
    assert turns(decoding(*[1e-5] * 8), 20)[0] == [20] * 8
    assert turns(decoding(0.0, 0.02), 20, defers=False)[0] == [20, 20]


def test_a_prompt_gets_less_room_beside_costly_samplers() -> None:
    budget = PrefillBudget(512, TARGET, StepCostModel(known=SMALL, frozen=True))
    budget.cost.largest_prefill, budget.cost.largest_attended = 512, 1e9
    assert budget.prefill_tokens(4, sampling_s=0.1) < budget.prefill_tokens(4)


@pytest.mark.parametrize("each_s", [0.1, 0.15], ids=["masks", "masks and biases"])
def test_costly_samplers_leave_time_for_prompts(each_s: float) -> None:
    """Seven masks of 100 ms are three times the target: a prompt beside them would get two tokens a step."""
    budget = PrefillBudget(512, TARGET, StepCostModel(known=SMALL, frozen=True), defers=True)
    budget.cost.largest_prefill, budget.cost.largest_attended = 512, 1e9
    costly = decoding(*[each_s] * 7)
    prompt = Sequence(Request(id="prompt", prompt=Prompt((1,) * 4000), max_tokens=1), 8192, 7)
    steps, given = 0, 0
    turns_had = dict.fromkeys((each.id for each in costly), 0)
    while prompt.num_computed < 3500:
        shares = budget.schedule_tokens([*costly, prompt], lambda sequence: sequence.pending)
        prompt.num_computed += shares.pop("prompt")
        given += len(shares)
        for name in shares:
            turns_had[name] += 1
        steps += 1
    assert steps < 80 and TARGET / 5 < each_s * given / steps < TARGET / 2, "both get on"
    assert max(turns_had.values()) - min(turns_had.values()) <= 1, "they go in turn"


# Tenants --------------------------------------------------------------------------------------------


def share_time(cost: StepCost, *, tenants: tuple[str, str], steps: int = 600) -> tuple[float, float]:
    """Two rows of one tenant beside prompts without end of another: the rows' part of all seconds.

    Before anybody is ahead, and afterwards.
    """
    budget = known(cost)
    rows, parts = decoding(0.0, 0.0), []
    for row in rows:
        row.request = msgspec.structs.replace(row.request, tenant=tenants[0])
    request = Request(id="prompt", prompt=Prompt((1,) * 400), max_tokens=1, tenant=tenants[1])
    prompt = Sequence(request, 8192, 7)
    for _ in range(steps):
        shares = budget.schedule_tokens([*rows, prompt], lambda sequence: sequence.pending)
        assert {"0", "1"} <= shares.keys(), "rows miss no step"
        rows_s = cost.seconds(StepShape(1, 0, 2, 10))
        part, at = shares.get("prompt", 0), prompt.num_computed
        chunk_s = cost.seconds(StepShape(1, part, 0, *attended_pairs(part, at, part - 1))) if part else 0.0
        parts.append((rows_s, chunk_s))
        prompt.num_computed = (at + part) % 399
    first, rest = parts[: steps // 60], parts[steps // 3 :]
    return tuple(sum(row for row, _ in each) / sum(map(sum, each)) for each in (first, rest))  # type: ignore[return-value]


@pytest.mark.parametrize("cost", [X86, N1, SMALL])
def test_prompts_of_one_tenant_leave_half_of_the_time_to_another(cost: StepCost) -> None:
    first, rest = share_time(cost, tenants=("a", "b"))
    assert 0.45 < rest < 0.6 and first < 0.3, "but prompts that come now and then do not wait"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([1, 20, 400])), min_size=1, max_size=8))
@example([("a", 400), ("b", 400)])
def test_of_tenants_that_are_all_ahead_one_gets_on(running: list[tuple[str, int]]) -> None:
    """They were so of one that has gone."""
    budget = known(X86)
    sequences = [
        Sequence(
            Request(id=str(number), prompt=Prompt((1,) * tokens), max_tokens=1, tenant=tenant), 8192, number
        )
        for number, (tenant, tokens) in enumerate(running)
    ]
    budget.shares.charge([("a", 50.0), ("b", 50.0), ("gone", 0.0)])
    shares = budget.schedule_tokens(sequences, lambda sequence: sequence.pending)
    assert sum(shares.values()) > 0


@pytest.mark.parametrize("backlogged", [True, False])
def test_the_seconds_of_a_step_are_shared_by_its_requests(backlogged: bool) -> None:
    """By rows and prompts alike; where a tenant waits for slots, those that are left out pay, too."""
    budget, rows = known(AMX), decoding(0.0, 0.0)
    prompt = Sequence(Request(id="prompt", prompt=Prompt((1,) * 400), max_tokens=1), 8192, 7)

    def take(*sequences: Sequence) -> dict[str, float]:
        budget.spent = {}
        budget.schedule_tokens(sequences, lambda sequence: sequence.pending)
        return budget.spent

    assert not take(*rows) and not take(prompt), "with one tenant there is nothing to share"
    for row in rows:
        row.request = msgspec.structs.replace(row.request, tenant="a", backlogged=backlogged)
    first, steps = take(prompt, *rows), [take(*rows)]
    assert first.keys() == {"0", "1", "prompt"} and first["prompt"] > first["0"] == first["1"]
    assert sum(steps[0].values()) == pytest.approx(AMX.seconds(StepShape(1, 0, 2, 10)))
    budget.spent = {}
    budget.charge_step(rows, rows)  # on a GPU, which has the next one
    assert [budget.spent] == steps
    assert take(prompt)["prompt"] == pytest.approx(
        AMX.seconds(StepShape(1, 400, 0, *attended_pairs(400, 0, 400)))
    )
    budget.shares.charge([(prompt.request.tenant, 9.0), ("a", 0.0)])
    assert ("prompt" in take(prompt, *rows)) == backlogged


def test_a_step_without_sequences_is_charged_to_none() -> None:
    budget, (row, other) = known(X86), decoding(0.0, 0.0)
    other.request = msgspec.structs.replace(row.request, tenant="b")
    budget.shares.charge([(row.request.tenant, 1.0), (other.request.tenant, 9.0)])
    assert budget.shares and budget.schedule_tokens([], lambda sequence: sequence.pending) == {}


@pytest.mark.parametrize("cost", [X86, N1, VNNI, SMALL, AMX, GPU])
@pytest.mark.parametrize("backlogged", [True, False])
def test_a_tenant_that_waits_for_slots_keeps_half_of_its_tokens(cost: StepCost, backlogged: bool) -> None:
    """It has two of four slots, another's prompts hold the others. Alone it would have all four."""
    budget = known(cost)
    rows = decoding(0.0, 0.0)
    for row in rows:
        row.request = msgspec.structs.replace(row.request, tenant="a", backlogged=backlogged)
    prompts = [
        Sequence(Request(id=name, prompt=Prompt((1,) * 400), max_tokens=1, tenant="b"), 8192, 7)
        for name in ("first", "second")
    ]
    times = []
    for _ in range(900):
        shares = budget.schedule_tokens([*rows, *prompts], lambda sequence: sequence.pending)
        shape = [(shares.get(each.id, 0), each.num_computed) for each in prompts]
        pairs = [attended_pairs(part, at, part) for part, at in shape if part]
        attended, tiled = (sum(each) for each in zip((20, 0), *pairs, strict=True))
        prefill = sum(part for part, _ in shape)
        times.append(cost.seconds(StepShape(1 + len(pairs), prefill, 2, attended, tiled)))
        for prompt, (part, at) in zip(prompts, shape, strict=True):
            prompt.num_computed = (at + part) % 399
    share = 300 * 2 / sum(times[-300:]) * cost.seconds(StepShape(1, 0, 4, 40)) / 4
    assert 0.48 < share < 0.55 if backlogged else share < 0.46


def test_prompts_and_rows_of_one_tenant_share_by_the_target_alone() -> None:
    first, rest = share_time(X86, tenants=("a", "a"))
    assert rest < 0.3 and abs(first - rest) < 0.1


def test_a_tenant_that_was_away_is_no_longer_ahead() -> None:
    shares, (row,) = TenantShares(1.0), decoding(0.0)
    request = Request(id="b", prompt=Prompt((1,) * 400), max_tokens=1, tenant="b")
    prompt = Sequence(request, 8192, 7)
    shares.charge([(row.request.tenant, 0.5), (prompt.request.tenant, 4.0)])
    assert not shares.may_prefill(prompt, [row]) and shares.may_prefill(prompt, [prompt])
    shares.charge([(row.request.tenant, 2.0)])
    assert shares.may_prefill(prompt, [row]) and shares
    for _ in range(9):
        shares.charge([(row.request.tenant, 2.0)])
    shares.charge([(row.request.tenant, 0.5), (prompt.request.tenant, 2.0)])
    assert shares.may_prefill(prompt, [row]), "no more is held against it"


# Prompts that are scored -----------------------------------------------------------------------------


def test_scored_tokens_are_part_of_the_step() -> None:
    """Scoring a token of a large vocabulary takes as long as computing it."""
    budget = known(X86._replace(scored=5e-3), max_overrun=1.0)
    rows, plain, scored = StepShape(1, 0, 4, 1200), [(0, 2000)], [PromptPart(0, 2000, scored=True)]
    chunk = budget.prefill_tokens(4, context=1200, prompts=scored)
    cost = ChunkCost(X86._replace(scored=5e-3), rows, scored, split=True)
    assert cost.shape(chunk).scored == chunk and cost.seconds(chunk) <= TARGET
    assert chunk < budget.prefill_tokens(4, context=1200, prompts=plain)


def test_the_cost_of_scoring_is_learned_apart_from_that_of_prefill() -> None:
    budget = make_budget()
    truth, machine = SMALL._replace(scored=2e-3), random.Random(3)
    for number in range(60):
        chunk = machine.choice([20, 64, 128, 250])
        tokens, scored = [1] * chunk, [1] * (chunk if number % 3 == 0 else 0)
        row = Row(4, 0, tokens, 0, None, scored=scored)
        batch = Batch((*(Row(seq_id, 100, (1,), 1, None) for seq_id in range(4)), row))
        shape = StepShape.of(batch, 2, split=True)
        score_s, rest_s = truth.scored * len(scored), truth._replace(scored=0.0).seconds(shape)
        rows = (RowResult(),) * len(batch.rows)
        budget.cost.observe(batch, StepResult(StepStatus.DONE, rows, 0, 2, rest_s, score_s))
    step = budget.cost.step
    assert step is not None and step.scored == pytest.approx(truth.scored, rel=0.1)
    assert step.prefill_token == pytest.approx(truth.prefill_token, rel=0.2)
