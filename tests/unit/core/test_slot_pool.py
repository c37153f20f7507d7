"""Slots: a seq_id exists only inside a lease, and its KV is cleared before the next one."""

from __future__ import annotations

import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.core.slot_pool import SlotLease, SlotPool
from cllm.errors import IntegrityError
from tests.driver.fake_runner import FakeRunner


def test_slots_are_leased_lowest_first_and_never_shared() -> None:
    pool = SlotPool(FakeRunner(sequences=3))
    leases = [pool.lease(str(number)) for number in range(3)]
    assert [lease.seq_id for lease in leases if lease] == [0, 1, 2]
    assert pool.lease("one too many") is None
    assert leases[1] is not None
    pool.release(leases[1])
    again = pool.lease("next")
    assert again is not None and again.seq_id == 1


def test_kv_is_cleared_before_the_slot_is_free(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    free_when_cleared: list[int] = []

    def watch(_: int, name: str) -> None:
        if name == "truncate":
            free_when_cleared.append(len(pool.free))

    runner = FakeRunner(sequences=1, fail=watch)
    pool = SlotPool(runner)
    lease = pool.lease("r1")
    assert lease is not None
    runner.memory[0] = [1] * 41
    pool.release(lease)
    assert free_when_cleared == [0] and runner.memory[0] == []
    assert pool.free == {0} and pool.cleared_cells_total == 41
    assert [record.message for record in caplog.records] == [
        "leased seq 0 for request r1",
        "cleared KV of seq 0 (41 cells)",
        "released seq 0 of request r1: 0 cells kept",
    ]


def test_a_second_release_is_a_bug_and_says_so() -> None:
    pool = SlotPool(FakeRunner(sequences=1))
    lease = pool.lease("a")
    assert lease is not None
    pool.release(lease)
    other = pool.lease("b")
    with pytest.raises(IntegrityError):
        pool.release(lease)
    assert pool.held == {0: other}


def test_a_lease_moves_to_a_free_slot() -> None:
    pool = SlotPool(FakeRunner(sequences=2))
    began = time.monotonic()
    lease = pool.lease("a", 1)
    assert lease is not None and began <= lease.leased_at <= time.monotonic()
    assert pool.held == {1: lease} and pool.free == {0}
    pool.move(lease, 0)
    assert pool.held == {0: lease} and pool.free == {1} and lease.seq_id == 0


def test_a_slot_that_cannot_be_cleared_is_retired() -> None:
    pool = SlotPool(FakeRunner(sequences=1, fail=lambda *_: RuntimeError("no")))
    lease = pool.lease("a")
    assert lease is not None
    pool.release(lease)
    assert pool.retired == {0} and pool.lease("b") is None and not pool.held


@given(st.lists(st.integers(-1, 5), max_size=60))
def test_under_any_order_of_leases_and_releases_the_sums_hold(actions: list[int]) -> None:
    pool = SlotPool(FakeRunner(sequences=4))
    held: list[SlotLease] = []
    for number, action in enumerate(actions):
        if action < 0:
            free_before = len(pool.free)
            lease = pool.lease(str(number))
            assert (lease is None) == (free_before == 0)
            if lease is not None:
                assert lease.seq_id not in {other.seq_id for other in held}
                held.append(lease)
        elif action < len(held):
            pool.release(held.pop(action))
        assert len(pool.free) + len(pool.held) == 4
        assert pool.leased_total - pool.released_total == len(held)
