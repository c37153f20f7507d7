"""The GPU's memory counts where the library can use a GPU, the host's elsewhere."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm.backend.llama import devices, memory
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit
from cllm.config import EngineConfig
from tests.tiny_models import make_dense

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _forget_devices() -> Iterator[None]:
    devices.list_devices.cache_clear()
    yield
    devices.list_devices.cache_clear()


def test_a_library_for_a_gpu_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLLM_LIBRARY", str(tmp_path))
    assert not devices.supports_gpu()
    (tmp_path / "libggml-cuda.so").touch()
    assert devices.supports_gpu()
    assert devices.list_devices() == (), "a library that cannot be loaded has no GPU"
    assert devices.gpu_memory() is None


def test_a_library_for_the_cpu_lists_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked, and answers."""
    if devices.supports_gpu():
        pytest.skip("this library is for a GPU")
    assert devices.list_devices() == ()
    answers: list[bytes] = []
    run = subprocess.run

    def record(*arguments: Any, **options: Any) -> Any:
        done = run(*arguments, **options)
        answers.append(done.stdout)
        return done

    monkeypatch.setattr(subprocess, "run", record)
    assert devices.ask_library() == ()
    assert answers == [b"[]\n"]


@pytest.mark.parametrize(("layers", "available"), [(-1, 24 * GIB), (99, 24 * GIB), (1, None), (0, 64 * GIB)])
def test_the_memory_where_the_layers_lie_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int, available: int | None
) -> None:
    monkeypatch.setattr(memory, "supports_gpu", lambda: True)
    monkeypatch.setattr(memory, "gpu_memory", lambda: 24 * GIB)
    monkeypatch.setattr(memory, "available_memory", lambda: 64 * GIB)
    header = GgufHeader(make_dense(tmp_path / "m.gguf"))
    fit = MemoryFit(header, EngineConfig(gpu_layers=layers))
    assert fit.available == available and fit.on_gpu == (layers != 0)
    assert ("on the GPU" in fit.describe()) == fit.on_gpu
    monkeypatch.setattr(memory, "gpu_memory", lambda: None)
    assert MemoryFit(header, EngineConfig(gpu_layers=layers)).available == 64 * GIB
