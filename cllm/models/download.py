"""Download: one file of a hub, in several ranges at a time, continued after interruptions, verified."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import httpx

from cllm.errors import HubError
from cllm.models.files import HubFile, format_size
from cllm.models.hub import MAX_RETRY_AFTER_S, Hub, TemporaryError, describe_transport
from cllm.models.store import DownloadPaths

log = logging.getLogger(__name__)
BLOCK = 64 << 10  # bytes that the journal counts as one
MISSING, WRITTEN, SYNCED = 0, 1, 2  # the states of a block
_HEADER = 512  # bytes of the journal before the states
RANGE_BLOCKS = 256  # of one request: 16 MiB, less near the end so that all connections end together
SYNC_S = 2.0
POLL_S = 0.01
TIMEOUT_S = 30.0  # without a byte
ATTEMPTS = 8  # in a row that bring nothing
BACKOFF_S = 0.5  # after the first of them; twice as long after each other
MAX_BACKOFF_S = 30.0
STOP_S = 2.0  # for connections to notice that they are not needed any more


def boot_id() -> str:
    """Identify the time since the system was started; a random value where that is unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.urandom(8).hex()


class Journal:
    """States of a part file's blocks, in memory and beside it; they survive a killed process and a crash.

    A byte for each block: missing, written (the system has it: valid until this boot ends), or synced (on
    disk). A part file of another content is removed.
    """

    def __init__(self, path: Path, part: Path, etag: str, size: int) -> None:
        self._path, self._part = path, part
        self.size = size
        self.count = -(-size // BLOCK)
        header = {"etag": etag, "size": size, "block": BLOCK, "boot": boot_id()}
        self._states = self._read(header) or bytearray(self.count)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not any(self._states):
            part.unlink(missing_ok=True)
        with part.open("ab") as file:
            file.truncate(size)  # its blocks take no space until they are written
        fresh = path.with_name(path.name + ".fresh")
        with fresh.open("wb") as file:  # written in full now: later writes need no new space
            file.write(json.dumps(header).encode().ljust(_HEADER) + self._states)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        self._lock = threading.Lock()
        self._file: io.FileIO | None = io.FileIO(path, "r+")

    def _read(self, header: dict[str, object]) -> bytearray | None:
        with suppress(OSError, ValueError):
            data = self._path.read_bytes()
            before = json.loads(data[:_HEADER])
            states = bytearray(data[_HEADER:])
            if before | {"boot": ""} == header | {"boot": ""} and len(states) == self.count:
                if self._part.stat().st_size != self.size:
                    return None
                if before["boot"] != header["boot"]:  # what was not synced may be lost
                    states = bytearray(state if state == SYNCED else MISSING for state in states)
                return states
        return None

    def is_written(self, block: int) -> bool:
        return self._states[block] != MISSING

    def span(self, block: int) -> tuple[int, int]:
        """First and last byte, plus one, of a block."""
        return block * BLOCK, min(self.size, (block + 1) * BLOCK)

    def mark(self, block: int, state: int = WRITTEN) -> None:
        """Record that the block's bytes were written to the part file. Ignored once the journal is closed."""
        with self._lock:
            if self._file is not None:
                self._states[block] = state
                self._file.seek(_HEADER + block)
                self._file.write(bytes([state]))

    @property
    def missing_bytes(self) -> int:
        missing = self._states.count(MISSING) * BLOCK
        if self.count and self._states[-1] == MISSING:
            missing -= self.count * BLOCK - self.size
        return missing

    def sync(self) -> None:
        """Bring written blocks to disk, then their marks: in this order a mark never precedes its data."""
        if self._file is None:
            return
        if written := [found.start() for found in re.finditer(b"\1", self._states)]:
            with self._part.open("rb") as file:
                os.fsync(file.fileno())
            for block in written:
                self.mark(block, SYNCED)
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Later marks, of a thread that is late, are ignored."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def remove(self) -> None:
        """Forget the download: the journal first, so that no part file is ever trusted without it."""
        self.close()
        self._path.unlink(missing_ok=True)
        self._part.unlink(missing_ok=True)


class RateLimit:
    """A limit of bytes a second, shared by all connections."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._next = 0.0

    def wait(self, count: int) -> None:
        if self._rate <= 0:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(self._next, now)
            self._next = begin + count / self._rate
        if begin > now:
            time.sleep(begin - now)


class NoRanges(Exception):
    """The server sends the whole file whatever range it is asked for."""


class _Range:
    """Bytes that one connection is fetching. `position` is the first that is still missing."""

    def __init__(self, start: int, end: int) -> None:
        self.position, self.end = start, end


class Download:
    """One file on its way. Use it as a context manager, under the lock of its paths.

    `fetch` may be called for the beginning first. It leaves what it has when it raises: HubError, or OSError
    of the disk. Nothing has the file's own name before `finish` has verified it.
    """

    def __init__(
        self,
        hub: Hub,
        url: str,
        file: HubFile,
        paths: DownloadPaths,
        *,
        connections: int = 4,
        limit: RateLimit | None = None,
    ) -> None:
        self._hub, self._url, self._file, self._paths = hub, url, file, paths
        self._connections = connections
        self._limit = limit or RateLimit(0)
        self._direct: str | None = None  # where the hub redirects to: ranges after the first go there
        self._claimed = bytearray()  # a byte for each block: whether a connection has it
        self._cursor = 0  # no block before it is free
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._digest = ""

    def __enter__(self) -> Download:
        paths, file = self._paths, self._file
        self.journal = Journal(paths.journal, paths.part, file.etag, file.size)
        return self

    def __exit__(self, _: object, error: object, trace: object) -> None:
        self._stop.set()
        if not isinstance(error, OSError):
            self.journal.sync()
        self.journal.close()

    @property
    def done(self) -> int:
        """Bytes of the file that are here."""
        return self._file.size - self.journal.missing_bytes

    def fetch(self, end: int | None = None, report: Callable[[int], None] = lambda done: None) -> None:
        """Fetch what is missing before byte `end`, or everything, and hash it then."""
        stop_block = self.journal.count if end is None else min(self.journal.count, -(-end // BLOCK))
        hashing = [self._hash] if end is None else []
        try:
            self._run([partial(self._work, stop_block)] * self._connections + hashing, report)
        except NoRanges:
            if end is None:
                log.warning("%s: the server sends no ranges: an interruption begins again", self._file.path)
                self._run([partial(self._work, None), *hashing], report)
        report(self.done)

    def read(self, size: int) -> bytes | None:
        """Read the first bytes of the file; None where they are not here."""
        if not all(self.journal.is_written(block) for block in range(-(-size // BLOCK))):
            return None
        with self._paths.part.open("rb") as part:
            return part.read(size)

    def _run(self, tasks: Sequence[Callable[[], None]], report: Callable[[int], None]) -> None:
        """Run the tasks in threads to their end. The first error of one ends the others and is raised."""
        self._stop.clear()
        self._claimed, self._cursor = bytearray(self.journal.count), 0
        errors: list[BaseException] = []
        threads = [threading.Thread(target=_guard, args=(task, errors), daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        try:
            synced = time.monotonic()
            while any(thread.is_alive() for thread in threads) and not errors:
                time.sleep(POLL_S)
                report(self.done)
                if time.monotonic() - synced > SYNC_S:
                    self.journal.sync()
                    synced = time.monotonic()
        finally:
            self._stop.set()
            deadline = time.monotonic() + STOP_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        if errors:
            raise errors[0]

    # One connection ------------------------------------------------------------------------------------

    def _work(self, stop_block: int | None) -> None:
        """Fetch ranges up to a block; None: the whole file, where the server knows no ranges."""
        with io.FileIO(self._paths.part, "r+") as part:
            if stop_block is None:
                self._fetch_range(_Range(0, self._file.size), part, whole=True)
                return
            while (taken := self._take(stop_block)) is not None:
                self._fetch_range(taken, part)

    def _take(self, stop_block: int) -> _Range | None:
        """The next run of blocks that are missing and not claimed."""
        with self._lock:
            if self._stop.is_set():
                return None
            claimed, journal = self._claimed, self.journal
            blocks = range(self._cursor, stop_block)
            open_blocks = (block for block in blocks if not claimed[block] and not journal.is_written(block))
            if not (free := list(islice(open_blocks, RANGE_BLOCKS * 2 * self._connections))):
                return None
            size = max(1, min(RANGE_BLOCKS, len(free) // (2 * self._connections)))
            first = last = self._cursor = free[0]
            while last + 1 in free[1:size]:
                last += 1
            claimed[first : last + 1] = b"\1" * (last + 1 - first)
            return _Range(journal.span(first)[0], journal.span(last)[1])

    def _fetch_range(self, taken: _Range, part: io.FileIO, *, whole: bool = False) -> None:
        """Fetch one range, again after failures; as long as bytes come, it does not give up.

        The `whole` file begins again each time.
        """
        failures = 0
        while taken.position < taken.end and not self._stop.is_set():
            before = taken.position = 0 if whole else taken.position
            try:
                self._stream(taken, part, whole=whole)
                reason, wait_s = "the answer ended too early", 0.0
            except TemporaryError as error:
                reason, wait_s = str(error), error.retry_after_s
            except httpx.HTTPError as error:
                reason, wait_s = describe_transport(error, self._hub), 0.0
            failures = 1 if taken.position > before and not whole else failures + 1
            if taken.position < taken.end and not self._stop.is_set():
                self._back_off(failures, reason, wait_s)

    def _back_off(self, failures: int, reason: str, wait_s: float) -> None:
        if (long := wait_s > MAX_RETRY_AFTER_S) or failures >= ATTEMPTS:
            tried = f"it asks to wait {wait_s:.0f} s" if long else f"{failures} attempts brought nothing"
            kept = "The part that is here is kept: the same command continues"
            raise HubError(f"{self._file.path}: {reason}; {tried}. {kept}")
        self._direct = None
        seconds = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** (failures - 1))
        seconds = max(wait_s, seconds * random.uniform(0.5, 1.0))
        level = logging.WARNING if wait_s > 1 else logging.INFO
        log.log(level, "%s: %s; again in %.1f s", self._file.path, reason, seconds)
        self._stop.wait(seconds)

    def _stream(self, taken: _Range, part: io.FileIO, *, whole: bool) -> None:
        direct = self._direct
        headers = {} if whole else {"Range": f"bytes={taken.position}-{taken.end - 1}"}
        with self._hub.stream(direct or self._url, headers, TIMEOUT_S) as response:
            elsewhere = direct is not None or response.url.host != self._hub.host
            if elsewhere and response.status_code in (400, 401, 403, 404, 410):
                raise TemporaryError(f"{response.url.host}, where the hub redirects to, refuses the file")
            if response.status_code == 200 and (taken.position or taken.end < self._file.size):
                raise NoRanges
            self._hub.check(response, self._file.path)
            self._check_range(response, taken)
            if direct is None:
                self._direct = str(response.url)
            for data in response.iter_raw():
                if self._stop.is_set():
                    return
                self._write(part, taken, data)
                self._limit.wait(len(data))
                if taken.position >= taken.end:
                    return  # whatever else is sent

    def _check_range(self, response: httpx.Response, taken: _Range) -> None:
        if response.status_code != 206:
            return
        span, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if total not in ("", "*", str(self._file.size)):
            raise HubError(
                f"{self._file.path} has changed: it has {total:.20} bytes now, {self._file.size} were "
                "listed; the same command lists it again"
            )
        if span and span.partition("-")[0] != str(taken.position):
            raise NoRanges

    def _write(self, part: io.FileIO, taken: _Range, data: bytes) -> None:
        """Write bytes and mark the blocks that they complete; more than was asked for is dropped."""
        view = memoryview(data)[: taken.end - taken.position]
        part.seek(taken.position)
        first = taken.position // BLOCK
        while view:
            written = part.write(view)
            taken.position += written
            view = view[written:]
        last = self.journal.count if taken.position == self._file.size else taken.position // BLOCK
        for block in range(first, last):
            self.journal.mark(block)

    # The end -------------------------------------------------------------------------------------------

    def _hash(self) -> None:
        """Hash the part file from its beginning, close behind the blocks that arrive."""
        hasher = _make_hasher(self._file)
        with io.FileIO(self._paths.part, "r") as part:
            for block in range(self.journal.count):
                while not self.journal.is_written(block):
                    if self._stop.wait(POLL_S):
                        return
                start, end = self.journal.span(block)
                hasher.update(part.read(end - start))
        self._digest = hasher.hexdigest()

    def finish(self) -> None:
        """Give the file its name if its hash is the one listed. Raises HubError, and removes it, if not."""
        paths, file = self._paths, self._file
        if self._digest != file.etag:
            self.journal.remove()
            raise HubError(
                f"{file.path} is damaged: its hash is {self._digest[:12]}…, the hub lists {file.etag[:12]}…; "
                "it was removed. The same command fetches it again; from a mirror, try another one"
            )
        self.journal.sync()
        paths.part.replace(paths.final)
        folder = os.open(paths.final.parent, os.O_RDONLY)
        with suppress(OSError):  # some file systems have no such thing
            os.fsync(folder)
        os.close(folder)
        paths.journal.unlink(missing_ok=True)


def _guard(task: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        task()
    except BaseException as error:  # it is raised in the thread that waits
        errors.append(error)


def _make_hasher(file: HubFile) -> hashlib._Hash:
    """Make the hash that the listing has of a file: SHA-256, or git's for one that is in git itself."""
    if file.sha256:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def has_hash(path: Path, file: HubFile) -> bool:
    """Check that a file has the listed content."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, partial(_make_hasher, file)).hexdigest() == file.etag


def describe_disk(error: OSError, folder: Path, needed: int) -> str:
    """Describe a disk that cannot be written, in one line."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk of {folder} is full: {format_size(needed)} are missing. Free some and run the same "
            "command, which continues; --to DIR stores it elsewhere"
        )
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"{folder} cannot be written ({error.strerror}); HF_HOME or --to DIR stores models elsewhere"
    return f"{error.filename or folder}: {error.strerror}"
