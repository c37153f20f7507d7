"""Which GPUs the library can use, which process loads their module, and whose memory counts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm.backend.llama import devices, library, memory
from cllm.backend.llama.devices import Device
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit
from cllm.build.gpus import Drivers, Gpu
from cllm.build.module import Module
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


def test_a_library_that_dies_of_the_question_has_no_gpu_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dead = subprocess.CompletedProcess("python", -6, stdout=b"", stderr=b"ggml abort")
    monkeypatch.setattr(devices, "may_use_gpu", lambda: True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: dead)
    assert devices.list_devices() == devices.list_devices() == ()
    (line,) = caplog.messages
    assert line.startswith("no GPU is used") and "it was ended by SIGABRT" in line


def test_the_devices_are_what_the_library_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = b'[["CUDA0", "NVIDIA H200", 5, 7, false], ["Vulkan0", "Iris", 2, 3, true]]'
    monkeypatch.setattr(devices, "may_use_gpu", lambda: True)
    done = subprocess.CompletedProcess("python", 0, stdout=answer, stderr=b"")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    first, second = devices.list_devices()
    assert first == Device("CUDA0", "NVIDIA H200", 5, 7, False) and second.integrated
    assert devices.gpu_memory() == 5, "the other one's is the host's"


def test_a_gpu_that_is_not_used_is_offered_a_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus = Drivers((Gpu("cuda", "NVIDIA H200", 139 << 30, "90", "driver 580 (CUDA 13.0)"),))
    monkeypatch.setenv("CLLM_LIBRARY", str(tmp_path))
    monkeypatch.setattr(library, "find_modules", list)
    assert devices.offer_module(gpus) is None, "it is not a library of cllm build"
    (tmp_path / "build.json").touch()
    assert devices.offer_module(Drivers()) is None
    offer = devices.offer_module(gpus)
    assert offer is not None
    assert offer.startswith("NVIDIA H200 is not used; `cllm build --gpu auto` builds for it (about ")
    module = Module(tmp_path / "libggml-cuda.so", "cuda", frozenset({"90"}))
    monkeypatch.setattr(library, "find_modules", lambda: [module])
    assert devices.offer_module(gpus) is None


@pytest.mark.parametrize(("gpu", "expected"), [(True, 1), (False, 0)])
def test_only_a_process_that_computes_loads_the_module(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, expected: int
) -> None:
    """One that does not (as the tokenizer worker) asks no driver."""
    asked: list[Path] = []
    monkeypatch.setattr(library, "find_module", asked.append)
    library.load(gpu=gpu)
    assert len(asked) == expected
    assert devices.wants_gpu(EngineConfig()) and not devices.wants_gpu(EngineConfig(gpu_layers=0))


def test_no_driver_is_asked_where_no_module_was_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = Gpu("cuda", "NVIDIA H200", 139 << 30, "90", "driver 580 (CUDA 13.0)")
    asked: list[str] = []

    def ask(*backends: str) -> Drivers:
        asked.extend(backends)
        return Drivers((gpu,))

    monkeypatch.setattr(library, "ask_drivers", ask)
    (tmp_path / "build.json").touch()
    monkeypatch.setattr(library, "find_modules", list)
    assert library.find_module(tmp_path) is None and not asked
    module = Module(tmp_path / "libggml-cuda.so", "cuda", frozenset({"90"}))
    monkeypatch.setattr(library, "find_modules", lambda: [module])
    assert library.find_module(tmp_path) == module.path
    assert asked == ["cuda"], "no module is for another driver"
    gpu = gpu._replace(architecture="75")
    assert library.find_module(tmp_path) is None, "it was built for another GPU"


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
