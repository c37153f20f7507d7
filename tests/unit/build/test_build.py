"""The native build: which flags, which folder, and what is taken for a finished build."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cllm.build import build, toolchain
from cllm.build.options import BuildOptions, features, machine, revision
from cllm.build.toolchain import Compiler

GCC = Compiler(("gcc",), ("g++",), "gcc 12.2.0")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path))
    return tmp_path


def finished(cache: Path, name: str, age_s: float = 0, **differing: object) -> Path:
    """A folder as a finished build leaves it."""
    info = {
        "version": build.BINDINGS_VERSION,
        "machine": machine(),
        "cpu_features": list(features()),
        "recipe": revision(),
        **differing,
    }
    folder = cache / "native" / f"{build.BINDINGS_VERSION}-{name}"
    folder.mkdir(parents=True)
    file = folder / "build.json"
    file.write_text(json.dumps(info))
    os.utime(file, (file.stat().st_mtime - age_s,) * 2)
    return folder


def test_an_empty_cache_holds_no_build(cache: Path) -> None:
    assert build.find_built() is None


def test_the_newest_suitable_build_is_taken(cache: Path) -> None:
    finished(cache, "old", age_s=100)
    newest = finished(cache, "new")
    finished(cache, "other-cpu", cpu_features=["quantum"])
    finished(cache, "other-options", recipe="something else")
    finished(cache, "other-version", version="0.0.1")
    (cache / "native" / f"{build.BINDINGS_VERSION}-broken").mkdir()
    (cache / "native" / f"{build.BINDINGS_VERSION}-broken" / "build.json").write_text("{")
    assert build.find_built() == newest


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
