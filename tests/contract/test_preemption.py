"""Preemption when KV is full: one sequence is preempted and resumed later, token for token; none fails."""

from __future__ import annotations

import pytest

from cllm.types import FinishReason
from tests.driver.engine import Answer, StepDriver, ask, words
from tests.driver.kinds import Kind, Opened
from tests.driver.runner import feed
from tests.driver.same_text import Reference

POOLED = (
    Kind("fake", unified=True),
    Kind("dense", unified=True),
    Kind("dense", unified=True, flash=False),
    Kind("sliding", unified=True),
)
pytestmark = pytest.mark.parametrize("kind", POOLED, ids=lambda kind: kind.label)

CELLS = 256
LENGTHS = {1: 70, 2: 40, 3: 64, 4: 90}  # and the answers: together three to four times the pool
GENERATED = 250 - 90


def crowd(kind: Kind, opened: Opened, swap_space_mb: int) -> StepDriver:
    """Four requests that together want four times the cells there are."""
    driver = StepDriver(
        opened(kind, sequences=4, cells=CELLS, request_tokens=CELLS), swap_space_mb=swap_space_mb
    )
    driver.submit(
        *(
            ask(f"r{seed}", words(seed, length), GENERATED, ignore_eos=True)
            for seed, length in LENGTHS.items()
        )
    )
    return driver


def check_texts(kind: Kind, reference: Reference, answers: dict[str, Answer]) -> None:
    for seed, length in LENGTHS.items():
        reference.check(kind, words(seed, length), GENERATED, answers[f"r{seed}"], endless=True)


def swap_room(driver: StepDriver) -> int:
    host = driver.scheduler.prefix_cache.host
    return host.swap_limit - host.swapped_bytes


def recomputed(answers: dict[str, Answer]) -> int:
    return sum(answer.recomputed for answer in answers.values())


def test_preempted_requests_are_swapped_in_token_for_token(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    driver = crowd(kind, opened, swap_space_mb=64)
    budget = swap_room(driver)
    answers = driver.finish()
    assert driver.runner.saves > 0, "none was preempted: this proves nothing"
    assert recomputed(answers) == 0, "what was saved is not computed again"
    assert swap_room(driver) == budget
    check_texts(kind, reference, answers)
    driver.submit(*(ask(f"later{seed}", words(seed, 30), 6) for seed in range(6)))
    driver.finish()
    for seed in range(6):
        reference.check(kind, words(seed, 30), 6, answers[f"later{seed}"])


def test_without_swap_space_they_are_recomputed(kind: Kind, opened: Opened, reference: Reference) -> None:
    driver = crowd(kind, opened, swap_space_mb=0)
    answers = driver.finish()
    assert recomputed(answers) > 0
    assert swap_room(driver) == 0
    check_texts(kind, reference, answers)
    oldest = answers["r1"]
    assert len(oldest.ids) == 1 and oldest.recomputed == 0, "it is never preempted"


def test_a_preempted_request_can_be_cancelled_and_gives_its_ram_back(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    driver = crowd(kind, opened, swap_space_mb=64)
    budget = swap_room(driver)
    while swap_room(driver) == budget and driver.scheduler.live:
        driver.step()
    preempted = driver.scheduler.waiting[0].id  # it is older than who has not begun
    driver.scheduler.cancel(preempted)
    assert swap_room(driver) == budget
    answers = driver.finish()
    assert answers.pop(preempted).finish_reason is FinishReason.CANCELLED
    for seed, length in LENGTHS.items():
        if f"r{seed}" in answers:
            reference.check(kind, words(seed, length), GENERATED, answers[f"r{seed}"], endless=True)


def test_a_lone_sequence_that_cannot_go_on_ends_with_length(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind, sequences=4, cells=CELLS, request_tokens=CELLS))
    feed(driver.runner, 3, words(9, CELLS - 20))  # cells that are never freed
    driver.filled = {3}
    driver.submit(ask("lone", words(2, 12), 100, ignore_eos=True))
    driver.step(30)
    assert not driver.scheduler.live
    answer = driver.answers["lone"]
    assert answer.finish_reason is FinishReason.LENGTH
    # 12 of the prompt and 8 of the answer are computed; the ninth is known but finds no room
    assert len(answer.tokens) == 9 and answer.work.cells == 20
    driver.runner.truncate(3, 0)
    driver.check_idle()
    reference.check(kind, words(2, 12), 9, answer, endless=True)
