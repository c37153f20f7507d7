"""How far log-probabilities move with the number of tokens computed at once.

One text on the bare runner, without drafts, cache or neighbours: whole, in chunks of one size, twice. What
differs is the rounding of llama.cpp's kernels. It is what drafts and load change, and all that they change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bench.report import Table
from cllm.backend.base import Batch, Row
from cllm.backend.llama.memory import prepare
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.types import SamplingParams
from proof.command import ROOT, make_parser

TEXT = ROOT / "docs" / "performance.md"
Scores = npt.NDArray[np.float64]


def score(runner: LlamaRunner, tokens: Sequence[int], chunk: int) -> Scores:
    """Log-probabilities of the whole vocabulary after each token."""
    sampler = runner.create_sampler(SamplingParams(temperature=0))
    found = []
    for begin in range(0, len(tokens), chunk):
        part = tokens[begin : begin + chunk]
        runner.run(Batch((Row(0, begin, part, len(part), sampler),)))
        logits = np.array(runner._context.logits(len(part)), np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        found.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
    sampler.close()
    runner.truncate(0, 0)
    return np.concatenate(found)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, tokens=(400, "of the text"))
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8, 63, 64, 128])
    parser.add_argument("--no-flash-attention", dest="flash_attention", action="store_false")
    options = parser.parse_args(arguments)
    config = EngineConfig(parallel=2, ctx_size=4096, flash_attention=options.flash_attention)
    runner = LlamaRunner(prepare(config))
    tokens = runner.vocabulary.tokenize(TEXT.read_text(), add_special=True, parse_special=False)
    tokens = tokens[: options.tokens]
    first, *others = options.chunks
    base = score(runner, tokens, first)
    likeliest = base.argmax(axis=1)
    second, best = np.sort(base, axis=1)[:, -2:].T
    rows = []
    for chunk in (first, *others):
        found = score(runner, tokens, chunk)
        moved = np.abs(found - base)[np.arange(len(tokens)), likeliest]
        other = found.argmax(axis=1) != likeliest
        margin = (best - second)[other].max() if other.any() else 0.0
        rows.append(
            (f"{chunk}", f"{np.median(moved):.3f}", f"{moved.max():.3f}", f"{other.sum()}", f"{margin:.3f}")
        )
    runner.close()
    columns = ("at a time", "likeliest moves: median", "at most", "argmax differs", "largest margin there")
    print(f"{len(tokens)} tokens, against {first} at a time\n{Table(columns, rows).markdown()}")
    return 0
