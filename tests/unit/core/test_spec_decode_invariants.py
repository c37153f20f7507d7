"""The invariants hold for right and wrong drafts, and for any failure while drafts are verified."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.backend.base import Drafter, StepStatus
from cllm.testing.scripted import next_token
from cllm.types import FinishReason, Prompt, Request, SamplingParams
from tests.driver.engine import StepDriver
from tests.driver.fake_runner import FakeRunner, expected_text
from tests.driver.scenarios import SCENARIOS, STEP_FAILURES, Scenario, fail_each_call_in_turn, small_runner

pytestmark = pytest.mark.usefixtures("short_prefixes")


class FlawedDrafter:
    """Knows the fake model; each draft is wrong with a certain probability, some run on past the end."""

    def __init__(self, source: random.Random, wrong: float, seeds: int) -> None:
        self._source = source
        self._wrong = wrong
        self._seeds = seeds

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        known, source = list(tokens), self._source
        seed, ends = source.randrange(self._seeds), self._seeds > 1 and source.random() < 0.8
        for _ in range(source.randint(0, max_tokens)):
            right = next_token(known, seed, ends=ends)
            known.append(ord("A") if source.random() < self._wrong else right)
        return known[len(tokens) :]


def flawed_drafters(seed: int, wrong: float, seeds: int = 1) -> Callable[[], Drafter]:
    """Makes drafters that draw from one source, so that a driver is the same every time."""
    source = random.Random(seed)
    return lambda: FlawedDrafter(source, wrong, seeds)


def make_prompt(value: int, max_tokens: int) -> bytes:
    return bytes(random.Random(value % 3).choices(range(97, 123), k=1 + value % max_tokens))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(scenario=SCENARIOS, wrong=st.sampled_from([0.0, 0.2, 0.5, 1.0]), luck=st.integers(0, 1000))
def test_invariants_hold_whatever_is_drafted(scenario: Scenario, wrong: float, luck: int) -> None:
    driver = StepDriver(
        scenario.runner(),
        swap_space_mb=scenario.swap_space_mb,
        cache_mb=scenario.cache_mb,
        new_drafter=flawed_drafters(luck, wrong, seeds=3),
    )
    scenario.run(driver, make_prompt)


def start_drafting_run(runner: FakeRunner, wrong: float, cache_mb: int = 0) -> StepDriver:
    driver = StepDriver(runner, cache_mb=cache_mb, new_drafter=flawed_drafters(5, wrong))
    for number in range(5):
        driver.add(b"prompt %d " % number * (1 + number % 3), 14, ignore_eos=True)
    return driver


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("status", [None, *STEP_FAILURES])
@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
def test_one_failure_at_every_native_call_costs_one_request_at_most(
    wrong: float, status: StepStatus | None, unified: bool
) -> None:
    undisturbed = fail_each_call_in_turn(
        lambda fail: start_drafting_run(
            small_runner(unified=unified, trimmable=True, fail=fail), wrong, cache_mb=1
        ),
        status,
    )
    assert sum(undisturbed.usage(name).drafted_tokens for name in undisturbed.requests) > 0


def test_a_rejected_draft_that_cannot_be_rolled_back_costs_its_request() -> None:
    runner = FakeRunner(sequences=2)
    cut: list[int] = []

    def fail(number: int, name: str) -> Exception | None:
        if name == "truncate" and not cut:
            cut.append(number)
            return RuntimeError("cannot be cut")
        return None

    runner.fail = fail
    driver = StepDriver(runner, new_drafter=flawed_drafters(1, 1.0))
    names = [driver.add(b"one", 30, ignore_eos=True), driver.add(b"two", 30, ignore_eos=True)]
    driver.run()
    driver.check_end()
    assert cut and sorted(driver.outcome(name).value for name in names) == ["error", "length"]


def test_accepted_drafts_save_steps_and_are_counted() -> None:
    driver = StepDriver(FakeRunner(sequences=1), new_drafter=flawed_drafters(1, 0.0))
    name = driver.add(b"hello", 60, ignore_eos=True)
    driver.run()
    driver.check_end()
    usage = driver.usage(name)
    assert 0 < usage.accepted_tokens == usage.drafted_tokens
    assert usage.steps == 60 - usage.accepted_tokens < 40
    assert usage.decoded_tokens == usage.cells


def test_rejected_drafts_cost_nothing_that_counts_as_work() -> None:
    costs = []
    for wrong in (1.0, 0.0):
        driver = StepDriver(FakeRunner(sequences=1), new_drafter=flawed_drafters(3, wrong))
        name = driver.add(b"hello", 60, ignore_eos=True)
        driver.run()
        driver.check_end()
        costs.append(driver.usage(name))
    assert costs[0].drafted_tokens > 0 == costs[0].accepted_tokens
    assert costs[0].decoded_tokens == costs[1].decoded_tokens


@pytest.mark.parametrize("stop", [0, 1, 2, 5])
def test_an_end_inside_accepted_drafts_leaves_no_draft_behind(stop: int) -> None:
    """Drafts beyond a stop string are not computed text: the prefix cache does not keep them."""
    driver = StepDriver(FakeRunner(sequences=1), cache_mb=1, new_drafter=flawed_drafters(3, 0.0))
    prompt = tuple(b"a prompt that is long enough")
    text = expected_text(prompt, 40, ends=False)
    sampling = SamplingParams(ignore_eos=True)
    stopped = Request(
        id="stopped", prompt=Prompt(prompt), max_tokens=40, sampling=sampling, stop=(text[stop : stop + 3],)
    )
    driver.submit(stopped)
    driver.run()  # the driver checks that each state in RAM is that of its tokens
    usage = driver.usage(stopped.id)
    assert driver.text(stopped.id) == text[:stop] and driver.outcome(stopped.id) is FinishReason.STOP
    assert usage.cells <= len(prompt) + stop + 3
    assert usage.decoded_tokens == usage.cells
    again = driver.add(bytes(prompt) + text.encode(), 4, ignore_eos=True)
    driver.run()
    assert driver.usage(again).cached_tokens == usage.cells, "what it left behind can be used"


@pytest.mark.parametrize("batch_tokens", [4, 6, 8, 16])
def test_drafts_never_make_a_batch_too_large(batch_tokens: int) -> None:
    runner = FakeRunner(sequences=4, batch_tokens=batch_tokens)  # asserts the size of each batch
    driver = StepDriver(runner, new_drafter=flawed_drafters(1, 0.0), draft_tokens=64)
    for number in range(6):
        driver.add(b"prompt %d" % number, 30 + 9 * number, ignore_eos=True)
    driver.run()
    driver.check_end()
    drafted = sum(driver.usage(name).drafted_tokens for name in driver.requests)
    assert (drafted > 0) == (batch_tokens > 5)
