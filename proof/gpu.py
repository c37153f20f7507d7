"""A real second backend: the Vulkan module on a GPU, or on Mesa's software device.

The module is built first, which takes minutes. The variable `GGML_VK_VISIBLE_DEVICES`
admits the software device, which is no GPU otherwise. Its first compilation of the shaders takes a minute.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cllm.backend.llama.context import LlamaContext
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.library import DeferredFrees, find, load, modules_for
from cllm.backend.llama.memory import MemoryFit
from cllm.backend.llama.model import LlamaModel
from cllm.backend.llama.placement import list_devices
from cllm.backend.llama.probe import run_probe
from cllm.backend.llama.runner import LlamaRunner
from cllm.build.module import Module
from cllm.build.toolchain import cache_directory, find_compiler
from cllm.config import EngineConfig
from cllm.models.store import embedded_model
from tests.driver.same_text import Alone, run_alone
from tests.driver.server import StartServer, cllm

os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
TOKENS = 48
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
PROMPT = (5, 9, 14, 3, 27, 8, 40, 22, 17, 6)
# A module that is the real one, but in the probe.
ABORTING = """
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
void * ggml_backend_init(void) {
    char line[4096] = {0};
    FILE * file = fopen("/proc/self/cmdline", "r");
    size_t length = fread(line, 1, sizeof(line) - 1, file);
    for (size_t i = 0; i + 1 < length; i++) if (!line[i]) line[i] = ' ';
    if (strstr(line, "%s")) { fprintf(stderr, "the card fell off the bus\\n"); abort(); }
    void * real = dlopen("%s", RTLD_NOW | RTLD_LOCAL);
    return ((void * (*)(void)) dlsym(real, "ggml_backend_init"))();
}
"""


@pytest.fixture(scope="module")
def module() -> Module:
    """The module that is tested; there is a device for it."""
    (found,) = [module for module in modules_for(find()) if module.backend == "vulkan"][:1]
    assert list_devices(), "no Vulkan device: install a driver (Debian: apt install mesa-vulkan-drivers)"
    return found


@pytest.fixture(scope="module")
def layers(module: Module, models: dict[str, Path]) -> Iterator[int]:
    """Layers to put on the device: all, or the output alone.

    Mesa's software device of Debian 12 cannot convert f16 on ARM, as the other layers do: LLVM aborts. There
    ggml must not compute long prompts of the CPU's layers on the device, either.
    """
    if run_probe(get_config(models, -1)).passed:
        yield -1
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGML_OP_OFFLOAD_MIN_BATCH", "1000000")
        result = run_probe(get_config(models, 1))
        assert result.passed, f"the device cannot compute: {result.detail}"
        yield 1


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache folder with the library that is used here, and no module."""
    native = tmp_path / "cache" / "native"
    native.mkdir(parents=True)
    (native / find().name).symlink_to(find())
    return native.parent


def alone(cache: Path) -> dict[str, str]:
    """Variables with which only this cache folder is looked into."""
    return {"CLLM_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(cache)}


def get_config(models: dict[str, Path], gpu_layers: int) -> EngineConfig:
    """Settings with which rounding is the only difference."""
    return EngineConfig(
        model=str(models["dense"]),
        parallel=1,
        ctx_size=512,
        threads=1,
        gpu_layers=gpu_layers,
        flash_attention=False,
        cache_type_k="f32",
        cache_type_v="f32",
    )


def generate(models: dict[str, Path], gpu_layers: int) -> Alone:
    runner = LlamaRunner(get_config(models, gpu_layers))
    try:
        return run_alone(runner, PROMPT, TOKENS, endless=True)
    finally:
        runner.close()


def add_aborting(cache: Path, module: Module, process: str) -> None:
    """Put a module into a cache that aborts in a process with this in its command line."""
    folder = cache / "native" / module.path.parent.name
    folder.mkdir()
    (folder / "build.json").write_bytes((module.path.parent / "build.json").read_bytes())
    source = folder / "module.c"
    source.write_text(ABORTING % (process, module.path))
    compiler = find_compiler(cache_directory() / "tools")
    options = ("-shared", "-fPIC", "-o", str(folder / module.path.name), str(source), "-ldl")
    subprocess.run([*compiler.c, *options], check=True, timeout=60)


def get_gpu_warnings(log: str) -> list[str]:
    return [line for line in log.splitlines() if "WARNING" in line and "GPU" in line]


def test_the_library_lists_the_device(module: Module) -> None:
    device, *_ = list_devices()
    assert device.name == "Vulkan0" and device.description
    assert 0 < device.free <= device.total
    assert json.loads((module.path.parent / "build.json").read_text())["backend"] == "vulkan"


def test_greedy_text_on_the_device_is_that_of_the_cpu(
    layers: int, models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """By the same-text rule: another token only where two were as good."""
    with caplog.at_level(logging.DEBUG, "llama.cpp"):
        on_device = generate(models, layers)
        offloaded = re.search(r"offloaded (\d+)/(\d+) layers to GPU", caplog.text)
        assert offloaded is not None and offloaded[1] == (offloaded[2] if layers < 0 else str(layers))
        assert re.search(r"Vulkan0 model buffer size = +0\.\d*[1-9]", caplog.text), "weights lie there"
        assert ("Vulkan0 KV buffer size" in caplog.text) == (layers < 0), "KV does with its layer"
        caplog.clear()
        on_cpu = generate(models, 0)
        assert "Vulkan0 model buffer size" not in caplog.text
    assert len(on_device.tokens) == len(on_cpu.tokens) == TOKENS
    for step, (found, wanted) in enumerate(zip(on_device.tokens, on_cpu.tokens, strict=True)):
        if found != wanted:
            assert found in on_cpu.near[step], f"another text from token {step} on"
            break
        assert abs(on_device.logprobs[step] - on_cpu.logprobs[step]) < 0.05


def test_the_engine_alone_loads_the_module(
    module: Module, models: dict[str, Path], start: StartServer, layers: int
) -> None:
    arguments = (str(models["dense"]), "--parallel", "2", "--ctx-size", "512", "--threads", "1")
    for number, loaded in ((layers, True), (0, False)):
        server = start(*arguments, f"--gpu-layers={number}")
        assert server.generate("hello", 8)["text"]
        for process, expected in (
            (server.child("engine"), loaded),
            (server.child("tokenizer"), False),
            (server.process.pid, False),
        ):
            maps = Path(f"/proc/{process}/maps").read_text()
            assert (module.path.name in maps) == expected
            assert ("libvulkan" in maps) == expected
        assert not get_gpu_warnings(server.log_text)
        server.stop()


@pytest.mark.parametrize("process", ["llama.probe", "llama.placement"])
def test_a_module_that_aborts_leads_to_the_cpu_with_one_warning(
    module: Module, models: dict[str, Path], start: StartServer, cache: Path, process: str
) -> None:
    add_aborting(cache, module, process)
    arguments = (str(models["dense"]), "--parallel", "2", "--ctx-size", "512", "--threads", "1")
    for _ in range(2):  # the second start finds the same
        server = start(*arguments, **alone(cache))
        assert server.generate("hello", 8)["text"]
        (warning,) = get_gpu_warnings(server.log_text)
        assert "no GPU is used" in warning or "without the GPU" in warning
        assert module.path.name not in Path(f"/proc/{server.child('engine')}/maps").read_text()
        server.stop()


def test_a_library_beside_a_module_that_does_not_load_says_so(
    module: Module, models: dict[str, Path], start: StartServer, cache: Path
) -> None:
    add_aborting(cache, module, "nothing")
    (cache / "native" / module.path.parent.name / module.path.name).write_bytes(b"not a library")
    server = start(str(models["dense"]), "--threads", "1", **alone(cache))
    (warning,) = get_gpu_warnings(server.log_text)
    assert "cannot be loaded or finds no GPU; build it again with `cllm build --gpu auto --force`" in warning


def test_a_driver_that_aborts_leads_to_the_cpu_with_one_warning(
    layers: int, models: dict[str, Path], start: StartServer
) -> None:
    """Not a stand-in: where the driver cannot compute all layers, it dies of them in the probe."""
    if layers < 0:
        pytest.skip("this driver computes all layers")
    server = start(str(models["dense"]), "--threads", "1", "--gpu-layers=-1")
    assert server.generate("hello", 8)["text"]
    (warning,) = get_gpu_warnings(server.log_text)
    assert "it was ended by SIGABRT; serving without the GPU (--gpu-layers 0), which is slower" in warning


def test_doctor_shows_device_and_module(module: Module, models: dict[str, Path], cache: Path) -> None:
    done = cllm("doctor", str(models["dense"]), "--threads", "1", COLUMNS="1000")
    assert done.returncode == 0, done.stdout + done.stderr
    (device, *_) = list_devices()
    assert f"{device.name}: {device.description}" in done.stdout and str(module.path.parent) in done.stdout
    bare = cllm(
        "doctor",
        str(models["dense"]),
        "--threads",
        "1",
        COLUMNS="1000",
        CLLM_CACHE_DIR=str(cache),
        XDG_CACHE_HOME=str(cache),
    )
    assert "is not used; `cllm build --gpu auto` builds for it (about " in bare.stdout


def test_a_start_without_a_module_offers_one(
    module: Module, models: dict[str, Path], start: StartServer, cache: Path
) -> None:
    server = start(str(models["dense"]), "--threads", "1", **alone(cache))
    offers = [line for line in server.log_text.splitlines() if "cllm build --gpu auto" in line]
    assert len(offers) == 1 and "INFO" in offers[0]


def test_the_build_finds_what_is_built(module: Module) -> None:
    command = [sys.executable, "-m", "cllm.build.build", "--gpu", "vulkan"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(find()), str(module.path.parent)]


@pytest.fixture(autouse=True, scope="module")
def _say_what_is_tested() -> Iterator[None]:
    yield
    for device in list_devices():
        print(f"\ntested on {device.name}: {device.description}", file=sys.stderr)


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
