"""`python -m cllm.backend.llama.bare MODEL THREADS`: bare decodes on demand, nothing of cllm around them.

For each line on standard input (prompt tokens, tokens to generate) one prompt is decoded greedily and the
seconds are printed. Benchmarks interleave it with requests: what it takes is the machine's own pace.
"""

from __future__ import annotations

import sys
import time

from cllm.backend.base import Batch, Row
from cllm.backend.llama.backend import LlamaBackend
from cllm.config import EngineConfig
from cllm.types import SamplingParams


def decode(backend: LlamaBackend, prompt_tokens: int, count: int) -> float:
    """Seconds to compute a prompt and generate `count` tokens, each in a step of its own."""
    sampler = backend.create_sampler(SamplingParams(temperature=0, ignore_eos=True))
    tokens = [100 + number % 100 for number in range(prompt_tokens)]
    started = time.perf_counter()
    for _ in range(count):
        position = backend.next_position(0)
        tokens = list(backend.forward(Batch((Row(0, position, tokens, 1, sampler),))).rows[0].tokens)
    backend.truncate(0, 0)
    return time.perf_counter() - started


def main(model: str, threads: str) -> None:
    # No polling: between two probes its threads must not take a core from what is measured.
    config = EngineConfig(model=model, parallel=1, ctx_size=1024, threads=int(threads), poll=0)
    backend = LlamaBackend(config)
    print("ready", flush=True)
    for line in sys.stdin:
        prompt_tokens, count = map(int, line.split())
        print(decode(backend, prompt_tokens, count), flush=True)
    backend.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
