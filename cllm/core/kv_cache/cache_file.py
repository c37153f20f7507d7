"""Prefix cache files: the host cache written to disk, and read back after a restart.

    magic · version · fingerprint of model, library and KV layout · number of entries · checksum
    for each entry: lengths · tenant · tokens · lengths of checkpoints · state · checkpoints · checksum

Every checksum continues the one before it, so that nothing can be cut out, swapped or added. The first entry
is the one used last. All of this is work in slices of a few mebibytes. The engine begins a slice between two
steps, and a disk thread does it: a folder on a network may answer late, or never.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import re
import struct
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from cllm.backend.base import ModelRunner
from cllm.core.kv_cache.disk_thread import DiskThread, Operation, Slices, run_slices
from cllm.core.kv_cache.host_cache import MIB, Entry, HostKVCache
from cllm.core.kv_cache.prefix_index import TOKEN_BYTES, Checkpoint
from cllm.errors import (
    CllmError,
    EngineError,
    Forbidden,
    InvalidRequest,
    NotFound,
    StateFileError,
    StorageFailed,
)
from cllm.types import Failure
from cllm.workers.messages import Report, StateFileDone, UseStateFile

log = logging.getLogger(__name__)

MAX_JOBS = 8
SLICE_BYTES = 4 * MIB  # about ten milliseconds of hashing and copying
STALL_LIMIT_S = 60.0  # of one slice; the last one, a sync, may take a slow disk many seconds
CLOSE_LIMIT_S = 2.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
SUFFIX = ".prefixes"
_MAGIC = b"cllmpfx\n"
_VERSION = 2
_DIGEST = 32
_HEAD = struct.Struct(f"<8sI{_DIGEST}sI")  # magic, version, fingerprint, entries
_ENTRY = struct.Struct("<HIIIQ")  # bytes of the tenant, tokens, shortest cut, checkpoints, bytes of state
_CHECKPOINT = struct.Struct("<IQ")  # tokens, bytes of state


class Moved(NamedTuple):
    """What was written, or put back."""

    entries: int = 0
    tokens: int = 0
    size: int = 0
    skipped: int = 0  # of a file: known already, or no room

    def plus(self, entry: Entry) -> Moved:
        return self._replace(
            entries=self.entries + 1, tokens=self.tokens + len(entry.tokens), size=self.size + entry.size
        )


class Work(NamedTuple):
    """The operations of a job in their order, each of which gets the result of the one before."""

    operations: Generator[Operation, Any, Moved]
    discard: Operation  # closes the file and removes what is half-written; always the last


def get_path(folder: str, name: str) -> Path:
    """Where a file of this name lies. Raises Forbidden without a folder, InvalidRequest for a path."""
    if not folder:
        raise Forbidden("no state files are kept: start the server with --state-dir FOLDER")
    if not NAME.fullmatch(name):
        raise InvalidRequest("name: up to 64 letters, digits, '-' and '_', not a path", "name")
    return Path(folder) / (name + SUFFIX)


def get_digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def get_file_size(entry: Entry) -> int:
    """Bytes of a file with this entry alone."""
    fixed = _HEAD.size + _DIGEST + _ENTRY.size + _DIGEST + len(entry.tenant.encode())
    states = sum(_CHECKPOINT.size + len(checkpoint.state) for checkpoint in entry.checkpoints)
    return fixed + len(entry.tokens) * TOKEN_BYTES + len(entry.state) + states


# Saving --------------------------------------------------------------------------------------------


def save(host: HostKVCache, path: Path, fingerprint: str) -> Work:
    """Write everything the cache holds, atomically: the old file stays until the new one is on the disk.

    Raises StorageFailed; then nothing is left of the new one.
    """
    # Weakly: what is pushed out of RAM meanwhile must not be kept there by us.
    entries = [weakref.ref(entry) for entry in reversed(tuple(host.entries))]
    temporary = path.with_name(f".{path.name}.new")
    slices = write_file(entries, path, temporary, fingerprint)
    return Work(run_slices(slices), slices.close)


def write_file(
    entries: Iterable[weakref.ref[Entry]], path: Path, temporary: Path, fingerprint: str, *, sync: bool = True
) -> Slices[Moved]:
    """Write a file in slices, atomically. Without `sync`, a power failure may leave a damaged one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # 0600: it tells what users asked.
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            with contextlib.suppress(OSError):  # one without a lock was left by a crash
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            moved = yield from _write(file, entries, fingerprint)
            file.flush()
            if sync:
                os.fsync(file.fileno())
            temporary.replace(path)
    except OSError as error:
        raise StorageFailed(f"the state file could not be written: {get_reason(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return moved


def _write(file: BinaryIO, entries: Iterable[weakref.ref[Entry]], fingerprint: str) -> Slices[Moved]:
    """The entries, then the head that counts them; the chain of checksums begins with the fingerprint."""
    owner = get_digest(fingerprint.encode())
    file.write(bytes(_HEAD.size + _DIGEST))
    moved, last = Moved(), owner
    for reference in entries:
        entry = reference()
        if entry is None:
            continue
        checksum = hashlib.sha256(last)
        for state in (_pack_head(entry), entry.state, *(point.state for point in entry.checkpoints)):
            view = memoryview(state)
            for start in range(0, len(view), SLICE_BYTES):
                checksum.update(view[start : start + SLICE_BYTES])
                file.write(view[start : start + SLICE_BYTES])
                yield
        last = checksum.digest()
        file.write(last)
        moved = moved.plus(entry)
        del entry, state, view
    head = _HEAD.pack(_MAGIC, _VERSION, owner, moved.entries)
    file.seek(0)
    file.write(head + get_digest(head))
    return moved


def _pack_head(entry: Entry) -> bytes:
    """Everything of an entry before its state."""
    tenant, count = entry.tenant.encode(), len(entry.checkpoints)
    lengths = _ENTRY.pack(len(tenant), len(entry.tokens), entry.min_length, count, len(entry.state))
    table = (_CHECKPOINT.pack(point.length, len(point.state)) for point in entry.checkpoints)
    return b"".join((lengths, tenant, entry.tokens.tobytes(), *table))


# Restoring -----------------------------------------------------------------------------------------


def restore(host: HostKVCache, path: Path, fingerprint: str) -> Work:
    """Put a file's entries behind what the cache holds, as far as there is room; none is evicted for them.

    The whole file is checked before the first of them. Raises StateFileError, NotFound or StorageFailed:
    then nothing has changed.
    """
    reader = CacheFileReader(path, fingerprint)
    return Work(_restore(host, reader), reader.close)


def _restore(host: HostKVCache, reader: CacheFileReader) -> Generator[Operation, Any, Moved]:
    yield reader.open
    for _ in range(reader.entries):
        yield from run_slices(reader.read(max_bytes=0))
    yield reader.rewind
    moved = Moved()
    for _ in range(reader.entries):
        # Checked once more: the file may have been written to since the check.
        entry = yield from run_slices(reader.read(max_bytes=host.room))
        if entry is not None and host.put_last(entry):
            moved = moved.plus(entry)
        else:
            moved = moved._replace(skipped=moved.skipped + 1)
    return moved


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise NotFound("there is no state file of this name") from None
    except OSError as error:
        raise StorageFailed(f"the state file could not be read: {get_reason(error)}") from None


class EntryHead(NamedTuple):
    """Everything of an entry in a file but its states."""

    tenant: str
    tokens: array[int]
    min_length: int
    checkpoints: tuple[tuple[int, int], ...]  # tokens, bytes of state
    state_bytes: int
    packed: bytes  # as it lies in the file

    @property
    def states_bytes(self) -> int:
        return self.state_bytes + sum(size for _, size in self.checkpoints)

    @property
    def size(self) -> int:
        return len(self.tokens) * TOKEN_BYTES + self.states_bytes


class CacheFileReader:
    """A state file, entry by entry. Believes no length before it has seen that the file is that long."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        self._owner = get_digest(fingerprint.encode())
        self._file: BinaryIO | None = None
        self.entries = 0

    @_reading()
    def open(self) -> None:
        """Open the file and check its head."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # no pipe holds it up
        self._file = os.fdopen(descriptor, "rb")
        self._left = os.fstat(descriptor).st_size
        head = self._take(_HEAD.size)
        magic, version, owner, self.entries = _HEAD.unpack(head)
        if magic != _MAGIC:
            raise StateFileError("this is not a state file of cllm")
        if version != _VERSION:
            raise StateFileError(f"the state file is of version {version}; this cllm reads {_VERSION}")
        if self._take(_DIGEST) != get_digest(head):
            raise StateFileError("the state file is corrupt: its head does not match its checksum")
        if owner != self._owner:
            raise StateFileError("the state file is of another model, library or KV layout than this one")
        if self.entries * (_ENTRY.size + _DIGEST) > self._left:
            raise StateFileError(f"the state file is truncated: it is too short for {self.entries} entries")
        self._body = self._left
        self._last = self._owner

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    @_reading()
    def rewind(self) -> None:
        """Back to the first entry. The last one must have been read, with nothing behind it."""
        self.check_end()
        assert self._file is not None
        self._file.seek(_HEAD.size + _DIGEST)
        self._left, self._last = self._body, self._owner

    def check_end(self, left: int = 0) -> None:
        """Raise StateFileError unless so many bytes are left."""
        if extra := self._left - left:
            raise StateFileError(f"the state file is corrupt: {extra} bytes follow its last entry")

    def read_only_head(self) -> EntryHead:
        """Read the head of a file's one entry. Its states follow, whole, and nothing else."""
        head = self.read_head()
        self.check_end(head.states_bytes + _DIGEST)
        return head

    def read_head(self) -> EntryHead:
        """Read the next entry up to its states, unchecked but for its lengths."""
        lengths = self._take(_ENTRY.size)
        name_bytes, token_count, min_length, count, state_bytes = _ENTRY.unpack(lengths)
        self._check_room(name_bytes + token_count * TOKEN_BYTES + count * _CHECKPOINT.size + state_bytes)
        if not token_count or not state_bytes:
            raise StateFileError("the state file is corrupt: an entry is empty")
        name = self._take(name_bytes)
        tokens = self._take(token_count * TOKEN_BYTES)
        table = self._take(count * _CHECKPOINT.size)
        try:
            tenant = name.decode()
        except UnicodeDecodeError:
            raise StateFileError("the state file is corrupt: a tenant's name is not text") from None
        checkpoints = tuple(_CHECKPOINT.iter_unpack(table))
        packed = b"".join((lengths, name, tokens, table))
        head = EntryHead(tenant, array("i", tokens), min_length, checkpoints, state_bytes, packed)
        self._check_room(head.states_bytes)
        return head

    def _check_room(self, size: int) -> None:
        if size + _DIGEST > self._left:
            raise StateFileError("the state file is truncated, or corrupt: an entry is longer than the file")

    def read(self, max_bytes: int) -> Slices[Entry | None]:
        """Check the next entry and return it; one of more than `max_bytes` is only checked, in slices."""
        head = self.read_head()
        checksum = hashlib.sha256(self._last + head.packed)
        keep = head.size <= max_bytes
        states = []
        for size in (head.state_bytes, *(size for _, size in head.checkpoints)):
            state = _new_buffer(size if keep else min(size, SLICE_BYTES))
            for start in range(0, size, SLICE_BYTES):
                end = min(start + SLICE_BYTES, size)
                piece = state[start:end] if keep else state[: end - start]
                self._fill(piece)
                checksum.update(piece)
                yield
            states.append(state)
        self._last = checksum.digest()
        if self._take(_DIGEST) != self._last:
            raise StateFileError("the state file is corrupt: an entry does not match its checksum")
        if not keep:
            return None
        lengths = (length for length, _ in head.checkpoints)
        checkpoints = tuple(map(Checkpoint, lengths, states[1:]))
        return Entry(head.tenant, head.tokens, states[0], checkpoints, head.min_length)

    def _take(self, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    @_reading()
    def _fill(self, buffer: memoryview) -> None:
        assert self._file is not None
        if self._file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
            raise StateFileError("the state file is truncated")
        self._left -= len(buffer)


def _new_buffer(size: int) -> memoryview:
    """Memory for a state; a large one in pages of its own, which need neither clearing nor copying."""
    return memoryview(mmap.mmap(-1, size) if size >= SLICE_BYTES else bytearray(size))


def get_reason(error: OSError) -> str:
    """In words, without the path."""
    return os.strerror(error.errno).lower() if error.errno else type(error).__name__


class CacheFileJobs:
    """Saves and restores the prefix cache beside the steps; each job ends with one report.

    One job at a time, in the order they came. All fail while the disk does not answer.
    """

    def __init__(
        self,
        runner: ModelRunner,
        host: HostKVCache,
        folder: str,
        emit: Callable[[Report], None],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` is called when the disk has answered."""
        self._wake = wake
        self._runner = runner
        self._host = host
        self._folder = folder
        self._emit = emit
        self._jobs: deque[tuple[int, str, Work]] = deque()  # call id, label, work
        self._fingerprint = ""  # computed when it is first needed: that reads the model's file
        self._disk = DiskThread("state-files")
        self._operation: Future[Any] | None = None  # of the first job

    @property
    def idle(self) -> bool:
        return not self._jobs

    @property
    def has_work(self) -> bool:
        """There is a job that does not wait for the disk."""
        return bool(self._jobs) and (self._operation is None or self._operation.done())

    def add(self, command: UseStateFile) -> None:
        """Begin a job, or report at once why not."""
        try:
            path = get_path(self._folder, command.name)
            self._check_disk()
            if len(self._jobs) >= MAX_JOBS:
                raise EngineError(f"{MAX_JOBS} state files are being written or read already")
            self._fingerprint = self._fingerprint or self._runner.state_fingerprint()
            work = (save if command.save else restore)(self._host, path, self._fingerprint)
            label = f"{'save' if command.save else 'restore'} {command.name}"
            self._jobs.append((command.call_id, label, work))
        except Exception as error:
            self._fail(command.call_id, error)

    def _check_disk(self) -> None:
        if self._disk.busy_s > STALL_LIMIT_S:
            raise StorageFailed(
                f"the folder of the state files has not answered for {self._disk.busy_s:.0f} s: "
                "check its disk or network; state files work again when it answers"
            )

    def slice(self) -> None:
        """Go on with the job at hand: begin its next slice when the last one is done. There must be a job."""
        call_id, label, work = self._jobs[0]
        try:
            if self._operation is None:
                self._begin(next(work.operations))
            elif self._operation.done():
                self._begin(work.operations.send(self._operation.result()))
            else:
                self._check_disk()
            return
        except StopIteration as end:
            moved = end.value
            log.info("%s: %d entries, %d tokens", label, moved.entries, moved.tokens)
            self._emit(StateFileDone(call_id, moved.entries, moved.tokens, moved.size, moved.skipped))
        except Exception as error:
            log.warning("%s failed: %s", label, error)
            self._fail(call_id, error)
        self._operation = None
        self._disk.submit(work.discard)
        self._jobs.popleft()

    def _begin(self, operation: Operation) -> None:
        self._operation = self._disk.submit(operation)
        self._operation.add_done_callback(lambda _: self._wake())

    def _fail(self, call_id: int, error: Exception) -> None:
        if not isinstance(error, CllmError):
            log.exception("a state file failed", exc_info=error)
            error = EngineError("the state file could not be processed; the log has the details")
        self._emit(StateFileDone(call_id, failure=Failure(error.code, error.message)))

    def close(self) -> None:
        """Give up what is left; half-written files are removed, unless the disk does not answer."""
        last = [self._disk.submit(work.discard) for *_, work in self._jobs]
        wait(last, CLOSE_LIMIT_S)
        self._jobs.clear()
