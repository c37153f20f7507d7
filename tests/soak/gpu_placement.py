"""What is predicted for a device is what llama.cpp allocates there: on the device of `make gpu-test`."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from cllm.backend.llama.context import LlamaContext
from cllm.backend.llama.devices import list_devices
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.memory import MemoryFit, embedded_model
from cllm.backend.llama.model import LlamaModel
from cllm.config import EngineConfig

MIB = 1 << 20
_BUFFER = re.compile(r"(\w+?)(?:_Mapped)? (?:\(\w+\) )?\s*(model|KV|RS|compute) buffer size = +([\d.]+) MiB")
CASES = [
    *(("dense", {"gpu_layers": layers}) for layers in ("all", 2, 1)),
    *((kind, {"gpu_layers": "all"}) for kind in ("sliding", "hybrid", "experts", "compressed")),
    ("experts", {"gpu_layers": "all", "n_cpu_moe": 1}),
    ("dense", {"gpu_layers": "all", "flash_attention": False}),
    ("dense", {"gpu_layers": "all", "cache_type_k": "q8_0", "cache_type_v": "q8_0"}),
    *(("embedded", {"gpu_layers": layers}) for layers in ("all", 12)),
    ("embedded", {"gpu_layers": 12, "ctx_size": 32768, "batch_tokens": 512}),
]


def allocated(text: str, device: str) -> dict[str, float]:
    """Bytes of each kind of buffer on a device, as llama.cpp logs them."""
    sizes = dict.fromkeys(("model", "KV", "compute"), 0.0)
    for place, kind, size in _BUFFER.findall(text):
        if place == device:
            sizes["KV" if kind == "RS" else kind] += float(size) * MIB
    return sizes


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=str)
def test_the_sum_of_a_device_is_what_llama_allocates(
    models: dict[str, Path], kind: str, settings: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    model = embedded_model() if kind == "embedded" else models[kind]
    header = GgufHeader(model)
    plain = {"model": str(model), "parallel": 2, "ctx_size": 8192, "threads": 1, "batch_tokens": 256}
    asked = EngineConfig(**plain | settings)  # type: ignore[arg-type]
    fit = MemoryFit(header, asked, list_devices())
    library, frees = load(gpu=True), DeferredFrees()
    with (  # nothing is computed: a software device lacks some of the kernels
        caplog.at_level(logging.DEBUG, logger="llama.cpp"),
        LlamaModel(library, fit.ready(asked), frees) as loaded,
        LlamaContext(library, loaded, fit.ready(asked), frees),
    ):
        pass
    device = fit.places[1]
    converted = 8192 * 2 * 64 * 2 if "cache_type_k" in settings else 0  # a layer's KV as f16
    sizes = allocated(caplog.text, device.name)
    report = f"{device.describe()}; { ({name: round(size / MIB, 2) for name, size in sizes.items()}) }"
    assert device.model == pytest.approx(sizes["model"], rel=0.02, abs=0.05 * MIB), report
    assert device.kv == pytest.approx(sizes["KV"], rel=0.02, abs=0.05 * MIB), report
    assert 0.99 * sizes["compute"] <= device.compute <= 1.1 * sizes["compute"] + converted, report
