"""Which native library is loaded, and what is said where there is none."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from cllm.backend.llama import library
from cllm.build.toolchain import BINDINGS_VERSION
from cllm.errors import LibraryError


def add_package(folder: Path, **info: Any) -> Path:
    """The package cllm-native in a folder of packages."""
    package = folder / library.PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "build.json").write_text(json.dumps({"version": BINDINGS_VERSION, "variants": True, **info}))
    return package


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without a library; the folder is searched for packages."""
    monkeypatch.delenv("CLLM_LIBRARY", raising=False)
    for name in ("CLLM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_the_one_named_comes_first_then_the_built_one_then_the_package(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LibraryError, match=r"run `cllm build` .* or install the wheel cllm_native"):
        library.find()
    package = add_package(bare)
    assert library.find() == package
    monkeypatch.setattr(library, "find_built", lambda: bare / "built")
    assert library.find() == bare / "built"
    monkeypatch.setenv("CLLM_LIBRARY", str(bare / "own"))
    assert library.find() == bare / "own"


def test_a_package_of_another_version_is_refused(bare: Path) -> None:
    add_package(bare, version="0.0.1")
    with pytest.raises(LibraryError, match=rf"0\.0\.1 is installed.*cllm_native-{BINDINGS_VERSION}"):
        library.find()


def test_a_library_that_does_not_load_is_said(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match="cannot be loaded"):
        library.Api(tmp_path)
    (tmp_path / f"libllama.{library.LIBRARY_SUFFIX}").write_bytes(b"not a library")
    with pytest.raises(LibraryError, match="rebuild it with `cllm build --force`"):
        library.Api(tmp_path)


def test_two_llama_cpp_in_a_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", types.ModuleType("llama_cpp"))
    with pytest.raises(LibraryError, match="llama_cpp is imported"):
        library.Api(library.find())


def test_a_process_keeps_its_library(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = library.load()
    assert library.load() is first and not caplog.messages
    assert library.load(tmp_path) is first
    assert "another library was loaded before" in caplog.text
