"""The source: llama.cpp and its Python bindings, both from the sdist of the bindings.

Standard library only: this runs before the dependencies are installed.
"""

from __future__ import annotations

import os
import re
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from cllm.build import toolchain

BINDINGS_VERSION = "0.3.36"  # the structures in its ctypes must match the library, byte for byte

# The part of the sdist that is unpacked: the bindings, and what CMake reads of llama.cpp.
_WANTED = re.compile(
    r"[^/]+/(pyproject\.toml|README\.md|LICENSE\.md|CMakeLists\.txt|llama_cpp/.*"
    r"|vendor/llama\.cpp/(CMakeLists\.txt|LICENSE|(licenses|cmake|ggml|include|src|vendor|common|tools|scripts)/.*))"
)


def cache_directory() -> Path:
    """The cache folder of cllm: `$CLLM_CACHE_DIR`, else `cllm` in the user's cache."""
    own = os.environ.get("CLLM_CACHE_DIR")
    users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(own) if own else Path(users, "cllm")).expanduser().absolute()


def fetch_source(log: Callable[[str], None]) -> Path:
    """Download and unpack the sdist once; returns the folder. The caller holds the build lock."""
    source = cache_directory() / "source" / f"llama_cpp_python-{BINDINGS_VERSION}"
    if source.exists():
        return source
    log(f"downloading llama-cpp-python {BINDINGS_VERSION} (75 MB), which carries llama.cpp's source")
    source.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
        package = ("--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={BINDINGS_VERSION}")
        toolchain.run_pip("download", "--dest", scratch, *package)
        archive = next(Path(scratch).glob("*.tar.gz"))
        with tarfile.open(archive, "r|gz") as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            tar.extractall(scratch, (member for member in tar if _WANTED.fullmatch(member.name)))
        archive.replace(source.parent / archive.name)
        Path(scratch, source.name).rename(source)
    return source
