"""Cache files: what is written comes back; nothing else gets in."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.core.kv_cache import cache_file
from cllm.core.kv_cache.cache_file import get_file_size, read_entry, read_prefix, write_entry
from cllm.core.kv_cache.prefix_index import Checkpoint
from cllm.core.kv_cache.tiers import Entry
from cllm.errors import CacheFileError, CllmError, NotFound, StorageFailed
from cllm.types import Span
from tests.profiles import examples

LENGTHS = 8 + 4 + 32  # where they begin
POINTS = (Checkpoint(1, os.urandom(250)), Checkpoint(3, memoryview(b"abc")))


def make(tenant: str = "", size: int = 300, points: tuple[Checkpoint, ...] = ()) -> Entry:
    return Entry(tenant, tuple(b"abcd"), os.urandom(size), points, min_length=3)


def write(path: Path, entry: Entry, fingerprint: str = "here") -> int:
    """In how many slices."""
    with path.open("wb") as file:
        return len(list(write_entry(file, entry, fingerprint)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "warm.kv"


@pytest.mark.parametrize("slice_bytes", [100, 1 << 20])
def test_an_entry_comes_back_with_its_checkpoints(
    path: Path, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_file, "SLICE_BYTES", slice_bytes)
    entry = make("jürgen", 999, POINTS)
    assert write(path, entry) == (2 + 10 + 3 + 1 if slice_bytes == 100 else 4)
    assert path.stat().st_size == get_file_size(entry)
    found = read_entry(path, "here")
    assert (found.tenant, found.tokens, found.min_length) == ("jürgen", entry.tokens, 3)
    assert bytes(found.state) == entry.state and found.size == entry.size
    assert [(point.length, bytes(point.state)) for point in found.checkpoints] == [
        (1, POINTS[0].state),
        (3, b"abc"),
    ]
    head = read_prefix(path, "here")
    assert (head.tenant, head.tokens, head.min_length) == ("jürgen", entry.tokens, 3)
    assert [tuple(point) for point in head.checkpoints] == [(1, b""), (3, b"")]


def test_media_are_read_back(path: Path) -> None:
    entry = Entry("t", (1, -5, -6, 2), b"state", spans=(Span(1, 3, 1, "picture", columns=2, causal=False),))
    write(path, entry)
    found = read_entry(path, "here")
    assert (found.spans, found.position, path.stat().st_size) == (entry.spans, 3, get_file_size(entry))
    assert read_prefix(path, "here").spans == entry.spans


def refusal(path: Path, fingerprint: str = "here", kind: type[CllmError] = CacheFileError) -> str:
    with pytest.raises(kind) as error:
        read_entry(path, fingerprint)
    assert str(path.parent) not in str(error.value)
    return str(error.value)


def test_a_refusal_names_the_damage(path: Path) -> None:
    write(path, make("t", points=POINTS))
    data = path.read_bytes()
    assert "another model" in refusal(path, "elsewhere")
    lengths = struct.Struct("<HIIIIQ")
    body = LENGTHS + lengths.size

    def with_lengths(*given: int) -> bytes:
        return data[:LENGTHS] + lengths.pack(*given) + data[body:]

    for damaged, said in {
        b"": "truncated",
        b"GGUF" + data[4:]: "not a cache file",
        data[:8] + struct.pack("<I", 99) + data[12:]: "version 99",
        data[:-1]: "truncated",
        data + b"x": "truncated, or corrupt",
        with_lengths(1, 0, 2**32 - 1, 0, 0, 2**62): "truncated",
        with_lengths(1, 2**32 - 1, 4, 3, 2, 300): "truncated",
        with_lengths(1, 0, 4, 3, 2, 2**62): "its length",
        with_lengths(1, 0, 0, 3, 2, 300): "empty",
        data[:body] + b"\xff" + data[body + 1 :]: "cannot be read",
        data[:-33] + b"\0" * 33: "checksum",
    }.items():
        path.write_bytes(damaged)
        assert said in refusal(path), said
    path.unlink()
    refusal(path, kind=NotFound)
    path.symlink_to("/etc/passwd")
    refusal(path, kind=StorageFailed)
    path.unlink()
    os.mkfifo(path)
    assert "truncated" in refusal(path)


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60)
)
@given(place=st.integers(0, 700), value=st.binary(min_size=1, max_size=9), cut=st.integers(0, 700))
def test_no_damage_gets_in(path: Path, place: int, value: bytes, cut: int) -> None:
    write(path, make("t", points=POINTS))
    good = path.read_bytes()
    data = bytearray(good)
    data[place : place + len(value)] = value
    data = data[: max(0, len(data) - cut)]
    if data != good:
        path.write_bytes(data)
        refusal(path)
