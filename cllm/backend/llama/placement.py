"""Placement: which layers lie on which GPU, and what each device has to hold, before anything is loaded.

llama.cpp gives the last layers to the GPUs and leaves the first ones with the CPU. The output counts as one
layer more, after the last; the table of tokens stays with the host. Several GPUs get consecutive layers, each
its part of them. The same is computed here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from cllm.backend.llama.devices import Device
from cllm.backend.llama.gguf import GgufHeader
from cllm.config import EngineConfig
from cllm.errors import ConfigError

_MIB = 1 << 20
# Of each GPU, beside what is counted: scratch memory of kernels (their pool and cuBLAS's), what the driver
# adds to a context under work, and fragments. A kernel that gets no memory ends the process.
DEVICE_RESERVE = 512 * _MIB
PIPELINE_COPIES = 4  # of a step's inputs, where several GPUs hold all layers and work at once
ALL_LAYERS = 1 << 20  # more than any model has
EXPERTS = r"\.ffn_(gate_up|gate|up|down)_(ch)?exps"
_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_OF_INPUT = ("token_embd.", "position_embd.", "token_types.", "per_layer_token_embd.")


def experts_pattern(layers: int) -> str:
    """A regular expression for llama.cpp: the names of the tensors of experts in the first layers."""
    return rf"blk\.({'|'.join(map(str, range(layers)))}){EXPERTS}"


def asked_layers(config: EngineConfig) -> int | None:
    """The layers that `gpu_layers` asks for; None: as many as fit."""
    if config.gpu_layers == "auto":
        return None
    return ALL_LAYERS if config.gpu_layers in ("all", -1) else int(config.gpu_layers)


def placed_devices(config: EngineConfig) -> tuple[Device, ...]:
    """Stand-ins for the GPUs on which a checked configuration has layers; their memory is not looked at."""
    if not asked_layers(config):
        return ()
    count = max(config.tensor_split.count(",") + 1, config.main_gpu + 1)
    return tuple(Device(f"GPU{number}", "", 1 << 62, 1 << 62, False) for number in range(count))


def mib(size: int) -> str:
    return f"{size // _MIB} MiB"


class Place(NamedTuple):
    """What lies in one memory, a GPU's or the host's, in bytes. `free` is None where it is unknown."""

    name: str
    free: int | None
    model: int = 0
    kv: int = 0
    compute: int = 0
    draft: int = 0
    reserve: int = 0
    shared: int = 0  # what integrated GPUs take of it

    @property
    def needed(self) -> int:
        return self.model + self.kv + self.compute + self.draft + self.reserve + self.shared

    @property
    def fits(self) -> bool:
        return self.free is None or self.needed <= self.free

    @property
    def is_roomy(self) -> bool:
        """Whether KV takes at most half of what the rest leaves free."""
        return self.free is None or self.needed + self.kv <= self.free

    def describe(self) -> str:
        """The sum, in MiB."""
        parts = {"draft model": self.draft, "reserve": self.reserve, "integrated GPU": self.shared}
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
    def cpu_layers(self) -> int:
        return self.starts[0]

    @property
    def complete(self) -> bool:
        """Whether GPUs compute everything."""
        return not self.cpu_layers and not self.host_experts

    @property
    def counts(self) -> list[int]:
        """Layers of each device."""
        return [end - start for start, end in pairwise(self.starts)]

    def describe(self) -> str:
        """Which layers lie where."""
        if not self.gpu_layers:
            names = ", ".join(f"{device.name} ({mib(device.free)} free)" for device in self.devices)
            return f"all {self.total} layers on the CPU" + (f", none on {names}" if names else "")
        held = zip(self.devices, self.counts, strict=True)
        on = ", ".join(f"{count} on {device.name}" for device, count in held if count)
        if self.gpu_layers < self.total:
            rest = ", the rest on the CPU"
        else:
            rest = f", experts of {self.host_experts} layers on the CPU" if self.host_experts else ""
        count, _, where = on.partition(" ")
        return f"{count} of {self.total} layers {where}{rest}"


class Load(NamedTuple):
    """What a context asks of the memories: of each layer its KV, of each step its buffers."""

    batch: int  # tokens of a step
    outputs: int  # of them, that have logits
    cells: int  # that a token may attend to
    kv: Sequence[int]  # bytes of the layers before each, and of all
    largest_kv: Sequence[int]  # bytes of the largest of them
    converted: int  # bytes of the largest layer's KV as f16, where attention needs it converted
    draft: int
    draft_buffers: int  # of the draft model's steps, on a GPU


class Placer:
    """Places the layers of a model on devices, and sums up what each of them has to hold."""

    def __init__(self, header: GgufHeader, config: EngineConfig, devices: Sequence[Device]) -> None:
        """Raises ConfigError where settings name GPUs that are not there."""
        self._header, self._config = header, config
        self.devices = _choose_devices(config, devices)
        self.parts = _choose_parts(config, self.devices)
        self.total = header.number("block_count") + 1
        has_experts = any(re.search(EXPERTS, tensor.name) for tensor in header.tensors)
        self._host_experts = min(config.n_cpu_moe, self.total - 1) if has_experts else 0
        edges = np.cumsum(np.array(self.parts, np.float32), dtype=np.float32)
        self._edges = edges / edges[-1] if len(edges) else edges
        self._read_weights()

    @property
    def split(self) -> str:
        """The parts of all GPUs, as `tensor_split` has them."""
        return ",".join(f"{part:f}".rstrip("0").rstrip(".") for part in self.parts)

    def _read_weights(self) -> None:
        """Bytes that a GPU has to hold of each layer."""
        held = [0] * self.total
        matrices = [0] * self.total  # the largest of each layer
        self._host_matrix = 0  # the largest of the experts that the host holds
        sizes = {tensor.name: tensor.size or 0 for tensor in self._header.tensors}
        for name, size in sizes.items():
            found = _LAYER.match(name)
            layer = min(int(found[1]), self.total - 1) if found else self.total - 1
            if name.startswith(_OF_INPUT):
                continue
            if layer < self._host_experts and re.search(EXPERTS, name):
                self._host_matrix = max(self._host_matrix, size)
                continue
            held[layer] += size
            matrices[layer] = max(matrices[layer], size)
        # Where the output is the table of tokens, a GPU gets a copy of that.
        self._copied = 0 if "output.weight" in sizes else sizes.get("token_embd.weight", 0)
        held[-1] += self._copied
        matrices[-1] = max(matrices[-1], self._copied)
        self._held = [0, *accumulate(held)]
        self._largest = [self._host_matrix, *accumulate(matrices, max)]

    def place(self, gpu_layers: int) -> Placement:
        """So many layers on the GPUs, the last ones, as llama.cpp distributes them."""
        count = min(gpu_layers, self.total) if self.devices else 0
        start = self.total - count
        parts = np.arange(count, dtype=np.float32) / np.float32(max(1, count))
        starts = [start, *(start + int(np.searchsorted(parts, edge)) for edge in self._edges)]
        return Placement(self.devices, tuple(starts), self._host_experts if count else 0)

    def host_model(self, placement: Placement) -> int:
        """Bytes of the weights that stay in the host's memory."""
        if not placement.gpu_layers:
            return self._header.data_bytes
        moved = self._held[-1] - self._held[placement.starts[0]] - self._copied
        return self._header.data_bytes - moved

    def on_devices(self, placement: Placement, load: Load) -> list[Place]:
        """What each GPU has to hold. One without layers holds nothing."""
        counts = placement.counts
        first = next((index for index, count in enumerate(counts) if count), -1)
        drafting = min(self._config.main_gpu, len(self.devices) - 1) if load.draft and first >= 0 else -1
        places = []
        for index, device in enumerate(self.devices):
            start, end = placement.starts[index : index + 2]
            place = Place(device.name, device.free, self._weights(placement, index))
            if index == drafting:
                place = place._replace(draft=load.draft + load.draft_buffers)
            if counts[index]:
                last = len(load.kv) - 1  # the output has none
                kv = load.kv[min(end, last)] - load.kv[min(start, last)]
                compute = self._compute(placement, load, output=end == self.total)
                compute += self._offloaded(placement, load) if index == first else 0
                place = place._replace(kv=kv, compute=compute)
            places.append(place._replace(reserve=DEVICE_RESERVE) if place.needed else place)
        return places

    def _weights(self, placement: Placement, index: int) -> int:
        """Bytes of the weights on a GPU."""
        if self._config.split_mode == "row":
            moved = self._held[-1] - self._held[placement.starts[0]]
            return int(moved * self.parts[index] / sum(self.parts))
        return self._held[placement.starts[index + 1]] - self._held[placement.starts[index]]

    def _offloaded(self, placement: Placement, load: Load) -> int:
        """Buffers for layers of the host: for a long prompt the first GPU computes these, too.

        It gets one matrix at a time, and the KV of one layer.
        """
        if placement.complete:
            return 0
        start = placement.cpu_layers
        return self._largest[start] + load.largest_kv[min(start, len(load.kv) - 1)]

    def _compute(self, placement: Placement, load: Load, *, output: bool) -> int:
        pipelined = placement.complete and sum(map(bool, placement.counts)) > 1
        return load.converted + step_buffers(
            self._header,
            *(load.batch, load.cells),
            outputs=load.outputs,
            flash=self._config.flash_attention,
            output=output,
            copies=PIPELINE_COPIES if pipelined else 1,
        )


def step_buffers(
    header: GgufHeader,
    batch: int,
    cells: int,
    *,
    outputs: int,
    flash: bool,
    output: bool = True,
    copies: int = 1,
) -> int:
    """Buffers of the largest step on a GPU, where every page of them is taken; `copies` of its inputs.

    `output`: the last layer is there, and so are the logits of so many `outputs`.
    """
    embedding = header.number("embedding_length")
    widths = 8 * embedding + 3 * header.number("feed_forward_length")
    experts = header.number("expert_used_count")
    widths += experts * (2 * embedding + 3 * header.number("expert_feed_forward_length"))
    masks = 2 if header.number("attention.sliding_window") else 1
    mask = masks * (2 if flash else 4) * cells
    scores = 0 if flash else 4 * cells * header.number("attention.head_count")
    logits = 4 * header.vocabulary * min(batch, outputs) if output else 0
    return logits + batch * (copies * (mask + 4 * embedding) + scores + 4 * widths)


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
