"""Row cache: rows of pictures that were encoded, by tenant and file, in RAM and on disk."""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from cllm.backend.llama.fingerprint import sample_digest, state_fingerprint
from cllm.config import EngineConfig
from cllm.core.kv_cache.disk_folder import CacheFolder, DiskEntry, get_cache_folder, touch
from cllm.core.kv_cache.prefix_index import CachedPrefix
from cllm.core.kv_cache.tiers import MIB, Entry
from cllm.errors import CllmError, StorageFailed
from cllm.types import Prompt

log = logging.getLogger(__name__)
CACHE_BYTES = 256 << 20  # of rows: some hundred pictures of a usual model


class RowKey(NamedTuple):
    """A tenant, and the digest of a picture's file."""

    tenant: str
    digest: bytes


class CachedRows(NamedTuple):
    """A picture as a part of a prompt, and the rows of its spans."""

    prompt: Prompt
    rows: dict[str, bytes]

    @property
    def size(self) -> int:
        return sum(map(len, self.rows.values()))


class RowCache:
    """Rows of pictures by tenant and file, least recently used out; at most `limit` bytes."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit = limit
        self.size = 0
        self._entries: OrderedDict[RowKey, CachedRows] = OrderedDict()

    def get(self, key: RowKey) -> CachedRows | None:
        if (found := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: RowKey, rows: CachedRows) -> None:
        """Keep rows that are not here yet, unless they are larger than the whole cache."""
        if rows.size <= self.limit and key not in self._entries:
            self._entries[key] = rows
            self.size += rows.size
        while self.size > self.limit:
            self.size -= self._entries.popitem(last=False)[1].size


class DiskRows:
    """Rows in the folder of the disk cache, within its limit: an entry whose tokens are a file's digest."""

    def __init__(self, folder: CacheFolder, limit: int) -> None:
        self._folder, self._limit = folder, limit

    @classmethod
    def of(cls, config: EngineConfig) -> Self | None:
        """None where prompts are not kept on disk, either."""
        if not (config.prefix_cache and config.cache_disk_mb):
            return None

        def describe() -> str:
            model = state_fingerprint(config, unified=False)  # whose tokens stand around the rows
            return f"rows of {sample_digest(Path(config.mmproj))}\n{model}"

        return cls(CacheFolder(get_cache_folder(config.cache_dir), describe), config.cache_disk_mb * MIB)

    def get(self, key: RowKey) -> CachedRows | None:
        """Rows that are there and whole."""
        prefix = CachedPrefix(key.tenant, array("i", key.digest))
        path = self._folder.get_path(prefix)
        try:
            state = self._folder.read(DiskEntry(prefix, path, 0)).state
            touch(path)
            return msgspec.msgpack.decode(state, type=CachedRows)
        except (CllmError, msgspec.MsgspecError):
            return None

    def put(self, key: RowKey, rows: CachedRows) -> None:
        entry = Entry(key.tenant, array("i", key.digest), msgspec.msgpack.encode(rows))
        try:
            for _ in self._folder.write(entry, self._limit):
                pass
        except StorageFailed as error:
            log.warning("rows of a picture: %s", error)

    def clear(self) -> None:
        self._folder.clear()
