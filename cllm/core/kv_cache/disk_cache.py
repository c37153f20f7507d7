"""Disk tier of the KV cache: one file for each cached prefix, found again after a restart.

The owner thread has the index; a disk thread does what may wait for a disk. Prefixes are written behind, in
slices, while nothing is computed, and at exit. They come back at the next load of the same model.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from cllm.core.kv_cache.cache_file import Candidate, Moved, get_file_size, get_reason
from cllm.core.kv_cache.disk_folder import CacheFolder, DiskEntry, OtherFile, Scan, remove
from cllm.core.kv_cache.disk_thread import DiskThread, Operation, Work, run_slices
from cllm.core.kv_cache.host_cache import MIB, MIN_NEW_SHARE, Entry
from cllm.core.kv_cache.prefix_index import CachedPrefix, Match, PrefixTier
from cllm.core.step_cost import TILE
from cllm.errors import CllmError, NotFound

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 64 * MIB  # bytes that wait to be written, and that are being read; or one entry
RETRY_S = 60.0  # after a failure
QUIET_S = 2.0  # nothing is written before the engine has been idle for this long
MAX_SAVE_SHARE = 0.1  # a save may take so much of the time that the engine has been idle


class Loading(NamedTuple):
    """What a sequence waits for: its prefix is read, or, without a match, it looks again afterwards."""

    future: Future[Any]
    deadline: float
    match: Match[DiskEntry] | None = None

    @property
    def left_s(self) -> float:
        return 0.0 if self.future.done() else max(0.0, self.deadline - time.monotonic())


class DiskKVCache(PrefixTier[DiskEntry]):
    """Cached prefixes on disk, least recently used out first: never more than `limit` bytes of all models.

    With a limit of 0 it is off. What fails is said once, and is a miss.
    """

    def __init__(
        self,
        folder: CacheFolder,
        limit: int,
        wake: Callable[[], None] = lambda: None,
        disk: DiskThread | None = None,
    ) -> None:
        """`wake` is called when the disk has answered."""
        super().__init__()
        self.limit = limit
        self.bytes = 0  # of all files, other models' included
        self.loads = self.writes = self.evictions = self.failures = 0  # in all
        self._folder = folder
        self._wake = wake
        self._disk = disk or DiskThread("disk-cache")
        self._others: deque[OtherFile] = deque()  # oldest first
        self._loading: dict[DiskEntry, Future[Entry | None]] = {}
        self._unusable: SimpleQueue[DiskEntry] = SimpleQueue()  # from the disk thread
        self._read_byte_s = self._write_byte_s = 0.0  # measured
        self._late: Future[Any] | None = None  # a load that took too long
        self._queue: deque[Entry] = deque()  # to be written, the first of them now
        self._work: Work[Moved] | None = None  # of the first
        self._slice: Future[Any] | None = None  # of that
        self._write_s = 0.0  # of its slices so far
        self._refreshing: Future[Scan] | None = None
        self._refreshed_at = time.monotonic()
        self._retry_at = 0.0
        self._said = False  # that it cannot be written
        self.scanning: Future[Scan] | None = self._submit(folder.scan) if limit else None

    def _submit(self, operation: Operation) -> Future[Any]:
        future = self._disk.submit(operation)
        future.add_done_callback(lambda _: self._wake())
        return future

    @property
    def busy_s(self) -> float:
        """How long the disk has not answered."""
        return self._disk.busy_s

    # Finding and loading ---------------------------------------------------------------------------

    def matches(self, tenant: str, tokens: Sequence[int], min_length: int) -> list[Match[DiskEntry]]:
        """As for every tier; none while the disk does not answer."""
        self._settle()
        if self._late is not None and not self._late.done():
            return []
        return super().matches(tenant, tokens, min_length)

    def load_s(self, size: int) -> float:
        """How long a load will take, judging by the last one; 0 before the first."""
        return self._read_byte_s * size

    def load(self, entry: DiskEntry) -> Future[Entry | None] | None:
        """Read and check an entry; its result is None if it turns out unusable.

        None while too much is being read: ask again.
        """
        self._settle()
        if entry not in self._loading:
            reading = sum(other.size for other in self._loading)
            if self._loading and reading + entry.size > MAX_IN_FLIGHT:
                return None
            self.touch(entry)
            self._loading[entry] = self._submit(partial(self._read, entry))
        return self._loading[entry]

    @property
    def next_load(self) -> Future[Entry | None] | None:
        """The load that is to end first."""
        return next(iter(self._loading.values()), None)

    def give_up(self, load: Future[Any]) -> None:
        """A load took too long: until it is done, nothing is looked for here."""
        self._late = load

    def touch(self, entry: DiskEntry) -> None:
        super().touch(entry)
        entry.used_at = time.time()
        times = (entry.used_at, entry.used_at)
        self._disk.submit(partial(_set_times, entry.path, times))

    def _read(self, entry: DiskEntry) -> Entry | None:
        """On the disk thread."""
        started = time.perf_counter()
        try:
            found = self._folder.read(entry)
            self._read_byte_s = (time.perf_counter() - started) / entry.size
            self.loads += 1
            return found
        except NotFound:
            log.debug("disk cache: a prefix is gone; another server may have evicted it")
        except (CllmError, OSError, MemoryError) as error:
            reason = get_reason(error) if isinstance(error, OSError) else error
            log.warning("disk cache: a file cannot be used and is removed: %s", reason)
        self._unusable.put(entry)
        return None

    def _settle(self) -> None:
        """Take over what the disk thread has done."""
        while not self._unusable.empty():
            self.drop(self._unusable.get())
        self._loading = {entry: load for entry, load in self._loading.items() if not load.done()}
        if self.limit and self._refreshing is not None and self._refreshing.done():
            self._take_refreshed(self._refreshing)
            self._refreshing = None
        if not self.limit or self.scanning is None or not self.scanning.done():
            return
        scanning, self.scanning = self.scanning, None
        try:
            found = scanning.result()
        except Exception as error:
            self.limit = 0
            reason = get_reason(error) if isinstance(error, OSError) else error
            log.warning("disk cache: off, for its folder cannot be read: %s", reason)
            return
        for entry in sorted(found.entries, key=lambda entry: entry.used_at):
            self.insert(entry)
        self._others.extend(sorted(found.others))
        self.bytes = sum(one.size for one in found.entries) + sum(other.size for other in found.others)
        self._make_room(0)
        log.info(
            "disk cache: %d prefixes, %d MiB of %d", len(self.entries), self.bytes // MIB, self.limit // MIB
        )
        if found.ignored:
            log.warning("disk cache: %d files are damaged or of another layout; ignored", found.ignored)

    # Forgetting ------------------------------------------------------------------------------------

    def drop(self, entry: DiskEntry) -> None:
        """Forget an entry; one that is gone already is left alone. Its file is removed."""
        if self.remove(entry):
            self.bytes -= entry.size
            self._disk.submit(partial(remove, entry.path))

    def clear(self) -> Future[None]:
        """Remove everything of this model, of all tenants; the result comes when the files are gone."""
        self._end_write()
        self._queue.clear()
        self._refreshing = None
        self.entries.clear()
        self._indexes.clear()
        self._others.clear()
        self.bytes = 0
        removed = self._submit(self._folder.clear)
        if self.limit:
            self.scanning = self._submit(self._folder.scan)
        return removed

    def _make_room(self, size: int) -> None:
        while self.bytes + size > self.limit and (self.entries or self._others):
            self.evictions += 1
            oldest = next(iter(self.entries), None)
            if oldest is None or (self._others and self._others[0].used_at < oldest.used_at):
                other = self._others.popleft()
                self.bytes -= other.size
                self._disk.submit(partial(remove, other.path))
            else:
                self.drop(oldest)

    # Writing ---------------------------------------------------------------------------------------

    def count_new(self, tenant: str, tokens: Sequence[int]) -> int:
        """How many of these tokens could not be had from the disk."""
        found = super().matches(tenant, tokens, min(TILE, len(tokens)))
        return len(tokens) - max((match.value.longest_cut(match.length).length for match in found), default=0)

    @property
    def _slicing(self) -> bool:
        return self._slice is not None and not self._slice.done()

    def put(self, entry: Entry) -> bool:
        """Queue an entry for writing; False where it is known, too large, or too much is queued."""
        size = get_file_size(entry)
        queued = sum(map(get_file_size, self._queue))
        if size > self.limit or (self._queue and queued + size > MAX_IN_FLIGHT):
            return False
        queued_already = any(_covers(other, entry) for other in self._queue)
        if queued_already or not self.count_new(entry.tenant, entry.tokens):
            return False
        self._queue.append(entry)
        return True

    def idle(self, candidates: Iterable[Candidate], idle_s: float) -> float | None:
        """Write behind, after nothing was computed for `idle_s`: begin a slice, or save one candidate.

        They come most recently used first. Returns after how many seconds to call again; None: after `wake`.
        """
        self._settle()
        if not self.limit or self.scanning is not None or self._slicing:
            return None
        wait_s = max(QUIET_S - idle_s, self._retry_at - time.monotonic())
        if wait_s > 0:
            return wait_s
        if not self._queue:
            later_s = self._save_one(candidates, idle_s)
            if not self._queue:
                self._refresh(idle_s)
                return later_s
        self._advance()
        return None if self._slice is not None else 0.0

    def _refresh(self, idle_s: float) -> None:
        """Once a pause, look for what other engines have written."""
        now = time.monotonic()
        if now - self._refreshed_at > idle_s:
            self._refreshed_at = now
            self._refreshing = self._submit(partial(self._folder.find_new, self._known_paths()))

    def _take_refreshed(self, refreshing: Future[Scan]) -> None:
        if refreshing.exception() is not None:
            return
        found, known = refreshing.result(), self._known_paths()
        for entry in [entry for entry in self.entries if entry.path in found.gone]:
            self.remove(entry)
        for entry in found.entries:
            if entry.path not in known:
                self.insert(entry)
        self._others = deque(sorted(other for other in found.others if other.path not in known))
        writing = get_file_size(self._queue[0]) if self._work is not None else 0
        self.bytes = writing + sum(one.size for one in self.entries)
        self.bytes += sum(other.size for other in self._others)
        self._make_room(0)

    def _known_paths(self) -> set[Path]:
        known = {entry.path for entry in self.entries}
        return known | {self._folder.get_path(entry) for entry in self._queue}

    def _save_one(self, candidates: Iterable[Candidate], idle_s: float) -> float | None:
        """Queue the first candidate whose saving is unlikely to hold up the next request.

        None where there is none, or in how many seconds one will be.
        """
        later_s = []
        for candidate in self._choose(candidates, MIN_NEW_SHARE):
            quiet_s = candidate.save_s / MAX_SAVE_SHARE
            if quiet_s > idle_s:
                later_s.append(quiet_s - idle_s)
            elif (entry := candidate.save()) is not None:
                self.put(entry)
                break
        return min(later_s, default=None)

    def close(self, candidates: Iterable[Candidate] = (), within_s: float = QUIET_S) -> None:
        """Write what is queued, then candidates, as far as the time allows; nothing half-written is left."""
        if not self.limit:
            return
        deadline = time.monotonic() + within_s
        if self.scanning is not None:
            wait([self.scanning], within_s)
        self._settle()
        before = set(self.entries)
        chosen = self._choose(candidates, 0)
        while self.limit and self.scanning is None and (left_s := deadline - time.monotonic()) > 0:
            if not self._queue:
                if (candidate := next(chosen, None)) is None:
                    break
                seconds = candidate.save_s + candidate.size * self._write_byte_s
                if seconds <= left_s and (entry := candidate.save()) is not None:
                    self.put(entry)
            self._advance()
            if self._slice is not None:
                wait([self._slice], left_s)
        self._end_write()
        for saved in reversed([entry for entry in self.entries if entry not in before]):
            self.touch(saved)  # the first of them was used last
        last = self._disk.submit(lambda: None)
        self._disk.close()
        self.limit = 0
        wait([last], max(0.0, within_s - self._disk.busy_s))  # not for a disk that does not answer

    def _choose(self, candidates: Iterable[Candidate], min_share: int) -> Iterator[Candidate]:
        """Those that are worth their writing; none that would push out what was used later."""
        total = 0
        for candidate in candidates:
            total += candidate.size
            if total > self.limit:
                return
            length = len(candidate.tokens)
            least = max(TILE, length // min_share if min_share else 0)
            if self.count_new(candidate.tenant, candidate.tokens) >= least:
                yield candidate

    def _advance(self) -> None:
        """Begin the next slice of the write at hand, when the last one is done."""
        if not self._queue or self._slicing:
            return
        if self._work is None:
            self._work = self._begin_write(self._queue[0])
        try:
            done = self._slice.result() if self._slice is not None else None
            self._slice = self._submit(partial(self._timed, self._work.operations.send(done)))
        except StopIteration:
            self._end_write(written=True)
        except Exception as error:
            self._end_write()
            self._fail(error)

    def _begin_write(self, entry: Entry) -> Work[Moved]:
        size = get_file_size(entry)
        self._make_room(size)
        self.bytes += size
        self._write_s = 0.0
        slices = self._folder.write(entry, self.limit)
        return Work(run_slices(slices), slices.close)

    def _timed(self, operation: Operation) -> Any:
        """On the disk thread."""
        started = time.perf_counter()
        try:
            return operation()
        finally:
            self._write_s += time.perf_counter() - started

    def _end_write(self, *, written: bool = False) -> None:
        """Take the first of the queue out, and into the index if it was written."""
        work, self._work, self._slice = self._work, None, None
        if work is None:
            return
        self._disk.submit(work.discard)
        entry = self._queue.popleft()
        size = get_file_size(entry)
        if not written:
            self.bytes -= size
            return
        self.writes += 1
        self._said = False
        self._write_byte_s = self._write_s / size
        saved = DiskEntry(entry, self._folder.get_path(entry), size, used_at=time.time())
        for other in self.covered(saved):
            if saved.longest_cut(len(other.tokens)).length == len(other.tokens):
                self.drop(other)
        self.insert(saved)

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        self._queue.clear()
        self._retry_at = time.monotonic() + RETRY_S
        if not self._said:
            reason = error if isinstance(error, CllmError) else type(error).__name__
            log.warning("disk cache: %s; it is tried again every %.0f s", reason, RETRY_S)
        self._said = True


def _covers(longer: CachedPrefix, prefix: CachedPrefix) -> bool:
    length = len(prefix.tokens)
    same = longer.tenant == prefix.tenant and longer.tokens[:length] == prefix.tokens
    return same and longer.longest_cut(length).length == length


def _set_times(path: Path, times: tuple[float, float]) -> None:
    with contextlib.suppress(OSError):
        os.utime(path, times, follow_symlinks=False)
