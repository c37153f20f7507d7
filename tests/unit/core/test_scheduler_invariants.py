"""The invariants, checked after every step of random scenarios: arrivals, cancels, failures."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.backend.base import StepStatus
from tests.driver.engine import StepDriver
from tests.driver.fake_runner import FakeRunner
from tests.driver.scenarios import SCENARIOS, STEP_FAILURES, Scenario, fail_each_call_in_turn, small_runner

pytestmark = pytest.mark.usefixtures("short_prefixes")


def make_family_prompt(value: int, max_tokens: int) -> bytes:
    """A prompt of one of three families with a common prefix, so that prefixes are shared."""
    letters = random.Random(value % 3).choices(range(97, 123), k=96)
    prompt = bytes([*letters, *b"%d" % value][-1 - value % max_tokens :])
    return bytes(letters[: len(prompt) // 2]) + prompt[len(prompt) // 2 :]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(scenario=SCENARIOS, trimmable=st.booleans(), asynchronous=st.booleans())
def test_invariants_hold_in_any_scenario(scenario: Scenario, trimmable: bool, asynchronous: bool) -> None:
    driver = StepDriver(
        scenario.runner(trimmable=trimmable),
        swap_space_mb=scenario.swap_space_mb,
        cache_mb=scenario.cache_mb,
    )
    driver.runner.asynchronous = driver.follows = asynchronous
    tier = driver.host_cache
    tier.cached_limit = min(tier.cached_limit, 700)  # bytes: two or three states
    tier.swap_limit = min(tier.swap_limit, 400)
    tier.limit = max(tier.cached_limit, tier.swap_limit)
    scenario.run(driver, make_family_prompt)


def start_busy_run(runner: FakeRunner, cache_mb: int) -> StepDriver:
    driver = StepDriver(runner, cache_mb=cache_mb)
    for number in range(6):
        driver.add(b"prompt %d " % number * (1 + number % 3), 12, ignore_eos=True)
    if cache_mb:  # these find prefixes of the first
        for number in range(3):
            driver.add(b"prompt %d " % number * (1 + number % 3) + b"more", 6, ignore_eos=True)
    return driver


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("trimmable", [False, True])
@pytest.mark.parametrize("status", [None, *STEP_FAILURES])
@pytest.mark.parametrize("cache_mb", [0, 1])
def test_one_failure_at_every_native_call_in_turn(
    cache_mb: int, status: StepStatus | None, trimmable: bool, unified: bool
) -> None:
    fail_each_call_in_turn(
        lambda fail: start_busy_run(small_runner(unified=unified, trimmable=trimmable, fail=fail), cache_mb),
        status,
    )


@pytest.mark.parametrize("unified", [False, True])
def test_the_busy_run_finds_cached_prefixes(unified: bool) -> None:
    driver = start_busy_run(small_runner(unified=unified, trimmable=True), cache_mb=1)
    driver.run()
    cached = [driver.answers[name].usage for name in ("r6", "r7", "r8")]
    assert all(usage is not None and usage.cached_tokens >= 4 for usage in cached)


def test_identical_requests_cost_exactly_the_same_from_the_second_on_where_they_are_kept() -> None:
    driver = StepDriver(FakeRunner(sequences=4), cache_mb=1)
    usages = []
    for _ in range(300):
        name = driver.add(b"the same prompt, which is longer", 16, ignore_eos=True)
        driver.run()
        usages.append(driver.usage(name))
    assert len(set(usages[1:])) == 1 and usages[1].cached_tokens == 31
