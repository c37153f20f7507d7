"""Which GPUs the library can use, and which process loads their module."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cllm.backend.llama import library, placement
from cllm.backend.llama.library import may_use_gpu
from cllm.backend.llama.placement import Device
from cllm.build.gpus import Drivers, Gpu
from cllm.build.module import Module
from cllm.config import EngineConfig


@pytest.fixture(autouse=True)
def _forget_devices() -> Iterator[None]:
    placement.list_devices.cache_clear()
    yield
    placement.list_devices.cache_clear()


def test_a_library_for_a_gpu_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLLM_LIBRARY", str(tmp_path))
    assert not may_use_gpu()
    (tmp_path / "libggml-cuda.so").touch()
    assert may_use_gpu()
    assert placement.list_devices() == (), "a library that cannot be loaded has no GPU"


def test_a_library_for_the_cpu_lists_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is asked, and answers."""
    monkeypatch.setenv("CLLM_LIBRARY", str(library.find()))
    for name in ("CLLM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))  # without modules
    assert may_use_gpu() or library.run_apart("cllm.backend.llama.placement", b"", 60) == b"[]\n"


def test_a_library_that_dies_of_the_question_has_no_gpu_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dead = subprocess.CompletedProcess("python", -6, stdout=b"", stderr=b"ggml abort")
    monkeypatch.setattr(placement, "may_use_gpu", lambda: True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: dead)
    assert placement.list_devices() == placement.list_devices() == ()
    (line,) = caplog.messages
    assert line.startswith("no GPU is used") and "it was ended by SIGABRT" in line


def test_the_devices_are_what_the_library_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = b'[["CUDA0", "NVIDIA H200", 5, 7, false], ["Vulkan0", "Iris", 2, 3, true]]'
    monkeypatch.setattr(placement, "may_use_gpu", lambda: True)
    done = subprocess.CompletedProcess("python", 0, stdout=answer, stderr=b"")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    first, second = placement.list_devices()
    assert first == Device("CUDA0", "NVIDIA H200", 5, 7, False) and second.integrated


def test_a_gpu_that_is_not_used_is_offered_a_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus = Drivers((Gpu("cuda", "NVIDIA H200", 139 << 30, "90", "driver 580 (CUDA 13.0)"),))
    monkeypatch.setenv("CLLM_LIBRARY", str(tmp_path))
    monkeypatch.setattr(library, "find_modules", list)
    assert placement.offer_module(gpus) is None, "it is not a library of cllm build"
    (tmp_path / "build.json").touch()
    assert placement.offer_module(Drivers()) is None
    offer = placement.offer_module(gpus)
    assert offer is not None
    assert offer.startswith("NVIDIA H200 is not used; `cllm build --gpu auto` builds for it (about ")
    module = Module(tmp_path / "libggml-cuda.so", "cuda", frozenset({"90"}))
    monkeypatch.setattr(library, "find_modules", lambda: [module])
    assert placement.offer_module(gpus) is None


@pytest.mark.parametrize(("gpu", "expected"), [(True, 1), (False, 0)])
def test_only_a_process_that_computes_loads_the_module(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, expected: int
) -> None:
    """One that does not (as the tokenizer worker) asks no driver."""
    asked: list[Path] = []
    loaded = library.load()
    monkeypatch.setattr(loaded, "_module_looked_for", False)
    monkeypatch.setattr(library, "find_module", asked.append)
    for _ in range(2):
        assert library.load(gpu=gpu) is loaded
    assert len(asked) == expected
    assert placement.wants_gpu(EngineConfig()) and not placement.wants_gpu(EngineConfig(gpu_layers=0))


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


def test_a_driver_that_does_not_start_is_said_and_the_next_one_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "build.json").touch()
    cuda = Module(tmp_path / "libggml-cuda.so", "cuda", frozenset({"90"}))
    vulkan = Module(tmp_path / "libggml-vulkan.so", "vulkan", frozenset())
    modules = [cuda]
    radeon = Gpu("vulkan", "AMD Radeon", 16 << 30, "", "Vulkan 1.3")
    answers = {"cuda": Drivers(problems=("the NVIDIA driver does not start",)), "vulkan": Drivers((radeon,))}
    monkeypatch.setattr(library, "ask_drivers", answers.__getitem__)
    monkeypatch.setattr(library, "find_modules", lambda: modules)
    monkeypatch.setattr(placement, "_read_devices", lambda: [library.find_module(tmp_path)])
    assert placement.main() == 1
    assert capsys.readouterr().err == "the NVIDIA driver does not start\n", "the parent warns with it"
    modules.append(vulkan)
    assert library.find_module(tmp_path) == vulkan.path
