"""Calls on the KV cache: a saved slot is a hit when it is restored; what cannot be done is answered."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from cllm.core.kv_cache import cache_calls
from cllm.messages import CacheDone, ClearCache, SlotAction, UseSlot, Wake
from tests.driver.disk import LIMIT_S, PROMPT, DiskGate, Start, serve
from tests.driver.engine import StepDriver, words


def use(driver: StepDriver, action: SlotAction, slot: int = 0, name: str = "chat.bin") -> CacheDone:
    done = driver.use_cache(UseSlot(7, action, slot, name))
    assert done.call_id == 7
    return done


def refusal(done: CacheDone, code: str) -> str:
    assert done.failure is not None and done.failure.code == code and not done.tokens
    return done.failure.message


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("kv/*/*"))


@pytest.mark.parametrize("trimmable", [True, False])
def test_a_saved_slot_is_a_hit_when_it_is_restored(start: Start, tmp_path: Path, trimmable: bool) -> None:
    driver = start(trimmable=trimmable)
    serve(driver)
    done = use(driver, "save")
    (path,) = tmp_path.glob("kv/*/*")
    assert path.name == "chat.bin.slot" and done.failure is None
    assert done.tokens == 207 and done.size == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    driver = start(trimmable=trimmable)  # after a crash: nothing else was written
    assert use(driver, "restore", slot=2) == done
    assert serve(driver, (*PROMPT[:199], 5, 6))[0] == 199
    again = start(trimmable=trimmable)
    assert serve(again) == (0, ""), "a saved slot is found by its name alone"


def test_an_erased_slot_is_forgotten_in_all_tiers_but_its_name(start: Start, tmp_path: Path) -> None:
    driver = start()
    serve(driver)
    use(driver, "save")
    entry = driver.scheduler.transfer.save_entry(driver.prefix_cache.device.by_slot.get(0))  # type: ignore[arg-type]
    assert entry is not None and driver.host_cache.entries
    assert driver.core.disk.put(entry)
    while driver.core.disk._slice is None or driver.core.disk._slice.result(LIMIT_S) is None:
        driver.core.disk._advance()  # up to the last slice, whose result is not processed
    assert len(saved(tmp_path)) == 2
    assert use(driver, "erase").tokens == 207 and use(driver, "erase").tokens == 0
    assert saved(tmp_path) == ["chat.bin.slot"] and not driver.host_cache.entries
    assert serve(driver) == (0, "")
    use(driver, "erase")
    use(driver, "restore")
    assert serve(driver) == (199, "ram")


def test_clearing_removes_saved_slots(start: Start, tmp_path: Path) -> None:
    driver = start()
    serve(driver)
    use(driver, "save")
    done = driver.use_cache(ClearCache(9))
    assert (done.call_id, done.prefixes, done.tokens, done.failure) == (9, 1, 207, None)
    assert saved(tmp_path) == [] and driver.core.disk.bytes == 0
    refusal(use(driver, "restore"), "not_found")


def test_a_slot_that_computes_or_is_empty_is_not_saved(start: Start, tmp_path: Path) -> None:
    driver = start()
    name = driver.add(PROMPT, 8, ignore_eos=True)
    driver.step(3)
    (slot,) = driver.answers[name].ids or {0}
    assert "/debug/kv" in refusal(use(driver, "save", slot), "invalid_request")
    assert use(driver, "erase", slot).tokens == 0, "it computes"
    driver.finish()
    driver.check_answer(name)
    refusal(use(driver, "save", 3), "invalid_request")
    assert saved(tmp_path) == []


def test_without_a_disk_cache_the_refusal_names_the_option(start: Start, tmp_path: Path) -> None:
    driver = start(cache_disk_mb=0)
    serve(driver)
    for action in ("save", "restore"):
        assert "--cache-disk-mb" in refusal(use(driver, action), "not_supported")
    assert use(driver, "erase").tokens == 207 and serve(driver) == (0, "")
    assert not list(tmp_path.iterdir())


def test_what_finds_no_room_is_refused_with_the_option(start: Start, tmp_path: Path) -> None:
    driver = start()
    serve(driver)
    use(driver, "save")
    small = start(cache_mb=0)
    assert "--cache-ram-mb" in refusal(use(small, "restore"), "storage_failed")
    small = start(cache_mb=0, swap_space_mb=0)
    serve(small)
    assert "--cache-ram-mb" in refusal(use(small, "save"), "storage_failed")
    driver.core.disk.limit = 100
    assert "--cache-disk-mb" in refusal(use(driver, "save", name="b"), "storage_failed")
    assert saved(tmp_path) == ["chat.bin.slot"] and driver.core.disk.failures == 1


def test_a_failed_save_leaves_the_old_one(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    driver = start()
    serve(driver)
    use(driver, "save")
    (path,) = tmp_path.glob("kv/*/*")
    good = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        said = refusal(use(driver, "save"), "storage_failed")
    assert "no space left" in said and str(tmp_path) not in said
    assert path.read_bytes() == good and saved(tmp_path) == ["chat.bin.slot"]


def test_calls_are_answered_in_their_order_when_the_disk_is_done(
    start: Start, tmp_path: Path, gate: DiskGate
) -> None:
    driver = start()
    serve(driver)
    gate.close()
    commands = (UseSlot(1, "save", 0, "a"), UseSlot(2, "erase", 0), UseSlot(3, "restore", 0, "a"))
    for command in (*commands, ClearCache(4)):
        driver.core._handle(command)
    assert driver.cache_answers == [] and driver.prefix_cache.device.by_slot.get(0) is not None
    other = driver.add(words(8, 20), 8, ignore_eos=True)
    driver.step(20)
    assert driver.answers[other].finish_reason, "nothing that runs waits for the disk"
    gate.open()
    driver.use_cache(ClearCache(5))
    assert [done.call_id for done in driver.cache_answers] == [1, 2, 3, 4, 5]
    assert [done.tokens for done in driver.cache_answers[:3]] == [207, 207, 207]
    assert not [done for done in driver.cache_answers if done.failure] and saved(tmp_path) == []


def test_a_disk_that_does_not_answer_fails_its_calls(
    start: Start, gate: DiskGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start()
    serve(driver)
    gate.close()
    monkeypatch.setattr(cache_calls, "STALL_LIMIT_S", 0.05)
    for command in (UseSlot(1, "save", 0, "a"), ClearCache(2)):
        driver.core._handle(command)
    deadline = time.monotonic() + LIMIT_S
    while driver.core.cache_calls.calls:
        driver.core.post(Wake())  # the call that answers would wait for the next command
        assert time.monotonic() < deadline and driver.core._take_commands()
    for done in driver.cache_answers:
        assert "--cache-dir" in refusal(done, "storage_failed")
    assert not driver.core.cache_calls.calls and serve(driver) == (0, ""), "slots and RAM are clear"
    gate.open()


def test_files_that_cannot_be_removed_fail_the_clearing(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    driver = start()
    serve(driver)
    use(driver, "save")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        said = refusal(driver.use_cache(ClearCache(1)), "storage_failed")
    assert "permission denied" in said and str(tmp_path) not in said


def test_a_save_given_up_at_the_end_leaves_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cllm.core.kv_cache.cache_file.SLICE_BYTES", 10)
    driver = start()
    serve(driver)
    disk = driver.core.disk
    beat = disk._disk.beat

    def slow() -> None:
        time.sleep(0.01)
        beat()

    monkeypatch.setattr(disk._disk, "beat", slow)
    driver.core._handle(UseSlot(1, "save", 0, "a"))
    disk.close(within_s=0.1)
    thread = disk._disk._thread
    assert thread is not None
    thread.join(LIMIT_S)
    assert not thread.is_alive() and saved(tmp_path) == []
