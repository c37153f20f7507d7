"""The disk tier: what is put comes back after a restart, or is a miss; never more bytes than the limit."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.core.kv_cache import cache_file, disk_cache
from cllm.core.kv_cache.cache_file import get_file_size
from cllm.core.kv_cache.disk_cache import Candidate, DiskKVCache, DiskThread, Operation
from cllm.core.kv_cache.disk_folder import CacheFolder, DiskEntry
from cllm.core.kv_cache.prefix_index import CachedPrefix, Checkpoint
from cllm.core.kv_cache.tiers import Entry
from cllm.core.step_cost import TILE
from cllm.errors import CacheFileError, NotFound, StorageFailed
from tests.driver.engine import InlineExecutor
from tests.profiles import examples

MIB = 1 << 20
LONG_AGO = 99.0  # seconds that nothing was computed for


class InlineDisk(DiskThread):
    """Does each operation at once, on the caller's thread."""

    def __init__(self) -> None:
        super().__init__("inline")

    def submit(self, operation: Operation) -> Future[Any]:
        return InlineExecutor().submit(operation)


class Tier(DiskKVCache):
    """A disk tier whose disk answers at once, unless `disk` says otherwise."""

    def __init__(
        self,
        folder: Path,
        limit: int = MIB,
        fingerprint: str = "here",
        disk: DiskThread | None = None,
    ) -> None:
        self.woken = False
        super().__init__(
            CacheFolder(folder, lambda: fingerprint), limit, self._note, disk=disk or InlineDisk()
        )

    def _note(self) -> None:
        self.woken = True

    def write(self, *entries: Entry, candidates: Sequence[Candidate] = ()) -> None:
        """Put entries, after each be idle until there is nothing to do."""
        self._rest(candidates)
        for entry in entries:
            if self.put(entry):
                self._rest(candidates)

    def _rest(self, candidates: Sequence[Candidate]) -> None:
        for _ in range(10_000):
            self.woken = False
            again_s = self.idle(candidates, LONG_AGO)
            if again_s != 0.0 and not self.woken:
                return
        raise AssertionError("it is never done")

    def find(self, tokens: Sequence[int], tenant: str = "") -> DiskEntry | None:
        """The entry of exactly these tokens."""
        found = self.matches(tenant, tokens, len(tokens))
        return next((match.value for match in found if len(match.value.tokens) == len(tokens)), None)

    def fetch(self, tokens: Sequence[int], tenant: str = "") -> Entry | None:
        entry = self.find(tokens, tenant)
        load = self.load(entry) if entry is not None else None
        return load.result(30) if load is not None else None


def content(prefix: Sequence[int], tenant: str = "", size: int = 300) -> bytes:
    """The state of these tokens: a function of them."""
    seed = hashlib.sha256(repr((tenant, tuple(prefix))).encode()).digest()
    return random.Random(seed).randbytes(size)


def make(tokens: Sequence[int], tenant: str = "", size: int = 300, **more: Any) -> Entry:
    return Entry(tenant, tokens, content(tokens, tenant, size), **more)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("kv/*/*") if not path.is_dir())


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def words(seed: int, length: int = 100) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(1000) for _ in range(length))


def candidate(entry: Entry, save_s: float = 0.0, token_s: float = 1.0) -> Candidate:
    return Candidate(entry.tenant, entry.tokens, get_file_size(entry), save_s, token_s, lambda: entry)


# What is kept ----------------------------------------------------------------------------------------


def test_what_was_put_comes_back_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_file, "SLICE_BYTES", 100)
    points = (Checkpoint(10, b"x" * 250), Checkpoint(70, b"y"))
    Tier(tmp_path).write(make(words(1), "jürgen", checkpoints=points, min_length=80), make(words(2)))
    assert sorted(path.stat().st_mode & 0o777 for path in files(tmp_path)) == [0o600, 0o600]
    assert {path.parent.stat().st_mode & 0o777 for path in files(tmp_path)} == {0o700}
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    tier = Tier(tmp_path)
    known = tier.find(words(1), "jürgen")
    assert known is not None and known.longest_cut(75).length == 70 and known.longest_cut(90).length == 90
    found = tier.fetch(words(1), "jürgen")
    assert found is not None and tuple(found.tokens) == words(1) and found.tenant == "jürgen"
    assert bytes(found.state) == content(words(1), "jürgen") and found.min_length == 80
    assert [(point.length, bytes(point.state)) for point in found.checkpoints] == list(points)
    assert tier.fetch(words(2)) is not None and tier.loads == 2
    assert tier.bytes == used(tmp_path) == sum(entry.size for entry in tier.entries)


def test_tenants_stay_apart(tmp_path: Path) -> None:
    first = Tier(tmp_path)
    first.write(make(words(1), "one"), make(words(1), "other"))
    assert len({path.name for path in files(tmp_path)}) == 2
    for tier in (first, Tier(tmp_path)):
        assert tier.matches("third", words(1), 1) == tier.matches("", words(1), 1) == []
        found = tier.fetch(words(1), "one")
        assert found is not None and bytes(found.state) == content(words(1), "one")


def test_what_a_longer_prefix_covers_is_not_kept_beside_it(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    tier.write(make(words(1)[:80]), make(words(2)[:80]))
    tier.write(make(words(1)), make(words(2), min_length=90))
    assert tier.find(words(1)) and not tier.find(words(1)[:80])
    assert tier.find(words(2)) and tier.find(words(2)[:80]), "the longer one cannot be cut there"
    assert not tier.put(make(words(1)[:90])) and not tier.put(make(words(1)))
    assert not tier.put(make(words(2)[:70])) and not tier.put(make(words(2)[:95]))
    assert len(files(tmp_path)) == 3 and tier.bytes == used(tmp_path)
    point = Checkpoint(80, b"c")
    tier.write(make(words(2, 120), checkpoints=(point,), min_length=110))
    assert tier.writes == 5 and not tier.find(words(2)[:80]), "it has a checkpoint there"
    assert tier.find(words(2)), "but none here"


def test_the_least_recently_used_goes_first_also_after_a_restart(tmp_path: Path) -> None:
    size = get_file_size(make(words(1)))
    tier = Tier(tmp_path, 3 * size)
    for seed in (1, 2, 3):
        tier.write(make(words(seed)))
    assert tier.fetch(words(1)) is not None
    tier = Tier(tmp_path, 3 * size)
    tier.write(make(words(4)))
    assert [bool(tier.find(words(seed))) for seed in (1, 2, 3, 4)] == [True, False, True, True]
    assert used(tmp_path) == tier.bytes == 3 * size
    assert not tier.put(make(words(5), size=4 * size)), "it would not fit into an empty folder"
    tier = Tier(tmp_path, size)
    assert tier.find(words(4)) and used(tmp_path) == size, "the limit is smaller now"


def test_files_of_other_models_take_space_and_go_when_they_are_the_oldest(tmp_path: Path) -> None:
    size = get_file_size(make(words(1)))
    Tier(tmp_path, fingerprint="another").write(make(words(1)))
    tier = Tier(tmp_path, 3 * size)
    assert tier.matches("", words(1), 1) == [] and tier.bytes == size
    tier.write(make(words(2)), make(words(3)))
    assert len(files(tmp_path)) == 3
    tier.write(make(words(4)))
    assert len(files(tmp_path)) == 3 and all(tier.find(words(seed)) for seed in (2, 3, 4))
    assert Tier(tmp_path, fingerprint="another").matches("", words(1), 1) == []


def test_clear_removes_everything_of_this_model(tmp_path: Path) -> None:
    Tier(tmp_path, fingerprint="another").write(make(words(1)))
    tier = Tier(tmp_path)
    tier.write(make(words(1)), make(words(2), "t"))
    tier.put(make(words(3)))
    tier.idle((), LONG_AGO)  # in the middle of its write
    tier.clear().result(30)
    tier.write()
    assert len(files(tmp_path)) == 1 and not tier.entries and tier.bytes == used(tmp_path)
    tier.write(make(words(4)))
    assert tier.fetch(words(4)) is not None
    off = Tier(tmp_path, 0)
    off.clear().result(30)
    assert len(files(tmp_path)) == 1, "what was written before it was turned off"


def test_saved_slots_count_in_the_limit_and_are_not_evicted(tmp_path: Path) -> None:
    size = get_file_size(make(words(1)))
    tier = Tier(tmp_path, 3 * size)
    tier.write(make(words(1)), make(words(2)), make(words(3)))
    for name, seed in (("a", 4), ("b.bin", 5)):
        assert tier.save_slot(name, make(words(seed))).result(30) == size
    assert tier.bytes == used(tmp_path) == 3 * size and tier.writes == 5
    tier.write(make(words(6)))
    assert [bool(tier.fetch(words(seed))) for seed in (1, 2, 3, 6)] == [False, False, False, True]
    tier.save_slot("c", make(words(7))).result(30)
    assert not tier.put(make(words(8))) and used(tmp_path) == 3 * size
    with pytest.raises(StorageFailed, match="--cache-disk-mb"):
        tier.save_slot("d", make(words(8))).result(30)
    assert tier.save_slot("c", make(words(8))).result(30) == size, "in place of the one before"
    assert sorted(path.name for path in files(tmp_path)) == ["a.slot", "b.bin.slot", "c.slot"]
    tier = Tier(tmp_path, size)
    tier.write(make(words(9)), candidates=[candidate(make(words(9)))])
    assert tier.bytes == used(tmp_path) == 3 * size and not tier.failures, "the limit is smaller now"
    for name, seed in (("a", 4), ("b.bin", 5), ("c", 8)):
        assert tuple(tier.load_slot(name, size).result(30).tokens) == words(seed)
    with pytest.raises(NotFound):
        Tier(tmp_path, fingerprint="another").load_slot("a", size).result(30)
    with pytest.raises(StorageFailed, match="--cache-ram-mb"):
        tier.load_slot("a", size - 1).result(30)
    tier.clear().result(30)
    assert files(tmp_path) == []


def test_off_it_does_nothing(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "none", 0)
    assert not tier.put(make(words(1))) and tier.idle([candidate(make(words(1)))], LONG_AGO) is None
    tier.close([candidate(make(words(1)))])
    assert tier.matches("", words(1), 1) == [] and not (tmp_path / "none").exists()


# Writing behind --------------------------------------------------------------------------------------


def test_nothing_is_written_before_it_is_quiet(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    saves: list[int] = []

    def save() -> Entry:
        saves.append(1)
        return make(words(1))

    waiting = [Candidate("", words(1), 300, 0.0, 1.0, save)]
    assert tier.idle(waiting, 0.5) == disk_cache.QUIET_S - 0.5 and not saves
    tier.write(candidates=waiting)
    assert len(saves) == 1, "it is known now"
    assert len(files(tmp_path)) == 1


def test_only_what_is_worth_it_is_written(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    grown = words(1, 800)
    tier.write(make(grown[:700]))
    tier.write(
        candidates=[
            candidate(make(words(2, TILE - 1))),  # too short
            candidate(make(grown), save_s=1.0, token_s=1e-3),  # saving takes longer than the new ones do
            Candidate("", words(4), 300, 0.0, 1.0, lambda: None),  # cannot be saved
        ]
    )
    assert tier.writes == 1
    tier.write(candidates=[candidate(make(words(5))), candidate(make(grown))])
    assert tier.writes == 3 and tier.find(grown) and tier.find(words(5))


def test_a_long_save_waits_for_a_long_pause(tmp_path: Path) -> None:
    """A request that comes meanwhile has to wait for it."""
    tier = Tier(tmp_path)
    tier.write()
    waiting = [candidate(make(words(1)), save_s=1.0), candidate(make(words(2)), save_s=0.9)]
    assert tier.idle(waiting, 3.0) == pytest.approx(6.0) and tier._write is None
    assert tier.idle(waiting, 9.5) is None and tier._write is not None
    tier.write()
    assert tier.find(words(2)) and not tier.find(words(1))


def test_more_than_fits_is_not_written_over_and_over(tmp_path: Path) -> None:
    size = get_file_size(make(words(1)))
    tier = Tier(tmp_path, 3 * size)
    waiting = [candidate(make(words(seed))) for seed in range(6)]  # the first was used last
    tier.write(candidates=waiting)
    assert tier.writes == 3 and all(tier.find(words(seed)) for seed in range(3))
    tier.write(candidates=waiting[::-1])
    tier.write(candidates=waiting[::-1])
    assert tier.writes == 6 and all(tier.find(words(seed)) for seed in (3, 4, 5))


def test_at_exit_the_most_recently_used_come_first(tmp_path: Path) -> None:
    size = get_file_size(make(words(1)))
    tier = Tier(tmp_path, 3 * size)
    tier.write(make(words(9)))
    assert tier.put(make(words(8)))
    tier.close([candidate(make(words(seed))) for seed in (1, 2, 3, 4)])
    assert tier.put(make(words(7))) is False
    tier = Tier(tmp_path, 3 * size)
    assert all(tier.find(words(seed)) for seed in (1, 2, 3)) and len(files(tmp_path)) == 3
    assert [tuple(entry.tokens) for entry in tier.entries] == [words(3), words(2), words(1)]


def test_at_exit_only_what_fits_the_time_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_file, "SLICE_BYTES", 50)
    disk = SlowDisk(0.005)  # the first takes a tenth of a second, the second ten
    tier = Tier(tmp_path, disk=disk)
    began = time.monotonic()
    tier.close([candidate(make(words(1))), candidate(make(words(2), size=90_000))], within_s=0.8)
    assert time.monotonic() - began < 8
    assert len(files(tmp_path)) == 1, "nothing half-written is left"
    assert Tier(tmp_path).fetch(words(1)) is not None


# Failures --------------------------------------------------------------------------------------------


class SlowDisk(DiskThread):
    """Each operation takes a while, or as long as `answers` is clear."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__("slow")
        self.seconds = seconds
        self.answers = threading.Event()
        self.answers.set()

    def submit(self, operation: Operation) -> Future[Any]:
        def slowly() -> Any:
            time.sleep(self.seconds)
            assert self.answers.wait(60)
            return operation()

        return super().submit(slowly)


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_disk_that_does_not_answer_holds_up_nothing(tmp_path: Path) -> None:
    Tier(tmp_path).write(make(words(1)))
    disk = SlowDisk()
    tier = Tier(tmp_path, disk=disk)
    wait_until(lambda: tier.find(words(1)))
    disk.answers.clear()
    began = time.monotonic()
    entry = tier.find(words(1))
    assert entry is not None
    load = tier.load(entry)
    assert load is not None and load is tier.load(entry) and not load.done()
    tier.give_up(load)
    assert tier.matches("", words(1), 1) == [], "until it answers"
    tier.put(make(words(2)))
    assert tier.idle((), LONG_AGO) is None and tier.idle((), LONG_AGO) is None
    tier.close([candidate(make(words(3)))], within_s=0.2)
    assert time.monotonic() - began < 30
    disk.answers.set()
    assert load.result(30) is not None
    wait_until(lambda: not disk.busy_s and disk._operations.empty())
    assert len(files(tmp_path)) == 1, "nothing half-written is left"
    assert Tier(tmp_path).fetch(words(1)) is not None


def test_too_many_loads_wait_for_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tier(tmp_path).write(make(words(1)), make(words(2)))
    monkeypatch.setattr(disk_cache, "MAX_IN_FLIGHT", 1000)
    disk = SlowDisk()
    tier = Tier(tmp_path, disk=disk)
    wait_until(lambda: tier.find(words(1)))
    disk.answers.clear()
    first, second = tier.find(words(1)), tier.find(words(2))
    assert first is not None and second is not None
    load = tier.load(first)
    assert load is not None and tier.load(second) is None
    disk.answers.set()
    assert load.result(30) is not None
    assert (again := tier.load(second)) is not None and again.result(30) is not None


def test_a_load_that_has_ended_is_shared_while_one_has_it(tmp_path: Path) -> None:
    Tier(tmp_path).write(make(words(1)))
    tier = Tier(tmp_path)
    entry = tier.find(words(1))
    assert entry is not None
    load = tier.load(entry)
    assert load is not None and load.done() and tier.load(entry) is load and tier.loads == 1
    del load
    assert tier.load(entry) is not None and tier.loads == 2, "its state is not kept"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "replace", "mkdir"])
def test_a_folder_that_takes_no_more_is_said_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, call: str
) -> None:
    tier = Tier(tmp_path)
    tier.write(make(words(1)))

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code), "/secret/place")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        if call == "open":
            opened = os.open
            patch.setattr(os, "open", lambda *given: (fail if given[1] & os.O_CREAT else opened)(*given))
        else:
            patch.setattr(Path, call, fail)
        for _ in range(3):
            tier._retry_at = 0.0
            tier.write(make(words(2)), make(words(3)))
        assert tier.idle((), LONG_AGO) == pytest.approx(disk_cache.RETRY_S, abs=5)
        assert tier.fetch(words(1)) is not None, "what is there can be read"
    assert len(caplog.records) == 1 and os.strerror(code).lower() in caplog.text
    assert "secret" not in caplog.text and tier.failures == 3
    assert len(files(tmp_path)) == 1 and tier.bytes == used(tmp_path)
    tier._retry_at = 0.0
    tier.write(make(words(2)))
    assert tier.fetch(words(2)) is not None


def test_a_folder_that_cannot_be_read_turns_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", "/secret/place")

    monkeypatch.setattr(Path, "iterdir", fail)
    with caplog.at_level(logging.WARNING):
        tier = Tier(tmp_path)
        tier.write(make(words(1)))
    assert not tier.limit and tier.matches("", words(1), 1) == []
    assert len(caplog.records) == 1 and "secret" not in caplog.text


def test_files_that_are_none_of_ours_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Tier(tmp_path).write(make(words(1)), make(words(2)))
    first, second = files(tmp_path)
    folder = first.parent
    secret = tmp_path / "secret"
    secret.write_bytes(first.read_bytes())
    first.unlink()
    first.symlink_to(secret)
    (folder / "elsewhere").symlink_to(tmp_path)
    (folder / "a.kv").mkdir()
    (folder / "b.kv").write_bytes(second.read_bytes())  # under another name than its own
    (folder / "notes.txt").write_text("mine")
    os.mkfifo(folder / "c.kv")
    with caplog.at_level(logging.WARNING):
        tier = Tier(tmp_path)
        tier.write()
    assert len(tier.entries) == 1 and len(caplog.records) == 1 and "4 files" in caplog.text
    tier = Tier(tmp_path, limit=1)
    tier.write()
    assert secret.exists() and (folder / "notes.txt").exists(), "only files of the cache are removed"


def test_leftovers_of_a_crash_are_removed_and_writes_of_others_are_not(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    tier.put(make(words(1)))
    tier.idle((), LONG_AGO)  # another server, in the middle of a write
    (theirs,) = files(tmp_path)
    left = theirs.with_name(".left-1234.new")
    left.write_bytes(b"half")
    with left.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        Tier(tmp_path)
        assert left.exists()
    Tier(tmp_path)
    assert files(tmp_path) == [theirs]
    tier.write()
    assert Tier(tmp_path).fetch(words(1)) is not None


def test_what_another_server_has_written_is_found_in_the_next_pause(tmp_path: Path) -> None:
    size = get_file_size(make(words(1)))
    tier, other = Tier(tmp_path, 2 * size), Tier(tmp_path, 2 * size)
    tier.write(make(words(1)))
    other.write(make(words(1)), make(words(2)))
    assert tier.fetch(words(2)) is None
    tier._scanned_at -= 2 * LONG_AGO
    tier.write()
    assert tier.fetch(words(2)) is not None and len(tier.entries) == 2
    assert tier.bytes == used(tmp_path) == 2 * size
    other.write(make(words(3)))
    tier._scanned_at -= 2 * LONG_AGO
    tier.write()
    assert tier.bytes <= tier.limit and used(tmp_path) <= 2 * size
    assert tier.fetch(words(3)) is not None


def test_a_file_that_another_server_has_removed_is_a_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Tier(tmp_path)
    tier.write(make(words(1)))
    files(tmp_path)[0].unlink()
    with caplog.at_level(logging.WARNING):
        assert tier.fetch(words(1)) is None and not tier.find(words(1))
    assert not tier.entries and not tier.bytes and not caplog.records


# All of it, at random --------------------------------------------------------------------------------

PREFIXES = [words(seed)[:length] for seed in range(3) for length in (70, 85, 100)]
RARE = ["slice", "write", "restart", "hang", "clear", "damage", "save", "restore"]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from([*["put"] * 3, *["load"] * 2, *RARE]),
        st.integers(0, 1),  # which of two servers
        st.sampled_from(PREFIXES),
        st.sampled_from(["", "t"]),
    ),
    max_size=40,
)


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(200)
)
@given(actions=ACTIONS, cuttable=st.booleans())
def test_two_servers_on_one_folder(
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    actions: list[tuple[str, int, tuple[int, ...], str]],
    cuttable: bool,
) -> None:
    """A load yields exactly what was put, or nothing; each keeps the bytes it knows of within the limit."""
    folder = tmp_path_factory.mktemp("cache")
    size = get_file_size(make(PREFIXES[-1], "t"))
    tiers = [Tier(folder, 4 * size) for _ in range(2)]
    hanging: list[Tier] = []
    saved: set[tuple[str, tuple[int, ...]]] = set()  # whenever
    for action, number, tokens, tenant in actions:
        tier = tiers[number]
        if action == "put":
            if tier._write is None and tier.scanning is None:
                tier.put(make(tokens, tenant, min_length=0 if cuttable else len(tokens)))
        elif action == "load":
            found = tier.fetch(tokens, tenant)
            assert found is None or bytes(found.state) == content(tokens, tenant)
        elif action == "slice":
            tier.idle((), LONG_AGO)
        elif action == "write":
            tier._scanned_at -= 2 * LONG_AGO
            tier.write()
        elif action in ("restart", "hang"):
            if action == "restart":
                tier.close()
            else:
                hanging.append(tier)
            tiers[number] = Tier(folder, 4 * size)
        elif action == "clear":
            tier.clear()
        elif action == "save":  # one name a tenant
            tier.save_slot(f"slot{tenant}", make(tokens, tenant)).result(30)
            saved.add((tenant, tokens))
        elif action == "restore":
            with suppress(NotFound, CacheFileError):
                found = tier.load_slot(f"slot{tenant}", 4 * size).result(30)
                assert bytes(found.state) == content(tuple(found.tokens), tenant)
                assert (tenant, tuple(found.tokens)) in saved
        elif there := files(folder):
            path = there[len(tokens) % len(there)]
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        for one in tiers:
            paths = [entry.path for entry in one.entries]
            assert len(paths) == len(set(paths))
            assert sum(entry.size for entry in one.entries) <= one.bytes <= one.limit or not one.limit
        assert sum(path.stat().st_size for path in files(folder) if path.suffix != ".new") <= 4 * size
    for tier in (*tiers, *hanging):
        tier.close()
    last = Tier(folder, 4 * size)
    last.write()
    assert not [path for path in files(folder) if path.suffix == ".new"], "nothing half-written is left"
    assert last.bytes == used(folder) <= 4 * size
    for entry in tuple(last.entries):
        found = last.fetch(entry.tokens, entry.tenant)
        assert found is None or bytes(found.state) == content(tuple(entry.tokens), entry.tenant)


def test_the_name_tells_tenant_and_tokens_apart() -> None:
    folder = CacheFolder(Path("x"), lambda: "here")
    prefixes = [("a", (1, 2)), ("a", (1,)), ("", (1, 2)), ("a\1\0\0\0", (2,)), ("b", (1, 2))]
    names = {folder.get_path(CachedPrefix(tenant, tokens)).name for tenant, tokens in prefixes}
    assert len(names) == len(prefixes)
