"""Placement: the GPUs here, which layers lie on which of them, and what each memory has to hold.

llama.cpp gives the last layers to the GPUs and leaves the first ones with the CPU. The output counts as one
layer more, after the last. Several GPUs get consecutive layers, each its part of them. The same is computed
here.
"""

from __future__ import annotations

import ctypes
import json
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.library import find, load, may_use_gpu, modules_for, run_apart
from cllm.build.gpus import Drivers
from cllm.build.module import choose_backend, choose_module, describe_time
from cllm.config import EngineConfig
from cllm.errors import ConfigError, LibraryError

log = logging.getLogger(__name__)
_LIMIT_S = 60.0
_GPU, _INTEGRATED_GPU = 1, 2  # of ggml_backend_dev_type
_MIB = 1 << 20
# Of each GPU, beside what is counted: scratch memory of kernels (their pool and cuBLAS's), the context of the
# driver (all together 702 MiB on an H200), and fragments. A kernel that gets no memory ends the process.
DEVICE_RESERVE = 640 * _MIB
ALL_LAYERS = 1 << 20  # more than any model has
EXPERTS = r"\.ffn_(gate_up|gate|up|down)_(ch)?exps"


def experts_pattern(layers: int) -> str:
    """A regular expression for llama.cpp: the names of the tensors of experts in the first layers."""
    return rf"blk\.({'|'.join(map(str, range(layers)))}){EXPERTS}"


def asked_layers(config: EngineConfig) -> int | None:
    """The layers that `gpu_layers` asks for; None stands for as many as fit."""
    if config.gpu_layers == "auto":
        return None
    return ALL_LAYERS if config.gpu_layers in ("all", -1) else int(config.gpu_layers)


def wants_gpu(config: EngineConfig) -> bool:
    """True if layers may be put on a GPU; otherwise no module is loaded and no driver asked."""
    return asked_layers(config) != 0


def mib(size: int) -> str:
    return f"{size // _MIB} MiB"


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
    try:
        if not may_use_gpu():
            return ()
    except LibraryError:
        return ()
    try:
        devices = json.loads(run_apart("cllm.backend.llama.placement", b"", _LIMIT_S))
    except LibraryError as error:
        log.warning(
            "no GPU is used, since the library could not list them: %s; `cllm doctor` says more", error
        )
        return ()
    return tuple(Device(*device) for device in devices)


def offer_module(drivers: Drivers) -> str | None:
    """An offer to build a module for a GPU that its driver reports; None where it is there or of no use."""
    folder, backend = find(), choose_backend("auto", drivers)
    built = choose_module(modules_for(folder), drivers)
    fits = (folder / "build.json").exists()  # modules of `cllm build`: others may be of another version
    if backend is None or built is not None or not fits or list_devices():
        return None
    gpu, *_ = drivers.of(backend)
    return f"{gpu.name} is not used; `cllm build --gpu auto` builds for it ({describe_time(backend)})"


class Place(NamedTuple):
    """The content of one memory, a GPU's or the host's, in bytes. `free` is None where it is unknown."""

    name: str
    free: int | None
    model: int = 0
    kv: int = 0
    compute: int = 0
    draft: int = 0
    media: int = 0
    reserve: int = 0
    shared: int = 0  # what integrated GPUs take of it

    @property
    def needed(self) -> int:
        return self.model + self.kv + self.compute + self.draft + self.media + self.reserve + self.shared

    @property
    def fits(self) -> bool:
        return self.free is None or self.needed <= self.free

    @property
    def is_roomy(self) -> bool:
        """True if KV takes at most half of what the rest leaves free."""
        return self.free is None or self.needed + self.kv <= self.free

    def describe(self) -> str:
        """The sum, in MiB."""
        parts = {"draft model": self.draft, "mmproj": self.media, "reserve": self.reserve}
        parts["integrated GPU"] = self.shared
        more = "".join(f" + {name} {mib(size)}" for name, size in parts.items() if size)
        free = "unknown" if self.free is None else mib(self.free)
        return (
            f"{self.name}: model {mib(self.model)} + KV {mib(self.kv)} + compute {mib(self.compute)}{more} "
            f"= {mib(self.needed)}, free {free}"
        )


class Placement(NamedTuple):
    """Layers by device: `starts` has the first layer of each, then the number of layers with the output.

    Layers before the first start are the CPU's.
    """

    devices: tuple[Device, ...]
    starts: tuple[int, ...]
    host_experts: int = 0  # layers whose experts the host holds, although they may lie on a GPU

    @property
    def total(self) -> int:
        return self.starts[-1]

    @property
    def gpu_layers(self) -> int:
        return self.starts[-1] - self.starts[0]

    @property
    def slow_layers(self) -> int:
        """Layers for which a step waits for the CPU."""
        return max(self.starts[0], self.host_experts)

    @property
    def complete(self) -> bool:
        """True if GPUs compute everything."""
        return not self.slow_layers

    @property
    def counts(self) -> list[int]:
        """Layers of each device."""
        return [end - start for start, end in pairwise(self.starts)]

    def describe(self) -> str:
        """The layers of each device."""
        if not self.gpu_layers:
            names = ", ".join(f"{device.name} ({mib(device.free)} free)" for device in self.devices)
            return f"all {self.total} layers on the CPU" + (f", none on {names}" if names else "")
        held = zip(self.devices, self.counts, strict=True)
        on = ", ".join(f"{count} on {device.name}" for device, count in held if count)
        rest = f", experts of {self.host_experts} layers on the CPU" if self.host_experts else ""
        if self.gpu_layers < self.total:
            rest += ", the rest on the CPU"
        count, _, where = on.partition(" ")
        return f"{count} of {self.total} layers {where}{rest}"


class Placer:
    """Places the layers of a model on devices."""

    def __init__(self, header: GgufHeader, config: EngineConfig, devices: Sequence[Device]) -> None:
        """Raises ConfigError where settings name GPUs that are not there."""
        self._header, self._config = header, config
        self.devices = _choose_devices(config, devices)
        self.parts = _choose_parts(config, self.devices)
        self.total = header.number("block_count") + 1
        has_experts = any(re.search(EXPERTS, tensor.name) for tensor in header.tensors)
        self.chooses_experts = has_experts and config.n_cpu_moe is None
        self._host_experts = min(config.n_cpu_moe or 0, self.total - 1) if has_experts else 0
        edges = np.cumsum(np.array(self.parts, np.float32), dtype=np.float32)
        self._edges = edges / edges[-1] if len(edges) else edges

    def place(self, gpu_layers: int, host_experts: int = 0) -> Placement:
        """Put the last `gpu_layers` layers on the GPUs, as llama.cpp distributes them.

        The host holds the experts of as many layers as the settings say, or else of `host_experts`.
        """
        count = min(gpu_layers, self.total) if self.devices else 0
        start = self.total - count
        parts = np.arange(count, dtype=np.float32) / np.float32(max(1, count))
        starts = [start, *(start + int(np.searchsorted(parts, edge)) for edge in self._edges)]
        return Placement(self.devices, tuple(starts), (self._host_experts or host_experts) if count else 0)

    def settings(self, placement: Placement) -> dict[str, Any]:
        """The settings of a placement, for llama.cpp."""
        several = placement.gpu_layers and len(self.devices) > 1
        split = ",".join(f"{part:f}".rstrip("0").rstrip(".") for part in self.parts)
        return {
            "gpu_layers": placement.gpu_layers,
            "n_cpu_moe": placement.host_experts,
            "tensor_split": split if several else "",
        }

    def converted(self, cells: int) -> int:
        """Bytes that attention takes of a GPU for a layer's KV as f16, where it is kept in another type.

        llama.cpp counts them nowhere: kernels take them from their pool. At most, as all layers are alike.
        """
        config, number = self._config, self._header.number
        if not config.flash_attention or (config.cache_type_k, config.cache_type_v) == ("f16", "f16"):
            return 0
        heads = number("attention.head_count", 1)
        width = number("embedding_length") // max(1, heads)
        keys, values = number("attention.key_length", width), number("attention.value_length", width)
        return 2 * cells * number("attention.head_count_kv", heads) * (keys + values)


def _choose_devices(config: EngineConfig, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The GPUs that llama.cpp would use: those with memory of their own, if there are any."""
    found = tuple(device for device in devices if not device.integrated) or tuple(devices)
    if found and config.main_gpu >= len(found):
        names = ", ".join(device.name for device in found)
        raise ConfigError(f"main_gpu is {config.main_gpu}: the GPUs here are {names}, counted from 0")
    return found[config.main_gpu :][:1] if config.split_mode == "none" else found


def _choose_parts(config: EngineConfig, devices: Sequence[Device]) -> list[float]:
    """The part of each GPU: as `tensor_split` says, else by the memory that it has to give."""
    if len(devices) < 2:
        return [1.0] * len(devices)
    given = [float(part) for part in config.tensor_split.split(",") if part]
    if len(given) > len(devices):
        names = ", ".join(device.name for device in devices)
        raise ConfigError(f"tensor_split has {len(given)} parts, and the GPUs here are {names}")
    if any(given):
        return given + [0.0] * (len(devices) - len(given))
    found = [float(max(0, device.free - DEVICE_RESERVE) // _MIB) for device in devices]
    return found if any(found) else [1.0] * len(devices)


def encoder_device(config: EngineConfig) -> str:
    """The GPU that encodes pictures, the first of those with layers; empty without. The library is loaded."""
    devices = _choose_devices(config, tuple(_read_devices())) if wants_gpu(config) else ()
    return devices[0].name if devices else ""


def _read_devices() -> Iterator[Device]:
    """In the process itself."""
    api = load(gpu=True).api
    for index in range(api.ggml_backend_dev_count()):
        device = api.ggml_backend_dev_get(index)
        if (kind := api.ggml_backend_dev_type(device)) in (_GPU, _INTEGRATED_GPU):
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            api.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            reads = api.ggml_backend_dev_name, api.ggml_backend_dev_description
            name, description = (read(device).decode("utf-8", "replace") for read in reads)
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
