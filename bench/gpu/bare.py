"""Bare decode: llama.cpp's own loop with given tokens, no sampling, no server: the bound of all others.

    python -m bench.gpu.bare MODEL PROMPT_TOKENS OUTPUT_TOKENS MAX_STREAMS

Reads numbers of streams, a line each, and prints tokens per second for each.
"""

from __future__ import annotations

import sys
import time

from cllm.backend.base import Row
from cllm.backend.llama.context import LlamaContext
from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.model import LlamaModel
from cllm.config import EngineConfig

FIRST = 1000  # of the tokens that are decoded; which ones does not matter


def main(path: str, prompt: int, output: int, most: int) -> None:
    library, frees = load(gpu=True), DeferredFrees()
    config = EngineConfig(model=path, gpu_layers="all", parallel=most, ctx_size=most * 1024)
    with LlamaModel(library, config, frees) as model, LlamaContext(library, model, config, frees) as context:

        def step(rows: list[Row]) -> None:
            if (code := context.decode(rows)) != 0:
                sys.exit(f"llama_decode returned {code}")
            library.api.llama_synchronize(context.pointer)

        for line in sys.stdin:
            count = int(line)
            for seq_id in range(count):
                step([Row(seq_id, 0, list(range(FIRST, FIRST + prompt)), 1, None)])
            started = time.perf_counter()
            for number in range(output):
                position = prompt + number
                step([Row(i, position, (FIRST + number + i,), 1, None) for i in range(count)])
            print(count * output / (time.perf_counter() - started), flush=True)
            for seq_id in range(count):
                context.remove(seq_id)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
