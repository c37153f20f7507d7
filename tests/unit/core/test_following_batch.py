"""The following batch: submitted before the last result is processed, where nothing else is due."""

from __future__ import annotations

import pytest

from cllm.backend.base import Batch, StepResult, StepStatus
from cllm.core.scheduler import FollowingBatch
from cllm.core.spec_decode import SpecDecodePolicy
from cllm.messages import Cancel, Stop
from cllm.types import FinishReason
from tests.driver.engine import StepDriver, ask
from tests.driver.fake_runner import FakeRunner, expected_text

TOKENS = 20


def start(sequences: int = 3, draft_tokens: int = 0) -> StepDriver:
    driver = StepDriver(FakeRunner(sequences=sequences, cells=sequences * 128), draft_tokens=draft_tokens)
    driver.runner.asynchronous = driver.follows = True
    return driver


def test_rows_that_go_on_are_submitted_ahead() -> None:
    driver = start()
    for number in range(3):
        driver.add(b"prompt %d" % number, TOKENS, ignore_eos=True)
    answers = driver.finish()
    for number in range(3):
        expected = expected_text(b"prompt %d" % number, TOKENS, ends=False)
        assert answers[f"r{number}"].text == expected
        assert answers[f"r{number}"].finish_reason is FinishReason.LENGTH
    # Not the step with the prompts' ends, and not the last.
    assert TOKENS - 4 <= driver.followed <= TOKENS - 1


def test_no_step_is_computed_for_nothing() -> None:
    """An answer that ends at an end token, by its length or a stop string has no row in the next step."""
    driver = start(4)
    driver.add(b"ends by itself", 60)
    driver.add(b"by its length", 7, ignore_eos=True)
    whole = expected_text(b"by a stop", 30, ends=False)
    driver.add(b"by a stop", 30, stop=(whole[12],), ignore_eos=True)
    driver.add(b"the last", 40, ignore_eos=True)
    answers = driver.finish()
    assert driver.followed
    assert answers["r2"].text == whole[: whole.index(whole[12])]
    for answer in answers.values():
        assert answer.recomputed == 0


@pytest.mark.parametrize(
    "fields", [{"logprobs": 2}, {"stop": ("never",)}, {"min_tokens": TOKENS}, {"stop_token_ids": (7,)}]
)
def test_a_row_that_wants_more_is_never_submitted_ahead(fields: dict[str, object]) -> None:
    driver = start()
    driver.add(b"plain", TOKENS, ignore_eos=True)
    driver.add(b"not plain", TOKENS, ignore_eos=True, **fields)
    driver.finish()
    assert driver.followed == 0


def test_what_waits_is_admitted_as_soon_as_there_is_a_slot() -> None:
    driver = start(1)
    driver.add(b"first", 6, ignore_eos=True)
    driver.add(b"second", 6, ignore_eos=True)
    answers = driver.finish()
    assert answers["r1"].text == expected_text(b"second", 6, ends=False)
    assert driver.followed  # the second one alone


def test_now_and_then_a_step_is_scheduled() -> None:
    driver = start(1)
    driver.add(b"long", 100, ignore_eos=True)
    streaks, streak = [], 0
    while not driver.core.idle:
        before = driver.followed
        driver.step()
        streak = streak + 1 if driver.followed > before else 0
        streaks.append(streak)
    assert max(streaks) == FollowingBatch.EVERY - 1


@pytest.mark.parametrize("status", [StepStatus.FAILED, StepStatus.NO_ROOM, StepStatus.ABORTED, None])
def test_a_batch_submitted_ahead_may_fail(status: StepStatus | None) -> None:
    """None: its submit raises."""
    collects = submits = 0

    def fail(number: int, name: str) -> StepStatus | None:
        nonlocal collects
        collects += name == "collect"
        return status if name == "collect" and collects == 5 else None

    driver = StepDriver(FakeRunner(sequences=2, cells=256, fail=fail), draft_tokens=0)
    driver.runner.asynchronous = driver.follows = True
    submit = driver.runner.submit

    def submit_or_raise(batch: Batch) -> None:
        nonlocal submits
        submits += 1
        if submits == 5 and status is None:
            raise RuntimeError("broken")
        submit(batch)

    driver.runner.submit = submit_or_raise  # type: ignore[method-assign]
    driver.add(b"one", TOKENS, ignore_eos=True)
    driver.add(b"other", TOKENS, ignore_eos=True)
    driver.step(4)
    assert driver.core._ahead is not None
    answers = driver.finish()
    assert collects > 5 and submits > 5
    assert answers["r0"].text == expected_text(b"one", TOKENS, ends=False)
    assert answers["r1"].text == expected_text(b"other", TOKENS, ends=False)


def test_a_sequence_whose_position_cannot_be_read_fails_alone() -> None:
    driver = start(2)
    driver.add(b"one", TOKENS, ignore_eos=True)
    driver.add(b"other", TOKENS, ignore_eos=True)
    driver.step(4)
    assert driver.core._ahead is not None
    next_position, failures = driver.runner.next_position, 2  # here, and when the next step is scheduled

    def fail_for_one(seq_id: int) -> int:
        nonlocal failures
        if seq_id == 0 and failures:
            failures -= 1
            raise RuntimeError("broken")
        return int(next_position(seq_id))

    driver.runner.next_position = fail_for_one
    driver.core.step(follow=True)
    assert driver.core._ahead is None and failures == 1
    answers = driver.finish()
    assert not failures
    assert answers["r0"].finish_reason is FinishReason.ERROR
    assert answers["r1"].text == expected_text(b"other", TOKENS, ends=False)


def test_drafts_are_still_looked_for() -> None:
    """Where looking for drafts costs little of a step, each step is scheduled."""
    policy = SpecDecodePolicy(4)
    driver = start(1, draft_tokens=4)
    driver.add(b"abcabcabc", TOKENS, ignore_eos=True)
    driver.finish()
    assert driver.followed == 0
    assert policy.looks()
    assert not SpecDecodePolicy(0).looks()


def test_commands_wait_until_nothing_is_submitted() -> None:
    """In the engine's own loop a cancel is handled after the step that was submitted ahead."""
    driver = start(2)
    core, update = driver.core, driver.scheduler.update
    rows: list[int] = []  # of each step

    def update_and_post(batch: Batch, result: StepResult) -> None:
        update(batch, result)
        rows.append(len(batch.rows))
        if core._ahead is not None and rows.count(2) == 4:
            core.post(Cancel("r0"))
        if rows.count(1) == 3:
            core.post(Stop())

    driver.scheduler.update = update_and_post  # type: ignore[method-assign]
    for number in range(2):
        driver.enqueue(ask(f"r{number}", tuple(b"prompt"), 100, logprobs=0, ignore_eos=True))
    core.run()
    assert driver.answers["r0"].finish_reason is FinishReason.CANCELLED
    assert driver.answers["r0"].text == expected_text(b"prompt", 5, ends=False)
    assert rows.count(2) == 5  # one of them submitted before the cancel
    assert core._ahead is None
