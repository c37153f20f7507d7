"""Which slot a sequence gets: what is continued, copied, evicted and moved for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cllm.core.kv_cache.slot_choice import count_runs, densest
from cllm.core.step_cost import StepCost, StepCostModel
from cllm.testing import FakeRunner, expected_text
from tests.driver.engine import StepDriver, words

SYSTEM = words(1, 200)


class Slots(StepDriver):
    """Eight slots, four running at a time, costs that do not change."""

    def __init__(
        self,
        *,
        sequences: int = 8,
        step: StepCost | None = None,
        cost: StepCostModel | None = None,
        **settings: Any,
    ) -> None:
        cost = StepCostModel(known=step, frozen=True) if step is not None else cost
        runner = FakeRunner(sequences=sequences, cells=sequences * 1024, batch_tokens=64)
        super().__init__(runner, cache_mb=16, cost=cost, **settings)

    def ask(self, prompt: tuple[int, ...], count: int = 8) -> str:
        name = self.add(prompt, count, ignore_eos=True)
        self.finish()
        assert self.text(name) == expected_text(prompt, count, ends=False)
        return name

    def held(self) -> dict[int, int]:
        return dict(self.prefix_cache.device.lengths)


def test_a_conversation_goes_on_in_its_slot_and_another_leaves_it_alone() -> None:
    slots = Slots()
    first = SYSTEM + words(2, 100)
    slots.ask(first)
    assert slots.held() == {0: 307}
    other = slots.ask(SYSTEM + words(3, 100))
    assert slots.usage(other).cached_tokens == 200 and slots.held() == {0: 307, 1: 307}
    longer = first + tuple(expected_text(first, 8, ends=False).encode()) + words(4, 20)
    again = slots.ask(longer)
    assert slots.usage(again).cached_tokens == 307 and slots.held() == {0: 335, 1: 307}


def test_where_no_slot_is_empty_the_one_used_longest_ago_is_evicted_to_ram() -> None:
    slots = Slots(sequences=2)
    prompts = [words(seed, 150) for seed in range(3)]
    for prompt in prompts:
        slots.ask(prompt)
    assert len(slots.held()) == 2 and len(slots.host_cache.entries) == 1
    assert slots.prefix_cache.device.evictions == 1
    assert slots.usage(slots.ask(prompts[0])).cached_from == "ram"
    assert slots.usage(slots.ask(prompts[2])).cached_from == "device"


def test_a_branch_of_a_long_conversation_is_cut_rather_than_another_conversation_evicted() -> None:
    slots = Slots(sequences=2)
    slots.host_cache.cached_limit = slots.host_cache.limit = 0  # what is evicted is lost
    long, other = words(5, 400), words(6, 400)
    slots.ask(long)
    slots.ask(other)
    branch = slots.ask(long + words(7, 10))
    assert slots.usage(branch).cached_tokens == 400
    assert slots.prefix_cache.device.evictions == 0 and sorted(slots.held().values()) == [407, 417]


def test_what_one_covers_is_not_held_beside_it() -> None:
    slots = Slots()
    names = [slots.add(SYSTEM, 8, ignore_eos=True) for _ in range(3)]
    slots.finish()
    assert len({slots.text(name) for name in names}) == 1 and len(slots.held()) == 1


def test_more_slots_than_run_at_a_time_are_cache() -> None:
    runner = FakeRunner(sequences=8, parallel=2, cells=8192, batch_tokens=64)
    driver = StepDriver(runner, cache_mb=16)
    for seed in range(6):
        driver.add(words(seed, 100), 8, ignore_eos=True)
    while not driver.core.idle:
        driver.step()
        assert len(driver.scheduler.running) <= 2
    assert len(driver.prefix_cache.device.lengths) == 6


def next_turn(seed: int) -> tuple[int, ...]:
    """A conversation goes on: it begins with all that its slot holds."""
    prompt = words(seed, 100)
    return prompt + tuple(expected_text(prompt, 8, ends=False).encode()) + words(20 + seed, 20)


EXPENSIVE_PASS = StepCost(1.0, 1e-3, 1e-3, 0.0)
CHEAP_PASS = StepCost(1e-9, 1e-3, 1e-3, 0.0)


class DeviceSlots(Slots):
    """A GPU: a KV stream is copied in a tenth of a millisecond, and a gap costs a second."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"step": EXPENSIVE_PASS, **settings})
        self.runner.stream_copy_s = 1e-4


LAYOUTS = pytest.mark.parametrize(
    ("make", "step", "moves"),
    [(Slots, EXPENSIVE_PASS, True), (Slots, CHEAP_PASS, False), (DeviceSlots, EXPENSIVE_PASS, True)],
)


@LAYOUTS
def test_a_slot_is_moved_next_to_the_running_ones_where_gaps_cost_more(
    make: type[Slots], step: StepCost, moves: bool
) -> None:
    slots = make(step=step)
    for seed in range(8):
        slots.ask(words(seed, 100))
    running = slots.add(next_turn(0), 300, ignore_eos=True)
    slots.step(3)
    (first,) = slots.scheduler.running
    far = slots.add(next_turn(7), 100, ignore_eos=True)
    slots.step(2)
    ids = sorted(slots.scheduler.running)
    assert first in ids and len(ids) == 2
    assert (count_runs(ids) == 1) == moves
    slots.finish()
    for name, prompt in ((running, next_turn(0)), (far, next_turn(7))):
        assert slots.text(name) == expected_text(prompt, len(slots.answers[name].tokens), ends=False)
        assert slots.usage(name).cached_tokens == 107
    # Copies on a device need an empty slot; what made room was copied, too.
    assert slots.prefix_cache.device.evictions == (make is DeviceSlots)
    assert slots.usage(slots.ask(words(6, 100))).cached_tokens == 99


def failing(call: str, number: int) -> tuple[Callable[[int, str], Exception | None], list[str]]:
    """One native call of this name fails: the first, the second, …; and all of them that were made."""
    seen: list[str] = []

    def fail(_: int, name: str) -> Exception | None:
        seen.extend([name] * (name == call))
        return RuntimeError("native") if name == call and len(seen) == number else None

    return fail, seen


def test_a_move_that_would_keep_others_waiting_too_long_is_left() -> None:
    slots = Slots(step=EXPENSIVE_PASS, target_itl_ms=1)
    cost = slots.scheduler.budget.cost
    cost.frozen = False
    for _ in range(9):
        cost.observe_transfer(1000, 0.01, restore=False)
    cost.frozen = True
    for n in range(4):
        slots.add(words(n, 100), 10 if n == 1 else 80, ignore_eos=True)
    while slots.answers["r1"].finish_reason is None:
        slots.step()
    slots.step(2)
    assert sorted(slots.scheduler.running) == [0, 2, 3]
    slots.finish()


@pytest.mark.parametrize(
    ("make", "call"),
    [
        *((Slots, call) for call in ("save", "restore", "truncate")),
        *((DeviceSlots, call) for call in ("copy", "truncate", "next_position")),
    ],
)
def test_a_move_that_fails_costs_a_recompute_at_most(make: type[Slots], call: str) -> None:
    for number in range(1, 12):
        slots = make(step=EXPENSIVE_PASS)
        for seed in range(8):
            slots.ask(words(seed, 100))
        slots.add(next_turn(0), 60, ignore_eos=True)
        slots.add(next_turn(3), 20, ignore_eos=True)
        slots.step(3)
        slots.fake.fail, _ = failing(call, number)
        slots.add(next_turn(7), 30, ignore_eos=True)
        slots.run()
        slots.check_end()


@LAYOUTS
def test_a_gap_that_one_has_left_is_closed_where_it_costs_more(
    make: type[Slots], step: StepCost, moves: bool
) -> None:
    slots = make(step=step)
    prompts = [words(seed, 100) for seed in range(4)]
    names = [slots.add(prompt, 10 if n == 1 else 80, ignore_eos=True) for n, prompt in enumerate(prompts)]
    while slots.answers[names[1]].finish_reason is None:
        slots.step()
    slots.step(2)
    assert sorted(slots.scheduler.running) == ([0, 1, 2] if moves else [0, 2, 3])
    slots.finish()
    for name, prompt in zip(names, prompts, strict=True):
        assert slots.text(name) == expected_text(prompt, len(slots.answers[name].tokens), ends=False)
    again = slots.ask(prompts[1])
    assert slots.usage(again).cached_tokens == 99, "what lay in the gap was kept, too"


@pytest.mark.parametrize("call", ["save", "restore", "truncate", "next_position"])
def test_a_running_sequence_survives_a_move_that_fails(call: str) -> None:
    for number in range(1, 12):
        slots = Slots(step=EXPENSIVE_PASS)
        for n in range(4):
            slots.add(words(n, 100), 10 if n == 1 else 40, ignore_eos=True)
        while slots.answers["r1"].finish_reason is None:
            slots.step()
        slots.fake.fail, _ = failing(call, number)
        slots.run()
        slots.check_end()


def test_runs_and_the_densest_id() -> None:
    assert count_runs([]) == 0 and count_runs([0, 1, 2]) == 1 and count_runs([0, 2, 3, 7]) == 3
    assert densest({0, 5, 9}, {6, 7}) == 5
    assert densest({0, 9}, set()) == 0
    assert densest({3, 8}, {2, 4}) == 3


# Copies on the device -----------------------------------------------------------------------------


def test_on_a_device_what_is_evicted_makes_room_where_the_others_run() -> None:
    slots = DeviceSlots()
    for seed in (3, 1, 7, 0, 6, 2, 5, 4):
        slots.ask(words(seed, 100))
    names = [slots.add(words(20 + seed, 100), 60, ignore_eos=True) for seed in range(4)]
    slots.step(12)
    assert len(slots.scheduler.running) == 4 and count_runs(slots.scheduler.running) == 1
    slots.finish()
    for seed, name in enumerate(names):
        assert slots.text(name) == expected_text(words(20 + seed, 100), 60, ends=False)
    for seed in (4, 5, 2, 6):
        assert slots.usage(slots.ask(words(seed, 100))).cached_from == "device", "the latest used are left"


@pytest.mark.parametrize(
    "step", [StepCost(0.01, 0, 0, 0), StepCost(0, 0, 3e-3, 0), StepCost(0, 0, 0, 3e-5), StepCost(0, 0, 0, 0)]
)
def test_on_a_device_a_gap_costs_a_step_however_the_fit_explains_one(step: StepCost) -> None:
    """Steps that are all alike do not tell ubatches from rows, nor these from cells."""
    slots = Slots(cost=StepCostModel(records=True, known=step, frozen=True))
    slots.runner.stream_copy_s = 1e-3
    names = [slots.add(words(n, 100), 10 if n == 1 else 80, ignore_eos=True) for n in range(4)]
    while slots.answers[names[1]].finish_reason is None:
        slots.step()
    slots.step(2)
    assert sorted(slots.scheduler.running) == ([0, 1, 2] if any(step) else [0, 2, 3])
    slots.finish()


def test_an_answer_longer_than_others_were_goes_on_for_as_long() -> None:
    slots = DeviceSlots(sequences=12)
    for seed in range(8):
        slots.ask(words(seed, 20), 2)
    slots.runner.stream_copy_s = 0.01  # a padding row costs a tenth of that
    names = [slots.add(words(20 + n, 20), 4 if n == 1 else 80, ignore_eos=True) for n in range(3)]
    while slots.answers[names[1]].finish_reason is None:
        slots.step()
    slots.step(2)
    assert count_runs(slots.scheduler.running) == 2
    slots.step(30)
    assert count_runs(slots.scheduler.running) == 1
    slots.finish()


@pytest.mark.parametrize(("copy_s", "runs"), [(1e-4, 1), (1e9, 2)])
def test_a_whole_run_is_moved_where_no_single_move_would_close_the_gap(copy_s: float, runs: int) -> None:
    slots = DeviceSlots(sequences=12)
    slots.runner.stream_copy_s = copy_s
    counts = [8 if 3 <= seed < 8 else 90 for seed in range(12)]
    names = [slots.add(words(seed, 30), count, ignore_eos=True) for seed, count in enumerate(counts)]
    while not slots.answers or any(slots.answers[name].finish_reason is None for name in names[3:8]):
        slots.step()
    slots.step(4)
    assert len(slots.scheduler.running) == 7 and count_runs(slots.scheduler.running) == runs
    slots.finish()
    for seed, (name, count) in enumerate(zip(names, counts, strict=True)):
        assert slots.text(name) == expected_text(words(seed, 30), count, ends=False)
