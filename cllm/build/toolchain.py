"""The toolchain and the source: a compiler with the flags it needs on this CPU, CMake, Ninja, llama.cpp.

A missing tool is installed from its wheel into the cache's own `tools` folder: no root, and no change to the
environment that runs this. llama.cpp comes with the sdist of its Python bindings. Standard library only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cllm.errors import LibraryError

# Of llama-cpp-python, whose sdist carries llama.cpp. The declarations of cllm/backend/llama are made from it.
BINDINGS_VERSION = "0.3.36"
MIN_CMAKE = (3, 21)  # the bindings need it; DEFER needs 3.19
COMPILERS = ("gcc", "clang", "zig")

# GCC's header, up to the version that turned it into a built-in, declares that `ldtilecfg` reads one
# pointer of the 64 bytes it reads. The stores of the tile shapes are then dropped as dead, and the first
# AMX instruction is illegal.
_WRONG_TILE_DECLARATION = "*((const void **)__config)"

# The part of the sdist that is unpacked: the bindings, and what CMake reads of llama.cpp.
_WANTED = re.compile(
    r"[^/]+/(pyproject\.toml|README\.md|LICENSE\.md|CMakeLists\.txt|llama_cpp/.*"
    r"|vendor/llama\.cpp/(CMakeLists\.txt|LICENSE|(licenses|cmake|ggml|include|src|vendor|common|tools|scripts)/.*))"
)


class BuildError(LibraryError):
    """The native library could not be built. The message lists each attempt and its output."""

    code = "build_error"


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def cache_directory() -> Path:
    """The cache folder of cllm, for everything that is written: the first of `cache_directories`."""
    return cache_directories()[0]


def cache_directories() -> list[Path]:
    """Folders to look for builds in: `$CLLM_CACHE_DIR`, if it is set, then `cllm` in the user's cache."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "cllm")
    own = os.environ.get("CLLM_CACHE_DIR")
    return [path.expanduser().absolute() for path in ([Path(own), users] if own else [users])]


def write_record(path: Path, data: bytes) -> None:
    """Write a file of the cache whole or not at all; its folder is made if missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".new-{os.getpid()}")
    try:
        new.write_bytes(data)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, report: Callable[[], object]) -> Iterator[None]:
    """Hold a lock file, until this process ends at the latest. `report` is called before waiting for another.

    A file that was removed meanwhile is made again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report()
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    raise
                yield  # the file system has no locks
                return
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield
                return


def source_directory() -> Path:
    """Return the folder that the sdist is unpacked into."""
    return cache_directory() / "source" / f"llama_cpp_python-{BINDINGS_VERSION}"


def fetch_source() -> Path:
    """Download and unpack the sdist once; returns the folder. The caller holds the build lock."""
    source = source_directory()
    if source.exists():
        return source
    log(f"downloading llama-cpp-python {BINDINGS_VERSION} (75 MB), which carries llama.cpp's source")
    source.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
        package = ("--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={BINDINGS_VERSION}")
        run_pip("download", "--dest", scratch, *package)
        archive = next(Path(scratch).glob("*.tar.gz"))
        with tarfile.open(archive, "r|gz") as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            tar.extractall(scratch, (member for member in tar if _WANTED.fullmatch(member.name)))
        archive.replace(source.parent / archive.name)
        Path(scratch, source.name).rename(source)
    return source


@dataclass(frozen=True)
class Compiler:
    """A C and a C++ compiler that belong together. `identity` is family and version: `gcc 12.2.0`."""

    c: tuple[str, ...]
    cxx: tuple[str, ...]
    identity: str

    @property
    def is_zig(self) -> bool:
        return self.identity.startswith("zig")

    def native_flags(self) -> tuple[str, ...]:
        """Flags that `-march=native` needs beside it on this CPU; usually none.

        They come from the compiler's own macros, so a flag is set only where both CPU and compiler know the
        feature, and never on another architecture.
        """
        macros = _preprocess(self.c, "-dM", "-march=native") or ""
        flags: list[str] = []
        if "__AVX512FP16__" in macros:
            flags.append("-mno-avx512fp16")  # ggml's half-precision attention is 2.5 times slower than f32
        if "__AMX_TILE__" in macros:
            flags += self.tile_flags("-march=native")
        if flags and _preprocess(self.c, "-march=native", *flags) is None:
            return ()
        return tuple(flags)

    def tile_flags(self, *target: str) -> tuple[str, ...]:
        """Flags that code with AMX tiles needs, compiled with those of `target`."""
        header = _preprocess(self.c, *target, source="#include <immintrin.h>\n") or ""
        return ("-fno-dse", "-fno-tree-dse") if _WRONG_TILE_DECLARATION in header else ()


def find_compiler(tools: Path, name: str | None = None) -> Compiler:
    """The compiler called `name`, or the first of $CC, gcc, cc, clang, and zig from its wheel.

    Raises BuildError if the named one is missing or cannot run.
    """
    known = {"gcc": "g++", "cc": "c++", "clang": "clang++"}
    pairs = [(c, cxx) for c, cxx in known.items() if name in (None, c)]
    if name is None and ("CC" in os.environ or "CXX" in os.environ):
        pairs.insert(0, (os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")))
    for c, cxx in pairs:
        if (compiler := _identify(tuple(shlex.split(c)), tuple(shlex.split(cxx)))) is not None:
            return compiler
    if name not in (None, "zig"):
        raise BuildError(f"--compiler {name}: {name} or its C++ compiler does not run here")
    return _zig(tools)


def has_header(compiler: Compiler, header: str) -> bool:
    """Return True if C++ sources can include the header."""
    return _preprocess(compiler.cxx, source=f"#include <{header}>\n", language="c++") is not None


def find_cmake(tools: Path) -> Path:
    """CMake from PATH if it is new enough, else from its wheel."""
    if (found := shutil.which("cmake")) is not None:
        output = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"(\d+)\.(\d+)", output)
        if version is not None and (int(version[1]), int(version[2])) >= MIN_CMAKE:
            return Path(found)
    return install_tool(tools, "cmake", "cmake/data/bin/cmake")


def find_ninja(tools: Path) -> Path:
    """Ninja from PATH, else from its wheel."""
    found = shutil.which("ninja")
    return Path(found) if found is not None else install_tool(tools, "ninja", "bin/ninja")


def install_tool(tools: Path, package: str, program: str) -> Path:
    """Install a wheel into its own folder below `tools` (once) and return the program inside it."""
    path = tools / package / program
    if not path.exists():
        run_pip("install", "--no-deps", "--upgrade", "--target", str(tools / package), package)
    if not path.exists():
        raise BuildError(f"the package {package} holds no {program}")
    return path


def run_pip(*arguments: str) -> None:
    """Run this Python's pip. Raises BuildError with its output if it fails."""
    command = [sys.executable, "-m", "pip", *arguments]
    # Without the variable pip fetches CMake to read metadata.
    code, output = run_command(command, SKBUILD_WHEEL_CMAKE="false")
    if code != 0:
        raise BuildError(f"`{shlex.join(command)}` failed:\n{last_lines(output)}")


def run_command(command: list[str], **variables: str) -> tuple[int, str]:
    """Run a program; returns its exit code and what it printed, errors among it."""
    pipe, variables = subprocess.PIPE, {**os.environ, **variables}
    done = subprocess.run(command, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def default_jobs(bytes_per_job: int = 2**30) -> int:
    """Compilers at a time: one per core, if memory suffices for the largest sources."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, memory // bytes_per_job))


def last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-30:])


def _identify(c: tuple[str, ...], cxx: tuple[str, ...]) -> Compiler | None:
    """The compiler behind these commands, or None unless both of them run."""
    macros = _preprocess(c, "-dM")
    if macros is None or _preprocess(cxx, "-dM", language="c++") is None:
        return None
    values = dict(re.findall(r"^#define (\w+) (.*)$", macros, re.MULTILINE))
    family, parts = "gcc", ("__GNUC__", "__GNUC_MINOR__", "__GNUC_PATCHLEVEL__")
    if "__clang__" in values:
        family, parts = "clang", ("__clang_major__", "__clang_minor__", "__clang_patchlevel__")
    return Compiler(c, cxx, f"{family} {'.'.join(values.get(part, '?') for part in parts)}")


def _zig(tools: Path) -> Compiler:
    zig = install_tool(tools, "ziglang", "ziglang/zig")
    wrappers: list[Path] = []
    for verb in ("cc", "c++"):  # CMake wants a compiler to be one file
        wrapper = tools / "ziglang" / f"zig-{verb}"
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(str(zig))} {verb} "$@"\n', encoding="utf-8")
        wrapper.chmod(0o755)
        wrappers.append(wrapper)
    version = subprocess.run([str(zig), "version"], capture_output=True, text=True)
    if version.returncode != 0:
        raise BuildError(f"zig does not run here:\n{last_lines(version.stderr)}")
    return Compiler((str(wrappers[0]),), (str(wrappers[1]),), f"zig {version.stdout.strip()}")


def _preprocess(command: Sequence[str], *flags: str, source: str = "", language: str = "c") -> str | None:
    """The preprocessor's output, or None if the compiler is missing or refuses the flags."""
    line = [*command, *flags, "-E", "-x", language, "-"]
    try:
        done = subprocess.run(line, input=source, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
