"""Whatever a GGUF header says: a ModelFileError or a header, in little time and memory."""

from __future__ import annotations

import math
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.placement import Device, Placer
from cllm.config import EngineConfig
from cllm.errors import ModelFileError
from tests.profiles import examples
from tests.tiny_models import make_dense

QUICKLY = settings(
    deadline=None, max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
HUGE = st.sampled_from([0, 1, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1])
CARDS = tuple(Device(f"CUDA{i}", "", free, free, False) for i, free in enumerate((3 << 28, 1 << 30)))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_dense(tmp_path_factory.mktemp("gguf") / "dense.gguf").read_bytes()


def read(path: Path, data: bytes) -> GgufHeader | None:
    """The header, and what is computed from it; None where it was refused. Nothing else may come of it."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        header = GgufHeader(path)
        assert header.context_train >= 0 and header.vocabulary >= 0
        Placer(header, EngineConfig(model=str(path)), CARDS)
        return header
    except ModelFileError as error:
        assert "\n" not in str(error)
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * len(data) + (4 << 20)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header_of(*pairs: bytes, tensors: bytes = b"", tensor_count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensor_count, len(pairs)) + b"".join(pairs) + tensors + bytes(64)


@QUICKLY
@given(cut=st.integers(0, 20_000))
def test_cut_anywhere(good: bytes, tmp_path: Path, cut: int) -> None:
    assert read(tmp_path / "m.gguf", good[:cut]) is None


@QUICKLY
@given(flips=st.lists(st.tuples(st.integers(4, 16_000), st.integers(0, 7)), min_size=1, max_size=8))
def test_bits_flipped(good: bytes, tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    data = bytearray(good)
    for place, bit in flips:
        data[place] ^= 1 << bit
    read(tmp_path / "m.gguf", bytes(data))


@QUICKLY
@given(place=st.integers(4, 16_000), value=HUGE)
def test_absurd_numbers_anywhere(good: bytes, tmp_path: Path, place: int, value: int) -> None:
    read(tmp_path / "m.gguf", good[:place] + struct.pack("<Q", value) + good[place + 8 :])


@QUICKLY
@given(
    kind=st.integers(0, 20), inner=st.integers(0, 20), count=HUGE, rest=st.binary(max_size=64), length=HUGE
)
def test_absurd_arrays(tmp_path: Path, kind: int, inner: int, count: int, rest: bytes, length: int) -> None:
    value = struct.pack("<IIQQ", kind, inner, count, length)
    read(tmp_path / "m.gguf", header_of(string(b"tokenizer.ggml.tokens") + value + rest))


@QUICKLY
@given(dimensions=HUGE, sizes=st.lists(HUGE, max_size=9), kind=st.integers(0, 60), offset=HUGE)
def test_absurd_tensors(tmp_path: Path, dimensions: int, sizes: list[int], kind: int, offset: int) -> None:
    tensor = string(b"blk.0") + struct.pack("<I", min(dimensions, 2**32 - 1))
    tensor += b"".join(struct.pack("<Q", size) for size in sizes) + struct.pack("<IQ", kind, offset)
    read(tmp_path / "m.gguf", header_of(tensors=tensor, tensor_count=1))


def scalar(key: bytes, form: str, kind: int, value: Any) -> bytes:
    return string(key) + struct.pack("<I" + form, kind, value)


@pytest.mark.parametrize(
    "pair",
    [
        scalar(b"general.alignment", "I", 4, 0),
        scalar(b"general.alignment", "f", 6, math.inf),
        scalar(b"general.alignment", "f", 6, math.nan),
        string(b"general.alignment") + struct.pack("<I", 8) + string(b"x"),
        string(b"general.alignment") + struct.pack("<IIQ", 9, 4, 2) + bytes(8),
        string(b"general.alignment") + struct.pack("<IIQ", 9, 4, 2000) + bytes(8000),
        string(b"general.alignment") + struct.pack("<IIQ", 9, 8, 2000) + struct.pack("<Q", 2**64 - 1),
    ],
    ids=["zero", "inf", "nan", "text", "list", "long list", "texts without end"],
)
def test_an_alignment_that_is_none(tmp_path: Path, pair: bytes) -> None:
    assert read(tmp_path / "m.gguf", header_of(pair)) is None


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -1.0, 1e30])
@pytest.mark.parametrize(
    "key", [b"context_length", b"block_count", b"attention.head_count", b"embedding_length"]
)
def test_sizes_that_are_none(tmp_path: Path, key: bytes, value: float) -> None:
    architecture = string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama")
    heads = scalar(b"llama.attention.head_count", "I", 4, 4)
    pair = scalar(b"llama." + key, "f", 6, value)
    assert read(tmp_path / "m.gguf", header_of(architecture, heads, pair)) is None
