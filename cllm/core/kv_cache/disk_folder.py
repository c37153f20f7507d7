"""The folder of the disk cache: its files, and what the disk thread does with them.

    <folder>/kv/<fingerprint of model, library and KV layout>/<tenant and tokens>.kv

A file appears whole, and one that is gone is a miss, so several servers may share a folder. The files tell
what users asked: folders are 0700, files 0600.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cllm.build.toolchain import cache_directory
from cllm.core.kv_cache.cache_file import (
    CacheFileReader,
    CacheFileWriter,
    Moved,
    get_digest,
    get_file_size,
    get_reason,
    strip_states,
)
from cllm.core.kv_cache.disk_thread import Slices, finish
from cllm.core.kv_cache.host_cache import Entry
from cllm.core.kv_cache.prefix_index import TOKEN_BYTES, CachedPrefix, Checkpoint
from cllm.errors import CllmError, StateFileError, StorageFailed

SUFFIX, TEMPORARY = ".kv", ".new"
_NAME_BYTES = 16


class DiskEntry(CachedPrefix):
    """A cached prefix on disk. Its checkpoints have lengths; their states are in the file."""

    __slots__ = ("path", "size", "used_at")

    def __init__(self, prefix: CachedPrefix, path: Path, size: int, used_at: float) -> None:
        super().__init__(prefix.tenant, prefix.tokens, strip_states(prefix.checkpoints), prefix.min_length)
        self.path = path
        self.size = size  # of the file
        self.used_at = used_at  # by the wall clock, as the file's mtime


class OtherFile(NamedTuple):
    """A file of another model, or a damaged one: it only takes space."""

    used_at: float
    size: int
    path: Path


class Scan(NamedTuple):
    """What lies in the folder."""

    entries: list[DiskEntry]
    others: list[OtherFile]
    ignored: int = 0  # files of this model's folder that cannot be used
    gone: frozenset[Path] = frozenset()  # files that were known


def get_cache_folder(given: str) -> Path:
    """The folder for the disk cache: as given, else the cache folder of cllm."""
    return Path(given).expanduser().absolute() if given else cache_directory()


class CacheFolder:
    """The files of one model, and the space that those of others take. For the disk thread."""

    def __init__(self, folder: Path, get_fingerprint: Callable[[], str]) -> None:
        """`get_fingerprint` is called on the disk thread: it reads the model's file."""
        self._root = folder / "kv"
        self._get_fingerprint = get_fingerprint
        self._known = ""

    @property
    def _fingerprint(self) -> str:
        self._known = self._known or self._get_fingerprint()
        return self._known

    @property
    def _folder(self) -> Path:
        return self._root / get_digest(self._fingerprint.encode()).hex()[:_NAME_BYTES]

    def get_path(self, prefix: CachedPrefix) -> Path:
        return self._folder / (get_name(prefix) + SUFFIX)

    def scan(self) -> Scan:
        """Read the heads of this model's files, and the sizes of all. Raises OSError."""
        found = Scan([], [], 0)
        for folder in _list(self._root):
            ours = folder == self._folder
            for path in _list(folder) if not folder.is_symlink() else ():
                try:
                    status = path.lstat()
                except FileNotFoundError:  # another server has removed it
                    continue
                if path.suffix != SUFFIX:
                    _remove_leftover(path)
                    continue
                entry = self._find(path, status) if ours and stat.S_ISREG(status.st_mode) else None
                if entry is not None:
                    found.entries.append(entry)
                else:
                    found.others.append(OtherFile(status.st_mtime, status.st_size, path))
                    found = found._replace(ignored=found.ignored + ours)
        return found

    def find_new(self, known: set[Path]) -> Scan:
        """What other engines have written: entries of this model that are not known, and all other files."""
        files = self._list_files()
        found = Scan([], [], gone=frozenset(known.difference(files)))
        for path in files:
            if path in known:
                continue
            with contextlib.suppress(OSError):  # it is gone again
                status = path.lstat()
                ours = path.parent == self._folder and stat.S_ISREG(status.st_mode)
                if ours and (entry := self._find(path, status)) is not None:
                    found.entries.append(entry)
                else:
                    found.others.append(OtherFile(status.st_mtime, status.st_size, path))
        return found

    def _list_files(self) -> list[Path]:
        """The files of all models."""
        folders = [folder for folder in _list(self._root) if not folder.is_symlink()]
        return [path for folder in folders for path in _list(folder) if path.suffix == SUFFIX]

    def _make_room(self, size: int, limit: int) -> None:
        """Remove the files of any model that were not used for the longest time, so that `size` bytes fit.

        Other engines write here, too, and this one knows only what it found when it last looked.
        """
        found = []
        for path in self._list_files():
            with contextlib.suppress(OSError):
                status = path.lstat()
                found.append(OtherFile(status.st_mtime, status.st_size, path))
        size += sum(file.size for file in found)
        for file in sorted(found):
            if size <= limit:
                return
            remove(file.path)
            size -= file.size

    def _find(self, path: Path, status: os.stat_result) -> DiskEntry | None:
        """What a file holds, by its head, its length and its name; None if they do not agree."""
        try:
            with contextlib.closing(CacheFileReader(path, self._fingerprint)) as reader:
                reader.open()
                head = reader.read_only_head()
        except CllmError:
            return None
        points = tuple(Checkpoint(length, b"") for length, _ in head.checkpoints)
        prefix = CachedPrefix(head.tenant, head.tokens, points, head.min_length)
        if get_name(prefix) != path.stem:
            return None
        return DiskEntry(prefix, path, status.st_size, status.st_mtime)

    def read(self, entry: DiskEntry) -> Entry:
        """An entry with its states, checked whole. Raises NotFound, StateFileError or StorageFailed."""
        with contextlib.closing(CacheFileReader(entry.path, self._fingerprint)) as reader:
            reader.open()
            slices = reader.read(max_bytes=entry.size)
            found = finish(slices)
            reader.check_end()
        if found is None or get_name(found) != get_name(entry):
            raise StateFileError("the state file is another than was indexed")
        return found

    def write(self, entry: Entry, limit: int) -> Slices[Moved]:
        """Write an entry to its file, within the `limit` for all files, in bytes.

        Raises StorageFailed; then nothing is left of it.
        """
        path = self.get_path(entry)
        temporary = path.with_name(f".{path.stem}-{secrets.token_hex(_NAME_BYTES)}{TEMPORARY}")
        # Unsynced: after a power failure it may be damaged, and that is found out.
        with contextlib.closing(CacheFileWriter(path, temporary, self._fingerprint, sync=False)) as writer:
            for folder in (self._root, path.parent):
                _make_private(folder)
            writer.open()
            yield from writer.write(entry)
            self._make_room(get_file_size(entry), limit)
            return writer.finish()

    def clear(self) -> None:
        """Remove every file of this model."""
        for path in _list(self._folder):
            remove(path)


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def get_name(prefix: CachedPrefix) -> str:
    """The name of its file: a digest of tenant and tokens."""
    tenant = prefix.tenant.encode()
    named = len(tenant).to_bytes(TOKEN_BYTES) + tenant
    return get_digest(named + prefix.tokens.tobytes()).hex()[: 2 * _NAME_BYTES]


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _make_private(folder: Path) -> None:
    """Make a folder that only its owner may read. Raises StorageFailed."""
    try:
        folder.mkdir(stat.S_IRWXU, parents=True, exist_ok=True)
        if stat.S_IMODE(folder.stat().st_mode) != stat.S_IRWXU:
            folder.chmod(stat.S_IRWXU)
    except OSError as error:
        raise StorageFailed(f"its folder cannot be made: {get_reason(error)}") from None


def _remove_leftover(path: Path) -> None:
    """Remove a half-written file, unless it is being written by another server, which holds its lock."""
    if path.suffix != TEMPORARY:
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)
