"""Devices: the GPUs that the native library can use, with their memory."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from cllm.backend.llama.library import exit_reason, find, load, may_use_gpu, modules_for, takes_modules
from cllm.build.gpus import Drivers
from cllm.build.module import choose_backend, choose_module, describe_time
from cllm.config import EngineConfig
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


def wants_gpu(config: EngineConfig) -> bool:
    """Whether layers may be put on a GPU; without that no module is loaded and no driver asked."""
    return str(config.gpu_layers) != "0"


def ask_library() -> tuple[Device, ...]:
    """The devices that the library lists in a throw-away process; none, and a warning, if it dies."""
    command = [sys.executable, "-m", "cllm.backend.llama.devices"]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}  # or an abort would start a debugger first
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_S, env=environment)
        if done.returncode == 0:
            return tuple(Device(*device) for device in json.loads(done.stdout))
        reason = exit_reason(done.returncode, done.stderr)
    except subprocess.TimeoutExpired:
        reason = f"it did not finish within {_LIMIT_S} s"
    log.warning("no GPU is used, since the library could not list them: %s; `cllm doctor` says more", reason)
    return ()


def offer_module(drivers: Drivers) -> str | None:
    """An offer to build a module for a GPU that its driver reports; None where it is there or of no use."""
    folder, backend = find(), choose_backend("auto", drivers)
    built = choose_module(modules_for(folder), drivers)
    if backend is None or built is not None or not takes_modules(folder) or list_devices():
        return None
    gpu, *_ = drivers.of(backend)
    return f"{gpu.name} is not used; `cllm build --gpu auto` builds for it ({describe_time(backend)})"


def _read_devices() -> Iterator[Device]:
    """In the process itself."""
    api = load(gpu=True).api
    for index in range(api.ggml_backend_dev_count()):
        device = api.ggml_backend_dev_get(index)
        kind = api.ggml_backend_dev_type(device)
        if kind in (_GPU, _INTEGRATED_GPU):
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            api.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            name, description = (
                read(device).decode("utf-8", "replace")
                for read in (api.ggml_backend_dev_name, api.ggml_backend_dev_description)
            )
            yield Device(name, description, free.value, total.value, kind == _INTEGRATED_GPU)


def main() -> int:
    """Print the devices as JSON, or why there are none on standard error."""
    try:
        print(json.dumps(list(_read_devices())))
    except LibraryError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
