"""Row cache: bytes within their limits, in RAM and in the folder of the disk cache; tenants apart."""

from __future__ import annotations

from pathlib import Path

from cllm.core.kv_cache.disk_folder import CacheFolder
from cllm.types import Prompt
from cllm.workers.row_cache import CachedRows, DiskRows, RowCache, RowKey


def test_the_row_cache_keeps_its_byte_limit() -> None:
    cache = RowCache(100)
    for number in range(4):
        cache.put(RowKey("a", bytes([number])), CachedRows(Prompt(), {"x": bytes(40)}))
        assert cache.get(RowKey("a", b"\0")) is not None, "used again and again"
        assert cache.size <= 100
    assert cache.get(RowKey("a", b"\1")) is None and cache.get(RowKey("b", b"\0")) is None
    cache.put(RowKey("a", b"large"), CachedRows(Prompt(), {"x": bytes(101)}))
    assert cache.get(RowKey("a", b"large")) is None and cache.size == 80


def test_rows_on_disk_are_private_and_checked(tmp_path: Path) -> None:
    def open_rows(fingerprint: str = "model") -> DiskRows:
        return DiskRows(CacheFolder(tmp_path, lambda: fingerprint), 1000)

    key, rows = RowKey("a", bytes(range(32))), CachedRows(Prompt((5, -7)), {"x": bytes(40)})
    disk = open_rows()
    disk.put(key, rows)
    (file,) = tmp_path.glob("kv/*/*.kv")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert open_rows().get(key) == rows and open_rows("other").get(key) is None
    assert disk.get(RowKey("b", key.digest)) is None
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert disk.get(key) is None, "it is damaged"
    for number in range(20):
        disk.put(RowKey("a", bytes([number]) * 32), rows)
    assert sum(each.stat().st_size for each in tmp_path.glob("kv/*/*.kv")) <= 1000
    disk.clear()
    assert not list(tmp_path.glob("kv/*/*.kv"))
