"""The native build: which flags, which folder, and what is taken for a finished build."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest

from cllm.build import build, module, options, toolchain
from cllm.build.gpus import Drivers, Gpu
from cllm.build.options import BuildOptions, features, machine, revision
from cllm.build.toolchain import Compiler

GCC = Compiler(("gcc",), ("g++",), "gcc 12.2.0")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CLLM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


def finished(cache: Path, name: str, age_s: float = 0, **differing: object) -> Path:
    """A folder as a finished build leaves it."""
    info = {
        "version": toolchain.BINDINGS_VERSION,
        "machine": machine(),
        "cpu_features": list(features()),
        "recipe": revision(),
        **differing,
    }
    folder = cache / "native" / f"{toolchain.BINDINGS_VERSION}-{name}"
    folder.mkdir(parents=True)
    file = folder / "build.json"
    file.write_text(json.dumps(info))
    os.utime(file, (file.stat().st_mtime - age_s,) * 2)
    return folder


def test_the_newest_suitable_build_is_taken(cache: Path) -> None:
    assert build.find_built() is None
    finished(cache, "old", age_s=100)
    newest = finished(cache, "new")
    finished(cache, "other-cpu", cpu_features=["quantum"])
    finished(cache, "other-options", recipe="something else")
    finished(cache, "other-version", version="0.0.1")
    (cache / "native" / f"{toolchain.BINDINGS_VERSION}-broken").mkdir()
    (cache / "native" / f"{toolchain.BINDINGS_VERSION}-broken" / "build.json").write_text("{")
    assert build.find_built() == newest


def test_builds_of_the_users_cache_are_found_beside_another_cache_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`CLLM_CACHE_DIR` is where everything is written; it hides no library that is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "users"))
    sampling = build.sampling_path()
    assert sampling.parent == cache / "native" and build.find_built() is None
    users = finished(cache / "users" / "cllm", "users")
    (users.parent / sampling.name).touch()
    assert build.find_built() == users and build.sampling_path() == users.parent / sampling.name
    own = finished(cache, "own", age_s=100)
    assert build.find_built() == own, "the first folder's comes first"
    assert toolchain.cache_directory() == cache


def test_a_work_folder_that_was_copied_is_not_trusted(tmp_path: Path) -> None:
    assert build._made_here(tmp_path)
    (tmp_path / "CMakeCache.txt").write_text("CMAKE_CACHEFILE_DIR:INTERNAL=/somewhere/else\n")
    assert not build._made_here(tmp_path)
    (tmp_path / "CMakeCache.txt").write_text(f"CMAKE_CACHEFILE_DIR:INTERNAL={tmp_path}\n")
    assert build._made_here(tmp_path)


@pytest.mark.parametrize(
    ("macros", "header", "expected"),
    [
        ("", "", ()),
        ("#define __AVX512FP16__ 1", "", ("-mno-avx512fp16",)),
        ("#define __AMX_TILE__ 1", "a right declaration", ()),
        ("#define __AMX_TILE__ 1", toolchain._WRONG_TILE_DECLARATION, ("-fno-dse", "-fno-tree-dse")),
    ],
)
def test_a_flag_is_named_only_where_cpu_and_compiler_call_for_it(
    monkeypatch: pytest.MonkeyPatch, macros: str, header: str, expected: tuple[str, ...]
) -> None:
    def answer(_: object, *flags: str, source: str = "", language: str = "c") -> str:
        return header if source else macros

    monkeypatch.setattr(toolchain, "_preprocess", answer)
    assert GCC.native_flags() == expected


def test_a_flag_the_compiler_does_not_take_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(_: object, *flags: str, source: str = "", language: str = "c") -> str | None:
        return None if "-mno-avx512fp16" in flags else "#define __AVX512FP16__ 1"

    monkeypatch.setattr(toolchain, "_preprocess", answer)
    assert GCC.native_flags() == ()


def test_every_difference_that_matters_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiler, "native_flags", lambda self: ())
    plain = BuildOptions(GCC).key
    assert plain == BuildOptions(GCC).key
    assert plain != BuildOptions(GCC, portable=True).key
    assert plain != BuildOptions(Compiler(("gcc",), ("g++",), "gcc 13.1.0")).key
    monkeypatch.setattr(Compiler, "native_flags", lambda self: ("-mno-avx512fp16",))
    assert plain != BuildOptions(GCC).key


def test_hot_sources_are_optimised_and_openmp_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiler, "native_flags", lambda self: ())
    arguments = BuildOptions(GCC).cmake_arguments(tmp_path, with_server=False)
    assert "-DGGML_OPENMP=OFF" in arguments and "-DGGML_NATIVE=ON" in arguments
    levels = (tmp_path / "optimisation.cmake").read_text()
    assert "llama-kv-cache.cpp" in levels and "-O3" in levels


def test_variants_are_for_every_cpu(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiler, "native_flags", lambda self: ("-mno-avx512fp16",))
    monkeypatch.setattr(Compiler, "tile_flags", lambda self, *_: ("-fno-dse", "-fno-tree-dse"))
    variants = BuildOptions(GCC, variants=True)
    key = variants.key
    assert "-variants-" in key and variants.flags == (), "none of this CPU"
    monkeypatch.setattr(options, "features", lambda: ("quantum",))
    assert variants.key == key, "whichever CPU builds them"
    arguments = variants.cmake_arguments(tmp_path, with_server=False)
    assert {"-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON", "-DGGML_OPENMP=OFF"} <= set(arguments)
    assert not [word for word in arguments if word in ("-DGGML_NATIVE=ON", "-DGGML_AVX2=ON")]
    assert any("-static-libstdc++" in word and "--exclude-libs,ALL" in word for word in arguments)
    monkeypatch.setattr(options, "machine", lambda: "linux-x86_64")
    variants.cmake_arguments(tmp_path, with_server=False)
    assert (
        'amx/mmq.cpp TARGET_DIRECTORY ggml PROPERTIES COMPILE_OPTIONS "-fno-dse;-fno-tree-dse"'
        in (tmp_path / "optimisation.cmake").read_text()
    ), "GCC 12 drops the stores of the tile shapes"
    monkeypatch.setattr(options, "machine", lambda: "linux-aarch64")
    variants.cmake_arguments(tmp_path, with_server=False)
    assert "ggml-cpu-armv9.2_2 PROPERTY SOURCES" in (tmp_path / "optimisation.cmake").read_text()
    written = [tmp_path / name for name in ("hidden.map", "random.c", "empty.c")]
    assert all(file.exists() for file in written), "what CMake and the linker are pointed at"
    zig = Compiler(("zig",), ("zig",), "zig 0.13")
    monkeypatch.setattr(toolchain, "find_compiler", lambda *_: zig)
    assert build.main(["--variants"]) == 2, "it has another C++ library"


def test_a_library_for_every_cpu_is_not_taken_for_the_build_for_this_one(cache: Path) -> None:
    folder = finished(cache, "linux-variants")
    assert build.find_built() == folder
    arguments = Namespace(programs=())
    info = build._info(BuildOptions(GCC, variants=True), arguments)
    assert info["variants"] and "cpu_features" not in info
    (folder / "build.json").write_text(json.dumps(info))
    assert build.find_built() is None


class Steps:
    """Records what `cllm build` does, instead of doing it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
        self.done: list[str] = []
        tools = build._Tools(Path("source"), Path("cmake"), Path("ninja"))
        monkeypatch.setattr(build, "find_gpus", lambda: Drivers(gpus))
        monkeypatch.setattr(build, "find_built", lambda: None)
        monkeypatch.setattr(build, "_build", self._library)
        monkeypatch.setattr(build._Tools, "find", lambda: tools)
        monkeypatch.setattr(build._Tools, "compile", self._compile)
        monkeypatch.setattr(toolchain, "find_compiler", lambda *_: GCC)
        monkeypatch.setattr(module, "_find_glslc", lambda _: Path("glslc"))

    def _library(self, arguments: object, force: bool) -> Path:
        self.done.append("library, forced" if force else "library")
        return Path("the-library")

    def _compile(
        self, work: Path, settings: list[str], targets: list[str], jobs: int, project: None
    ) -> dict[str, str]:
        self.done.append(f"{' '.join(targets)}, {jobs} jobs")
        (work / "bin").mkdir()
        for name in ("libggml-vulkan.so", "libggml-base.so", "libggml.so"):
            (work / "bin" / name).touch()
        return {"date": "today"}


RADEON = Gpu("vulkan", "AMD Radeon", 16 << 30, "", "Vulkan 1.3")


def test_a_module_is_built_beside_the_library(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(monkeypatch, RADEON)
    assert build.main(["--gpu", "auto", "--jobs", "3"]) == 0
    assert steps.done == ["library", "ggml-vulkan, 3 jobs"]
    library, folder = capsys.readouterr().out.split()
    assert library == "the-library" and "-vulkan-" in folder
    assert sorted(file.name for file in Path(folder).iterdir()) == ["bin", "build.json", "libggml-vulkan.so"]
    info = json.loads(Path(folder, "build.json").read_text())
    assert info["backend"] == "vulkan" and info["date"] == "today"
    assert not list((cache / "work").iterdir())

    assert build.main(["--gpu", "vulkan"]) == 0, "it is there"
    assert steps.done[2:] == ["library"]
    assert build.main(["--gpu", "vulkan", "--force", "--jobs", "1"]) == 0
    assert steps.done[3:] == ["library", "ggml-vulkan, 1 jobs"], "the library is not built again"


@pytest.mark.parametrize("arguments", [[], ["--gpu", "none"], ["--gpu", "auto"]])
def test_without_a_gpu_only_the_library_is_built(
    cache: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(monkeypatch)
    assert build.main(arguments) == 0
    assert build.main([*arguments, "--force"]) == 0
    assert steps.done == ["library", "library, forced"]
    assert ("no GPU here by the drivers" in capsys.readouterr().err) == ("auto" in arguments)


def test_what_is_missing_is_said_before_anything_is_built(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(monkeypatch)
    monkeypatch.delenv("CUDAARCHS", raising=False)
    assert build.main(["--gpu", "cuda"]) == 2
    assert not steps.done and "the NVIDIA driver reports no GPU here" in capsys.readouterr().err


def test_progress_is_that_of_the_whole_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["[0/2] Re-checking", "[1/40] a/first.cpp.o", "[1/2] inner.o", "[2/2] inner", "[40/40] Linking x"]
    script = tmp_path / "ninja"
    script.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    script.chmod(0o755)
    build._run_ninja([str(script)])
    assert capsys.readouterr().err.splitlines() == ["100 %  40/40  Linking x"]
    script.write_text("#!/bin/sh\necho 'x.cu: error: no'\nexit 1\n")
    with pytest.raises(toolchain.BuildError, match=r"Ninja ended with code 1:\nx.cu: error: no"):
        build._run_ninja([str(script)])
