"""A damaged GGUF is refused in Python, in one line, before native code sees it."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.backend.llama.gguf import GgufHeader
from cllm.errors import ModelFileError
from tests.tiny_models import make_dense, make_recurrent


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dense(tmp_path_factory.mktemp("gguf") / "dense.gguf")


def test_a_good_file_is_read(good: Path, tmp_path: Path) -> None:
    header = GgufHeader(good)
    assert header.architecture == "llama" and header.context_train == 4096 and header.tensor_count > 10
    assert header.kv_bytes_per_cell() == 2 * 2 * (32 + 32) * 2 or header.kv_bytes_per_cell() > 0
    assert GgufHeader(make_recurrent(tmp_path / "mamba.gguf")).kv_bytes_per_cell() == 0


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as error:
        GgufHeader(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_wrong_is_said(good: Path, tmp_path: Path) -> None:
    data = good.read_bytes()
    path = tmp_path / "m.gguf"
    assert "no model file" in refusal(path)
    assert "folder" in refusal(tmp_path)
    path.write_bytes(b"")
    assert "not a GGUF" in refusal(path)
    path.write_bytes(b"PK\3\4" + data[4:])
    assert "not a GGUF" in refusal(path)
    path.write_bytes(data[:4] + struct.pack("<I", 99) + data[8:])
    assert "version 99" in refusal(path)
    path.write_bytes(data[:8] + struct.pack("<Q", 2**60) + data[16:])
    assert "claims" in refusal(path)
    path.write_bytes(data[:-1000])
    assert "truncated" in refusal(path)
    path.write_bytes(data[:200])
    assert "truncated" in refusal(path)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(4, 3000), value=st.binary(min_size=1, max_size=8), cut=st.integers(0, 5000))
def test_no_damage_raises_anything_else(
    good: Path, tmp_path: Path, place: int, value: bytes, cut: int
) -> None:
    data = bytearray(good.read_bytes())
    data[place : place + len(value)] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data[: len(data) - cut])
    with contextlib.suppress(ModelFileError):
        GgufHeader(path)
