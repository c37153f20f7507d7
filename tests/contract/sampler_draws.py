"""Tokens drawn by one sampler from one row of logits, for the tests of samplers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cllm.backend.base import Row
from cllm.backend.llama.runner import LlamaRunner
from cllm.backend.llama.sampler import LlamaSampler
from cllm.types import SamplingParams
from tests.tiny_models import VOCABULARY

Logits = npt.NDArray[np.float32]
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
A, B, C, D = 65, 66, 67, 68


def row_of(**values: float) -> Logits:
    """A flat row but for the tokens named by a letter."""
    row = np.full(VOCABULARY, -5.0, np.float32)
    for letter, value in values.items():
        row[ord(letter)] = value
    return row


def probabilities(logits: Logits) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(weights / weights.sum())


def choose(runner: LlamaRunner, sampler: LlamaSampler, logits: Logits) -> int:
    """The token a step with this one output would give."""
    (result,) = runner.batch_sampler.sample((Row(0, 0, (0,), 1, sampler),), logits[None].copy())
    assert result.error is None, result.error
    return result.tokens[0]


def draws(
    runner: LlamaRunner, logits: Logits, count: int = 300, *, history: Sequence[int] = (), **sampling: Any
) -> list[int]:
    """Tokens one sampler draws from the same row, one after the other."""
    sampler = runner.create_sampler(SamplingParams(**{**OFF, "seed": 11, **sampling}))
    sampler.accept(history)
    found = []
    for _ in range(count):
        found.append(choose(runner, sampler, logits))
    sampler.close()
    return found


def first_draws(runner: LlamaRunner, logits: Logits, seeds: int = 200, **sampling: Any) -> set[int]:
    """What samplers with different seeds draw first, together."""
    return {draws(runner, logits, 1, seed=seed, **sampling)[0] for seed in range(seeds)}


def likeliest(logits: Logits, count: int) -> set[int]:
    return set(np.argsort(-logits)[:count].tolist())
