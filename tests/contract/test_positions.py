"""Derived positions: they are read from KV memory; a sequence that disagrees with it fails alone."""

from __future__ import annotations

import logging

import pytest

from cllm.types import FinishReason
from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import LAYOUTS, Kind, Opened
from tests.driver.runner import feed
from tests.driver.same_text import Reference

pytestmark = pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.label)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("tampering", ["cut", "grown", "emptied"])
def test_a_tampered_sequence_fails_alone_with_both_numbers(
    kind: Kind,
    tampering: str,
    asynchronous: bool,
    opened: Opened,
    reference: Reference,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = StepDriver(opened(kind))
    driver.runner.asynchronous = driver.follows = asynchronous
    driver.submit(*(ask(f"r{seed}", words(seed, 20), 12) for seed in range(5)))
    driver.step(3)
    driver.land()
    (victim,) = [lease for lease in driver.scheduler.pool.held.values() if lease.request_id == "r1"]
    computed = driver.runner.next_position(victim.seq_id)
    match tampering:
        case "cut":
            found = driver.runner.truncate(victim.seq_id, computed - 1)
            assert found == (0 if kind.recurrent else computed - 1)
        case "grown":
            feed(driver.runner, victim.seq_id, [65])
            found = computed + 1
        case _:
            found = driver.runner.truncate(victim.seq_id, 0)
    with caplog.at_level(logging.ERROR, logger="cllm.core.scheduler"):
        answers = driver.finish()
    assert answers["r1"].finish_reason is FinishReason.ERROR
    assert answers["r1"].error_code == "position_mismatch"
    assert f"next position is {found}," in answers["r1"].error_message
    assert f"has computed {computed}" in answers["r1"].error_message
    assert any("inconsistent position" in record.message for record in caplog.records)
    for seed in (0, 2, 3, 4):
        reference.check(kind, words(seed, 20), 12, answers[f"r{seed}"])


def test_batches_submitted_ahead_change_no_text(kind: Kind, opened: Opened) -> None:
    texts = []
    for follows in (False, True):
        driver = StepDriver(opened(kind), draft_tokens=0)
        driver.runner.asynchronous, driver.follows = True, follows
        driver.submit(*(ask(f"r{seed}", words(seed, 20), 12, logprobs=0) for seed in range(4)))
        texts.append({name: answer.tokens for name, answer in driver.finish().items()})
        assert (driver.followed > 3) is follows
    assert texts[0] == texts[1]
