"""The laws hold whoever guesses, rightly or wrongly, and whatever fails while guesses are verified."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.backend.base import Drafter, StepStatus
from cllm.core.kv_cache import prefix_cache as prefix
from cllm.testing import FakeRunner, expected_text, next_token
from cllm.types import FinishReason, Request, SamplingParams, Usage
from tests.unit.core.engine_sim import (
    FORWARD_FAILURES,
    SCENARIOS,
    EngineSim,
    Scenario,
    fail_each_call_in_turn,
    small_runner,
)


@pytest.fixture(autouse=True)
def short_prefixes_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "MIN_COPY_TOKENS", 4)
    monkeypatch.setattr(prefix, "MIN_RESTORE_TOKENS", 4)


class Guesser:
    """Knows the fake model; each guess is spoilt with a certain probability, some run on past the end."""

    def __init__(self, source: random.Random, wrong: float, seeds: int) -> None:
        self._source = source
        self._wrong = wrong
        self._seeds = seeds

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        known, source = list(tokens), self._source
        seed, ends = source.randrange(self._seeds), self._seeds > 1 and source.random() < 0.8
        for _ in range(source.randint(0, most)):
            right = next_token(known, seed, ends=ends)
            known.append(ord("A") if source.random() < self._wrong else right)
        return known[len(tokens) :]


def guessers(seed: int, wrong: float, seeds: int = 1) -> Callable[[], Drafter]:
    """Makes drafters that draw from one source, so that a life is the same every time."""
    source = random.Random(seed)
    return lambda: Guesser(source, wrong, seeds)


def usage_of(life: EngineSim, name: str) -> Usage:
    usage = life.deltas[name][-1].usage
    assert usage is not None
    return usage


def of_letters(value: int, most: int) -> bytes:
    return bytes(random.Random(value % 3).choices(range(97, 123), k=1 + value % most))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(fate=SCENARIOS, wrong=st.sampled_from([0.0, 0.2, 0.5, 1.0]), luck=st.integers(0, 1000))
def test_the_laws_hold_whatever_is_guessed(fate: Scenario, wrong: float, luck: int) -> None:
    life = EngineSim(fate.runner(), fate.swap_space_mb, fate.cache_mb, guessers(luck, wrong, seeds=3))
    fate.run(life, of_letters)


def a_guessing_life(runner: FakeRunner, wrong: float, cache_mb: int = 0) -> EngineSim:
    life = EngineSim(runner, cache_mb=cache_mb, new_drafter=guessers(5, wrong))
    for number in range(5):
        life.add(b"prompt %d " % number * (1 + number % 3), 14, ignore_eos=True)
    return life


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("status", [None, *FORWARD_FAILURES])
@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0])
def test_one_failure_at_every_native_call_costs_one_request_at_most(
    wrong: float, status: StepStatus | None, unified: bool
) -> None:
    undisturbed = fail_each_call_in_turn(
        lambda fail: a_guessing_life(
            small_runner(unified=unified, trimmable=True, fail=fail), wrong, cache_mb=1
        ),
        status,
    )
    assert sum(usage_of(undisturbed, name).drafted_tokens for name in undisturbed.requests) > 0


def test_a_wrong_guess_that_cannot_be_taken_back_costs_its_request() -> None:
    runner = FakeRunner(sequences=2)
    cut: list[int] = []

    def fail(number: int, name: str) -> Exception | None:
        if name == "truncate" and not cut:
            cut.append(number)
            return RuntimeError("cannot be cut")
        return None

    runner.fail = fail
    life = EngineSim(runner, new_drafter=guessers(1, 1.0))
    names = [life.add(b"one", 30, ignore_eos=True), life.add(b"two", 30, ignore_eos=True)]
    life.run()
    life.check_end()
    assert cut and sorted(life.outcome(name).value for name in names) == ["error", "length"]


def test_right_guesses_save_steps_and_are_counted() -> None:
    life = EngineSim(FakeRunner(sequences=1), new_drafter=guessers(1, 0.0))
    name = life.add(b"hello", 60, ignore_eos=True)
    life.run()
    life.check_end()
    usage = usage_of(life, name)
    assert 0 < usage.accepted_tokens == usage.drafted_tokens
    assert usage.steps == 60 - usage.accepted_tokens < 40
    assert usage.decoded_tokens == usage.cells


def test_wrong_guesses_cost_nothing_that_counts_as_work() -> None:
    costs = []
    for wrong in (1.0, 0.0):
        life = EngineSim(FakeRunner(sequences=1), new_drafter=guessers(1, wrong))
        name = life.add(b"hello", 60, ignore_eos=True)
        life.run()
        life.check_end()
        costs.append(usage_of(life, name))
    assert costs[0].drafted_tokens > 0 == costs[0].accepted_tokens
    assert costs[0].decoded_tokens == costs[1].decoded_tokens


@pytest.mark.parametrize("stop", [0, 1, 2, 5])
def test_an_end_inside_right_guesses_leaves_no_guess_behind(stop: int) -> None:
    """What was guessed beyond a stop string is not computed text: it is no part of what the cache keeps."""
    life = EngineSim(FakeRunner(sequences=1), cache_mb=1, new_drafter=guessers(3, 0.0))
    prompt = tuple(b"a prompt that is long enough")
    text = expected_text(prompt, 40, ends=False)
    sampling = SamplingParams(ignore_eos=True)
    stopped = Request(
        id="stopped", prompt=prompt, max_tokens=40, sampling=sampling, stop=(text[stop : stop + 3],)
    )
    life.requests[stopped.id] = stopped
    life.loop.scheduler.add(stopped)
    life.run()  # the laws check that each state in RAM is that of its tokens
    usage = usage_of(life, stopped.id)
    assert life.text(stopped.id) == text[:stop] and life.outcome(stopped.id) is FinishReason.STOP
    assert usage.cells <= len(prompt) + stop + 3
    assert usage.decoded_tokens == usage.cells
    again = life.add(bytes(prompt) + text.encode(), 4, ignore_eos=True)
    life.run()
    assert usage_of(life, again).cached_tokens == usage.cells, "what it left behind can be used"


@pytest.mark.parametrize("batch_tokens", [4, 6, 8, 16])
def test_guesses_never_make_a_batch_too_large(batch_tokens: int) -> None:
    runner = FakeRunner(sequences=4, batch_tokens=batch_tokens)  # asserts the size of each batch
    life = EngineSim(runner, new_drafter=guessers(1, 0.0), draft_tokens=64)
    for number in range(6):
        life.add(b"prompt %d" % number, 30 + 9 * number, ignore_eos=True)
    life.run()
    life.check_end()
    drafted = sum(usage_of(life, name).drafted_tokens for name in life.requests)
    assert (drafted > 0) == (batch_tokens > 5)


def test_memory_that_cannot_be_cut_is_never_guessed_into() -> None:
    life = EngineSim(FakeRunner(sequences=2, trimmable=False), new_drafter=guessers(1, 0.0))
    name = life.add(b"hello", 40, ignore_eos=True)
    life.run()
    life.check_end()
    assert usage_of(life, name).drafted_tokens == 0
