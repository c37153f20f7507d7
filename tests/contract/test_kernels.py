"""Kernels on this machine: types can be timed, and a model can be written as another one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from cllm.backend.llama import kernels
from cllm.backend.llama.conversion import write_copy
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.kernels import count_weights, time_types
from cllm.backend.llama.library import load
from cllm.backend.llama.probe import run_probe
from cllm.config import EngineConfig
from cllm.errors import LibraryError
from tests.tiny_models import make_dense

_Q4_1_FILE, _Q8_0_FILE = 3, 7  # LLAMA_FTYPE_MOSTLY_Q4_1, …_Q8_0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own; the library stays."""
    monkeypatch.setenv("CLLM_LIBRARY", str(load().directory))
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_types_are_timed_in_a_process_and_remembered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = ["F32", "F16", "Q8_0", "Q4_1", "Q4_0", "Q4_K", "IQ2_XXS", "MXFP4"]
    speeds = time_types(types, 1)
    assert list(speeds) == sorted(types) and len(list((cache / "kernels").iterdir())) == 1
    for speed in speeds.values():
        assert all(figure > 0 for layout in speed if layout for figure in layout)
    # A row alone reads all weights for one token.
    assert speeds["F32"].plain.single > speeds["F32"].plain.prompt
    monkeypatch.setattr(kernels, "run_apart", None)
    assert time_types(types, 1) == speeds


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A tiny model as Q4_1."""
    path, api = tmp_path / "tiny.Q4_1.gguf", load().api
    params = api.llama_model_quantize_default_params()
    params.ftype = _Q4_1_FILE
    source = make_dense(tmp_path / "dense.gguf")
    assert not api.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params))
    assert "Q4_1" in count_weights(GgufHeader(path))
    return path


def test_a_model_is_written_as_another_type_and_can_be_loaded(shipped: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    write_copy(GgufHeader(shipped), copy, _Q8_0_FILE)
    types = count_weights(GgufHeader(copy))
    assert "Q8_0" in types and "Q4_1" not in types
    assert run_probe(EngineConfig(model=str(copy), threads=1)).passed


def test_what_llama_cpp_refuses_leaves_no_copy(shipped: Path, tmp_path: Path) -> None:
    data = shipped.read_bytes()
    assert data.count(b"llama") > 1
    shipped.write_bytes(data.replace(b"llama.block_count", b"llama.block_kount"))
    with pytest.raises(LibraryError):
        write_copy(GgufHeader(shipped), tmp_path / "copy.gguf", _Q8_0_FILE)
    assert not [path for path in tmp_path.iterdir() if "copy" in path.name or path.name.startswith(".new")]
