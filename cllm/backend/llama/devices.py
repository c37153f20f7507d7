"""Devices: the GPUs that the native library can use, with their memory."""

from __future__ import annotations

import ctypes
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from cllm.backend.llama.library import LIBRARY_SUFFIX, find, find_module, may_use_gpu
from cllm.errors import LibraryError

log = logging.getLogger(__name__)
_LIMIT_S = 60
_GPU, _INTEGRATED_GPU = 1, 2  # of ggml_backend_dev_type


class Device(NamedTuple):
    """A GPU. Memory is in bytes; that of an `integrated` one is the host's."""

    name: str  # CUDA0
    description: str  # NVIDIA H200
    free: int
    total: int
    integrated: bool


@cache
def list_devices() -> tuple[Device, ...]:
    """The GPUs that the native library can use with its module; none without a library.

    They are asked for in a process that may die of it, and takes its memory along; once in a process's life.
    """
    with suppress(LibraryError):
        return ask_library() if may_use_gpu() else ()
    return ()


def ask_library() -> tuple[Device, ...]:
    """The devices that the library lists in a throw-away process; none if it dies."""
    command = [sys.executable, "-m", "cllm.backend.llama.devices"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_S, check=True)
        return tuple(Device(*device) for device in json.loads(done.stdout))
    except (subprocess.SubprocessError, ValueError, TypeError) as error:
        log.debug("the library lists no devices: %s", error)
        return ()


def _read_devices() -> Iterator[Device]:
    """In the process itself: load ggml and its module, without llama.cpp and its bindings."""
    folder = find()
    base, ggml = (ctypes.CDLL(str(folder / f"lib{name}.{LIBRARY_SUFFIX}")) for name in ("ggml-base", "ggml"))
    if (module := find_module(folder)) is not None:
        ggml.ggml_backend_load(str(module).encode())
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    for index in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(index)))
        kind = base.ggml_backend_dev_type(device)
        if kind in (_GPU, _INTEGRATED_GPU):
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            name = _text(base.ggml_backend_dev_name, device)
            description = _text(base.ggml_backend_dev_description, device)
            yield Device(name, description, free.value, total.value, kind == _INTEGRATED_GPU)


def _text(read: Any, device: ctypes.c_void_p) -> str:
    read.restype = ctypes.c_char_p
    return str(read(device).decode("utf-8", "replace"))


if __name__ == "__main__":
    print(json.dumps(list(_read_devices())))
