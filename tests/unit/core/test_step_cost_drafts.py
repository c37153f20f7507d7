"""What guesses cost is learnt from steps, whatever else the machine does."""

from __future__ import annotations

import pytest

from cllm.backend.base import Batch, Row
from cllm.core.step_cost import ALONE, DETOUR, PASS, SHORTER, USUAL, GuessClock, GuessPrice


def a_step(rows: int, guesses: int = 0, *, guessing: int | None = None) -> Batch:
    guessing = rows if guessing is None else guessing
    lengths = [1 + guesses * (number < guessing) for number in range(rows)]
    return Batch(tuple(Row(number, 50, [1] * length, length, None) for number, length in enumerate(lengths)))


def taught(rows: int, *, guess_s: float, plain_s: float = 0.02, split: bool = True) -> GuessClock:
    clock = GuessClock(512, 0.25, split=split)
    for number in range(20):
        clock.observe(a_step(rows), plain_s)
        length = 1 + number % 4
        clock.observe(a_step(rows, length), plain_s + length * guess_s)
    return clock


def priced(clock: GuessClock, rows: int) -> GuessPrice:
    price = clock.price(rows)
    assert price is not None
    return price


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("guess_s", [0.002, 0.01, 0.05])
def test_the_price_is_that_of_the_steps(rows: int, guess_s: float) -> None:
    price = priced(taught(rows, guess_s=guess_s), rows)
    assert price.guess(2) == pytest.approx(guess_s / 0.02)


def test_nothing_is_known_of_steps_never_seen() -> None:
    clock = taught(8, guess_s=0.01)
    assert clock.price(7) is None
    clock.observe(a_step(7), 0.02)
    assert priced(clock, 7).guess(1) == USUAL


def test_a_busy_moment_changes_nothing() -> None:
    clock = taught(8, guess_s=0.01)
    for _ in range(5):
        clock.observe(a_step(8, 2), 1.0)
        clock.observe(a_step(8), 0.5)
    assert priced(clock, 8).guess(2) == pytest.approx(0.5)


def test_a_lasting_change_is_learnt() -> None:
    clock = taught(8, guess_s=0.01)
    for _ in range(GuessClock.REMEMBERED):
        clock.observe(a_step(8, 2), 0.02 + 2 * 0.03)
    assert priced(clock, 8).guess(2) == pytest.approx(1.5)


def test_each_length_has_its_own_price_and_what_is_not_known_is_tried() -> None:
    clock = GuessClock(512, 0.25, split=True)
    for _ in range(5):
        clock.observe(a_step(8), 0.02)
        clock.observe(a_step(8, 4), 0.02 * (1 + 4 * 0.8))
    price = priced(clock, 8)
    assert price.guess(4) == price.guess(6) == pytest.approx(0.8)
    assert price.guess(1) == pytest.approx(0.8 * SHORTER)
    for _ in range(5):
        clock.observe(a_step(8, 1), 0.02 * 1.9)
    assert priced(clock, 8).guess(1) == pytest.approx(0.9)


def test_a_price_that_was_refused_often_is_tried_again() -> None:
    clock = taught(8, guess_s=0.1)
    assert priced(clock, 8).guess(2) == pytest.approx(5)
    for _ in range(GuessClock.PATIENCE * GuessClock.REMEMBERED):
        clock.refused(8)
    assert priced(clock, 8).guess(1) == USUAL


def test_steps_that_say_nothing_of_guesses_are_left_out() -> None:
    clock = taught(8, guess_s=0.01)
    before = priced(clock, 8)
    prompt = Row(7, 0, [1] * 30, 1, None)
    for _ in range(20):
        clock.observe(a_step(8, 3, guessing=5), 3.0)
        clock.observe(Batch((*a_step(7).rows, prompt)), 3.0)
        clock.observe(Batch((*a_step(7).rows, Row(7, 0, [1] * 30, 0, None))), 3.0)
        clock.observe(a_step(8)._replace(padding=(9,)), 3.0)
        clock.observe(a_step(8), 0.0)
    assert priced(clock, 8) == before


def test_in_one_pool_some_who_guess_teach_as_much_as_all() -> None:
    clock = GuessClock(512, 0.25, split=False)
    for _ in range(5):
        clock.observe(a_step(8), 0.02)
        clock.observe(a_step(8, 4, guessing=2), 0.02 + 0.01)
    assert priced(clock, 8).guess(1) == pytest.approx(0.5)


def test_what_a_step_takes() -> None:
    price = priced(taught(8, guess_s=0.01), 8)
    everybody = range(8)
    assert price.parts(everybody, 2) == pytest.approx(1 + 2 * 0.5)
    assert price.parts([0, 1, 2, 3], 2) == pytest.approx(1 + 0.5 + PASS)
    assert price.parts([0, 1, 6, 7], 2) == pytest.approx(1 + 0.5 + 2 * PASS), "a hole is another pass"
    assert price._replace(split=False).parts([0, 1, 6, 7], 2) == pytest.approx(1.5)
    assert price.parts(everybody, 64) is None, "beyond the batch"
    assert price.parts(everybody, 30) is None, "beyond the target"


def test_the_price_of_a_lone_row_does_not_hang_on_the_clock() -> None:
    fresh, slow = GuessClock(512, 0.25, split=True), taught(1, guess_s=0.5)
    assert fresh.price(1) == slow.price(1)
    assert priced(slow, 1).parts([3], 4) == pytest.approx(1 + DETOUR + 4 * ALONE)
    assert priced(slow, 1).parts([3], 512) is None


def test_a_step_that_is_slow_anyway_may_take_twice_as_long() -> None:
    slow = priced(taught(8, guess_s=0.1, plain_s=1.0), 8)
    assert slow.parts(range(8), 10) == pytest.approx(2.0)
    assert slow.parts(range(8), 11) is None
