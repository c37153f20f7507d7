"""Sampling in C: compiled once for this CPU, in a second, beside the builds of llama.cpp.

Standard library only: this runs before the dependencies are installed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cllm.build import toolchain
from cllm.build.options import digest, features, machine
from cllm.build.toolchain import cache_directory

SOURCE = Path(__file__).with_name("sampling.c")
NAME = "libcllm-sampling.so"  # in a folder of a library for every CPU


def library_path() -> Path:
    """Where the library for this source and this CPU is, or is to be."""
    key = digest([SOURCE.read_text(encoding="utf-8"), machine(), *features()])
    return cache_directory() / "native" / f"libcllm-sampling-{key}.so"


def compile_sampling(compiler: str | None = None, folder: Path | None = None) -> None:
    """Compile it, unless it is there: for this CPU, or into a `folder` for every CPU of its architecture.

    Where that fails NumPy does its work, and a line says so.
    """
    path = library_path() if folder is None else folder / NAME
    if path.exists():
        return
    new = path.with_suffix(".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    found = toolchain.find_compiler(cache_directory() / "tools", compiler)
    for target in (("-march=native",), ("-mcpu=native",), ()) if folder is None else (("-Wl,--strip-all",),):
        command = [*found.c, "-O3", *target, "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(new)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode == 0:
            new.replace(path)
            return
    toolchain.log(f"sampling in C could not be compiled, so sampling is slower: {done.stdout.strip()}")


if __name__ == "__main__":
    compile_sampling()
    print(library_path(), file=sys.stderr)
