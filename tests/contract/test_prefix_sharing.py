"""Prefixes shared between running requests: computed once, and no text shows it."""

from __future__ import annotations

import pytest

from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import LAYOUTS, Kind, Opened
from tests.driver.same_text import Reference

pytestmark = pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.label)

SYSTEM = words(77, 100)


def shares(kind: Kind) -> bool:
    """Where memory cannot be cut and there is no RAM for checkpoints, nothing is shared."""
    return kind.model in ("dense", "fake", "sliding")


def test_identical_long_prompts_that_arrive_together_are_computed_once(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind, sequences=4))
    driver.submit(*(ask(f"r{n}", SYSTEM, 12, ignore_eos=True) for n in range(4)))
    answers = driver.finish()
    for answer in answers.values():
        reference.check(kind, SYSTEM, 12, answer, endless=True)
        assert answer.recomputed == 0
    cached = [answers[f"r{n}"].work.cached_tokens for n in range(4)]
    assert cached == ([0, 99, 99, 99] if shares(kind) else [0, 0, 0, 0])


def test_a_common_prefix_is_shared_and_the_rest_is_not(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind, sequences=3))
    prompts = {f"r{n}": (*SYSTEM, *words(n, 20 + n)) for n in range(9)}
    for number, (name, prompt) in enumerate(prompts.items()):
        driver.submit(ask(name, prompt, 4 + number % 5))
        driver.step(number % 3)
    answers = driver.finish()
    for number, (name, prompt) in enumerate(prompts.items()):
        reference.check(kind, prompt, 4 + number % 5, answers[name])
        # now and then a first token of the rest is the same, too
        assert answers[name].work.cached_tokens in ((0, 100, 101, 102) if shares(kind) else (0,))
    assert any(answer.work.cached_tokens for answer in answers.values()) == shares(kind)


def test_a_source_sequence_that_is_cancelled_takes_nothing_along(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind, sequences=3))
    driver.submit(ask("source", SYSTEM, 50, ignore_eos=True))
    driver.step(3)
    driver.submit(ask("heir", (*SYSTEM, 65), 10), ask("other", words(3, 80), 10))
    driver.scheduler.schedule()  # the heir has its copy, no decode has carried it out
    driver.scheduler.cancel("source")
    driver.submit(ask("newcomer", words(4, 90), 10))  # it gets the source's slot at once
    answers = driver.finish()
    assert answers["newcomer"].ids == answers["source"].ids == {0}
    assert answers["heir"].work.cached_tokens == (100 if shares(kind) else 0)
    reference.check(kind, (*SYSTEM, 65), 10, answers["heir"])
    reference.check(kind, words(3, 80), 10, answers["other"])
    reference.check(kind, words(4, 90), 10, answers["newcomer"])


def test_a_prefix_of_what_is_being_generated_is_shared_too(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind, sequences=3))
    driver.submit(ask("source", SYSTEM, 60, ignore_eos=True))
    driver.step(30)
    history = SYSTEM + driver.answers["source"].tokens[:20]
    driver.submit(ask("heir", (*history, 65, 66), 10))
    answers = driver.finish()
    assert answers["heir"].work.cached_tokens == (120 if shares(kind) else 0)
    reference.check(kind, (*history, 65, 66), 10, answers["heir"])
    reference.check(kind, SYSTEM, 60, answers["source"], endless=True)
