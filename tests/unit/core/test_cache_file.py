"""State files: what is written comes back; nothing else gets in, and then nothing has changed."""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
import weakref
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.core.kv_cache import cache_file, cache_file_jobs
from cllm.core.kv_cache.cache_file import Candidate, Moved
from cllm.core.kv_cache.cache_file_jobs import CacheFileJobs, get_path, restore, save
from cllm.core.kv_cache.disk_thread import Work
from cllm.core.kv_cache.host_cache import Entry, HostKVCache
from cllm.core.kv_cache.prefix_index import Checkpoint
from cllm.errors import CllmError, Forbidden, InvalidRequest, NotFound, StateFileError, StorageFailed
from cllm.testing import FakeRunner
from cllm.workers.messages import Report, StateFileDone, UseStateFile
from tests.profiles import examples

HEAD = 8 + 4 + 32 + 4


def run(work: Work[Moved]) -> Moved:
    """All operations, here instead of on the disk thread."""
    result = None
    try:
        while True:
            result = work.operations.send(result)()
    except StopIteration as end:
        moved = end.value
        assert isinstance(moved, Moved)
        return moved
    finally:
        work.discard()


def candidates(tier: HostKVCache) -> list[Candidate]:
    """Its entries, those used last first."""
    return [
        Candidate(entry.tenant, entry.tokens, entry.size, 0.0, weakref.ref(entry))
        for entry in reversed(tier.entries)
    ]


def write(tier: HostKVCache, path: Path, fingerprint: str) -> Moved:
    return run(save(candidates(tier), path, fingerprint))


def tier_of(*entries: tuple[str, str, int], limit: int = 1 << 20) -> HostKVCache:
    tier = HostKVCache(cached_limit=limit)
    for tenant, tokens, size in entries:
        assert tier.put(Entry(tenant, tuple(tokens.encode()), os.urandom(size)))
    return tier


def contents(tier: HostKVCache) -> list[tuple[str, bytes, bytes]]:
    return [(entry.tenant, entry.tokens.tobytes(), bytes(entry.state)) for entry in tier.entries]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "warm.prefixes"


def test_what_is_saved_comes_back_in_its_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_file, "SLICE_BYTES", 100)  # several slices an entry
    tier = tier_of(("", "abc", 1000), ("jürgen", "abd", 99), ("", "xyz", 100))
    told = write(tier, path, "here")
    assert told == (3, 9, tier.cached_bytes, 0)
    again = HostKVCache(cached_limit=1 << 20)
    assert run(restore(again, path, "here")) == told
    assert contents(again) == contents(tier) and again.cached_bytes == tier.cached_bytes
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["warm.prefixes"]
    assert run(restore(again, path, "here")) == (0, 0, 0, 3), "they are known"


def test_checkpoints_come_back_with_their_entry(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_file, "SLICE_BYTES", 100)
    tier = tier_of(("", "xyz", 50))
    points = (Checkpoint(1, os.urandom(250)), Checkpoint(3, memoryview(b"abc")))
    tier.put(Entry("t", tuple(b"abcd"), os.urandom(120), points, min_length=3))
    write(tier, path, "")
    again = HostKVCache(cached_limit=1 << 20)
    assert run(restore(again, path, "")).size == tier.cached_bytes
    (found,) = (entry for entry in again.entries if entry.tenant)
    assert [(point.length, bytes(point.state)) for point in found.checkpoints] == [
        (1, points[0].state),
        (3, b"abc"),
    ]
    assert found.min_length == 3 and contents(again) == contents(tier)
    path.write_bytes(path.read_bytes()[:-33] + b"\0" * 33)
    assert "checksum" in refusal(path)


def test_restoring_keeps_to_the_byte_budget_and_evicts_nothing(path: Path) -> None:
    tier = tier_of(("", "old", 100), ("", "mid", 100), ("", "new", 100))
    write(tier, path, "")
    small = tier_of(("", "own", 100), limit=2 * (100 + 24) + 10)
    assert run(restore(small, path, "")) == (1, 3, 124, 2)
    assert ["".join(map(chr, entry.tokens)) for entry in small.entries] == ["new", "own"]
    assert small.cached_bytes <= small.cached_limit and small.evictions == 0


def test_an_entry_evicted_while_it_is_saved_is_left_out(path: Path) -> None:
    tier = tier_of(("", "abc", 100), ("", "abd", 100), ("", "xyz", 100))
    work = save(candidates(tier), path, "")
    work.operations.send(next(work.operations)())()  # in the middle of the last one
    for entry in tuple(tier.entries)[:2]:
        tier.drop(entry)
    del entry
    assert run(work).entries == 1
    assert run(restore(HostKVCache(cached_limit=1 << 20), path, "")).entries == 1


def test_what_another_entry_covers_is_not_written_beside_it(path: Path) -> None:
    """A conversation may be in a slot and, shorter, in RAM."""
    tier = tier_of(("", "abc", 100), ("t", "abc", 100), ("", "abcd", 100), ("", "xyz", 100))
    tier.put(Entry("", tuple(b"xyzz"), b"state", min_length=4))
    assert write(tier, path, "").entries == 4
    again = HostKVCache(cached_limit=1 << 20)
    run(restore(again, path, ""))
    kept = {(entry.tenant, "".join(map(chr, entry.tokens))) for entry in again.entries}
    assert kept == {("t", "abc"), ("", "abcd"), ("", "xyz"), ("", "xyzz")}


def refusal(path: Path, identity: str = "", kind: type[CllmError] = StateFileError) -> str:
    tier = tier_of(("", "own", 50))
    before = contents(tier)
    with pytest.raises(kind) as error:
        run(restore(tier, path, identity))
    assert contents(tier) == before and str(path.parent) not in str(error.value)
    return str(error.value)


def with_head(data: bytes, entries: int) -> bytes:
    head = data[: HEAD - 4] + struct.pack("<I", entries)
    return head + hashlib.sha256(head).digest() + data[HEAD + 32 :]


def test_what_is_wrong_is_said(path: Path) -> None:
    write(tier_of(("", "abc", 300), ("t", "xyz", 300)), path, "here")
    data = path.read_bytes()
    assert "another model" in refusal(path, "elsewhere")
    body = HEAD + 32
    huge = data[:body] + struct.pack("<HIIIQ", 0, 2**32 - 1, 0, 0, 2**62) + data[body + 22 :]
    first = 22 + 0 + 12 + 300 + 32
    swapped = data[:body] + data[body + first + 1 :] + data[body : body + first + 1]
    for damaged, said in {
        b"": "truncated",
        b"GGUF" + data[4:]: "not a state file",
        data[:8] + struct.pack("<I", 99) + data[12:]: "version 99",
        data[:44] + struct.pack("<I", 2**32 - 1) + data[48:]: "head",
        with_head(data, 2**32 - 1): "truncated",
        with_head(data, 1): "follow its last entry",
        with_head(data, 3): "truncated",
        data[:-1]: "truncated",
        data + b"x": "follow its last entry",
        huge: "longer than the file",
        swapped: "checksum",
    }.items():
        path.write_bytes(damaged)
        assert said in refusal(path, "here"), said
    path.unlink()
    assert "no state file" in refusal(path, kind=NotFound)
    path.symlink_to("/etc/passwd")
    refusal(path, kind=StorageFailed)


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60)
)
@given(place=st.integers(0, 900), value=st.binary(min_size=1, max_size=9), cut=st.integers(0, 900))
def test_no_damage_gets_in(path: Path, place: int, value: bytes, cut: int) -> None:
    write(tier_of(("", "abc", 300), ("t", "xyz", 300)), path, "")
    good = path.read_bytes()
    data = bytearray(good)
    data[place : place + len(value)] = value
    data = data[: max(0, len(data) - cut)]
    if data != good:
        path.write_bytes(data)
        refusal(path)


def test_names_are_no_paths() -> None:
    with pytest.raises(Forbidden, match="--state-dir"):
        get_path("", "warm")
    for name in ("", "..", "../x", "a/b", "/etc/passwd", ".hidden", "a\0", "x" * 65, "a\n"):
        with pytest.raises(InvalidRequest, match="name"):
            get_path("/tmp", name)


def test_a_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tier_of(("", "abc", 300)), path, "")
    good = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFailed, match="no space left") as error:
        write(tier_of(("", "xyz", 300)), path, "")
    assert str(path) not in str(error.value)
    assert path.read_bytes() == good and list(path.parent.iterdir()) == [path]


def test_work_that_is_given_up_leaves_nothing(path: Path) -> None:
    tier = tier_of(("", "abc", 300))
    work = save(candidates(tier), path, "")
    next(work.operations)()
    assert list(path.parent.iterdir())
    work.discard()
    assert list(path.parent.iterdir()) == []


class Jobs:
    """State files of a fake runner, whose disk hangs while `answers` is clear; and their reports."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.reports: list[StateFileDone] = []
        self.tier = tier_of(("", "abc", 300))
        runner = FakeRunner()
        monkeypatch.setattr(runner, "state_fingerprint", lambda: "here")
        self.jobs = CacheFileJobs(runner, self.tier, lambda: candidates(self.tier), str(folder), self._emit)
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            assert self.answers.wait(60)
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    def _emit(self, report: Report) -> None:
        assert isinstance(report, StateFileDone)
        self.reports.append(report)

    def add(self, call_id: int, *, save: bool = True) -> None:
        self.jobs.add(UseStateFile(call_id, "warm", save=save))

    def finish(self) -> list[str]:
        """Step until no job is left; the codes of what failed, by call."""
        deadline = time.monotonic() + 30
        while not self.jobs.idle:
            assert time.monotonic() < deadline
            began = time.monotonic()
            self.jobs.slice()
            assert time.monotonic() - began < 10, "a step waited for the disk"
            time.sleep(0.002)
        reports, self.reports = self.reports, []
        return [report.failure.code if report.failure else "" for report in reports]


def test_jobs_run_one_after_the_other_on_the_disk_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Jobs(tmp_path, monkeypatch)
    disk.add(1)
    disk.add(2, save=False)
    assert disk.jobs.has_work and disk.finish() == ["", ""]
    disk.jobs.close()
    assert [file.name for file in tmp_path.iterdir()] == ["warm.prefixes"]


def test_a_disk_that_does_not_answer_fails_its_jobs_and_holds_up_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Jobs(tmp_path, monkeypatch)
    patience_s = cache_file_jobs.STALL_LIMIT_S
    monkeypatch.setattr(cache_file_jobs, "STALL_LIMIT_S", 0.2)
    monkeypatch.setattr(cache_file_jobs, "CLOSE_LIMIT_S", 0.2)
    disk.answers.clear()
    disk.add(1)
    disk.add(2, save=False)
    assert disk.finish() == ["storage_failed", "storage_failed"]
    disk.add(3)
    assert "not answered" in disk.reports[0].failure.message  # type: ignore[union-attr]
    assert disk.finish() == ["storage_failed"], "at once, while it hangs"
    began = time.monotonic()
    disk.jobs.close()
    assert time.monotonic() - began < 10, "an exit does not wait for it"
    disk.answers.set()
    monkeypatch.setattr(cache_file_jobs, "STALL_LIMIT_S", patience_s)
    deadline = time.monotonic() + 30
    while disk.jobs._disk.busy_s and time.monotonic() < deadline:
        time.sleep(0.002)
    disk.add(4)
    disk.add(5, save=False)
    assert disk.finish() == ["", ""], "it answers again"


def test_jobs_given_up_at_the_end_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_file, "SLICE_BYTES", 10)
    disk = Jobs(tmp_path, monkeypatch)
    disk.add(1)
    for _ in range(200):
        disk.jobs.slice()
        time.sleep(0.001)
        if list(tmp_path.iterdir()):
            break
    disk.jobs.close()
    assert list(tmp_path.iterdir()) == [] and disk.jobs.idle
