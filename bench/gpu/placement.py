"""`python -m bench.gpu.placement VOCABULARY`: experts placed by themselves, three sizes of memory of a card.

Another process holds the rest of the card. Predicted bytes of the card beside what the driver says is used.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from bench.gpu.models import make
from cllm.backend.base import Row
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit, prepare
from cllm.backend.llama.placement import list_devices
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig

FREE_GIB = (3.0, 5.0, 7.0)
LOWEST, HIGHEST = 0.95, 1.05
QUERY = ("nvidia-smi", "--query-gpu=memory.used,memory.free", "--format=csv,noheader,nounits")


def hold(free_mib: int) -> None:
    """Take the card's memory until so much is left; give it back when the input ends."""
    cuda, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    context, card = ctypes.c_void_p(), ctypes.c_int()
    cuda.cuInit(0)
    cuda.cuDeviceGet(ctypes.byref(card), 0)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), card)
    cuda.cuCtxSetCurrent(context)
    left = ask_driver()[1] - free_mib
    code = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(left << 20))
    print(code, flush=True)
    sys.stdin.read()


def ask_driver() -> tuple[int, int]:
    """MiB of the card that are used, and free."""
    used, free = subprocess.run(QUERY, capture_output=True, text=True, check=True).stdout.split(",")
    return int(used), int(free)


def serve(model: str) -> None:
    """Print what is predicted and used, with the model loaded and a prompt computed."""
    before = ask_driver()[0]
    config = prepare(EngineConfig(model=model, parallel=4, ctx_size=4 * 2048))
    fit = MemoryFit(GgufHeader.of(config), config, list_devices())
    runner = LlamaRunner(config)
    code = runner.decode((Row(0, 0, tuple(range(1000, 1000 + config.batch_tokens)), 1, None),))
    runner.api.llama_synchronize(runner.pointer)
    used, predicted = ask_driver()[0] - before, fit.places[1].needed >> 20
    placed = {"layers": fit.placement.gpu_layers, "host experts": fit.placement.host_experts, "code": code}
    print(json.dumps({**placed, "predicted": predicted, "used": used, "ratio": round(predicted / used, 3)}))
    runner.close()


def main(
    vocabulary: Annotated[Path, typer.Argument(help="GGUF file with the tokenizer")],
    folder: Annotated[Path, typer.Option(help="Where the model is made")] = Path("/tmp"),
) -> None:
    path = folder / "random-MoE.gguf"
    if not path.exists():
        make(path, "MoE", vocabulary)
    failed = False
    for free in FREE_GIB:
        command = [sys.executable, "-m", "bench.gpu.placement"]
        pipe = subprocess.PIPE
        with subprocess.Popen([*command, "hold", str(int(free * 1024))], stdin=pipe, stdout=pipe) as holder:
            assert holder.stdout is not None and holder.stdin is not None
            assert holder.stdout.readline() == b"0\n", "the card's memory could not be taken"
            done = subprocess.run([*command, "serve", str(path)], capture_output=True, text=True)
            holder.stdin.close()
        print(f"{free:g} GiB free: {done.stdout.strip() or done.stderr[-2000:]}", flush=True)
        failed |= done.returncode != 0 or not LOWEST <= json.loads(done.stdout)["ratio"] <= HIGHEST
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["hold"]:
        hold(int(sys.argv[2]))
    elif sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        typer.run(main)
