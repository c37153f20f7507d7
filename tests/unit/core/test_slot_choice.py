"""Which slot a sequence gets: what is continued, copied and evicted for it."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.core.kv_cache.slot_choice import Gaps
from cllm.core.step_cost import StepCost, StepCostModel
from tests.driver.engine import StepDriver, words
from tests.driver.fake_runner import FakeRunner, expected_text
from tests.unit.core.test_prefix_cache import failing

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


def test_an_evicted_slot_keeps_what_the_next_sequence_shares_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The opening of a template is not worth a copy, and is there."""
    slots = Slots(sequences=2)
    slots.host_cache.cached_limit = slots.host_cache.limit = 0
    monkeypatch.setattr(slots.prefix_cache._transfer, "copy_s", lambda tokens: 1.0)
    names = [slots.ask(words(1, 12) + words(seed, 300)) for seed in range(2, 6)]
    assert [slots.usage(name).cached_tokens for name in names] == [0, 0, 12, 12]
    assert slots.usage(slots.ask(words(9, 300))).cached_tokens == 0
    assert slots.prefix_cache.device.evictions == 3


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


@pytest.mark.parametrize(("step", "slot"), [(EXPENSIVE_PASS, 3), (StepCost(1e-9, 1e-3, 1e-3, 0.0), 0)])
def test_a_new_sequence_runs_next_to_the_others_where_gaps_cost_more(step: StepCost, slot: int) -> None:
    slots = Slots(step=step)
    for seed in range(5):
        slots.ask(words(seed, 100))
    slots.add(next_turn(2), 300, ignore_eos=True)
    slots.step(3)
    assert list(slots.scheduler.running) == [2]
    slots.add(words(30, 100), 100, ignore_eos=True)
    slots.step(2)
    assert sorted(slots.scheduler.running) in ([2, slot], [slot, 2], [2, 5], [1, 2])
    slots.finish()


def test_a_conversation_is_not_evicted_for_a_gap_that_padding_closes() -> None:
    """On a GPU a padding row is cheap, and a conversation takes long to compute again."""
    slots = Slots(step=StepCost(6e-3, 1e-3, 1e-6, 0.0))
    slots.host_cache.cached_limit = slots.host_cache.limit = 0
    for seed in range(6):
        slots.ask(words(seed, 300))
    slots.add(words(30, 100), 100, ignore_eos=True)
    slots.add(words(31, 100), 100, ignore_eos=True)
    slots.finish()
    assert slots.prefix_cache.device.evictions == 0
    slots.add(next_turn(0), 100)
    slots.finish()


def test_of_two_conversations_the_shorter_one_is_evicted() -> None:
    slots = Slots(sequences=2, step=StepCost(1e-3, 1e-3, 1e-3, 0.0))
    slots.host_cache.cached_limit = slots.host_cache.limit = 0
    long, short = words(1, 600), words(2, 50)
    slots.ask(long)
    slots.ask(short)
    slots.ask(words(3, 50))
    assert slots.usage(slots.ask(long)).cached_tokens == 599, "it was used longer ago, but costs more"


def test_prompts_that_start_together_get_slots_by_their_length() -> None:
    slots = Slots()
    lengths = [90, 30, 70, 50]
    for number, length in enumerate(lengths):
        slots.add(words(number, length), 20, ignore_eos=True)
    slots.step()
    running = slots.scheduler.running
    assert [len(running[seq_id].request.prompt) for seq_id in sorted(running)] == sorted(lengths)
    slots.finish()


@pytest.mark.parametrize("row_s", [1e-4, math.inf])
@given(st.sets(st.integers(0, 15), min_size=1, max_size=15), st.data())
def test_a_slot_is_priced_by_the_gaps_that_are_there_with_it(
    row_s: float, running: set[int], data: st.DataObject
) -> None:
    slot = data.draw(st.sampled_from(sorted(set(range(16)) - running)))
    free = data.draw(st.lists(st.integers(0, 64), min_size=16, max_size=16))
    gaps = Gaps(6e-3, row_s, [0.0, *accumulate(map(float, free))])
    added_s, runs = gaps.added_s(slot, sorted(running))
    assert added_s == pytest.approx(gaps.total_s({*running, slot}) - gaps.total_s(running))
    assert runs in (-1, 0, 1) and gaps.total_s(range(16)) == 0.0


def test_a_gap_costs_what_padding_or_a_ubatch_takes_while_it_lasts() -> None:
    gaps = Gaps(6e-3, 1e-4, [10.0 * slot for slot in range(65)])  # each will be free for ten steps
    assert gaps.gap_s(0, 2) == pytest.approx(10 * 1e-4), "one row of padding"
    assert gaps.gap_s(0, 64) == pytest.approx(10 * 6e-3), "a ubatch takes less than 63 rows"
    assert Gaps(6e-3, 1e-4, [0.0] * 65).gap_s(0, 64) == 0, "others come at once"


class DeviceSlots(Slots):
    """A GPU: a KV stream is copied in a tenth of a millisecond."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.runner.stream_copy_s = 1e-4


def leave_gap(slots: Slots) -> list[str]:
    """Four run, and the second is done first."""
    names = [slots.add(words(n, 100), 10 if n == 1 else 80, ignore_eos=True) for n in range(4)]
    while slots.answers.get(names[1]) is None or slots.answers[names[1]].finish_reason is None:
        slots.step()
    slots.step(2)
    return names


@pytest.mark.parametrize(
    ("make", "ubatch_s", "ids"),
    [(Slots, 1.0, [0, 1, 2]), (Slots, 1e-9, [0, 2, 3]), (DeviceSlots, 1.0, [0, 1, 2])],
)
def test_a_gap_is_closed_where_it_costs_more_than_what_lies_there(
    make: type[Slots], ubatch_s: float, ids: list[int]
) -> None:
    slots = make(step=StepCost(ubatch_s, 1e-3, 1.0, 0.0))
    names = leave_gap(slots)
    assert sorted(slots.scheduler.running) == ids
    slots.finish()
    for number, name in enumerate(names):
        count = len(slots.answers[name].tokens)
        assert slots.text(name) == expected_text(words(number, 100), count, ends=False)
    assert slots.usage(slots.ask(words(1, 100))).cached_tokens == 99, "what lay in the gap was kept"


def test_a_conversation_worth_more_than_a_gap_is_left_alone() -> None:
    slots = DeviceSlots(step=StepCost(1e-4, 1e-3, 1e-4, 0.0))
    slots.host_cache.cached_limit = slots.host_cache.limit = 0
    leave_gap(slots)
    assert sorted(slots.scheduler.running) == [0, 2, 3]
    slots.finish()


@pytest.mark.parametrize(
    ("make", "call"),
    [
        *((Slots, call) for call in ("save", "restore", "truncate", "next_position")),
        *((DeviceSlots, call) for call in ("copy", "truncate", "next_position")),
    ],
)
def test_a_move_that_fails_costs_a_recompute_at_most(make: type[Slots], call: str) -> None:
    for number in range(1, 12):
        slots = make(step=StepCost(1.0, 1e-3, 1.0, 0.0))
        for n in range(4):
            slots.add(words(n, 100), 10 if n == 1 else 40, ignore_eos=True)
        while slots.answers.get("r1") is None or slots.answers["r1"].finish_reason is None:
            slots.step()
        slots.fake.fail, _ = failing(call, number)
        slots.run()
        slots.check_end()
