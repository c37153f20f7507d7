"""The audit of a server's log finds what must not be."""

from __future__ import annotations

from tests.driver.slot_log import SlotLog

GOOD = (
    "leased seq 0 for request a",
    "request a in seq 0: 0 cells kept, 0 cut, 5 tokens to compute",
    "released seq 0 of request a: 7 cells kept",
    "leased seq 0 for request b",
    "request b in seq 0: 4 cells kept, 3 cut, 2 tokens to compute",
    "cleared KV of seq 0 (9 cells)",
    "released seq 0 of request b: 0 cells kept",
)


def faults(*lines: str) -> list[str]:
    return SlotLog(lines).find_faults(["a", "b"])


def test_a_good_log_has_no_faults() -> None:
    assert faults(*GOOD) == []
    moved = ("cleared KV of seq 0 (7 cells)", "moved 7 cells to seq 3", "cleared KV of seq 3 (7 cells)")
    rest = (GOOD[3], "request b in seq 0: 0 cells kept, 0 cut, 6 tokens to compute", GOOD[6])
    assert faults(*GOOD[:3], *moved, *rest) == []


def test_a_running_request_may_move() -> None:
    moved = (GOOD[0], "moved 3 cells to seq 2", "request a moved from seq 0 to seq 2")
    ended = ("cleared KV of seq 0 (3 cells)", "released seq 2 of request a: 7 cells kept")
    assert SlotLog([*moved, *ended]).find_faults(["a"]) == []
    assert SlotLog([*moved, moved[-1]]).problems


def test_every_fault_is_found() -> None:
    assert faults(*GOOD[:1], *GOOD[3:]), "leased while it was held"
    assert faults(*GOOD[:6]), "not released"
    assert faults(*GOOD[:4], GOOD[4].replace("3 cut", "2 cut"), *GOOD[5:]), "a cell too many"
    assert faults(*GOOD[:3], "cleared KV of seq 0 (8 cells)", *GOOD[3:]), "a cell that no request left"
    assert faults(*GOOD[:6], GOOD[6].replace("request b", "request a")), "released by another"
    assert faults(*GOOD, "inconsistent position in seq 1")
    assert SlotLog(GOOD).find_faults(["a", "b", "never seen"])
