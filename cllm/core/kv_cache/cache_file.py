"""Cache files: a cached prefix with its states in a checked file.

magic · version · fingerprint of model, library and KV layout · lengths ·
tenant · media · tokens · lengths of checkpoints · state · checkpoints · checksum of all before it
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from cllm.core.kv_cache.prefix_index import TOKEN_BYTES, CachedPrefix, Checkpoint
from cllm.core.kv_cache.tiers import MIB, Entry
from cllm.errors import CacheFileError, CllmError, NotFound, StorageFailed
from cllm.types import Span

SLICE_BYTES = 4 * MIB  # about ten milliseconds of hashing and copying
_MAGIC = b"cllmpfx\n"
_VERSION = 4
DIGEST_BYTES = hashlib.sha256().digest_size
# Magic, version, fingerprint; bytes of tenant and media, tokens, shortest cut, checkpoints, bytes of state.
_HEAD = struct.Struct(f"<8sI{DIGEST_BYTES}sHIIIIQ")
_CHECKPOINT = struct.Struct("<IQ")  # tokens, bytes of state


def get_digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def get_file_size(entry: Entry) -> int:
    """Bytes of the file of an entry."""
    fixed = _HEAD.size + len(entry.tenant.encode()) + len(_pack_spans(entry)) + DIGEST_BYTES
    states = sum(_CHECKPOINT.size + len(checkpoint.state) for checkpoint in entry.checkpoints)
    return fixed + len(entry.tokens) * TOKEN_BYTES + len(entry.state) + states


def write_entry(file: BinaryIO, entry: Entry, fingerprint: str) -> Iterator[None]:
    """Write an entry in slices. Raises OSError."""
    tenant, owner, count = entry.tenant.encode(), get_digest(fingerprint.encode()), len(entry.checkpoints)
    media = _pack_spans(entry)
    lengths = (len(tenant), len(media), len(entry.tokens), entry.min_length, count, len(entry.state))
    table = (_CHECKPOINT.pack(point.length, len(point.state)) for point in entry.checkpoints)
    fixed = _HEAD.pack(_MAGIC, _VERSION, owner, *lengths)
    head = b"".join((fixed, tenant, media, entry.tokens.tobytes(), *table))
    checksum = hashlib.sha256()
    for part in (head, entry.state, *(point.state for point in entry.checkpoints)):
        view = memoryview(part)
        for start in range(0, len(view), SLICE_BYTES):
            piece = view[start : start + SLICE_BYTES]
            checksum.update(piece)
            file.write(piece)
            yield
    file.write(checksum.digest())


def read_prefix(path: Path, fingerprint: str) -> CachedPrefix:
    """The prefix in a file, its lengths checked; its checkpoints have no states. Raises as `read_entry`."""
    with _open(path) as reader:
        return reader.read_head(fingerprint)[0]


def read_entry(path: Path, fingerprint: str) -> Entry:
    """The entry in a file, checked whole. Raises NotFound, CacheFileError or StorageFailed."""
    with _open(path) as reader:
        prefix, sizes = reader.read_head(fingerprint)
        first, *states = map(reader.read_state, sizes)
        reader.check_end()
    pairs = zip(prefix.checkpoints, states, strict=True)
    points = tuple(Checkpoint(point.length, state) for point, state in pairs)
    return Entry(prefix.tenant, prefix.tokens, first, points, prefix.min_length, prefix.spans)


def _pack_spans(entry: Entry) -> bytes:
    return msgspec.msgpack.encode(entry.spans) if entry.spans else b""


@contextmanager
def _open(path: Path) -> Iterator[_Reader]:
    try:
        with open(path, "rb", opener=open_plainly) as file:
            yield _Reader(file)
    except FileNotFoundError:
        raise NotFound("there is no such cache file") from None
    except OSError as error:
        raise StorageFailed(f"the cache file could not be read: {get_reason(error)}") from None


def open_plainly(path: str, flags: int) -> int:
    """An opener that follows no link, waits for no pipe, and makes private files."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, stat.S_IRUSR | stat.S_IWUSR)


class _Reader:
    """A file, read once. Believes no length before it has seen that the file is that long."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size
        self._checksum = hashlib.sha256()

    def read_head(self, fingerprint: str) -> tuple[CachedPrefix, list[int]]:
        """The prefix, and the bytes of its states, which must be all that follows but the checksum."""
        head = _HEAD.unpack(self._take(_HEAD.size))
        magic, version, owner, name_bytes, media_bytes, count, min_length, points, state_bytes = head
        if magic != _MAGIC:
            raise CacheFileError("this is not a cache file of cllm")
        if version != _VERSION:
            raise CacheFileError(f"the cache file is of version {version}; this cllm reads {_VERSION}")
        if owner != get_digest(fingerprint.encode()):
            raise CacheFileError("the cache file is of another model, library or KV layout than this one")
        if not count or not state_bytes:
            raise CacheFileError("the cache file is corrupt: it is empty")
        name, media = self._take(name_bytes), self._take(media_bytes)
        tokens = array("i", self._take(count * TOKEN_BYTES))
        table = list(_CHECKPOINT.iter_unpack(self._take(points * _CHECKPOINT.size)))
        sizes = [state_bytes, *(size for _, size in table)]
        if sum(sizes) + DIGEST_BYTES != self._left:
            raise CacheFileError("the cache file is truncated, or corrupt: its length is not what it says")
        try:
            tenant = name.decode()
            spans = msgspec.msgpack.decode(media, type=tuple[Span, ...]) if media else ()
        except (UnicodeDecodeError, msgspec.MsgspecError):
            raise CacheFileError("the cache file is corrupt: tenant or media cannot be read") from None
        checkpoints = tuple(Checkpoint(length, b"") for length, _ in table)
        return CachedPrefix(tenant, tokens, checkpoints, min_length, spans), sizes

    def read_state(self, size: int) -> memoryview:
        # A large one in pages of its own, which need neither clearing nor copying.
        state = memoryview(mmap.mmap(-1, size) if size >= SLICE_BYTES else bytearray(size))
        for start in range(0, size, SLICE_BYTES):
            self._fill(state[start : start + SLICE_BYTES])
        return state

    def check_end(self) -> None:
        """Raise CacheFileError unless the checksum follows."""
        expected = self._checksum.digest()
        if self._take(DIGEST_BYTES) != expected:
            raise CacheFileError("the cache file is corrupt: it does not match its checksum")

    def _take(self, size: int) -> bytes:
        if size > self._left:
            raise CacheFileError("the cache file is truncated")
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, buffer: memoryview) -> None:
        if self._file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
            raise CacheFileError("the cache file is truncated")
        self._checksum.update(buffer)
        self._left -= len(buffer)


def get_reason(error: Exception) -> str:
    """In words, without a path."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return error.message if isinstance(error, CllmError) else type(error).__name__
