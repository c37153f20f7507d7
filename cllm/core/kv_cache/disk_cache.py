"""Disk tier of the KV cache: one file for each cached prefix, found again after a restart.

The owner thread has the index; a disk thread does what may wait for a disk. Prefixes are written behind, in
slices, while nothing is computed, and at exit. They come back at the next load of the same model.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from cllm.core.kv_cache.cache_file import get_file_size, get_reason
from cllm.core.kv_cache.disk_folder import CacheFolder, Contents, DiskEntry, Writing, remove, touch
from cllm.core.kv_cache.prefix_index import CachedPrefix, Match, PrefixTier
from cllm.core.kv_cache.tiers import MIB, Entry
from cllm.core.step_cost import TILE
from cllm.errors import CllmError, NotFound, StorageFailed

Operation = Callable[[], Any]


class DiskThread:
    """Does operations one after the other. It is a daemon: one that never returns holds up no exit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._operations: SimpleQueue[tuple[Operation, Future[Any]] | None] = SimpleQueue()  # None: end
        self._thread: threading.Thread | None = None
        self._began_at: float | None = None  # of the operation that runs

    @property
    def busy_s(self) -> float:
        """How long the running operation has taken, or has not called `beat`."""
        began_at = self._began_at
        return 0.0 if began_at is None else time.monotonic() - began_at

    def beat(self) -> None:
        """The operation that calls this takes long, but the disk answers."""
        self._began_at = time.monotonic()

    def submit(self, operation: Operation) -> Future[Any]:
        future: Future[Any] = Future()
        self._operations.put((operation, future))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """Let the thread end when it has done what it was given; nothing is submitted any more."""
        if self._thread is not None:
            self._operations.put(None)

    def _run(self) -> None:
        while (item := self._operations.get()) is not None:
            operation, future = item
            self.beat()
            try:
                future.set_result(operation())
            except BaseException as error:
                future.set_exception(error)
            self._began_at = None
            del item, operation, future  # their result may be a large state


log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 64 * MIB  # bytes that are being read; or one entry
STALL_LIMIT_S = 60.0  # of one slice; the last one, a sync, may take a slow disk many seconds
RETRY_S = STALL_LIMIT_S  # after a failure
QUIET_S = 2.0  # nothing is written before the engine has been idle for this long
MAX_SAVE_SHARE = 0.1  # of the time that the engine has been idle, for a save


class Candidate(NamedTuple):
    """A cached prefix that could be written."""

    tenant: str
    tokens: Sequence[int]
    size: int  # of its state, predicted
    save_s: float  # how long `save` will hold up the owner thread, predicted
    token_s: float  # to compute a token of it
    save: Callable[[], Entry | None]  # None if it is gone, or cannot be saved


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

    With a limit of 0 it is off. What fails is said once, and is a miss. Slots saved under a name take part of
    the limit, are not evicted, and are found by their name alone.
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
        self._slot_bytes = 0  # of those, of saved slots
        self.loads = self.writes = self.failures = 0  # in all
        self._folder = folder
        self._wake = wake
        self._disk = disk or DiskThread("disk-cache")
        self._loading: dict[DiskEntry, Future[Entry | None]] = {}
        # Loads that have ended, while a sequence has one that it has not put into RAM yet.
        self._loaded: WeakValueDictionary[DiskEntry, Future[Entry | None]] = WeakValueDictionary()
        self._read_byte_s = self._write_byte_s = 0.0  # measured
        self._late: Future[Any] | None = None  # a load that took too long
        self._write: Writing | None = None  # of one entry at a time
        self._slice: Future[Contents | None] | None = None  # of that
        self._write_s = 0.0  # of its slices so far
        self._scanned_at = 0.0  # when the last scan began
        self._indexed = False  # the first scan is done
        self._retry_at = 0.0
        self._said = False  # that it cannot be written
        self.scanning: Future[Contents] | None = None
        self._scan()

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
        if (known := self._loading.get(entry) or self._loaded.get(entry)) is not None:
            return known
        if self._loading and sum(other.size for other in self._loading) + entry.size > MAX_IN_FLIGHT:
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
        self._disk.submit(partial(touch, entry.path))

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
        except Exception as error:
            log.warning("disk cache: a file cannot be used and is removed: %s", get_reason(error))
        return None

    def _settle(self) -> None:
        """Take over what the disk thread has done."""
        for entry, load in tuple(self._loading.items()):
            if load.done():
                del self._loading[entry]
                if load.result() is None:
                    self.drop(entry)
                else:
                    self._loaded[entry] = load
        if not self.limit or self.scanning is None or not self.scanning.done():
            return
        scanning, self.scanning = self.scanning, None
        try:
            found = scanning.result()
        except Exception as error:
            if not self._indexed:
                self.limit = 0
                log.warning("disk cache: off, for its folder cannot be read: %s", get_reason(error))
            return
        self._take(found)
        if not self._indexed:
            sizes = self.bytes // MIB, self.limit // MIB
            log.info("disk cache: %d prefixes, %d MiB of %d", len(self.entries), *sizes)
            if found.ignored:
                log.warning("disk cache: %d files are damaged or of another layout; ignored", found.ignored)
        self._indexed = True

    def _scan(self) -> None:
        """Look for what other engines, or an earlier one, have written."""
        if self.limit:
            self._scanned_at = time.monotonic()
            known = frozenset(entry.path for entry in self.entries)
            self.scanning = self._submit(partial(self._folder.scan, self.limit, known))

    def _take(self, found: Contents) -> None:
        """Make the index what lies in the folder."""
        paths = found.paths
        for entry in [entry for entry in self.entries if entry.path not in paths]:
            self.remove(entry)
        for entry in found.entries:
            self.insert(entry)
        self.bytes, self._slot_bytes = found.bytes, found.slot_bytes

    # Forgetting ------------------------------------------------------------------------------------

    def drop(self, entry: DiskEntry) -> None:
        """Forget an entry; one that is gone already is left alone. Its file is removed."""
        if self.remove(entry):
            self.bytes -= entry.size
            self._disk.submit(partial(remove, entry.path))

    def forget(self, prefix: CachedPrefix) -> Future[None]:
        """Remove what this prefix covers, but no saved slot; the result comes when the files are gone."""
        self._end_write()
        for entry in self.covered(prefix):
            self.drop(entry)
        # It may have been written just now.
        return self._submit(lambda: remove(self._folder.get_path(prefix)))

    def clear(self) -> Future[None]:
        """Remove everything of this model, of all tenants; the result comes when the files are gone."""
        self._end_write()
        self.entries.clear()
        self._indexes.clear()
        self.bytes = self._slot_bytes = 0
        self._indexed = False
        removed = self._submit(self._folder.clear)
        self._scan()
        return removed

    # Saved slots -----------------------------------------------------------------------------------

    def save_slot(self, name: str, entry: Entry) -> Future[int]:
        """Write a slot under a name, whatever is computed meanwhile; the result is the size of its file."""
        return self._submit(partial(self._save_slot, name, entry))

    def _save_slot(self, name: str, entry: Entry) -> int:
        """On the disk thread."""
        try:
            with contextlib.closing(self._folder.write(entry, self.limit, name)) as slices:
                for found in slices:
                    self._disk.beat()
                    if not self.limit:
                        raise StorageFailed("the engine ends: the slot is not saved")
                    if found is not None:
                        self.bytes, self._slot_bytes = found.bytes, found.slot_bytes
        except CllmError:
            self.failures += 1
            raise
        self.writes += 1
        return get_file_size(entry)

    def load_slot(self, name: str, max_bytes: int) -> Future[Entry]:
        """Read and check what was saved under a name."""
        return self._submit(partial(self._folder.read_slot, name, max_bytes))

    # Writing ---------------------------------------------------------------------------------------

    def count_new(self, tenant: str, tokens: Sequence[int]) -> int:
        """How many of these tokens could not be had from the disk."""
        found = super().matches(tenant, tokens, min(TILE, len(tokens)))
        return len(tokens) - max((match.value.longest_cut(match.length).length for match in found), default=0)

    @property
    def _budget(self) -> int:
        """Bytes for files that are not saved slots."""
        return self.limit - self._slot_bytes

    def put(self, entry: Entry) -> bool:
        """Begin to write an entry; False where it is known or too large. The one before must be written."""
        if get_file_size(entry) > self._budget or not self.count_new(entry.tenant, entry.tokens):
            return False
        self._write, self._write_s = self._folder.write(entry, self.limit), 0.0
        return True

    def idle(self, candidates: Iterable[Candidate], idle_s: float) -> float | None:
        """Write behind, after nothing was computed for `idle_s`: begin a slice, or save one candidate.

        They come most recently used first. Returns after how many seconds to call again; None: after `wake`.
        """
        self._settle()
        if not self.limit or self.scanning is not None:
            return None
        if (wait_s := max(QUIET_S - idle_s, self._retry_at - time.monotonic())) > 0:
            return wait_s
        if self._write is None:
            later_s = self._save_one(candidates, idle_s)
            if self._write is None:
                if time.monotonic() - self._scanned_at > idle_s:  # once a pause
                    self._scan()
                return later_s
        self._advance()
        return None if self._slice is not None else 0.0

    def _save_one(self, candidates: Iterable[Candidate], idle_s: float) -> float | None:
        """Begin to write the first candidate whose saving is unlikely to hold up the next request.

        None where there is none, or in how many seconds one will be.
        """
        later_s = []
        for candidate in self._choose(candidates):
            if (quiet_s := candidate.save_s / MAX_SAVE_SHARE) > idle_s:
                later_s.append(quiet_s - idle_s)
            elif (entry := candidate.save()) is not None:
                self.put(entry)
                break
        return min(later_s, default=None)

    def close(self, candidates: Iterable[Candidate] = (), within_s: float = QUIET_S) -> None:
        """Write what was begun, then candidates, as far as the time allows; nothing half-written is left."""
        if not self.limit:
            return
        deadline = time.monotonic() + within_s
        if self.scanning is not None:
            wait([self.scanning], within_s)
        self._settle()
        before = set(self.entries)
        chosen = self._choose(candidates)
        while self.limit and self.scanning is None and (left_s := deadline - time.monotonic()) > 0:
            if self._write is None:
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

    def _choose(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """Those that take longer to compute than to write; none that would push out what was used later."""
        total = 0
        for candidate in candidates:
            total += candidate.size
            if total > self._budget:
                return
            writing_s = candidate.save_s + candidate.size * self._write_byte_s
            new = self.count_new(candidate.tenant, candidate.tokens)
            if new >= TILE and new * candidate.token_s > writing_s:  # fewer are not worth a file
                yield candidate

    def _advance(self) -> None:
        """Begin the next slice of the write at hand, when the last one is done."""
        if self._write is None or (self._slice is not None and not self._slice.done()):
            return
        try:
            found = self._slice.result() if self._slice is not None else None
            if found is None:
                self._slice = self._submit(partial(self._run_slice, self._write))
            else:
                self._end_write()
                self._take_written(found)
        except Exception as error:
            self._fail(error)

    def _run_slice(self, write: Writing) -> Contents | None:
        """On the disk thread."""
        started = time.perf_counter()
        try:
            return next(write)
        finally:
            self._write_s += time.perf_counter() - started

    def _take_written(self, found: Contents) -> None:
        self.writes += 1
        self._said = False
        self._take(found)
        for saved in found.entries:
            self._write_byte_s = self._write_s / saved.size
            for other in self.covered(saved):
                if other is not saved and saved.longest_cut(len(other.tokens)).length == len(other.tokens):
                    self.drop(other)

    def _end_write(self) -> None:
        """Close the write at hand; nothing half-written is left."""
        if self._write is not None:
            self._disk.submit(self._write.close)
        self._write = self._slice = None

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        self._end_write()
        self._retry_at = time.monotonic() + RETRY_S
        if not self._said:
            log.warning("disk cache: %s; it is tried again every %.0f s", get_reason(error), RETRY_S)
        self._said = True
