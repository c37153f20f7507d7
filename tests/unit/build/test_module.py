"""GPU modules: which is built, which is loaded, and what is said where something is missing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cllm.build import module
from cllm.build.gpus import Drivers, Gpu
from cllm.build.module import Module, ModuleOptions, plan_module
from cllm.build.options import revision
from cllm.build.toolchain import BINDINGS_VERSION, BuildError, Compiler

GCC = Compiler(("gcc",), ("g++",), "gcc 12.2.0")
ZIG = Compiler(("zig",), ("zig",), "zig 0.13")
H200 = Gpu("cuda", "NVIDIA H200", 139 << 30, "90", "driver 580.82 (CUDA 13.0)")
T4 = H200._replace(name="Tesla T4", architecture="75")
RADEON = Gpu("vulkan", "AMD Radeon", 16 << 30, "", "Vulkan 1.3")
NO_GPU = Drivers()


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUDAARCHS", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CLLM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(module, "NVCC_FOLDER", str(tmp_path / "usual"))


def install(file: Path, output: str) -> Path:
    """A program that prints a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\necho '{output}'\n")
    file.chmod(0o755)
    return file


def finish(folder: Path, options: ModuleOptions, age_s: float = 0, **differing: object) -> Module:
    """A finished module."""
    folder = folder / "native" / f"{options.key}{age_s:.0f}"
    folder.mkdir(parents=True)
    file = folder / "build.json"
    file.write_text(json.dumps({**options.info(), **differing}))
    os.utime(file, (file.stat().st_mtime - age_s,) * 2)
    path = folder / f"lib{options.target}.so"
    return Module(path, options.backend, frozenset(options.architectures))


@pytest.mark.parametrize(
    ("asked", "gpus", "backend"),
    [
        ("none", (H200,), None),
        ("auto", (), None),
        ("auto", (RADEON,), "vulkan"),
        ("auto", (RADEON, H200), "cuda"),
        ("vulkan", (H200,), "vulkan"),
        ("cuda", (), "cuda"),
    ],
)
def test_auto_is_decided_by_the_gpu(asked: str, gpus: tuple[Gpu, ...], backend: str | None) -> None:
    assert module.choose_backend(asked, Drivers(gpus)) == backend


def test_cuda_is_built_for_the_architectures_that_are_here(tmp_path: Path) -> None:
    nvcc = install(tmp_path / "bin" / "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    options = plan_module("cuda", Drivers((H200, T4, H200)), GCC)
    assert options == ModuleOptions("cuda", GCC, nvcc, ("75", "90"))
    arguments = options.cmake_arguments()
    assert {"-DCMAKE_CUDA_ARCHITECTURES=75-real;90-real", "-DGGML_CUDA=ON"} <= set(arguments)
    assert {"-DGGML_BACKEND_DL=ON", "-DGGML_NATIVE=OFF", "-DGGML_CPU=OFF"} <= set(arguments)
    assert any(word.startswith("-DCMAKE_INSTALL_RPATH=$ORIGIN;") for word in arguments)
    assert str(options) == "the GPU module cuda for compute capability 75, 90, gcc 12.2.0"


def test_architectures_can_be_named_for_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        BuildError, match=r"no GPU here \(the driver is broken\).* set CUDAARCHS .* such as 90"
    ):
        plan_module("cuda", Drivers(problems=("the driver is broken",)), GCC)
    install(tmp_path / "bin" / "nvcc", "release 13.0")
    monkeypatch.setenv("CUDAARCHS", "90-real;120a")
    assert plan_module("cuda", NO_GPU, GCC).architectures == ("120", "90"), "ggml makes 120a of 120"


def test_a_gpu_without_its_compiler_is_an_error_that_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(
        BuildError, match=r"NVIDIA H200 .* is here, but .* no nvcc .* install the CUDA toolkit"
    ):
        plan_module("cuda", Drivers((H200,)), GCC)
    with pytest.raises(BuildError, match=r"needs the program glslc, the header vulkan/.* apt install glslc"):
        plan_module("vulkan", Drivers((RADEON,)), GCC)
    with pytest.raises(BuildError, match=r"needs gcc or clang"):
        plan_module("vulkan", Drivers((RADEON,)), ZIG)


def test_vulkan_needs_its_headers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    glslc = install(tmp_path / "bin" / "glslc", "shaderc")
    headers = {"vulkan/vulkan.hpp"}
    monkeypatch.setattr(module, "has_header", lambda _, name: name in headers)
    with pytest.raises(BuildError, match=r"needs the header spirv/unified1/spirv.hpp \(Debian"):
        plan_module("vulkan", NO_GPU, GCC)
    headers.add("spirv/unified1/spirv.hpp")
    options = plan_module("vulkan", NO_GPU, GCC)
    assert options == ModuleOptions("vulkan", GCC, glslc)
    arguments = options.cmake_arguments()
    assert {"-DGGML_VULKAN=ON", f"-DCMAKE_CXX_FLAGS=-include {module.OLD_VULKAN}"} <= set(arguments)


def test_nvcc_is_found_in_its_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Drivers((H200,))
    usual = install(tmp_path / "usual" / "nvcc", "release 13.0")
    assert plan_module("cuda", gpus, GCC).tool == usual
    on_path = install(tmp_path / "bin" / "nvcc", "release 13.0")
    assert plan_module("cuda", gpus, GCC).tool == on_path
    named = install(tmp_path / "home" / "bin" / "nvcc", "release 12.4")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert plan_module("cuda", gpus, GCC).tool == named


def test_a_compiler_too_new_for_the_driver_is_refused(tmp_path: Path) -> None:
    install(tmp_path / "bin" / "nvcc", "release 14.0")
    with pytest.raises(
        BuildError, match=r"CUDA 13 and older, .* of CUDA 14: update the driver, or set CUDA_HOME"
    ):
        plan_module("cuda", Drivers((H200,)), GCC)


def test_the_toolkit_is_where_nvcc_says_it_is(tmp_path: Path) -> None:
    script = install(tmp_path / "bin" / "nvcc", "#$ _HERE_=/opt/cuda-13/bin")
    assert "-DCMAKE_INSTALL_RPATH=$ORIGIN;/opt/cuda-13/lib64;/opt/cuda-13/lib" in (
        ModuleOptions("cuda", GCC, script, ("90",)).cmake_arguments()
    )


def test_a_module_is_known_by_what_it_is(tmp_path: Path) -> None:
    cuda = ModuleOptions("cuda", GCC, Path("nvcc"), ("90",))
    vulkan = ModuleOptions("vulkan", GCC, Path("glslc"))
    assert cuda.key.startswith(f"{BINDINGS_VERSION}-") and "-cuda-" in cuda.key
    assert len({cuda.key, vulkan.key, ModuleOptions("cuda", GCC, Path("nvcc"), ("75",)).key}) == 3
    old = finish(tmp_path, cuda, age_s=100)
    new = finish(tmp_path, vulkan)
    finish(tmp_path, cuda, age_s=1, version="0.0.1")
    finish(tmp_path, cuda, age_s=2, machine="plan9-mips")
    finish(tmp_path, cuda, age_s=3, recipe=revision())  # a library's
    (tmp_path / "native" / f"{BINDINGS_VERSION}-broken").mkdir()
    (tmp_path / "native" / f"{BINDINGS_VERSION}-broken" / "build.json").write_text("{")
    assert module.find_modules() == [new, old]


@pytest.mark.parametrize(
    ("gpus", "chosen"),
    [
        ((), None),
        ((H200,), "h200"),
        ((H200, RADEON), "h200"),
        ((T4,), None),
        ((T4, RADEON), "any"),
        ((H200, T4), "both"),
        ((RADEON,), "any"),
    ],
)
def test_the_module_for_all_gpus_that_are_here_is_loaded(gpus: tuple[Gpu, ...], chosen: str | None) -> None:
    """ggml would use a GPU that the module has no code for, and abort."""
    modules = [Module(Path("any"), "vulkan", frozenset()), Module(Path("h200"), "cuda", frozenset({"90"}))]
    if chosen == "both":
        modules.append(Module(Path("both"), "cuda", frozenset({"75", "90"})))
    found = module.choose_module(modules, Drivers(gpus))
    assert (found and found.path.name) == chosen


def test_the_time_is_that_of_this_machine() -> None:
    assert module.describe_time("cuda", 16) == "about 5 minutes, once"
    assert module.describe_time("vulkan", 64) == "about 1 minute, once"
