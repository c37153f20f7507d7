"""libmtmd: which file is loaded beside a library, and what its project compiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cllm.build import build, module, toolchain
from cllm.build.module import MediaOptions, find_media
from cllm.build.toolchain import Compiler

GCC = Compiler(("gcc",), ("g++",), "gcc 12.2.0")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CLLM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


def test_it_is_found_beside_the_library_or_in_the_cache(cache: Path) -> None:
    library = cache / "library"
    (library / "bin").mkdir(parents=True)
    assert find_media(library) is None
    options = MediaOptions(GCC, library)
    for folder, info in (
        (options.key, options.info()),
        (f"{options.key}x", {**options.info(), "media": "old"}),
    ):
        target = cache / "native" / folder
        target.mkdir(parents=True)
        (target / "build.json").write_text(json.dumps(info))
        (target / "libmtmd.so").touch()
    assert find_media(library) == cache / "native" / options.key / "libmtmd.so"
    (library / "bin" / "libmtmd.so").touch()
    assert find_media(library) == library / "bin" / "libmtmd.so"
    assert build.find_built() is None, "it is not taken for the library"


def test_the_project_compiles_against_the_finished_library(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, source = cache / "library", cache / "source"
    library.mkdir()
    commands: list[list[str]] = []

    def compile_it(_: object, work: Path, *given: object) -> dict[str, object]:
        settings, targets, _, project = given
        assert isinstance(settings, list) and isinstance(project, Path)
        commands.append(settings)
        assert targets == ["mtmd"] and "tools/mtmd" in (project / "CMakeLists.txt").read_text()
        (work / "bin").mkdir(parents=True)
        (work / "bin" / "libmtmd.so").touch()
        return {"seconds": 1}

    monkeypatch.setattr(build._Tools, "find", lambda: build._Tools(source, source, source))
    monkeypatch.setattr(build._Tools, "compile", compile_it)
    monkeypatch.setattr(toolchain, "find_compiler", lambda *_: GCC)
    path = build.build_media(library)
    assert path == build.build_media(library) == find_media(library) and len(commands) == 1
    assert "-DMTMD_VIDEO=OFF" in commands[0] and f"-DLIBRARIES={library}" in commands[0]
    assert module.media_revision() in path.parent.joinpath("build.json").read_text()
    build.build_media(library, force=True)
    assert len(commands) == 2
