"""`python -m bench.sampling_bench SIZE…`: what choosing a token costs, by size of the vocabulary.

Made-up logits, no model. For each size one line: the seconds for a token with the default sampler chain, as a
sequence uses it, and with llama.cpp's chain over the whole vocabulary; medians.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from cllm.backend.llama.candidates import Candidates, TopKPrefilter
from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.sampler import DryPrototypes, build_chain
from cllm.types import SamplingParams

ROWS = 8
TIMES = 25


def choosing_seconds(size: int) -> tuple[float, float]:
    """With exactly the candidates that can matter, and with all of them."""
    api = load().api
    params = SamplingParams(seed=1)
    dry = DryPrototypes(api, None, 0, DeferredFrees())  # the default chain has none
    chain = build_chain(api, params, dry=dry, vocabulary_size=size, context=0)
    candidates = Candidates(api, size)
    drawn = np.random.default_rng(1).normal(0, 3, (ROWS, size)).astype(np.float32)
    try:
        cut, everything = TopKPrefilter(params), TopKPrefilter(SamplingParams(temperature=0))
        return (
            _median_s(lambda row: candidates.sample(chain, drawn[row], cut)),
            _median_s(lambda row: candidates.sample(chain, drawn[row], everything)),
        )
    finally:
        api.llama_sampler_free(chain)


def _median_s(choose: Callable[[int], int]) -> float:
    taken = []
    for number in range(ROWS * (TIMES + 1)):  # the first of each row warms up
        started = time.perf_counter()
        choose(number % ROWS)
        taken.append(time.perf_counter() - started)
    return median(taken[ROWS:])


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(*choosing_seconds(int(argument)), flush=True)
