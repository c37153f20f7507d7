"""Conversion of the embedded model: when it is done, and that a failure serves the file as shipped."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from cllm.backend.llama import conversion
from cllm.backend.llama.conversion import choose_file, convert
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.placement import Device
from cllm.config import EngineConfig
from cllm.errors import LibraryError
from cllm.models import store
from cllm.models.resolve import resolve_config
from tests.tiny_models import make_dense

FASTER, SLOWER = (2.0, 1.2), (1.0, 1.0)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(conversion, "list_devices", tuple)
    monkeypatch.setattr(conversion, "find_gain", lambda header, threads: FASTER)
    path = make_dense(tmp_path / "shipped.gguf")
    monkeypatch.setattr(store, "embedded_model", lambda: path)
    return path


def test_only_a_model_that_was_not_named_is_converted(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(conversion, "convert", lambda header: Path("copy.gguf"))
    with caplog.at_level(logging.INFO):
        assert resolve_config(EngineConfig()).model == "copy.gguf"
    assert caplog.messages == ["shipped is served as Q8_0: here prefill is 2.0 × and decode 1.2 × as fast"]
    assert resolve_config(EngineConfig(model=str(shipped))).model == str(shipped)
    monkeypatch.setattr(conversion, "find_gain", lambda header, threads: SLOWER)
    assert resolve_config(EngineConfig()).model == str(shipped)


def test_with_a_gpu_the_model_is_not_converted(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "convert", lambda header: Path("copy.gguf"))
    monkeypatch.setattr(conversion, "list_devices", lambda: [Device("CUDA0", "NVIDIA H200", 1, 2, False)])
    assert choose_file(shipped, EngineConfig()) == shipped
    assert choose_file(shipped, EngineConfig(gpu_layers=0)) == Path("copy.gguf")


@pytest.mark.parametrize("failing", ["find_gain", "run_apart", "locked", "nothing", "type"])
def test_a_failure_serves_the_shipped_file_with_a_warning(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(28, "No space left") if failing == "locked" else LibraryError("it died")

    def write(module: str, data: bytes, limit_s: float) -> bytes:
        if failing == "type":  # the tensors are there, and not as Q8_0
            Path(json.loads(data)[1]).write_bytes(shipped.read_bytes())
        return b""

    monkeypatch.setattr(conversion, "run_apart", write)
    if failing in ("find_gain", "run_apart", "locked"):
        monkeypatch.setattr(conversion, failing, fail)
    with caplog.at_level(logging.WARNING):
        assert choose_file(shipped, EngineConfig()) == shipped
    (line,) = caplog.messages
    assert line.startswith("shipped.gguf is served as it is, since it cannot be converted: ")
    left = [path for path in (shipped.parent / "cache").rglob("*") if path.is_file()]
    assert all(path.suffix == ".lock" for path in left)


def test_a_damaged_copy_is_made_again(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, calls = GgufHeader(shipped), []

    def write(module: str, data: bytes, limit_s: float) -> bytes:
        calls.append(module)
        Path(json.loads(data)[1]).write_bytes(shipped.read_bytes())
        return b""

    monkeypatch.setattr(conversion, "run_apart", write)
    monkeypatch.setattr(conversion, "TARGET", "F32")
    copy = convert(header)
    assert copy.name == shipped.name and copy.stat().st_mtime_ns == shipped.stat().st_mtime_ns
    assert convert(header) == copy and len(calls) == 1
    copy.write_bytes(copy.read_bytes()[:-100])
    assert convert(header) == copy and len(calls) == 2
    assert copy.read_bytes() == shipped.read_bytes()
