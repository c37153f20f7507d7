"""What llama.cpp's source carries of real models: vocabularies and chat templates, unpacked once."""

from __future__ import annotations

import fcntl
import re
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

from cllm.build.toolchain import BINDINGS_VERSION, cache_directory

_WANTED = re.compile(r"[^/]+/vendor/llama\.cpp/models/(ggml-vocab-[^/]+\.gguf|templates/[^/]+\.jinja)")


@cache
def corpus_folder() -> Path:
    """The folder with both, in the cache; skips the test where the sdist is not kept there."""
    source = cache_directory() / "source"
    archive = source / f"llama_cpp_python-{BINDINGS_VERSION}.tar.gz"
    folder = source / f"corpus-{BINDINGS_VERSION}"
    if not folder.exists():
        if not archive.exists():
            pytest.skip("the source of llama.cpp is not in the cache: `cllm build` keeps it")
        with (source / "corpus.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=source) as scratch:
            fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
            if not folder.exists():
                with tarfile.open(archive, "r|gz") as tar:
                    tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
                    tar.extractall(scratch, (member for member in tar if _WANTED.fullmatch(member.name)))
                next(Path(scratch).glob("*/vendor/llama.cpp/models")).rename(folder)
    return folder


def vocabulary_files() -> dict[str, Path]:
    """GGUF files with a vocabulary and no weights, by the name of their model family."""
    files = sorted(corpus_folder().glob("ggml-vocab-*.gguf"))
    return {path.stem.removeprefix("ggml-vocab-"): path for path in files}


def template_files() -> dict[str, Path]:
    """Chat templates as their models publish them, by name."""
    return {path.stem: path for path in sorted(corpus_folder().glob("templates/*.jinja"))}
