"""Holes filled with a token that is thrown away: one pass instead of two, and nobody's text shows it."""

from __future__ import annotations

import pytest

from cllm.backend.base import Batch, StepResult, StepStatus
from cllm.core.step_cost import StepCost
from tests.contract.alone import Reference, assert_alike
from tests.contract.harness import Aborts, Drive, StoppedClock, Watched, ask, feed, native, row, words
from tests.contract.kinds import DENSE, SLIDING, Kind, Opened

STREAMS = (DENSE, Kind("dense", flash=False), SLIDING)
streams = pytest.mark.parametrize("kind", STREAMS, ids=lambda kind: kind.label)


def positions(backend: Watched) -> list[int]:
    return [backend.next_position(i) for i in range(backend.limits.sequences)]


@streams
def test_a_filler_makes_one_pass_of_two_and_is_gone_afterwards(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    backend = Watched(opened(kind, sequences=4))
    for sequence_id in (0, 2, 3):
        feed(backend, sequence_id, words(sequence_id, 30 + sequence_id))
    rows = tuple(
        row(backend, sequence_id, (65,), outputs=1)._replace(logprobs=8) for sequence_id in (0, 2, 3)
    )
    with Aborts(native(backend)).watching() as aborts:
        result = backend.forward(Batch(rows, fillers=(1,)))
        filled, aborts.nodes = aborts.nodes, 0
        cut = backend.forward(Batch(tuple(row(backend, i, (66,), outputs=1) for i in (0, 2, 3))))
        assert (result.ubatches, cut.ubatches) == (1, 2)
        assert aborts.nodes == 2 * filled
    assert positions(backend) == [32, 0, 34, 35]
    for sequence_id, outcome in zip((0, 2, 3), result.rows, strict=True):
        prompt = (*words(sequence_id, 30 + sequence_id), 65)
        assert_alike(kind, dict(outcome.logprobs[0].top), reference.says(kind, prompt))


@streams
def test_a_filler_is_gone_after_a_step_that_failed(kind: Kind, opened: Opened) -> None:
    backend = Watched(opened(kind, sequences=3))
    for sequence_id in (0, 2):
        feed(backend, sequence_id, words(sequence_id, 30))
    aborts = Aborts(native(backend))
    with aborts.watching():
        for stop in (0, 5):
            aborts.nodes, aborts.at = 0, stop
            rows = tuple(row(backend, sequence_id, (65,), outputs=1) for sequence_id in (0, 2))
            assert backend.forward(Batch(rows, fillers=(1,))).status is StepStatus.ABORTED
            assert backend.next_position(1) == 0
            for sequence_id in (0, 2):
                assert backend.truncate(sequence_id, 30) == 30
    refused = tuple(row(backend, sequence_id, (10_000,)) for sequence_id in (0, 2))
    assert backend.forward(Batch(refused, fillers=(1,))).status is StepStatus.BAD_BATCH
    assert positions(backend) == [30, 0, 30]


@streams
def test_a_filler_in_an_id_that_was_just_given_up_spoils_no_copy(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    # The copy from 1 to 2 is carried out by the very decode that puts the filler into 1.
    backend = Watched(opened(kind, sequences=3))
    prompt = words(4, 80)
    feed(backend, 0, words(0, 20))
    feed(backend, 1, prompt)
    assert backend.copy(1, 2, 80) == 80
    backend.truncate(1, 0)
    rows = (row(backend, 0, (65,), outputs=1), row(backend, 2, (66,), outputs=1)._replace(logprobs=8))
    result = backend.forward(Batch(rows, fillers=(1,)))
    assert positions(backend) == [21, 0, 81]
    assert_alike(kind, dict(result.rows[1].logprobs[0].top), reference.says(kind, (*prompt, 66)))


DEAR_PASS = StepCost(ubatch=1.0, prefill_token=1e-3, row=1e-3, attended=0.0)
FREE_PASS = StepCost(ubatch=0.0, prefill_token=1e-3, row=1e-3, attended=0.0)


@pytest.mark.parametrize("kind", [Kind("fake"), *STREAMS], ids=lambda kind: kind.label)
def test_a_crowd_with_holes_says_the_same_in_fewer_passes(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    lengths = {n: 3 + 7 * (n % 5) for n in range(16)}
    passes = {}
    for filling in (False, True):
        drive = Drive(opened(kind, sequences=5), cache_mb=64)
        drive.scheduler.budget.clock = StoppedClock(DEAR_PASS if filling else FREE_PASS)
        for number, count in lengths.items():
            drive.submit(ask(f"r{number}", words(number, 9 + number % 3), count, ignore_eos=True))
            drive.step(number % 4)
        answers = drive.finish()
        for number, count in lengths.items():
            reference.check(kind, words(number, 9 + number % 3), count, answers[f"r{number}"], endless=True)
        assert any(batch.fillers for batch in drive.backend.batches) == filling
        passes[filling] = sum(answer.work.ubatches for answer in answers.values())
    assert passes[True] < passes[False] or kind.model == "fake"


def test_a_failed_step_with_fillers_is_undone_whole(opened: Opened, reference: Reference) -> None:
    drive = Drive(opened(DENSE, sequences=4))
    drive.scheduler.budget.clock = StoppedClock(DEAR_PASS)
    failed: list[int] = []

    def fail(number: int, batch: Batch) -> StepResult | None:
        if not batch.fillers or len(failed) > 3 or number % 2:
            return None
        failed.append(number)
        drive.backend.inner.forward(batch)
        return StepResult(StepStatus.FAILED, code=-3)

    drive.backend.fail = fail
    counts = (20, 3, 3, 20)
    drive.submit(*(ask(f"r{n}", words(n, 9), count, ignore_eos=True) for n, count in enumerate(counts)))
    answers = drive.finish()
    assert failed
    for number, count in enumerate(counts):
        reference.check(DENSE, words(number, 9), count, answers[f"r{number}"], endless=True)
