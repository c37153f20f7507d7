"""Build options: compiler, flags and CMake options of one build of llama.cpp, and the CPU they are for.

Standard library only: this runs before the dependencies are installed.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from cllm.build.toolchain import BINDINGS_VERSION, Compiler, cache_directories

OPTIONS = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))
_COLD, _HOT, _HOT_SOURCES = "-O1", "-O3", OPTIONS["hot_sources"]
CMAKE_OPTIONS, _VARIANTS = OPTIONS["common"], OPTIONS["variants"]
# Its C++ runtime is inside and hidden: that of the machine may be older, and in the same process another one.
_VARIANT_LINKING = "-static-libstdc++ -Wl,--exclude-libs,ALL,--gc-sections,--strip-all"
_HIDDEN = "{ local: _Z*St*; _Z*9__gnu_cxx*; };\n"  # instances of the C++ library's templates
# The C++ library of GCC 12 asks glibc 2.36 for random numbers; older ones have this.
_RANDOM = Path(__file__).with_name("random.c").read_text(encoding="utf-8")
LEFT_OUT_VARIANTS = "armv9.2_1", "armv9.2_2"  # SME serves kernels that are not built; GCC 12 lacks it
SERVER_PROGRAMS = ("llama-server", "llama-bench")

# What ggml has switches for, where the build is not for this very CPU; as /proc/cpuinfo calls them.
_INSTRUCTION_SETS = ("sse4_2", "avx", "avx2", "bmi2", "fma", "f16c")


@dataclass(frozen=True)
class BuildOptions:
    """Options of one build: a compiler, with flags for this very CPU, portable ones, or all variants."""

    compiler: Compiler
    portable: bool = False
    variants: bool = False

    @cached_property
    def flags(self) -> tuple[str, ...]:
        """Flags for C and C++ alike. Asks the compiler."""
        if not self.portable and not self.variants:
            return self.compiler.native_flags()
        return ("-mcpu=baseline",) if self.compiler.is_zig else ()  # only zig targets this CPU by default

    @property
    def key(self) -> str:
        """The name of the build's folder: equal options on equal CPUs have equal keys."""
        if self.variants:
            more = (*_VARIANTS, _VARIANT_LINKING, _HIDDEN, _RANDOM, *LEFT_OUT_VARIANTS)
            info = [self.compiler.identity, *self.flags, revision(), *more]
            return f"{BINDINGS_VERSION}-{machine()}-variants-{digest(info)}"
        info = [self.compiler.identity, str(self.portable), *self.flags, revision(), *features()]
        return f"{BINDINGS_VERSION}-{machine()}-{digest(info)}"

    def cmake_arguments(self, work: Path, with_server: bool) -> list[str]:
        """CMake's arguments without the folders. Writes a file that CMake reads into `work`."""
        file = _optimisation_file(work, *(self._variant_lines(work) if self.variants else ()))
        arguments = [*CMAKE_OPTIONS, f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={file}"]
        origin = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
        arguments.append(f"-DCMAKE_INSTALL_RPATH={origin};{origin}/..")
        for language, command in (("C", self.compiler.c), ("CXX", self.compiler.cxx)):
            arguments.append(f"-DCMAKE_{language}_COMPILER={';'.join(command)}")
            arguments.append(f"-DCMAKE_{language}_FLAGS={' '.join(self.flags)}")
        for part in ("COMMON", "TOOLS", "SERVER"):
            arguments.append(f"-DLLAMA_BUILD_{part}={_switch(with_server)}")
        if self.variants:
            linking = f"{_VARIANT_LINKING} -Wl,--version-script={work / 'hidden.map'}"
            arguments += (f"-DCMAKE_{kind}_LINKER_FLAGS={linking}" for kind in ("SHARED", "MODULE"))
            return [*arguments, *_VARIANTS]
        arguments.append(f"-DGGML_NATIVE={_switch(not self.portable)}")
        if self.portable:  # ggml's default would be a CPU of 2013, and this one may be older
            for name in _INSTRUCTION_SETS:
                arguments.append(f"-DGGML_{name.upper().replace('_', '')}={_switch(name in features())}")
        return arguments

    def _variant_lines(self, work: Path) -> Iterator[str]:
        """Return CMake's calls that change the variants. Write the files that they need into `work`."""
        (work / "hidden.map").write_text(_HIDDEN, encoding="utf-8")
        (work / "random.c").write_text(_RANDOM, encoding="utf-8")
        yield f"target_sources llama PRIVATE {work / 'random.c'}"
        if machine() == "linux-aarch64":
            empty = work / "empty.c"
            empty.touch()
            targets = " ".join(f"ggml-cpu-{name}" for name in LEFT_OUT_VARIANTS)
            yield f"set_property TARGET {targets} PROPERTY SOURCES {empty}"
            yield f'set_property TARGET {targets} PROPERTY COMPILE_OPTIONS ""'
        elif flags := self.compiler.tile_flags("-mamx-tile"):
            source = "${CMAKE_SOURCE_DIR}/ggml/src/ggml-cpu/amx/mmq.cpp"
            options = f'PROPERTIES COMPILE_OPTIONS "{";".join(flags)}"'
            yield f"set_source_files_properties {source} TARGET_DIRECTORY ggml {options}"

    def __str__(self) -> str:
        kind = "portable" if self.portable else "for every CPU" if self.variants else "for this CPU"
        return " ".join((f"{self.compiler.identity}, {kind}", *self.flags))


def revision() -> str:
    """A digest of the constants above: an older build with other options is not reused."""
    return digest([*CMAKE_OPTIONS, _COLD, _HOT, *_HOT_SOURCES])


def _optimisation_file(work: Path, *more: str) -> Path:
    """Write a CMake file that sets the levels; deferred to the end, when the targets exist."""
    sources = " ".join(f"${{CMAKE_SOURCE_DIR}}/src/{name}.cpp" for name in _HOT_SOURCES)
    calls = (
        f"target_compile_options llama PRIVATE {_COLD}",
        f"set_source_files_properties {sources} TARGET_DIRECTORY llama PROPERTIES COMPILE_OPTIONS {_HOT}",
        *more,
    )
    lines = (f"cmake_language(DEFER DIRECTORY ${{CMAKE_SOURCE_DIR}} CALL {call})\n" for call in calls)
    file = work / "optimisation.cmake"
    file.write_text("".join(lines), encoding="utf-8")
    return file


def find_builds(wanted: Mapping[str, Any]) -> dict[Path, dict[str, Any]]:
    """Return the finished builds whose `build.json` has the `wanted` entries, by folder.

    Those of the first cache folder come first, and the newest of each before the others.
    """
    builds: dict[Path, dict[str, Any]] = {}
    for directory in cache_directories():
        found: list[tuple[float, Path, dict[str, Any]]] = []
        for file in (directory / "native").glob(f"{BINDINGS_VERSION}-*/build.json"):
            with suppress(OSError, ValueError):
                info = json.loads(file.read_text(encoding="utf-8"))
                if info.items() >= wanted.items():
                    found.append((file.stat().st_mtime, file.parent, info))
        builds |= {folder: info for _, folder, info in sorted(found, key=itemgetter(0), reverse=True)}
    return builds


def digest(words: list[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]


def _switch(value: bool) -> str:
    return "ON" if value else "OFF"


def machine() -> str:
    """Operating system and architecture, such as `linux-x86_64`."""
    return f"{sys.platform}-{platform.machine().lower()}"


def features() -> tuple[str, ...]:
    """The instruction sets of this CPU, sorted, as its system names them; empty where it does not say."""
    if sys.platform == "darwin":
        names = _sysctl_features()
    else:
        lists = map(_read_cpuinfo().get, ("flags", "features", "isa"))
        names = {word for words in lists if words for word in words.lower().split()}
    if platform.machine().lower() in ("x86_64", "amd64", "i386", "i686"):
        names = {name for name in names if name.startswith(tuple(OPTIONS["x86_instruction_sets"]))}
    return tuple(sorted(names))


def _read_cpuinfo() -> dict[str, str]:
    """The entries of /proc/cpuinfo, names in lower case, of the first processor that has them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    entries = (line.partition(":") for line in reversed(lines))
    return {name.strip().lower(): value.strip() for name, _, value in entries}


def _sysctl_features() -> set[str]:
    listing = subprocess.run(["sysctl", "machdep.cpu", "hw.optional"], capture_output=True, text=True).stdout
    found: set[str] = set()
    for line in listing.splitlines():
        name, _, value = line.partition(":")
        if name.startswith("machdep.cpu.") and name.endswith("features"):
            found.update(value.lower().replace(".", "_").split())
        elif name.startswith("hw.optional.arm") and value.strip() == "1":
            found.add(name.rpartition(".")[2].lower())
    return found
