"""Cache files: cached prefixes with their states in a checked file.

    magic · version · fingerprint of model, library and KV layout · number of entries · checksum
    for each entry: lengths · tenant · tokens · lengths of checkpoints · state · checkpoints · checksum

Every checksum continues the one before it, so that nothing can be cut out, swapped or added. Entries are
written and read in slices of a few mebibytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import stat
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cllm.core.kv_cache.disk_thread import Slices
from cllm.core.kv_cache.host_cache import MIB, Entry
from cllm.core.kv_cache.prefix_index import TOKEN_BYTES, Checkpoint
from cllm.errors import NotFound, StateFileError, StorageFailed

SLICE_BYTES = 4 * MIB  # about ten milliseconds of hashing and copying
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


def get_digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def get_file_size(entry: Entry) -> int:
    """Bytes of a file with this entry alone."""
    fixed = _HEAD.size + _DIGEST + _ENTRY.size + _DIGEST + len(entry.tenant.encode())
    states = sum(_CHECKPOINT.size + len(checkpoint.state) for checkpoint in entry.checkpoints)
    return fixed + len(entry.tokens) * TOKEN_BYTES + len(entry.state) + states


def strip_states(checkpoints: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Their lengths alone."""
    return tuple(Checkpoint(checkpoint.length, b"") for checkpoint in checkpoints)


class Candidate(NamedTuple):
    """A cached prefix that could be written."""

    tenant: str
    tokens: Sequence[int]
    size: int  # of its state, predicted
    save_s: float  # how long `save` will hold up the owner thread, predicted
    save: Callable[[], Entry | None]  # None if it is gone, or cannot be saved


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"the state file could not be written: {get_reason(error)}") from None


class CacheFileWriter:
    """Writes a state file, entry by entry: `open`, `write`, `finish`. The old one stays until the end.

    They raise StorageFailed. `close` leaves nothing half-written.
    """

    def __init__(self, path: Path, temporary: Path, fingerprint: str, *, sync: bool = True) -> None:
        """Without `sync`, a power failure may leave a damaged file."""
        self._path = path
        self._temporary = temporary
        self._owner = self._last = get_digest(fingerprint.encode())  # the chain of checksums begins with it
        self._sync = sync
        self._file: BinaryIO | None = None
        self._moved = Moved()

    @_writing()
    def open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # 0600: it tells what users asked.
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(self._temporary, flags, stat.S_IRUSR | stat.S_IWUSR), "wb")
        with contextlib.suppress(OSError):  # one without a lock was left by a crash
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file.write(bytes(_HEAD.size + _DIGEST))

    def write(self, entry: Entry) -> Slices[None]:
        """Write the next entry in slices."""
        assert self._file is not None
        checksum = hashlib.sha256(self._last)
        for state in (_pack_head(entry), entry.state, *(point.state for point in entry.checkpoints)):
            view = memoryview(state)
            for start in range(0, len(view), SLICE_BYTES):
                piece = view[start : start + SLICE_BYTES]
                checksum.update(piece)
                with _writing():
                    self._file.write(piece)
                yield
        self._last = checksum.digest()
        with _writing():
            self._file.write(self._last)
        self._moved = self._moved.plus(entry)

    @_writing()
    def finish(self) -> Moved:
        """Write the head, which counts the entries, and put the file in its place."""
        assert self._file is not None
        head = _HEAD.pack(_MAGIC, _VERSION, self._owner, self._moved.entries)
        self._file.seek(0)
        self._file.write(head + get_digest(head))
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())
        self._temporary.replace(self._path)
        return self._moved

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is buffered may find no space
            if self._file is not None:
                self._file.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()


def _pack_head(entry: Entry) -> bytes:
    """Everything of an entry before its state."""
    tenant, count = entry.tenant.encode(), len(entry.checkpoints)
    lengths = _ENTRY.pack(len(tenant), len(entry.tokens), entry.min_length, count, len(entry.state))
    table = (_CHECKPOINT.pack(point.length, len(point.state)) for point in entry.checkpoints)
    return b"".join((lengths, tenant, entry.tokens.tobytes(), *table))


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
