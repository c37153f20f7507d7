"""Same text: on every kind of runner the text under load is the text alone."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.types import FinishReason
from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import KINDS, Kind, Opened, open_runner
from tests.driver.same_text import Reference

pytestmark = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)


def test_concurrent_requests_say_what_they_say_alone(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind, sequences=4), learns=True)
    lengths = {seed: 3 + 17 * seed % 40 for seed in range(10, 14)}
    for seed, length in lengths.items():
        driver.submit(ask(f"r{seed}", words(seed, length), 24))
        driver.step(2)  # each joins while the others run
    assert len(driver.scheduler.running) == 4
    answers = driver.finish()
    for seed, length in lengths.items():
        reference.check(kind, words(seed, length), 24, answers[f"r{seed}"])


def test_prompts_longer_than_a_step_are_chunked(kind: Kind, opened: Opened, reference: Reference) -> None:
    driver = StepDriver(opened(kind, batch_tokens=32))
    lengths = {0: 200, 1: 150, 2: 31, 3: 32, 4: 33, 5: 97}
    driver.submit(*(ask(f"r{seed}", words(seed, length), 6) for seed, length in lengths.items()))
    answers = driver.finish()
    assert max(batch.token_count for batch in driver.runner.batches) == 32
    for seed, length in lengths.items():
        reference.check(kind, words(seed, length), 6, answers[f"r{seed}"])
        assert answers[f"r{seed}"].work.steps >= length / 32


def test_sixty_requests_on_three_slots_are_all_answered(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind))
    prompts = {f"r{seed}": words(seed, 1 + seed * 7 % 45) for seed in range(60)}
    driver.submit(*(ask(name, prompt, 1 + len(prompt) % 9) for name, prompt in prompts.items()))
    answers = driver.finish()
    for name, prompt in prompts.items():
        reference.check(kind, prompt, 1 + len(prompt) % 9, answers[name])
        assert len(answers[name].ids) <= 1, "no request changed its slot on the way"
    pool = driver.scheduler.pool
    assert pool.leased_total == pool.released_total == 60
    assert pool.cleared_cells_total == sum(answer.work.cells for answer in answers.values())


def test_a_full_context_ends_with_length(kind: Kind, opened: Opened, reference: Reference) -> None:
    runner = opened(kind, sequences=2, cells=1024, request_tokens=100)
    assert runner.limits.request_tokens == 100
    driver = StepDriver(runner)
    driver.submit(ask("full", words(1, 90), 1000, ignore_eos=True), ask("other", words(2, 10), 8))
    answers = driver.finish()
    assert answers["full"].finish_reason is FinishReason.LENGTH
    assert len(answers["full"].tokens) == 10
    reference.check(kind, words(2, 10), 8, answers["other"])


class Arrival(NamedTuple):
    steps_before: int
    seed: int
    length: int
    max_tokens: int
    cancelled_after: int | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 3),
        st.integers(0, 5),
        st.sampled_from([1, 2, 9, 30, 64, 65, 130]),
        st.integers(1, 8),
        st.none() | st.integers(0, 6),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=8, deadline=None)
@given(arrivals=ARRIVALS)
def test_any_arrivals_and_cancels_leave_every_text_right(
    kind: Kind, models: dict[str, Path], reference: Reference, arrivals: list[Arrival]
) -> None:
    runner = open_runner(models, kind)
    driver = StepDriver(runner)
    to_cancel: dict[str, int] = {}  # request -> steps that it may still have

    def step() -> None:
        driver.step()
        for name in [name for name, left in to_cancel.items() if left <= 0]:
            driver.scheduler.cancel(name)
            del to_cancel[name]
        to_cancel.update({name: left - 1 for name, left in to_cancel.items()})

    for number, arrival in enumerate(arrivals):
        for _ in range(arrival.steps_before):
            step()
        driver.submit(ask(f"r{number}", words(arrival.seed, arrival.length), arrival.max_tokens))
        if arrival.cancelled_after is not None:
            to_cancel[f"r{number}"] = arrival.cancelled_after
    while to_cancel:
        step()
    answers = driver.finish()
    runner.close()
    for number, arrival in enumerate(arrivals):
        answer = answers[f"r{number}"]
        if answer.finish_reason is not FinishReason.CANCELLED:
            reference.check(kind, words(arrival.seed, arrival.length), arrival.max_tokens, answer)
