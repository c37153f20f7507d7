"""The folder of the disk cache: its files, and what the disk thread does with them.

    <folder>/kv/<fingerprint of model, library and KV layout>/<digest of tenant and tokens>.kv
    <folder>/kv/<fingerprint of model, library and KV layout>/<name>.slot

A file appears whole, and one that is gone is a miss, so several servers may share a folder. The files tell
what users asked: folders are 0700, files 0600.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Collection, Generator, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from cllm.build.toolchain import cache_directory
from cllm.core.kv_cache import cache_file
from cllm.core.kv_cache.prefix_index import TOKEN_BYTES, CachedPrefix, Checkpoint
from cllm.core.kv_cache.tiers import MIB, Entry
from cllm.errors import CacheFileError, CllmError, NotFound, StorageFailed
from cllm.names import path_below

PREFIX, SLOT, TEMPORARY = ".kv", ".slot", ".new"  # suffixes
_NAME_BYTES = cache_file.DIGEST_BYTES // 2


class DiskEntry(CachedPrefix):
    """A cached prefix on disk. Its checkpoints have lengths; their states are in the file."""

    __slots__ = ("path", "size")

    def __init__(self, prefix: CachedPrefix, path: Path, size: int) -> None:
        points = tuple(Checkpoint(point.length, b"") for point in prefix.checkpoints)
        super().__init__(prefix.tenant, prefix.tokens, points, prefix.min_length, prefix.spans)
        self.path = path
        self.size = size  # of the file


class _File(NamedTuple):
    """A file of any model, in the order of eviction."""

    saved: bool  # a slot: never evicted
    used_at: float
    size: int
    path: Path


class Contents(NamedTuple):
    """What lies in the folder."""

    files: list[_File]
    entries: list[DiskEntry]  # those that are new, least recently used first
    ignored: int = 0  # files of this model's folder that cannot be used

    @property
    def paths(self) -> set[Path]:
        return {file.path for file in self.files}

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def slot_bytes(self) -> int:
        return sum(file.size for file in self.files if file.saved)


Writing = Generator[Contents | None, None, None]


def get_cache_folder(given: str) -> Path:
    """The folder for the disk cache: as given, else the cache folder of cllm."""
    return Path(given).expanduser().absolute() if given else cache_directory()


class CacheFolder:
    """The files of one model, and the space that those of others take. For the disk thread."""

    def __init__(self, folder: Path, get_fingerprint: Callable[[], str]) -> None:
        """`get_fingerprint` is called on the disk thread: it reads the model's file."""
        self._root = folder / "kv"
        self._get_fingerprint = get_fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return self._get_fingerprint()

    @cached_property
    def _folder(self) -> Path:
        return self._root / cache_file.get_digest(self._fingerprint.encode()).hex()[:_NAME_BYTES]

    def get_path(self, prefix: CachedPrefix) -> Path:
        return self._folder / (get_name(prefix) + PREFIX)

    def _get_slot_path(self, name: str) -> Path:
        return path_below(self._folder, name + SLOT)

    def scan(self, limit: int, known: Collection[Path] = ()) -> Contents:
        """Keep the files of all models to `limit` bytes; read the heads of those not `known` of this one.

        Raises OSError.
        """
        files = self._make_room(limit)
        own = (file for file in files if file.path.parent == self._folder and not file.saved)
        new = [self._find(file) for file in own if file.path not in known]
        return Contents(files, [entry for entry in new if entry is not None], new.count(None))

    def _make_room(self, limit: int, size: int = 0, path: Path | None = None) -> list[_File]:
        """Remove what was not used for the longest time, so that `size` bytes fit; return what is left.

        The file at `path` is to be replaced. Other engines write here, too. Raises StorageFailed.
        """
        files = sorted(file for file in self._list_files() if file.path != path)
        slots = sum(file.size for file in files if file.saved)
        if size and slots + size > limit:
            sizes = f"{size / MIB:.1f} MiB do not fit beside {slots / MIB:.1f} MiB of saved slots"
            raise StorageFailed(f"{sizes}: raise --cache-disk-mb, or clear the cache")
        total = size + sum(file.size for file in files)
        while total > limit and files and not files[0].saved:
            evicted = files.pop(0)
            remove(evicted.path)
            total -= evicted.size
        return files

    def _list_files(self) -> Iterator[_File]:
        """The files of all models. Leftovers of a crash are removed."""
        for folder in _list(self._root):
            for path in _list(folder) if not folder.is_symlink() else ():
                if path.suffix == TEMPORARY:
                    _remove_leftover(path)
                elif path.suffix in (PREFIX, SLOT):
                    with contextlib.suppress(FileNotFoundError):  # another server has removed it
                        status = path.lstat()
                        yield _File(path.suffix == SLOT, status.st_mtime, status.st_size, path)

    def _find(self, file: _File) -> DiskEntry | None:
        """What a file holds, by its head, its length and its name; None if they do not agree."""
        try:
            prefix = cache_file.read_prefix(file.path, self._fingerprint)
        except CllmError:
            return None
        return DiskEntry(prefix, file.path, file.size) if get_name(prefix) == file.path.stem else None

    def read(self, entry: DiskEntry) -> Entry:
        """An entry with its states, checked whole. Raises NotFound, CacheFileError or StorageFailed."""
        found = cache_file.read_entry(entry.path, self._fingerprint)
        if get_name(found) != entry.path.stem:
            raise CacheFileError("the cache file is another than was indexed")
        return found

    def read_slot(self, name: str, max_bytes: int) -> Entry:
        """A saved slot, checked whole. Raises NotFound, CacheFileError or StorageFailed."""
        path = self._get_slot_path(name)
        try:
            size = path.lstat().st_size
        except FileNotFoundError:
            raise NotFound("no slot of this model and KV layout is saved under this name") from None
        if size > max_bytes:
            raise StorageFailed(f"the saved slot takes {size // MIB} MiB of RAM: raise --cache-ram-mb")
        return cache_file.read_entry(path, self._fingerprint)

    def write(self, entry: Entry, limit: int, slot: str = "") -> Writing:
        """Write an entry to its file, or to that of a saved slot, within the `limit` for all files, in bytes.

        In slices; what lies in the folder comes last. Raises StorageFailed; then nothing is left of it.
        """
        path = self._get_slot_path(slot) if slot else self.get_path(entry)
        temporary = path.with_name(f".{path.stem}-{secrets.token_hex(_NAME_BYTES)}{TEMPORARY}")
        size = cache_file.get_file_size(entry)
        try:
            for folder in (self._root, path.parent):
                folder.mkdir(stat.S_IRWXU, parents=True, exist_ok=True)
                folder.chmod(stat.S_IRWXU)
            self._make_room(limit, size, path)
            with open(temporary, "xb", opener=cache_file.open_plainly) as file:
                with contextlib.suppress(OSError):  # one without a lock was left by a crash
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield from cache_file.write_entry(file, entry, self._fingerprint)
                file.flush()
                if slot:  # others may be damaged after a power failure, and that is found out
                    os.fsync(file.fileno())
                files = self._make_room(limit, size, path)
                touch(temporary)
                temporary.replace(path)
        except OSError as error:
            raise StorageFailed(
                f"the cache file could not be written: {cache_file.get_reason(error)}"
            ) from None
        finally:
            remove(temporary)
        used_at = time.time()
        files.append(_File(bool(slot), used_at, size, path))
        yield Contents(files, [] if slot else [DiskEntry(entry, path, size)])

    def clear(self) -> None:
        """Remove every file of this model, those of saved slots too. Raises OSError."""
        for path in _list(self._folder):
            if not path.is_dir():
                path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def touch(path: Path) -> None:
    """Note that a file was used, more precisely than file systems do by themselves."""
    used_at = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(path, ns=(used_at, used_at), follow_symlinks=False)


def get_name(prefix: CachedPrefix) -> str:
    """The name of its file: a digest of tenant and tokens."""
    tenant = prefix.tenant.encode()
    named = len(tenant).to_bytes(TOKEN_BYTES) + tenant
    return cache_file.get_digest(named + prefix.tokens.tobytes()).hex()[: 2 * _NAME_BYTES]


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove_leftover(path: Path) -> None:
    """Remove a half-written file, unless it is being written by another server, which holds its lock."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(descriptor)
