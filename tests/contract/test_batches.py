"""Batches on every runner: their rows, their refusals, and the memory after those."""

from __future__ import annotations

import pytest

from cllm.backend.base import Batch, Row, StepStatus
from tests.driver.engine import words
from tests.driver.kinds import DENSE, KINDS, NATIVE, Kind, Opened
from tests.driver.runner import GREEDY, feed, native, row, says
from tests.driver.same_text import Reference, assert_alike

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
native_kinds = pytest.mark.parametrize("kind", NATIVE, ids=lambda kind: kind.label)


@every_kind
def test_rows_together_say_what_they_say_apart(kind: Kind, opened: Opened, reference: Reference) -> None:
    runner = opened(kind)
    prompts = {0: words(0, 9), 1: words(1, 30), 2: words(2, 9)}
    rows = tuple(row(runner, i, prompt, 1)._replace(logprobs=8) for i, prompt in prompts.items())
    result = runner.run(Batch(rows))
    assert result.status is StepStatus.DONE and len(result.rows) == 3
    for i, prompt in prompts.items():
        assert_alike(kind, dict(result.rows[i].logprobs[0].top), reference.says(kind, prompt))


@every_kind
def test_a_row_that_wants_no_output_gets_none(kind: Kind, opened: Opened) -> None:
    runner = opened(kind)
    rows = (row(runner, 0, (65, 66), 0), row(runner, 1, (65, 66), 1), row(runner, 2, (65,), 0))
    result = runner.run(Batch(rows))
    assert [len(outcome.tokens) for outcome in result.rows] == [0, 1, 0]
    assert all(outcome.logprobs == () for outcome in result.rows)


@every_kind
def test_a_batch_over_the_limit_raises_and_nothing_is_computed(kind: Kind, opened: Opened) -> None:
    runner = opened(kind, batch_tokens=32)
    assert runner.limits.batch_tokens == 32
    with pytest.raises((ValueError, AssertionError)):
        runner.run(Batch((row(runner, 0, words(0, 33)),)))
    with pytest.raises((ValueError, AssertionError)):
        runner.run(Batch((row(runner, 0, words(0, 16)), row(runner, 1, words(1, 17)))))
    assert [runner.next_position(i) for i in range(3)] == [0, 0, 0]
    assert runner.run(Batch((row(runner, 0, words(0, 32)),))).status is StepStatus.DONE


# Was (llama): neither order nor repetition nor range of ids is checked. Repeated ids get each other's
# results, and an id past the end reads beyond NativeBatch's table of ids.
@pytest.mark.parametrize("kind", [Kind("fake"), DENSE], ids=lambda kind: kind.label)
@pytest.mark.parametrize("ids", [(1, 0), (0, 2, 1), (0, 0), (0, 3)])
def test_rows_out_of_order_repeated_or_out_of_range_are_the_callers_bug(
    kind: Kind, ids: tuple[int, ...], opened: Opened
) -> None:
    runner = opened(kind)
    sampler = runner.create_sampler(GREEDY)
    with pytest.raises((ValueError, AssertionError, IndexError)):
        runner.run(Batch(tuple(Row(i, 0, (65,), 1, sampler) for i in ids)))
    assert [runner.next_position(i) for i in range(3)] == [0, 0, 0]


@native_kinds
@pytest.mark.parametrize("defect", ["no such token", "negative token", "gap", "repeated position"])
def test_a_refused_batch_leaves_the_memory_as_it_was(
    kind: Kind, defect: str, opened: Opened, reference: Reference
) -> None:
    runner = opened(kind)
    feed(runner, 0, words(0, 20))
    feed(runner, 1, words(1, 20))
    good, bad = row(runner, 0, (65,), 1), row(runner, 1, (65,), 1)
    match defect:
        case "no such token":
            bad = bad._replace(tokens=(runner.vocabulary.size,))
        case "negative token":
            bad = bad._replace(tokens=(-1,))
        case "gap":
            bad = bad._replace(position=bad.position + 1)
        case _:
            bad = bad._replace(position=bad.position - 1)
    result = runner.run(Batch((good, bad)))
    assert result.status is StepStatus.BAD_BATCH and result.rows == ()
    for i in range(2):
        assert runner.next_position(i) == 20
        assert_alike(kind, says(runner, i, 65), reference.says(kind, (*words(i, 20), 65)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.unified and not kind.recurrent])
def test_no_room_leaves_the_memory_as_it_was(kind: Kind, opened: Opened, reference: Reference) -> None:
    runner = opened(kind, sequences=3, cells=256, request_tokens=256)
    prompts = {0: words(0, 150), 1: words(1, 90)}
    for i, prompt in prompts.items():
        feed(runner, i, prompt)
    result = runner.run(Batch((row(runner, 0, (65,), 1), row(runner, 2, words(2, 16), 1))))
    assert result.status is StepStatus.NO_ROOM and result.code == 1 and result.rows == ()
    assert [runner.next_position(i) for i in range(3)] == [150, 90, 0]
    for i, prompt in prompts.items():
        assert_alike(kind, says(runner, i, 65), reference.says(kind, (*prompt, 65)))


@pytest.mark.parametrize("kind", [kind for kind in NATIVE if not kind.unified and not kind.recurrent])
def test_one_kv_stream_that_is_full_says_no_room_and_the_others_go_on(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    runner = opened(kind, sequences=2, cells=512)
    feed(runner, 0, words(0, 256))
    feed(runner, 1, words(1, 20))
    result = runner.run(Batch((row(runner, 0, (65,), 1), row(runner, 1, (65,), 1))))
    assert result.status is StepStatus.NO_ROOM
    assert [runner.next_position(i) for i in range(2)] == [256, 20]
    assert_alike(kind, says(runner, 1, 65), reference.says(kind, (*words(1, 20), 65)))


def test_every_return_code_has_its_status() -> None:
    names = {0: "DONE", 1: "NO_ROOM", 2: "ABORTED", -1: "BAD_BATCH", -2: "FAILED", -3: "FAILED", 3: "FAILED"}
    assert {code: StepStatus(code).name for code in names} == names


@native_kinds
def test_limits_are_read_from_the_context(kind: Kind, opened: Opened) -> None:
    runner = opened(kind, sequences=3, cells=3 * 512, batch_tokens=64)
    limits = runner.limits
    assert (limits.sequences, limits.cells, limits.batch_tokens) == (3, 1536, 64)
    assert limits.sequence_cells == (1536 if kind.unified else 512)
    assert limits.request_tokens == 512, "the layout must not decide who gets a 400"
    assert native(runner).api.llama_n_ubatch(native(runner).pointer) == 64
    assert runner.info.recurrent is kind.recurrent
    assert runner.info.sliding_window == (64 if kind.model == "sliding" else 0)
    assert runner.info.vocabulary_size == runner.vocabulary.size == 512
