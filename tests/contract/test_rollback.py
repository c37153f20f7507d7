"""Whole-step rollback: a failed step is undone whole, and no text shows that it happened."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cllm.backend.base import Batch, StepResult, StepStatus
from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import LAYOUTS, NATIVE_LAYOUTS, Kind, Opened
from tests.driver.runner import Aborts, CheckedRunner, native
from tests.driver.same_text import Reference

every_kind = pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.label)
native_kinds = pytest.mark.parametrize("kind", NATIVE_LAYOUTS, ids=lambda kind: kind.label)

# Past the sliding model's window (64) and past what its memory keeps of it (256).
LENGTHS = {0: 320, 1: 20, 2: 310, 3: 65, 4: 1}


def computing(part: str, runner: CheckedRunner, batch: Batch) -> None:
    """Really compute some of a batch, sampling nothing, as a step that breaks off does."""
    rows = [row._replace(outputs=0) for row in batch.rows]
    match part:
        case "none":
            rows = []
        case "half":
            # half of the rows, and of the last of them half of its tokens
            rows = rows[: (len(rows) + 1) // 2]
            rows[-1] = rows[-1]._replace(tokens=rows[-1].tokens[: (len(rows[-1].tokens) + 1) // 2])
    if rows:
        assert runner.inner.run(Batch(tuple(rows))).status is StepStatus.DONE


def failing(
    runner: CheckedRunner, part: str, status: StepStatus, when: Callable[[int], bool]
) -> Callable[[int, Batch], StepResult | None]:
    def fail(number: int, batch: Batch) -> StepResult | None:
        if not when(number):
            return None
        computing(part, runner, batch)
        return StepResult(status, code=2 if status is StepStatus.ABORTED else -3)

    return fail


@every_kind
@pytest.mark.parametrize(
    ("part", "status"),
    [
        ("none", StepStatus.ABORTED),
        ("half", StepStatus.ABORTED),
        ("all", StepStatus.ABORTED),
        ("half", StepStatus.FAILED),
        ("all", StepStatus.FAILED),
    ],
)
def test_a_failed_step_is_rolled_back_whatever_it_had_computed(
    kind: Kind, part: str, status: StepStatus, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind))
    driver.runner.fail = failing(driver.runner, part, status, lambda number: number in (2, 7, 9, 13))
    driver.submit(*(ask(f"r{seed}", words(seed, length), 6) for seed, length in LENGTHS.items()))
    answers = driver.finish()
    for seed, length in LENGTHS.items():
        reference.check(kind, words(seed, length), 6, answers[f"r{seed}"])
    recomputed = sum(answer.recomputed for answer in answers.values())
    if kind.recurrent:
        assert recomputed > 0 or part == "none", "what cannot be cut is recomputed whole"
    elif not kind.unified:
        assert recomputed == 0, "what can be cut is not recomputed"


@native_kinds
def test_an_aborted_decode_harms_no_sequence_of_a_later_ubatch(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    # Was (recurrent): llama.cpp swaps the cells of sequences while it lays out a physical batch, and copies
    # the states inside the graph. Aborted before that, "r3" (of a later physical batch of the same decode)
    # is left with the state of another sequence at its own right position. See Scheduler._rollback_step.
    lengths = {0: 70, 1: 70, 2: 4, 3: 1}
    driver = StepDriver(opened(kind, sequences=4))
    driver.submit(*(ask(f"r{seed}", words(seed, length), 6) for seed, length in lengths.items()))
    aborts = Aborts(native(driver.runner))

    def fail(number: int, batch: Batch) -> StepResult | None:
        aborts.at = 0 if number == 1 else None
        return driver.runner.inner.run(batch)

    driver.runner.fail = fail
    with aborts.watching():
        answers = driver.finish()
    assert len(driver.runner.batches[1].rows) == 3
    for seed, length in lengths.items():
        reference.check(kind, words(seed, length), 6, answers[f"r{seed}"])


@native_kinds
@pytest.mark.parametrize("seed", range(2))
def test_a_decode_that_llama_aborts_at_any_node_leaves_every_text_right(
    kind: Kind, seed: int, opened: Opened, reference: Reference
) -> None:
    driver = StepDriver(opened(kind, sequences=4))
    source = random.Random(seed)
    lengths = {number: source.choice([1, 5, 40, 70, 310]) for number in range(10)}
    driver.submit(*(ask(f"r{number}", words(number, length), 6) for number, length in lengths.items()))
    aborts = Aborts(native(driver.runner))
    aborted: list[Batch] = []

    def fail(number: int, batch: Batch) -> StepResult | None:
        aborts.nodes = 0
        # not for ever: a recurrent model starts anew each time
        aborts.at = source.randrange(60) if number % 3 and len(aborted) < 12 else None
        result = driver.runner.inner.run(batch)
        if result.status is not StepStatus.DONE:
            assert result.status is StepStatus.ABORTED and result.code == 2 and result.rows == ()
            aborted.append(batch)
        return result

    driver.runner.fail = fail
    with aborts.watching():
        answers = driver.finish()
    assert len(aborted) > 5, "too few decodes were aborted: this proves nothing"
    for number, length in lengths.items():
        reference.check(kind, words(number, length), 6, answers[f"r{number}"])
