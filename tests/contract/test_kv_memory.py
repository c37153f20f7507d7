"""KV memory of every runner: positions, truncate, save, restore, copy."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.backend.base import Batch, KVState, StepStatus
from cllm.backend.llama import context
from tests.driver.engine import words
from tests.driver.kinds import KINDS, NATIVE, SLIDING, Kind, Opened, open_runner
from tests.driver.runner import feed, row, says
from tests.driver.same_text import Reference, assert_alike

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
native_kinds = pytest.mark.parametrize("kind", NATIVE, ids=lambda kind: kind.label)


# Positions -------------------------------------------------------------------------------------------


@every_kind
def test_the_next_position_counts_what_a_sequence_holds(kind: Kind, opened: Opened) -> None:
    runner = opened(kind)
    assert [runner.next_position(i) for i in range(3)] == [0, 0, 0]
    feed(runner, 1, words(1, 100))
    assert [runner.next_position(i) for i in range(3)] == [0, 100, 0]
    feed(runner, 2, words(2, 1))
    assert [runner.next_position(i) for i in range(3)] == [0, 100, 1]
    runner.submit(Batch((row(runner, 1, words(3, 2)),)))
    assert [runner.next_position(i) for i in range(3)] == [0, 102, 1], "before it is collected"
    assert runner.collect().status is StepStatus.DONE
    assert [runner.next_position(i) for i in range(3)] == [0, 102, 1]


# Truncate --------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("length", [20, 21, 1000])
def test_truncating_to_what_is_there_or_more_changes_nothing(
    kind: Kind, length: int, opened: Opened, reference: Reference
) -> None:
    runner = opened(kind)
    feed(runner, 0, words(0, 20))
    assert runner.truncate(0, length) == 20
    assert_alike(kind, says(runner, 0, 65), reference.says(kind, (*words(0, 20), 65)))


@every_kind
@pytest.mark.parametrize("length", [1, 19, 30])
def test_what_truncate_says_remains_is_usable_and_the_rest_is_gone(
    kind: Kind, length: int, opened: Opened, reference: Reference
) -> None:
    runner = opened(kind)
    prompt = words(0, 40)
    feed(runner, 0, prompt)
    feed(runner, 1, words(1, 40))
    kept = runner.truncate(0, length)
    assert kept == (0 if kind.recurrent else length)
    assert runner.next_position(0) == kept
    feed(runner, 0, prompt[kept:30])
    assert_alike(kind, says(runner, 0, 65), reference.says(kind, (*prompt[:30], 65)))
    assert_alike(kind, says(runner, 1, 65), reference.says(kind, (*words(1, 40), 65)))


@pytest.mark.parametrize("kind", [SLIDING, Kind("sliding", unified=True), Kind("sliding", flash=False)])
@pytest.mark.parametrize("length", [10, 60, 65, 100, 200, 336, 390, 399])
def test_a_window_that_has_moved_on_is_cut_exactly_or_removed_whole(
    kind: Kind, length: int, opened: Opened, reference: Reference
) -> None:
    runner = opened(kind, cells=3 * 512)
    prompt = words(0, 400)
    feed(runner, 0, prompt)
    kept = runner.truncate(0, length)
    assert kept in (0, length) and runner.next_position(0) == kept
    assert kept == 0 or length > 100, "what left the window cannot come back"
    assert kept == length or length < 390, "a short cut needs no recomputing"
    feed(runner, 0, prompt[kept:length])
    assert_alike(kind, says(runner, 0, 65), reference.says(kind, (*prompt[:length], 65)))


# Save and restore ------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("length", [1, 50, 400])
def test_a_restored_sequence_says_bit_for_bit_the_same(kind: Kind, length: int, opened: Opened) -> None:
    runner = opened(kind)
    feed(runner, 0, words(0, length))
    state = runner.save(0)
    assert state is not None
    wanted = says(runner, 0, 65)
    runner.truncate(0, 0)
    assert runner.restore(0, state)
    assert runner.next_position(0) == length
    found = says(runner, 0, 65)
    if kind.model == "sliding":  # its cells lie elsewhere then, and are added up in other blocks
        assert found == pytest.approx(wanted, abs=1e-5)
    else:
        assert found == wanted


@native_kinds
def test_a_state_in_pages_of_its_own_is_the_same_state(
    kind: Kind, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = opened(kind)
    feed(runner, 0, words(0, 70))
    in_heap = runner.save(0)
    monkeypatch.setattr(context, "MIN_MAPPED_STATE", 1)
    mapped = runner.save(0)
    assert isinstance(mapped, memoryview) and mapped == in_heap
    runner.truncate(0, 0)
    assert runner.restore(0, mapped) and runner.next_position(0) == 70
    assert runner.save(0) == in_heap


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux")
def test_states_that_come_and_go_take_no_more_memory_than_they_count_for() -> None:
    """In the heap, every other state of one size would leave gaps that those of the next do not fit into."""
    block = 256 << 10
    raised = bytes(128 * block)
    del raised  # from now on the C library would put large blocks into its heap
    before, states = resident_bytes(), [_filled_state(block) for _ in range(128)]
    for size in (2 * block, 4 * block):
        states = states[::2]
        states += [_filled_state(size) for _ in range((128 * block - sum(map(len, states))) // size)]
    taken = resident_bytes() - before
    assert taken == pytest.approx(sum(map(len, states)), rel=0.2)


def _filled_state(size: int) -> KVState:
    state = context._new_state(size)
    ctypes.memset(context._address(state), 1, size)
    return state


@pytest.mark.parametrize("kind", [kind for kind in NATIVE if kind.unified and not kind.recurrent])
def test_a_state_that_does_not_fit_is_refused_and_leaves_the_sequence_empty(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    runner = opened(kind, sequences=2, cells=256, request_tokens=256)
    feed(runner, 0, words(0, 150))
    state = runner.save(0)
    assert state is not None
    runner.truncate(0, 0)
    feed(runner, 1, words(1, 160))
    assert not runner.restore(0, state)
    assert [runner.next_position(i) for i in range(2)] == [0, 160]
    assert_alike(kind, says(runner, 1, 65), reference.says(kind, (*words(1, 160), 65)))
    runner.truncate(1, 0)
    assert runner.restore(0, state)


@native_kinds
@pytest.mark.parametrize("damage", ["cut", "junk"])
def test_a_damaged_state_is_refused_and_leaves_the_sequence_empty(
    kind: Kind, damage: str, opened: Opened, reference: Reference
) -> None:
    runner = opened(kind)
    feed(runner, 0, words(0, 30))
    state = runner.save(0)
    assert state is not None
    runner.truncate(0, 0)
    assert not runner.restore(0, state[: len(state) // 2] if damage == "cut" else b"\x07" * len(state))
    assert runner.next_position(0) == 0
    assert_alike(kind, says(runner, 0, 65), reference.says(kind, (65,)))


# Copy ------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("length", [1, 30, 79, 80])
def test_a_copy_is_exact_or_empty_and_both_go_on_apart(
    kind: Kind, length: int, opened: Opened, reference: Reference
) -> None:
    runner = opened(kind)
    prompt = words(0, 80)
    feed(runner, 0, prompt)
    feed(runner, 2, words(2, 20))
    held = runner.copy(0, 1, length)
    assert held == (0 if kind.recurrent and length < 80 else length)
    assert [runner.next_position(i) for i in range(3)] == [80, held, 20]
    feed(runner, 1, prompt[held:length])
    assert_alike(kind, says(runner, 1, 65), reference.says(kind, (*prompt[:length], 65)))
    assert_alike(kind, says(runner, 0, 66), reference.says(kind, (*prompt, 66)))
    assert_alike(kind, says(runner, 1, 67), reference.says(kind, (*prompt[:length], 65, 67)))
    assert_alike(kind, says(runner, 2, 65), reference.says(kind, (*words(2, 20), 65)))


@every_kind
def test_a_copy_survives_the_end_of_its_source(kind: Kind, opened: Opened, reference: Reference) -> None:
    runner = opened(kind)
    prompt = words(0, 80)
    feed(runner, 0, prompt)
    assert runner.copy(0, 1, 80) == 80
    runner.truncate(0, 0)  # before a decode could carry the copy out
    feed(runner, 0, words(5, 30))  # and another sequence is there already
    assert_alike(kind, says(runner, 1, 65), reference.says(kind, (*prompt, 65)))
    assert_alike(kind, says(runner, 0, 65), reference.says(kind, (*words(5, 30), 65)))


@every_kind
def test_a_pending_copy_is_not_saved_wrong(kind: Kind, opened: Opened, reference: Reference) -> None:
    runner = opened(kind)
    feed(runner, 0, words(0, 80))
    assert runner.copy(0, 1, 80) == 80
    if (state := runner.save(1)) is not None:  # it may be refused
        assert runner.restore(2, state)
        assert_alike(kind, says(runner, 2, 65), reference.says(kind, (*words(0, 80), 65)))


@every_kind
def test_a_pending_copy_does_not_overwrite_what_is_restored(
    kind: Kind, opened: Opened, reference: Reference
) -> None:
    runner = opened(kind)
    feed(runner, 0, words(0, 80))
    feed(runner, 2, words(2, 80))
    state = runner.save(2)
    assert state is not None
    assert runner.copy(0, 1, 80) == 80
    runner.truncate(1, 0)  # the copy is given up, and its id is leased anew
    if runner.restore(1, state):  # it may be refused
        assert_alike(kind, says(runner, 1, 65), reference.says(kind, (*words(2, 80), 65)))
    else:
        assert runner.next_position(1) == 0


# A life of one runner -------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["feed", "feed", "feed", "together", "cut", "swap", "copy"]),
        st.integers(0, 2),
        st.integers(1, 150),
    ),
    min_size=1,
    max_size=14,
)


@every_kind
@settings(max_examples=12, deadline=None)
@given(actions=ACTIONS)
def test_after_any_actions_every_sequence_says_what_its_tokens_say(
    kind: Kind, models: dict[str, Path], reference: Reference, actions: list[tuple[str, int, int]]
) -> None:
    runner = open_runner(models, kind)
    held: list[tuple[int, ...]] = [(), (), ()]
    for number, (action, i, count) in enumerate(actions):
        more = words(number, count)
        match action:
            case "feed" if len(held[i]) + count <= 450:
                feed(runner, i, more)
                held[i] += more
            case "together":
                rows = [row(runner, j, words(j, 1 + count % (5 + 7 * j))) for j in range(3)]
                if all(r.position + len(r.tokens) <= 450 for r in rows):
                    assert runner.run(Batch(tuple(rows))).status is StepStatus.DONE
                    held = [tokens + tuple(r.tokens) for tokens, r in zip(held, rows, strict=True)]
            case "cut":
                held[i] = held[i][: runner.truncate(i, max(0, len(held[i]) - count))]
            # Not in a common pool of window cells: llama.cpp cannot reuse one that two sequences share.
            case "copy" if kind != Kind("sliding", unified=True):
                other, length = (i + 1) % 3, min(count, len(held[i]))
                runner.truncate(other, 0)
                held[other] = held[i][: runner.copy(i, other, length)] if length else ()
            case "swap" if (state := runner.save(i)) is not None:  # none: its cells are still being copied
                runner.truncate(i, 0)
                if not runner.restore(i, state):
                    held[i] = ()
        assert [runner.next_position(j) for j in range(3)] == [len(tokens) for tokens in held]
    for i, tokens in enumerate(held):
        assert_alike(kind, says(runner, i, 65), reference.says(kind, (*tokens, 65)))
    runner.close()
