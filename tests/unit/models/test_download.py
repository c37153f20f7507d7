"""Downloads from a real server on loopback: ranges, every fault, the hash, and kill -9 at random moments."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cllm.errors import HubError
from cllm.models import download as module
from cllm.models.download import BLOCK, Download, Journal, RateLimit, describe_disk, has_hash
from cllm.models.files import HubFile, HubReference
from cllm.models.hub import make_hub
from cllm.models.store import DownloadPaths
from tests.driver.hub import COMMIT, FakeHub

REPO, NAME = "Example/Big", "big-Q8_0.gguf"
CONNECTIONS = 4
KILLS = 50
KILLED_BYTES = 8 << 20
READ = 64 << 10  # bytes that are read at a time
LIMIT_S = 60.0


def make_file(data: bytes) -> HubFile:
    return HubFile(NAME, len(data), hashlib.sha256(data).hexdigest())


def make_place(folder: Path) -> DownloadPaths:
    return DownloadPaths(folder / "x.cllm.incomplete", folder / "x", folder / "x.lock")


@contextmanager
def downloading(folder: Path, data: bytes, limit: RateLimit | None = None) -> Iterator[Download]:
    with make_hub(HubReference("hf", REPO)) as hub:
        url = hub.file_url(COMMIT, NAME)
        with Download(hub, url, make_file(data), make_place(folder), limit=limit) as download:
            yield download


class ByteCounter(RateLimit):
    """Counts the bytes that come over the network, and limits nothing."""

    def __init__(self) -> None:
        super().__init__(0)
        self.count, self._counting = 0, threading.Lock()

    def wait(self, count: int) -> None:
        with self._counting:
            self.count += count


def fetch(folder: Path, data: bytes) -> int:
    """Download the file whole; returns the bytes that came over the network."""
    received = ByteCounter()
    with downloading(folder, data, received) as download:
        download.fetch()
        download.finish()
    return received.count


@pytest.fixture
def data(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The file, from a hub that is not waited for long."""
    for name, value in {"TIMEOUT_S": 0.3, "ATTEMPTS": 4, "BACKOFF_S": 0.01}.items():
        monkeypatch.setattr(module, name, value)
    return hub.repos[REPO][NAME]


def test_a_file_comes_in_several_ranges_and_whole(hub: FakeHub, tmp_path: Path, data: bytes) -> None:
    assert fetch(tmp_path, data) == len(data) == hub.sent
    assert (tmp_path / "x").read_bytes() == data
    ranges = [asked.range for asked in hub.requests if asked.host == "files"]
    assert len(ranges) == len(set(ranges)) > CONNECTIONS
    assert 1 <= len([asked for asked in hub.requests if asked.host == "hub"]) <= CONNECTIONS, "at first only"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["x"]


@pytest.mark.parametrize("fault", ["cut", "stall", "429", "500", "expired", "early"])
def test_a_passing_fault_is_overcome(
    hub: FakeHub, tmp_path: Path, data: bytes, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.driver.hub.STALL_S", 1.0)
    hub.faults[fault] = 2
    received = fetch(tmp_path, data)
    assert (tmp_path / "x").read_bytes() == data
    assert received == len(data)  # within a process no byte comes twice
    assert hub.faults[fault] == 0


def test_an_address_that_expires_is_asked_for_again(hub: FakeHub, tmp_path: Path, data: bytes) -> None:
    with downloading(tmp_path, data) as download:
        download.fetch(BLOCK)
        before = len([asked for asked in hub.requests if asked.host == "hub"])
        hub.faults["expired"] = 1
        download.fetch()
        download.finish()
    assert len([asked for asked in hub.requests if asked.host == "hub"]) > before
    assert (tmp_path / "x").read_bytes() == data


def test_a_server_without_ranges_sends_the_whole(hub: FakeHub, tmp_path: Path, data: bytes) -> None:
    hub.faults["whole"] = 100
    hub.faults["cut"] = 1
    fetch(tmp_path, data)
    assert (tmp_path / "x").read_bytes() == data


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("416", "shorter than was listed"),
        ("resized", "has changed: it has 3000002 bytes now, 3000001 were listed"),
        ("refuse", "the connection to localhost broke .*; 4 attempts brought nothing"),
        ("500", "answers 500; 4 attempts brought nothing"),
        ("429", "limits how often it is asked; HF_TOKEN raises the limit; it asks to wait 3600 s"),
    ],
)
def test_a_lasting_fault_is_one_clear_line(
    hub: FakeHub, tmp_path: Path, data: bytes, fault: str, words: str
) -> None:
    hub.faults[fault] = 10_000
    hub.retry_after = "3600"
    with pytest.raises(HubError, match=words):
        fetch(tmp_path, data)
    assert not (tmp_path / "x").exists()


def test_a_wrong_hash_leaves_nothing(hub: FakeHub, tmp_path: Path, data: bytes) -> None:
    hub.faults["wrong"] = 1
    with pytest.raises(HubError, match="is damaged: its hash is"):
        fetch(tmp_path, data)
    assert not any(path.is_file() for path in tmp_path.iterdir())
    assert fetch(tmp_path, data) == len(data)


def test_a_file_of_git_is_verified_by_its_oid(tmp_path: Path) -> None:
    data = b"small"
    (tmp_path / "x").write_bytes(data)
    oid = hashlib.sha1(b"blob 5\0" + data).hexdigest()
    assert has_hash(tmp_path / "x", HubFile("x", 5, "", oid))
    assert not has_hash(tmp_path / "x", HubFile("x", 5, "", "0" * 40))


def test_the_beginning_is_not_fetched_again(hub: FakeHub, tmp_path: Path, data: bytes) -> None:
    with downloading(tmp_path, data) as download:
        download.fetch(2 * BLOCK)
        assert download.done == 2 * BLOCK == hub.sent
        assert download.read(2 * BLOCK) == data[: 2 * BLOCK] and download.read(2 * BLOCK + 1) is None
        download.fetch()
        download.finish()
    assert hub.sent == len(data)


def test_a_rate_is_kept(hub: FakeHub, tmp_path: Path, data: bytes) -> None:
    began = time.monotonic()
    with downloading(tmp_path, data, RateLimit(6_000_000)) as download:
        download.fetch(8 * BLOCK)
    assert time.monotonic() - began > 8 * BLOCK / 6_000_000 * 0.8


def test_an_empty_file(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos[REPO][NAME] = b""
    assert fetch(tmp_path, b"") == 0
    assert (tmp_path / "x").read_bytes() == b""


def test_disks_that_cannot_be_written_are_named() -> None:
    folder = Path("/models")
    assert "is full: 5.0 MB are missing" in describe_disk(OSError(28, "No space left"), folder, 5_000_000)
    assert "cannot be written" in describe_disk(OSError(30, "Read-only file system"), folder, 0)


# A process without threads forks one for each attempt, so that 50 of them take seconds.
FORKS = """
import json, mmap, os, sys, threading
from pathlib import Path
from cllm.models.download import Download
from cllm.models.files import HubFile, HubReference
from cllm.models.hub import make_hub
from cllm.models.store import DownloadPaths
make_hub(HubReference("hf", "Example/Big"))
url, folder, size, digest = json.loads(sys.stdin.readline())
folder = Path(folder)
with (folder / "received").open("r+b") as file:
    counted = mmap.mmap(file.fileno(), 8)
lock, write = threading.Lock(), Download._write
def count(download, part, taken, data):
    with lock:
        counted[:8] = (int.from_bytes(counted[:8], "little") + len(data)).to_bytes(8, "little")
    write(download, part, taken, data)
Download._write = count
for line in sys.stdin:
    child = os.fork()
    if not child:
        with make_hub(HubReference("hf", "Example/Big")) as hub:
            place = DownloadPaths(folder / "x.cllm.incomplete", folder / "x", folder / "x.lock")
            with Download(hub, url, HubFile("big-Q8_0.gguf", size, digest), place) as download:
                download.fetch()
                download.finish()
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_killed_50_times_it_goes_on_where_it_was(hub: FakeHub, tmp_path: Path) -> None:
    """Each time at most one block for each connection is lost, and what was just read."""
    data = hub.repos[REPO][NAME] = random.Random(2).randbytes(KILLED_BYTES)
    hub.bytes_per_s = 40e6
    journal, received = tmp_path / "x.cllm.journal", tmp_path / "received"
    received.write_bytes(bytes(8))
    lost, chance = [], random.Random(3)
    forks = subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with forks:
        assert forks.stdin is not None and forks.stdout is not None
        url = f"{hub.url}/{REPO}/resolve/{COMMIT}/{NAME}"
        forks.stdin.write(json.dumps([url, str(tmp_path), len(data), make_file(data).sha256]) + "\n")
        for attempt in range(KILLS + 1):
            before, had = count_bytes(received), count_blocks(journal)
            forks.stdin.write("go\n")
            forks.stdin.flush()
            child = int(forks.stdout.readline())
            if attempt < KILLS:
                time.sleep(chance.uniform(0.005, 0.03))
                os.kill(child, signal.SIGKILL)
            status = int(forks.stdout.readline())
            assert status == (-signal.SIGKILL if attempt < KILLS else 0) or (tmp_path / "x").exists()
            if (tmp_path / "x").exists():
                break
            lost.append(count_bytes(received) - before - (count_blocks(journal) - had) * BLOCK)
        forks.stdin.close()
        forks.wait(LIMIT_S)
    assert (tmp_path / "x").read_bytes() == data
    assert len(lost) > KILLS // 2
    assert max(lost) <= CONNECTIONS * (BLOCK + READ), lost


def count_bytes(received: Path) -> int:
    return int.from_bytes(received.read_bytes(), "little")


def count_blocks(journal: Path) -> int:
    return len(journal.read_bytes()[512:].replace(b"\0", b"")) if journal.exists() else 0


# The journal --------------------------------------------------------------------------------------

SIZE = 3 * BLOCK + 5
OpenJournal = Callable[..., Journal]


@pytest.fixture
def open_journal(tmp_path: Path) -> Iterator[OpenJournal]:
    """Opens journals of the same file; the one before is left as it is, as after kill -9."""
    with ExitStack() as stack:

        def make(etag: str = "e", size: int = SIZE) -> Journal:
            journal = Journal(tmp_path / "x.journal", tmp_path / "x.part", etag, size)
            stack.callback(journal.close)
            return journal

        yield make


def written(journal: Journal) -> list[bool]:
    return [journal.is_written(block) for block in range(journal.count)]


def test_marks_survive_without_being_closed(open_journal: OpenJournal, tmp_path: Path) -> None:
    first = open_journal()
    first.mark(1)
    first.mark(3)
    again = open_journal()
    assert written(again) == [False, True, False, True]
    assert again.missing_bytes == 2 * BLOCK and again.span(3) == (3 * BLOCK, SIZE)
    assert (tmp_path / "x.part").stat().st_size == SIZE


def test_after_a_crash_only_what_was_synced_counts(
    open_journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_journal()
    first.mark(0)
    first.sync()
    first.mark(1)
    monkeypatch.setattr(module, "boot_id", lambda: "the next boot")
    assert written(open_journal()) == [True, False, False, False]


@pytest.mark.parametrize("change", ["etag", "size", "part is gone", "journal is damaged"])
def test_what_does_not_match_begins_again(open_journal: OpenJournal, tmp_path: Path, change: str) -> None:
    first = open_journal()
    (tmp_path / "x.part").write_bytes(b"\1" * SIZE)
    first.mark(0)
    if change == "part is gone":
        (tmp_path / "x.part").unlink()
    if change == "journal is damaged":
        (tmp_path / "x.journal").write_bytes(b"{")
    again = open_journal("f" if change == "etag" else "e", SIZE + (change == "size"))
    assert not any(written(again))
    assert not any((tmp_path / "x.part").read_bytes())


def test_a_late_mark_is_ignored(open_journal: OpenJournal, tmp_path: Path) -> None:
    journal = open_journal()
    journal.close()
    journal.mark(0)
    assert not any(written(open_journal()))
