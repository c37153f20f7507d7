"""Slots: a seq_id exists only inside a lease, and its KV is cleared before the next one."""

from __future__ import annotations

import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.core.slot_pool import SlotLease, SlotPool
from cllm.errors import IntegrityError
from cllm.testing import FakeRunner


def test_slots_are_leased_lowest_first_and_never_shared() -> None:
    pool = SlotPool(FakeRunner(sequences=3))
    leases = [pool.lease(str(number)) for number in range(3)]
    assert [lease.seq_id for lease in leases if lease] == [0, 1, 2]
    assert pool.lease("one too many") is None
    assert leases[1] is not None
    leases[1].release()
    again = pool.lease("next")
    assert again is not None and again.seq_id == 1


def test_kv_is_cleared_before_the_slot_is_free() -> None:
    free_when_cleared: list[int] = []

    def watch(_: int, name: str) -> None:
        if name == "truncate":
            free_when_cleared.append(pool.free_count)

    runner = FakeRunner(sequences=1, fail=watch)
    pool = SlotPool(runner)
    lease = pool.lease("a")
    assert lease is not None
    runner.memory[0] = [1] * 7
    lease.release()
    assert free_when_cleared == [0] and runner.memory[0] == []
    assert pool.free_count == 1 and pool.cleared_cells_total == 7


def test_a_second_release_is_a_bug_and_says_so() -> None:
    pool = SlotPool(FakeRunner(sequences=1))
    lease = pool.lease("a")
    assert lease is not None
    lease.release()
    other = pool.lease("b")
    with pytest.raises(IntegrityError):
        lease.release()
    assert pool.leases == (other,)


def test_the_pool_knows_who_holds_a_slot_and_since_when() -> None:
    pool = SlotPool(FakeRunner(sequences=2))
    began = time.monotonic()
    lease = pool.lease("a", 1)
    assert lease is not None and began <= lease.leased_at <= time.monotonic()
    assert pool.holder(1) == "a" and pool.holder(0) is None and pool.free_ids == {0}
    pool.move(lease, 0)
    assert pool.holder(0) == "a" and pool.holder(1) is None and pool.free_ids == {1}
    lease.release()
    assert pool.holder(0) is None and pool.free_count == 2


def test_a_slot_that_cannot_be_cleared_is_retired() -> None:
    pool = SlotPool(FakeRunner(sequences=1, fail=lambda *_: RuntimeError("no")))
    lease = pool.lease("a")
    assert lease is not None
    lease.release()
    assert pool.retired == {0} and pool.lease("b") is None and not pool.leases


def test_the_log_shows_lease_and_clear(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    runner = FakeRunner(sequences=4)
    lease = SlotPool(runner).lease("r1")
    assert lease is not None
    runner.memory[0] = [1] * 41
    lease.release()
    assert [record.message for record in caplog.records] == [
        "leased seq 0 for request r1",
        "cleared KV of seq 0 (41 cells)",
        "released seq 0 of request r1: 0 cells kept",
    ]


@given(st.lists(st.integers(-1, 5), max_size=60))
def test_under_any_order_of_leases_and_releases_the_sums_hold(actions: list[int]) -> None:
    pool = SlotPool(FakeRunner(sequences=4))
    held: list[SlotLease] = []
    for number, action in enumerate(actions):
        if action < 0:
            free_before = pool.free_count
            lease = pool.lease(str(number))
            assert (lease is None) == (free_before == 0)
            if lease is not None:
                assert lease.seq_id not in {other.seq_id for other in held}
                held.append(lease)
        elif action < len(held):
            held.pop(action).release()
        assert pool.free_count + len(pool.leases) == 4
        assert pool.leased_total - pool.released_total == len(held)


def test_leftovers_are_named_and_cleared() -> None:
    runner = FakeRunner(sequences=3)
    pool = SlotPool(runner)
    assert pool.leftovers({}) == []
    pool.lease("a")
    runner.memory[2] = [1, 2, 3]
    assert pool.leftovers({}) == ["lease of slot 0", "3 cells in slot 2"]
    assert pool.leftovers({2: 2}) == ["lease of slot 0", "3 cells in slot 2 instead of 2"]
    assert pool.clear(2)
    assert runner.memory == [[], [], []]
