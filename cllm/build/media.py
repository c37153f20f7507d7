"""Media library: libmtmd, which turns pictures and sound into rows of embeddings.

It takes more than a minute on two cores, so it is built only for models that need it: as a project of its
own, against the finished library of the same version. Its folder is
`CACHE/native/<version>-<machine>-media-<digest>/`; one serves all CPUs of an architecture. Standard library
only.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cllm.build.options import digest, find_builds, machine
from cllm.build.toolchain import BINDINGS_VERSION, Compiler

TARGET = "mtmd"
PROJECT = Path(__file__).with_name("libmtmd")
_SUFFIX = "dylib" if sys.platform == "darwin" else "so"
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",  # it builds graphs; the arithmetic is ggml's
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON",
    "-DCMAKE_SKIP_RPATH=ON",  # what it needs is loaded before it
    "-DMTMD_VIDEO=OFF",  # it would start ffmpeg
)


@dataclass(frozen=True)
class MediaOptions:
    """Options of a build of libmtmd against the library in a folder."""

    compiler: Compiler
    library: Path
    target = TARGET
    project = PROJECT

    @property
    def key(self) -> str:
        """The name of its folder: without the CPU's features, which it does not use."""
        return f"{BINDINGS_VERSION}-{machine()}-media-{digest([self.compiler.identity, media_revision()])}"

    def cmake_arguments(self) -> list[str]:
        """CMake's arguments without the folders of the source and the build."""
        compilers = (("C", self.compiler.c), ("CXX", self.compiler.cxx))
        return [
            *_OPTIONS,
            *(f"-DCMAKE_{language}_COMPILER={';'.join(command)}" for language, command in compilers),
            f"-DLIBRARIES={self.library}",
            f"-DSUFFIX=.{_SUFFIX}",
        ]

    def info(self) -> dict[str, Any]:
        """The part of its `build.json` that says what it is."""
        return {**_wanted(), "compiler": self.compiler.identity}

    def __str__(self) -> str:
        return f"libmtmd for pictures and sound, {self.compiler.identity}"


def media_revision() -> str:
    """A digest of the options: an older build with other ones is not loaded."""
    return digest([*_OPTIONS, (PROJECT / "CMakeLists.txt").read_text(encoding="utf-8")])


def find_media(library: Path) -> Path | None:
    """The libmtmd for the library in a folder: beside it, with its programs, or of `cllm build --media`."""
    name = f"lib{TARGET}.{_SUFFIX}"
    folders = (library, library / "bin", *find_builds(_wanted()))
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def _wanted() -> dict[str, Any]:
    return {"version": BINDINGS_VERSION, "machine": machine(), "media": media_revision()}
