"""Padding between slots and after prompts: one ubatch instead of two, and no text shows it."""

from __future__ import annotations

import pytest

from cllm.backend.base import Batch, StepStatus
from cllm.core.step_cost import StepCost, StepCostModel
from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import DENSE, SLIDING, Kind, Opened
from tests.driver.runner import Aborts, CheckedRunner, feed, native, row
from tests.driver.same_text import Reference, assert_alike

STREAMS = (DENSE, Kind("dense", flash=False), SLIDING)
streams = pytest.mark.parametrize("kind", STREAMS, ids=lambda kind: kind.label)


def positions(runner: CheckedRunner) -> list[int]:
    return [runner.next_position(i) for i in range(runner.limits.sequences)]


@streams
def test_a_padding_row_makes_one_ubatch_of_two_and_is_gone_afterwards(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    runner = CheckedRunner(opened(kind, sequences=4))
    for seq_id in (0, 2, 3):
        feed(runner, seq_id, words(seq_id, 30 + seq_id))
    rows = tuple(row(runner, seq_id, (65,), outputs=1)._replace(logprobs=8) for seq_id in (0, 2, 3))
    with Aborts(native(runner)).watching() as aborts:
        result = runner.run(Batch(rows, padding={1: 1}))
        filled, aborts.nodes = aborts.nodes, 0
        cut = runner.run(Batch(tuple(row(runner, i, (66,), outputs=1) for i in (0, 2, 3))))
        assert (result.ubatches, cut.ubatches) == (1, 2)
        assert aborts.nodes == 2 * filled
    assert positions(runner) == [32, 0, 34, 35]
    for seq_id, outcome in zip((0, 2, 3), result.rows, strict=True):
        prompt = (*words(seq_id, 30 + seq_id), 65)
        assert_alike(kind, dict(outcome.logprobs[0].top), reference.says(kind, prompt))


@streams
def test_a_slot_that_takes_no_part_can_be_padding_and_keeps_what_it_holds(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    runner = CheckedRunner(opened(kind, sequences=3))
    known = {seq_id: list(words(seq_id, 30 + 20 * seq_id)) for seq_id in range(3)}
    for seq_id, tokens in known.items():
        feed(runner, seq_id, tokens)
    for token in range(65, 85):  # more steps than a sliding window holds
        rows = tuple(row(runner, seq_id, (token,), outputs=1) for seq_id in (0, 2))
        assert runner.run(Batch(rows, padding={1: 1})).ubatches == 1
        for seq_id in (0, 2):
            known[seq_id].append(token)
        assert positions(runner) == [len(known[seq_id]) for seq_id in range(3)]
    last = tuple(row(runner, seq_id, (90,), outputs=1)._replace(logprobs=8) for seq_id in range(3))
    for seq_id, outcome in enumerate(runner.run(Batch(last)).rows):
        assert_alike(kind, dict(outcome.logprobs[0].top), reference.says(kind, (*known[seq_id], 90)))


@pytest.mark.parametrize("kind", STREAMS[:2], ids=lambda kind: kind.label)
def test_prompts_of_unequal_length_make_one_ubatch_and_the_shorter_ones_end_where_they_did(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    runner = CheckedRunner(opened(kind, sequences=4))
    feed(runner, 1, words(7, 25))  # one goes on, beside those that begin
    prompts = {0: words(0, 12), 1: words(1, 9), 2: words(2, 12), 3: words(3, 5)}
    rows = [row(runner, each, tokens, outputs=1)._replace(logprobs=8) for each, tokens in prompts.items()]
    result = runner.run(Batch(tuple(rows), padding={1: 3, 3: 7}))
    assert result.ubatches == 1 and positions(runner) == [12, 34, 12, 5]
    for seq_id, outcome in enumerate(result.rows):
        prompt = (*words(7, 25), *prompts[1]) if seq_id == 1 else prompts[seq_id]
        assert_alike(kind, dict(outcome.logprobs[0].top), reference.says(kind, prompt))
        prompts[seq_id] = (*prompt, 65)
    for outcome, prompt in zip(
        runner.run(Batch(tuple(row(runner, i, (65,), outputs=1)._replace(logprobs=8) for i in prompts))).rows,
        prompts.values(),
        strict=True,
    ):
        assert_alike(kind, dict(outcome.logprobs[0].top), reference.says(kind, prompt))


@streams
def test_a_padding_row_is_gone_after_a_step_that_failed(kind: Kind, opened: Opened) -> None:
    runner = CheckedRunner(opened(kind, sequences=3))
    for seq_id in (0, 2):
        feed(runner, seq_id, words(seq_id, 30))
    aborts = Aborts(native(runner))
    with aborts.watching():
        for stop in (0, 5):
            aborts.nodes, aborts.at = 0, stop
            rows = tuple(row(runner, seq_id, (65,), outputs=1) for seq_id in (0, 2))
            assert runner.run(Batch(rows, padding={1: 1})).status is StepStatus.ABORTED
            assert runner.next_position(1) == 0
            for seq_id in (0, 2):
                assert runner.truncate(seq_id, 30) == 30
    refused = tuple(row(runner, seq_id, (10_000,)) for seq_id in (0, 2))
    assert runner.run(Batch(refused, padding={1: 1})).status is StepStatus.BAD_BATCH
    assert positions(runner) == [30, 0, 30]


@streams
def test_padding_in_a_slot_that_was_just_released_spoils_no_copy(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    # The copy from 1 to 2 is carried out by the very decode that puts the padding into 1.
    runner = CheckedRunner(opened(kind, sequences=3))
    prompt = words(4, 80)
    feed(runner, 0, words(0, 20))
    feed(runner, 1, prompt)
    assert runner.copy(1, 2, 80) == 80
    runner.truncate(1, 0)
    rows = (row(runner, 0, (65,), outputs=1), row(runner, 2, (66,), outputs=1)._replace(logprobs=8))
    result = runner.run(Batch(rows, padding={1: 1}))
    assert positions(runner) == [21, 0, 81]
    assert_alike(kind, dict(result.rows[1].logprobs[0].top), reference.says(kind, (*prompt, 66)))


DEAR_PASS = StepCost(ubatch=1.0, prefill_token=1e-3, row=1e-3, attended=0.0)
FREE_PASS = StepCost(ubatch=0.0, prefill_token=1e-3, row=1e-3, attended=0.0)


@pytest.mark.parametrize("kind", [Kind("fake"), *STREAMS], ids=lambda kind: kind.label)
def test_slots_with_gaps_give_the_same_texts_in_fewer_ubatches(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    lengths = {n: 3 + 7 * (n % 5) for n in range(16)}
    passes = {}
    for filling in (False, True):
        driver = StepDriver(opened(kind, sequences=5), cache_mb=64)
        driver.scheduler.budget.cost = StepCostModel(known=DEAR_PASS if filling else FREE_PASS, frozen=True)
        for number, count in lengths.items():
            driver.submit(ask(f"r{number}", words(number, 9 + number % 3), count, ignore_eos=True))
            driver.step(number % 4)
        answers = driver.finish()
        for number, count in lengths.items():
            reference.check(kind, words(number, 9 + number % 3), count, answers[f"r{number}"], endless=True)
        assert any(batch.padding for batch in driver.runner.batches) == filling
        passes[filling] = sum(answer.work.ubatches for answer in answers.values())
    assert passes[True] < passes[False] or kind.model == "fake"
