"""Bare decode: llama.cpp's own loop with given tokens, no sampling, no server: the bound of all others.

    python -m bench.gpu.bare MODEL PROMPT_TOKENS OUTPUT_TOKENS ROUNDS STREAMS...

Prints a line of JSON for each number of streams: tokens per second, the median of the rounds.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median

from cllm.backend.base import Row
from cllm.backend.llama.context import LlamaContext, NativeBatch
from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.model import LlamaModel
from cllm.config import EngineConfig

FIRST = 1000  # of the tokens that are decoded; which ones does not matter


def main(path: str, prompt: int, output: int, rounds: int, streams: list[int]) -> None:
    library, frees = load(gpu=True), DeferredFrees()
    most = max(streams)
    config = EngineConfig(model=path, gpu_layers="all", parallel=most, ctx_size=most * 1024)
    with LlamaModel(library, config, frees) as model, LlamaContext(library, model, config, frees) as context:
        batch = NativeBatch(library.api, context.batch_tokens, most)

        def step(rows: list[Row]) -> None:
            batch.fill(rows)
            if (code := context.decode(batch.struct)) != 0:
                sys.exit(f"llama_decode returned {code}")
            library.api.llama_synchronize(context.pointer)

        for count in streams:
            rates = []
            for _ in range(rounds):
                for seq_id in range(count):
                    step([Row(seq_id, 0, list(range(FIRST, FIRST + prompt)), 1, None)])
                started = time.perf_counter()
                for number in range(output):
                    position = prompt + number
                    step([Row(i, position, (FIRST + number + i,), 1, None) for i in range(count)])
                rates.append(count * output / (time.perf_counter() - started))
                for seq_id in range(count):
                    context.remove(seq_id)
            print(json.dumps({"streams": count, "tokens_per_second": median(rates)}), flush=True)


if __name__ == "__main__":
    sizes = [int(word) for word in sys.argv[2:]]
    main(sys.argv[1], sizes[0], sizes[1], sizes[2], sizes[3:])
