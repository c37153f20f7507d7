"""Devices: the free memory of the GPUs that the native library can use."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from cllm.backend.llama.library import find
from cllm.errors import LibraryError

_LIMIT_S = 60
_GPU_LIBRARIES = tuple(f"libggml-{name}*" for name in ("cuda", "hip", "metal", "musa", "sycl", "vulkan"))
_ASK = """
import ctypes, sys
base, ggml = (ctypes.CDLL(f"{sys.argv[1]}/lib{name}.{sys.argv[2]}") for name in ("ggml-base", "ggml"))
ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
found = []
for index in range(ggml.ggml_backend_dev_count()):
    device = ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(index)))
    if base.ggml_backend_dev_type(device) == 1:  # a GPU with memory of its own
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        found.append(free.value)
print(len(found), sum(found))
"""


def supports_gpu() -> bool:
    """Whether the native library was built for a GPU."""
    with suppress(LibraryError):
        folder = find()
        return any(any(folder.glob(pattern)) for pattern in _GPU_LIBRARIES)
    return False


def gpu_memory() -> int | None:
    """Free bytes of all GPUs together; None without one. Raises LibraryError."""
    return ask_library(find())


def ask_library(folder: Path) -> int | None:
    """The free memory that a library reports: in a process that may die of it, and takes its memory along."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    command = [sys.executable, "-c", _ASK, str(folder), suffix]
    with suppress(subprocess.SubprocessError, ValueError):
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_S, check=True)
        count, free = map(int, done.stdout.split())
        return free if count else None
    return None
