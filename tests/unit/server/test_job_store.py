"""The job store: tenants apart, bytes and age bounded, every line answered once, nothing lost by a kill."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cllm.config import ServerConfig
from cllm.errors import ConfigError, InvalidRequest, NotFound, StorageFailed
from cllm.server import job_store
from cllm.server.job_store import (
    DONE,
    FAILED,
    BatchLine,
    JobDatabase,
    JobStore,
    LineCounts,
    LineTokens,
    StoredObject,
    find_folder,
)
from tests.profiles import examples

Result = TypeVar("Result")
TENANTS = ("", "a", "b")


def run(call: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(call)


def make(name: str, tenant: str = "", size: int = 10, **fields: Any) -> StoredObject:
    return StoredObject(id=name, tenant=tenant, created=time.time(), record=b"x" * size, **fields)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    store = JobStore(tmp_path / "jobs", 1000)
    yield store
    store.close()


def names(store: JobStore, *asked: str, tenant: str = "") -> list[str]:
    found = []
    for name in asked:
        try:
            found.append(run(store.run(JobDatabase.get, "response", tenant, name)).id)
        except NotFound:
            continue
    return found


def put(store: JobStore, *new: StoredObject) -> None:
    for each in new:
        store.submit(JobDatabase.put_response, each).result()


def test_responses_not_used_for_longest_make_room_in_their_tenant(store: JobStore) -> None:
    put(store, *(make(name, size=300) for name in "abc"), make("d", "other", 900))
    run(store.run(JobDatabase.get_chain, "", "a"))
    put(store, make("e", size=300))
    assert names(store, *"abcde") == ["a", "c", "e"] and names(store, "d", tenant="other") == ["d"]
    with pytest.raises(StorageFailed, match="does not fit"):
        put(store, make("too large", size=1001))
    assert names(store, "too large") == []


def test_responses_make_room_for_a_file(store: JobStore) -> None:
    put(store, *(make(name, size=300) for name in "abc"))
    with pytest.raises(StorageFailed, match="1001 bytes do not fit"):
        run(store.run(JobDatabase.check, 1001, ""))
    assert names(store, *"abc") == ["a", "b", "c"], "what fails drops nothing"
    run(store.add_file(make("file-1"), io.BytesIO(b"x" * 600), 600))
    assert names(store, *"abc") == ["c"]


def test_a_folder_without_a_column_is_opened(tmp_path: Path) -> None:
    store = JobStore(tmp_path, 1000)
    run(store.run(lambda database: database.sql.execute("ALTER TABLE lines DROP COLUMN input") and None))
    store.close()
    store = JobStore(tmp_path, 1000)
    assert run(store.run(JobDatabase.count_lines, "batch-1"))[1] == LineTokens(0, 0, 0)
    store.close()


def test_an_active_response_stays_and_cannot_be_continued(store: JobStore) -> None:
    active = msgspec.structs.replace(make("a", size=300), active=True, expires=1.0)
    put(store, active)
    with pytest.raises(InvalidRequest, match="has not ended"):
        run(store.run(JobDatabase.get_chain, "", "a"))
    put(store, *(make(name, size=300) for name in "bcd"))
    assert names(store, *"abcd") == ["a", "c", "d"]

    def end(old: StoredObject) -> StoredObject:
        return msgspec.structs.replace(old, active=False, expires=None, record=b"{}", more=b"[]")

    run(store.run(JobDatabase.change, "response", "", "a", end))
    put(store, make("e", size=300))
    assert names(store, *"abcde") == ["a", "c", "d", "e"]


def test_files_are_filtered_before_they_are_paged(store: JobStore) -> None:
    for number in range(6):
        purpose = b"batch" if number == 0 else b"other"
        file = StoredObject(f"f{number}", "", number, record=b'{"purpose":"%b"}' % purpose)
        run(store.run(JobDatabase.add, "file", file))
    found = run(store.run(JobDatabase.list_objects, "file", "", 2, purpose="batch"))
    assert [each.id for each in found] == ["f0"]


def test_a_tenant_has_its_part_of_the_bytes(tmp_path: Path) -> None:
    store = JobStore(tmp_path, 1000, lambda: 4)
    with pytest.raises(StorageFailed, match=r"0 of 250 bytes are in use \(--job-store-mb\)"):
        run(store.run(JobDatabase.add, "conversation", make("a", size=251)))
    run(store.run(JobDatabase.add, "conversation", make("a", size=250)))
    store.close()


def test_a_chain_is_the_oldest_first(store: JobStore) -> None:
    put(store, make("a"), make("b", previous="a"), make("c", previous="b"))
    assert [each.id for each in run(store.run(JobDatabase.get_chain, "", "c"))] == ["a", "b", "c"]
    with pytest.raises(NotFound):
        run(store.run(JobDatabase.get_chain, "other", "c"))
    run(store.run(JobDatabase.delete, "response", "", "a"))
    with pytest.raises(NotFound, match="whole conversation"):
        run(store.run(JobDatabase.get_chain, "", "c"))


def test_what_has_expired_is_removed_with_its_file(store: JobStore) -> None:
    run(store.add_file(make("file-1", expires=time.time() - 1), io.BytesIO(b"abc"), 3))
    run(store.run(JobDatabase.add, "batch", make("batch-1", expires=time.time() - 1, active=True)))
    path = store.get_path("file-1")
    assert path.read_bytes() == b"abc" and path.stat().st_mode & 0o777 == 0o600
    store._database._purge_at = 0.0  # type: ignore[union-attr]
    with pytest.raises(NotFound):
        run(store.run(JobDatabase.get, "file", "", "file-1"))
    assert not path.exists()
    assert run(store.run(JobDatabase.get, "batch", "", "batch-1")).active  # its work is not done


def test_files_are_for_their_owner_alone(store: JobStore, tmp_path: Path) -> None:
    put(store, make("a"))
    folder = tmp_path / "jobs"
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o077 for path in folder.iterdir() if path.is_file()}
    assert "jobs.sqlite" in modes and not any(modes.values())


def test_a_store_of_no_size_keeps_nothing() -> None:
    store = JobStore(None, 0)
    assert not store.enabled
    with pytest.raises(NotFound, match="--job-store-mb 0"):
        run(store.run(JobDatabase.add, "batch", make("a")))


def test_a_second_server_cannot_open_the_same_folder(store: JobStore, tmp_path: Path) -> None:
    store.open()
    other = JobStore(tmp_path / "jobs", 1000)
    with pytest.raises(ConfigError, match="another server uses it"):
        other.open()
    other.close()


def test_the_folder_follows_the_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert find_folder(ServerConfig(port=81)) == tmp_path / "cllm" / "jobs-81"
    assert find_folder(ServerConfig(port=0)) is None
    assert find_folder(ServerConfig(port=0, state_dir="/x")) == Path("/x")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert find_folder(ServerConfig(port=81)) is None, "a home that cannot be written to stops no server"


def test_a_full_disk_refuses_new_jobs_and_keeps_accepted_ones(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store.run(JobDatabase.add, "batch", make("batch-1", active=True), 0, [BatchLine(1, 0, 5)]))
    monkeypatch.setattr(job_store, "RESERVED_DISK", 1 << 60)
    with pytest.raises(StorageFailed, match="do not fit on the disk"):
        run(store.run(JobDatabase.add, "batch", make("batch-2")))
    with pytest.raises(StorageFailed, match="do not fit on the disk"):
        run(store.add_file(make("file-1"), io.BytesIO(b"abc"), 3))
    run(store.run(JobDatabase.add_answer, "batch-1", 1, b"{}", DONE))
    assert run(store.run(JobDatabase.count_lines, "batch-1")) == (LineCounts(1, 1, 0), LineTokens(0, 0, 0))


def test_a_failed_commit_fails_its_calls_and_changes_nothing(tmp_path: Path) -> None:
    store = JobStore(tmp_path, 1 << 20)

    def limit(database: JobDatabase, pages: int) -> None:
        database.sql.execute(f"PRAGMA max_page_count = {pages}")

    run(store.run(limit, 20))
    with pytest.raises(StorageFailed, match="full"):
        run(store.run(JobDatabase.add, "batch", make("a", size=200_000)))
    run(store.run(limit, 100_000))
    run(store.run(JobDatabase.add, "batch", make("b", size=200_000)))
    with pytest.raises(NotFound):
        run(store.run(JobDatabase.get, "batch", "", "a"))
    store.close()


def test_a_line_is_answered_once_and_the_files_are_written_from_the_rows(store: JobStore) -> None:
    run(store.run(lambda database: setattr(database, "_max_bytes", 100_000)))
    lines = [BatchLine(number, 0, 5, opening) for number, opening in enumerate((b"b", b"a", b"c", b"a"), 1)]
    run(store.run(JobDatabase.add, "batch", make("batch-1", active=True), 0, lines))
    first = run(store.run(JobDatabase.next_lines, "batch-1", None, 3))
    assert [line.number for line in first] == [2, 4, 1]
    assert [line.number for line in run(store.run(JobDatabase.next_lines, "batch-1", first[-1], 9))] == [3]
    for answer in (b'{"first":1}', b'{"second":1}'):
        run(store.run(JobDatabase.add_answer, "batch-1", 2, answer, DONE, 5, 7))
    run(store.run(JobDatabase.add_answer, "batch-1", 4, b'{"bad":1}', FAILED))

    def make_file(name: str, size: int) -> StoredObject:
        return msgspec.structs.replace(make(name), record=b"%d" % size)

    def change(batch: StoredObject, files: dict[int, str], *sums: LineCounts | LineTokens) -> StoredObject:
        assert sums == (LineCounts(4, 1, 3), LineTokens(5, 2, 7)) and len(files) == 2
        return msgspec.structs.replace(batch, active=False)

    batch = run(store.run(JobDatabase.get, "batch", "", "batch-1"))
    given = (batch, make_file, change, lambda line: b'{"left":%d}' % line.number)
    run(store.run(JobDatabase.finish_batch, *given))
    done, failed = "file-batch-1-output", "file-batch-1-error"
    assert store.get_path(done).read_bytes() == b'{"first":1}\n'
    assert store.get_path(failed).read_bytes() == b'{"left":1}\n{"left":3}\n{"bad":1}\n'
    assert run(store.run(JobDatabase.get, "file", "", done)).record == b"12"
    assert not run(store.run(JobDatabase.get, "batch", "", "batch-1")).active
    assert run(store.run(JobDatabase.count_lines, "batch-1"))[0] == LineCounts(0, 0, 0)


KILLED = """
import asyncio, os, sys, time
from pathlib import Path
from cllm.server.job_store import BatchLine, JobDatabase, JobStore, StoredObject

async def main():
    store = JobStore(Path(sys.argv[1]), 1 << 20)
    batch = StoredObject(id="batch", tenant="", created=time.time(), active=True, record=b"{}")
    await store.run(JobDatabase.add, "batch", batch, 0, [BatchLine(number, 0, 1) for number in range(100)])
    for number in range(100):
        await store.run(JobDatabase.add_answer, "batch", number, b"answer")
        if number == 41:
            os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def test_a_kill_loses_no_accepted_line_and_no_answer(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, env=environment)
    assert ended.returncode == -9
    store = JobStore(tmp_path, 1 << 20)
    assert run(store.run(JobDatabase.count_lines, "batch"))[0] == LineCounts(100, 42, 0)
    assert [each.id for each in run(store.run(JobDatabase.list_active, "batch"))] == ["batch"]
    assert [line.number for line in run(store.run(JobDatabase.next_lines, "batch", None, 2))] == [42, 43]
    store.close()


class StoreMachine(RuleBasedStateMachine):
    """The store against a dictionary; it is closed and opened at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = JobStore(Path(self.folder.name), 100_000)
        self.known: dict[tuple[str, str], StoredObject] = {}
        self.answered: dict[tuple[str, int], bytes] = {}
        self.count = 0

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(tenant=st.sampled_from(TENANTS), lines=st.integers(0, 3), size=st.integers(0, 50))
    def add(self, tenant: str, lines: int, size: int) -> None:
        self.count += 1
        new = make(f"batch-{self.count:03}", tenant, size, active=True)
        run(
            self.store.run(
                JobDatabase.add, "batch", new, 0, [BatchLine(number, 0, 1) for number in range(lines)]
            )
        )
        self.known[tenant, new.id] = new

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if self.known:
            tenant, name = data.draw(st.sampled_from(sorted(self.known)))
            run(self.store.run(JobDatabase.delete, "batch", tenant, name))
            del self.known[tenant, name]
            self.answered = {key: answer for key, answer in self.answered.items() if key[0] != name}

    @rule(number=st.integers(0, 3), data=st.data(), answer=st.binary(max_size=8))
    def answer(self, number: int, data: st.DataObject, answer: bytes) -> None:
        if self.known:
            _, name = data.draw(st.sampled_from(sorted(self.known)))
            there = {line.number for line in run(self.store.run(JobDatabase.next_lines, name, None, 9))}
            run(self.store.run(JobDatabase.add_answer, name, number, answer, DONE))
            if number in there:
                assert self.answered.setdefault((name, number), answer) is answer

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = JobStore(Path(self.folder.name), 100_000)

    @invariant()
    def every_tenant_sees_its_own(self) -> None:
        for tenant in TENANTS:
            own = [name for owner, name in sorted(self.known) if owner == tenant]
            found = run(self.store.run(JobDatabase.list_objects, "batch", tenant, 999, oldest=True))
            assert [each.id for each in found] == own
            for name in own:
                for other in TENANTS:
                    if other != tenant:
                        with pytest.raises(NotFound):
                            run(self.store.run(JobDatabase.get, "batch", other, name))

    @invariant()
    def bytes_are_accounted_for(self) -> None:
        def read(database: JobDatabase, query: str) -> list[Any]:
            return database.sql.execute(query).fetchall()

        sizes = run(self.store.run(read, "SELECT tenant, sum(size) FROM objects GROUP BY tenant"))
        database = self.store._database
        assert database is not None and +database.sizes == {tenant: size for tenant, size in sizes if size}
        stored = run(self.store.run(read, "SELECT batch, number, answer FROM answers"))
        assert {(batch, number): answer for batch, number, answer in stored} == self.answered


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=examples(10), deadline=None)  # each step waits for a disk
