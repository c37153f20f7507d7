"""Sets of LoRA adapters take turns: long ones, fair ones, and none where there is one set."""

from __future__ import annotations

import random
from itertools import groupby
from typing import NamedTuple

import pytest

from cllm.adapters import Adapter, join_key
from cllm.backend.base import Batch, Row, StepResult, StepStatus
from cllm.core.kv_cache.slot_choice import SlotChoice
from cllm.core.prefill_budget import PrefillBudget
from cllm.core.step_cost import StepCostModel
from cllm.core.step_groups import AdapterTurns
from cllm.messages import AdapterDone, LoadAdapter, Report, UnloadAdapter
from cllm.types import FinishReason
from tests.driver.engine import StepDriver, words
from tests.driver.fake_runner import FakeRunner

STEP_S, SWITCH_S = 0.01, 0.005


class Member(NamedTuple):
    adapter: str


class Turns:
    """`AdapterTurns` over sequences that never end."""

    def __init__(self, switch_s: float = SWITCH_S) -> None:
        self.runner = FakeRunner()
        self.runner.adapters["a"] = 1
        self.switch_s = switch_s
        self.budget = PrefillBudget(64, 0.25, StepCostModel(split=False))
        self.turns = AdapterTurns(self.runner, self.budget)
        self.steady: list[bool] = []
        self.computed = ""

    def run(self, keys: str, steps: int, step_s: float | dict[str, float] = STEP_S) -> str:
        """The set of each step; `_` is the base. `step_s` may differ between sets."""
        running = {slot: Member(key.strip("_")) for slot, key in enumerate(keys)}
        taken = ""
        for _ in range(steps):
            chosen = self.turns.choose(running)
            assert {each.adapter for each in chosen.values()} == {self.turns.key}
            switched = self.turns.key != self.computed
            self.computed = self.turns.key
            seconds = step_s[self.turns.key] if isinstance(step_s, dict) else step_s
            result = StepResult(StepStatus.DONE, compute_s=seconds + self.switch_s * switched)
            self.steady.append(self.turns.observe(Batch((), adapter=self.turns.key), result))
            taken += self.turns.key or "_"
        return taken


def test_one_set_has_no_turns() -> None:
    turns = Turns()
    running = {0: Member("a"), 1: Member("a")}
    assert turns.turns.choose(running) is running and turns.budget.sets == 1
    assert turns.run("aa", 3) == "aaa" and not turns.turns.due
    assert turns.steady == [False, True, True]


def test_without_adapters_no_sequence_is_looked_at() -> None:
    turns = Turns()
    turns.runner.adapters.clear()
    running: dict[int, Member] = {0: None}  # type: ignore[dict-item]
    assert turns.turns.choose(running) is running


def test_a_turn_takes_ten_switches_of_steps() -> None:
    turns = Turns()
    turns.run("_ab", 2)  # not measured yet: no longer than it takes to measure it
    assert turns.run("_ab", 15) == "a" * 5 + "b" * 5 + "_" * 5
    assert turns.budget.sets == 3 and turns.turns.switch_s == pytest.approx(SWITCH_S)
    assert turns.steady.count(False) == 3  # the first step of each turn but that of the base


def test_noise_makes_no_switch_long() -> None:
    turns = Turns()
    turns.run("ab", 40)
    turns.switch_s = 0.2
    turns.run("ab", 6)
    assert turns.turns.switch_s == pytest.approx(SWITCH_S)


def test_turns_are_measured_again_after_a_free_switch() -> None:
    turns = Turns(switch_s=0.0)
    turns.run("ab", 4)
    turns.switch_s = SWITCH_S
    turns.run("ab", 40)
    assert turns.turns.switch_s == pytest.approx(SWITCH_S)


def test_a_turn_is_no_longer_than_others_may_wait() -> None:
    turns = Turns(switch_s=0.05)
    turns.run("_ab", 40)
    lengths = [len(list(steps)) for _, steps in groupby(turns.run("_ab", 100))]
    assert set(lengths[1:-1]) == {8}  # half of what two others may wait, and not ten switches


def test_steps_of_other_sizes_measure_no_switch() -> None:
    turns = Turns()
    for number, key in enumerate("abab"):
        for tokens in (9, 1 + number):
            row = Row(0, 0, (0,) * tokens, 1, None)
            turns.turns.observe(Batch((row,), adapter=key), StepResult(StepStatus.DONE, compute_s=tokens))
    assert turns.turns.switch_s == 0


def test_a_gpu_is_measured_until_it_has_a_recording() -> None:
    turns = Turns()
    turns.runner.asynchronous = True
    for key in "ab":
        for extra in (3, 1, 1, 1, 0, 0):
            turns.turns.observe(Batch((), adapter=key), StepResult(StepStatus.DONE, compute_s=1 + extra))
    assert turns.turns.switch_s == 6


def test_a_turn_ends_after_a_step_that_is_as_long() -> None:
    assert Turns().run("ab", 6, step_s=1.0) == "ababab"


def test_turns_are_shared_by_time() -> None:
    turns = Turns()
    step_s = {"a": 0.2, "b": 0.01, "c": 0.02}
    taken = turns.run("abc", 300, step_s)
    spent = {key: taken.count(key) * each_s for key, each_s in step_s.items()}
    assert max(spent.values()) < 1.5 * min(spent.values())


def test_a_set_without_sequences_gives_its_turn_up() -> None:
    turns = Turns()
    assert turns.run("ab", 1) == "a"
    assert turns.run("b", 1) == "b"
    assert turns.run("cb", 1) == "b"


def test_a_set_that_comes_has_saved_up_no_time() -> None:
    turns = Turns()
    turns.run("ab", 1000)
    assert turns.run("abc", 300).count("c") in range(95, 106)


# On the scheduler ------------------------------------------------------------------------------------


def start() -> tuple[StepDriver, list[str]]:
    driver = StepDriver(FakeRunner(sequences=6), cache_mb=8)
    return driver, ["", *(driver.load_adapter(name) for name in "abc")]


def test_each_set_gets_its_own_text() -> None:
    driver, keys = start()
    names = [driver.add(words(1, 30), 20, adapter=key, seed=3) for key in keys]
    answers = driver.finish()
    assert len({answers[name].text for name in names}) == len(keys)
    assert all(answers[name].text == driver.expected(name) for name in names)


def test_a_step_computes_one_set() -> None:
    driver, keys = start()
    for key in keys:
        driver.add(words(2, 12), 8, adapter=key, ignore_eos=True)
    driver.finish()
    assert {batch.adapter for batch in driver.runner.batches} == set(keys)
    assert driver.fake.switches >= len(keys) - 1


def test_a_long_turn_has_few_switches() -> None:
    driver, keys = start()
    driver.fake.switch_s, driver.fake.step_s = 0.002, 0.001
    for key in keys[:2]:
        driver.add(words(2, 12), 60, adapter=key, ignore_eos=True)
    driver.finish()
    assert driver.fake.switches <= 12


def test_prefixes_of_one_set_are_never_given_to_another() -> None:
    driver, keys = start()
    for key in (*keys, *keys):
        driver.add(words(3, 40), 4, adapter=key)
        driver.finish()
    cached = [driver.usage(f"r{number}").cached_tokens for number in range(8)]
    assert cached[:4] == [0] * 4 and min(cached[4:]) >= 38
    for number in range(8):
        driver.check_answer(f"r{number}")


def test_two_scales_of_an_adapter_are_two_sets() -> None:
    driver, _ = start()
    keys = [driver.load_adapter("a", scale) for scale in (1.0, 0.5)]
    for key in keys:
        driver.add(words(3, 40), 4, adapter=key)
        driver.finish()
    assert driver.usage("r1").cached_tokens == 0 and keys[0] != keys[1]


def test_unknown_adapters_are_refused() -> None:
    driver, _ = start()
    driver.add(words(3, 9), 4, adapter="ffff:1.0")
    driver.run()
    assert driver.answers["r0"].error_code == "adapter_refused"


@pytest.mark.parametrize("seed", range(6))
def test_mixed_sets_under_preemption_get_their_own_text(seed: int) -> None:
    source = random.Random(seed)
    unified = bool(seed % 2)
    runner = FakeRunner(sequences=6, cells=400 if unified else 6 * 96, unified=unified, request_tokens=96)
    driver = StepDriver(runner, cache_mb=1, swap_space_mb=1)
    driver.follows = runner.asynchronous = seed > 3
    driver.kv_runs_out = unified
    keys = ["", *(driver.load_adapter(name) for name in "abc")]
    for _ in range(60):
        begin = words(source.randrange(3), source.randint(8, 30))
        prompt = (*begin, *words(source.randrange(99), source.randint(1, 20)))
        border = source.choice([0, 0, len(begin)])
        driver.add(prompt, source.randint(1, 30), adapter=source.choice(keys), adapter_from=border)
        driver.step(source.randint(0, 6))
        if source.random() < 0.1:
            driver.cancel(source.choice(list(driver.requests)))
    driver.run()
    for name in driver.requests:
        driver.check_answer(name)


def test_sequences_of_a_set_get_neighbouring_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, keys = start()
    seen: list[set[int]] = []
    choose = SlotChoice.choose

    def watch(self: SlotChoice, sequence, running, *given, **named):  # type: ignore[no-untyped-def]
        seen.append(set(running))
        return choose(self, sequence, running, *given, **named)

    monkeypatch.setattr(SlotChoice, "choose", watch)
    for key in (keys[1], keys[2], keys[1]):
        driver.add(words(5, 10), 30, adapter=key, ignore_eos=True)
        driver.step()
    slots = {one.id: slot for slot, one in driver.scheduler.running.items()}
    assert seen == [set(), set(), {slots["r0"]}]
    driver.finish()


# aLoRA -----------------------------------------------------------------------------------------------


def test_aloras_share_the_prefix_of_the_base() -> None:
    driver, keys = start()
    prefix = words(7, 50)
    for key in keys[1:]:
        driver.add((*prefix, *words(8, 6)), 6, adapter=key, adapter_from=len(prefix))
        driver.finish()
    driver.add((*prefix, *words(8, 6)), 6)
    driver.finish()
    assert [driver.usage(f"r{number}").cached_tokens for number in range(4)] == [0, 50, 50, 50]
    for number in range(4):
        driver.check_answer(f"r{number}")


def test_a_chunk_ends_where_an_alora_begins() -> None:
    driver, keys = start()
    driver.add(words(7, 30), 4, adapter=keys[1], adapter_from=20)
    driver.finish()
    assert [(batch.adapter, batch.token_count) for batch in driver.runner.batches[:2]] == [
        ("", 20),
        (keys[1], 10),
    ]
    driver.check_answer("r0")


# Loading ---------------------------------------------------------------------------------------------


def call(driver: StepDriver, command: LoadAdapter | UnloadAdapter) -> AdapterDone:
    reports: list[Report] = []
    driver.core._adapter_calls._emit = reports.append
    driver.core._handle(command)
    driver.core._adapter_calls.advance()
    (report,) = reports
    assert isinstance(report, AdapterDone)
    return report


def test_an_adapter_in_use_is_not_unloaded() -> None:
    driver, _ = start()
    adapter = driver.runner.check_adapter(Adapter(name="a", file="a.gguf"))
    driver.add(words(1, 9), 20, adapter=join_key([(adapter.digest, 1.0)]))
    driver.step()
    failure = call(driver, UnloadAdapter(1, adapter)).failure
    assert failure is not None and failure.code == "adapter_busy"
    driver.finish()
    assert call(driver, UnloadAdapter(2, adapter)).failure is None
    assert adapter.digest not in driver.fake.adapters
    assert driver.outcome("r0") in (FinishReason.LENGTH, FinishReason.STOP)


def test_an_adapter_loads_beside_a_stream() -> None:
    driver, _ = start()
    driver.add(words(1, 9), 20, ignore_eos=True)
    driver.step()
    done = call(driver, LoadAdapter(1, Adapter(name="d", file="d.gguf")))
    assert done.failure is None and done.adapter.digest in driver.fake.adapters
    refused = call(driver, LoadAdapter(2, Adapter(name="e", file="refused.gguf")))
    assert refused.failure is not None and refused.failure.code == "adapter_refused"
    driver.finish()
