"""State files: what is written comes back; nothing else gets in, and then nothing has changed."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.core.kv_cache import cache_file as state_file
from cllm.core.kv_cache.cache_file import Moved, Work, get_path, restore, save
from cllm.core.kv_cache.host_cache import Entry, HostKVCache
from cllm.errors import CllmError, Forbidden, InvalidRequest, NotFound, StateFileError, StorageFailed
from tests.profiles import examples

HEAD = 8 + 4 + 32 + 4


def run(work: Work) -> Moved:
    while True:
        try:
            next(work)
        except StopIteration as end:
            moved = end.value
            assert isinstance(moved, Moved)
            return moved


def tier_of(*entries: tuple[str, str, int], limit: int = 1 << 20) -> HostKVCache:
    tier = HostKVCache(cached_limit=limit)
    for tenant, tokens, size in entries:
        assert tier.put(Entry(tenant, tuple(tokens.encode()), os.urandom(size)))
    return tier


def contents(tier: HostKVCache) -> list[tuple[str, bytes, bytes]]:
    return [(entry.tenant, entry.tokens.tobytes(), bytes(entry.state)) for entry in tier.entries]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "warm.prefixes"


def test_what_is_saved_comes_back_in_its_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "SLICE_BYTES", 100)  # several slices an entry
    tier = tier_of(("", "abc", 1000), ("jürgen", "abd", 99), ("", "xyz", 100))
    told = run(save(tier, path, "here"))
    assert told == (3, 9, tier.cached_bytes, 0)
    again = HostKVCache(cached_limit=1 << 20)
    assert run(restore(again, path, "here")) == told
    assert contents(again) == contents(tier) and again.cached_bytes == tier.cached_bytes
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["warm.prefixes"]
    assert run(restore(again, path, "here")) == (0, 0, 0, 3), "they are known"


def test_restoring_keeps_to_the_byte_budget_and_evicts_nothing(path: Path) -> None:
    tier = tier_of(("", "old", 100), ("", "mid", 100), ("", "new", 100))
    run(save(tier, path, ""))
    small = tier_of(("", "own", 100), limit=2 * (100 + 24) + 10)
    assert run(restore(small, path, "")) == (1, 3, 124, 2)
    assert ["".join(map(chr, entry.tokens)) for entry in small.entries] == ["new", "own"]
    assert small.cached_bytes <= small.cached_limit and small.evictions == 0


def test_an_entry_evicted_while_it_is_saved_is_left_out(path: Path) -> None:
    tier = tier_of(("", "abc", 100), ("", "abd", 100), ("", "xyz", 100))
    work = save(tier, path, "")
    next(work)  # in the middle of the last one
    for entry in tuple(tier.entries)[:2]:
        tier.drop(entry)
    del entry
    assert run(work).entries == 1
    assert run(restore(HostKVCache(cached_limit=1 << 20), path, "")).entries == 1


def refusal(path: Path, identity: str = "", kind: type[CllmError] = StateFileError) -> str:
    tier = tier_of(("", "own", 50))
    before = contents(tier)
    with pytest.raises(kind) as error:
        run(restore(tier, path, identity))
    assert contents(tier) == before and str(path.parent) not in str(error.value)
    return str(error.value)


def with_head(data: bytes, entries: int) -> bytes:
    head = data[: HEAD - 4] + struct.pack("<I", entries)
    return head + hashlib.blake2b(head, digest_size=32).digest() + data[HEAD + 32 :]


def test_what_is_wrong_is_said(path: Path) -> None:
    run(save(tier_of(("", "abc", 300), ("t", "xyz", 300)), path, "here"))
    data = path.read_bytes()
    assert "another model" in refusal(path, "elsewhere")
    body = HEAD + 32
    huge = data[:body] + struct.pack("<HIQ", 0, 2**32 - 1, 2**62) + data[body + 14 :]
    first = 14 + 0 + 12 + 300 + 32
    swapped = data[:body] + data[body + first + 1 :] + data[body : body + first + 1]
    for damaged, said in {
        b"": "truncated",
        b"GGUF" + data[4:]: "not a state file",
        data[:8] + struct.pack("<I", 99) + data[12:]: "version 99",
        data[:44] + struct.pack("<I", 2**32 - 1) + data[48:]: "head",
        with_head(data, 2**32 - 1): "truncated",
        with_head(data, 1): "follow its last entry",
        with_head(data, 3): "truncated",
        data[:-1]: "truncated",
        data + b"x": "follow its last entry",
        huge: "longer than the file",
        swapped: "checksum",
    }.items():
        path.write_bytes(damaged)
        assert said in refusal(path, "here"), said
    path.unlink()
    assert "no state file" in refusal(path, kind=NotFound)
    path.symlink_to("/etc/passwd")
    refusal(path, kind=StorageFailed)


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60)
)
@given(place=st.integers(0, 900), value=st.binary(min_size=1, max_size=9), cut=st.integers(0, 900))
def test_no_damage_gets_in(path: Path, place: int, value: bytes, cut: int) -> None:
    run(save(tier_of(("", "abc", 300), ("t", "xyz", 300)), path, ""))
    good = path.read_bytes()
    data = bytearray(good)
    data[place : place + len(value)] = value
    data = data[: max(0, len(data) - cut)]
    if data != good:
        path.write_bytes(data)
        refusal(path)


def test_names_are_no_paths() -> None:
    with pytest.raises(Forbidden, match="--state-dir"):
        get_path("", "warm")
    for name in ("", "..", "../x", "a/b", "/etc/passwd", ".hidden", "a\0", "x" * 65, "a\n"):
        with pytest.raises(InvalidRequest, match="name"):
            get_path("/tmp", name)


def test_a_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(save(tier_of(("", "abc", 300)), path, ""))
    good = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFailed, match="no space left") as error:
        run(save(tier_of(("", "xyz", 300)), path, ""))
    assert str(path) not in str(error.value)
    assert path.read_bytes() == good and list(path.parent.iterdir()) == [path]


def test_work_that_is_given_up_leaves_nothing(path: Path) -> None:
    work = save(tier_of(("", "abc", 300)), path, "")
    next(work)
    work.close()
    assert list(path.parent.iterdir()) == []
