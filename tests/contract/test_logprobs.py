"""Logprobs are the model's own: a log-softmax of the raw logits, whatever the samplers did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cllm.backend.base import Batch, Row, StepStatus
from cllm.backend.llama.runner import LlamaRunner
from cllm.types import SamplingParams, TokenLogprob
from tests.driver.engine import words
from tests.driver.kinds import NATIVE, open_runner
from tests.driver.runner import native
from tests.tiny_models import VOCABULARY

CLOSE = 1e-3


@pytest.fixture(scope="module", params=NATIVE, ids=lambda kind: kind.label)
def runner(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[LlamaRunner]:
    runner = open_runner(models, request.param)
    yield native(runner)
    runner.close()


def get_logprobs(
    runner: LlamaRunner, prompts: dict[int, tuple[int, ...]], count: int, **sampling: Any
) -> tuple[list[TokenLogprob], npt.NDArray[np.float64]]:
    """What a step tells of its rows, and log-softmaxes of the raw logits of the same step."""
    greedy = runner.create_sampler(SamplingParams(temperature=0))
    rows = tuple(Row(i, 0, prompt, 1, greedy) for i, prompt in prompts.items())
    assert runner.run(Batch(rows)).status is StepStatus.DONE
    raw = runner._context.logits(len(rows)).astype(np.float64)  # greedy leaves them as they are
    softmax = raw - np.log(np.exp(raw - raw.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    softmax -= raw.max(axis=1, keepdims=True)
    for i in prompts:
        runner.truncate(i, 0)
    sampler = runner.create_sampler(SamplingParams(**sampling))
    result = runner.run(Batch(tuple(row._replace(sampler=sampler, logprobs=count) for row in rows)))
    sampler.close()
    for i in prompts:
        runner.truncate(i, 0)
    for outcome in result.rows:
        assert [entry.token for entry in outcome.logprobs] == list(outcome.tokens)
    return [outcome.logprobs[0] for outcome in result.rows], softmax


PROMPTS = {0: words(0, 7), 1: words(1, 20), 2: words(2, 7)}


@pytest.mark.parametrize("count", [1, 2, 5, VOCABULARY])
def test_greedy_logprobs_are_the_log_softmax_of_the_raw_logits(runner: LlamaRunner, count: int) -> None:
    entries, softmax = get_logprobs(runner, PROMPTS, count, temperature=0)
    for entry, expected in zip(entries, softmax, strict=True):
        assert len(entry.top) == count
        assert entry.top[0] == (entry.token, entry.logprob)
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert np.allclose(values, np.sort(expected)[::-1][:count], atol=CLOSE)
        for token, value in entry.top:
            assert abs(value - expected[token]) < CLOSE


def test_all_logprobs_together_are_one(runner: LlamaRunner) -> None:
    entries, _ = get_logprobs(runner, PROMPTS, VOCABULARY, temperature=0)
    for entry in entries:
        assert len({token for token, _ in entry.top}) == VOCABULARY
        assert abs(np.exp([value for _, value in entry.top]).sum() - 1) < CLOSE


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 2.0, "seed": 1},
        {"temperature": 1.0, "top_k": 3, "seed": 2},
        {"temperature": 0, "logit_bias": ((70, 100.0),)},
        {"temperature": 0, "ignore_eos": True},
        {"temperature": 1.0, "mirostat": 2, "seed": 3, "ignore_eos": True},
    ],
)
def test_samplers_choose_but_do_not_change_logprobs(runner: LlamaRunner, sampling: dict[str, Any]) -> None:
    entries, softmax = get_logprobs(runner, PROMPTS, VOCABULARY, **sampling)
    for entry, expected in zip(entries, softmax, strict=True):
        assert abs(entry.logprob - expected[entry.token]) < CLOSE
        assert dict(entry.top)[entry.token] == entry.logprob, "the chosen token is among them"
        for token, value in entry.top:
            assert abs(value - expected[token]) < CLOSE


def test_no_logprobs_are_returned_unless_asked_for(runner: LlamaRunner) -> None:
    sampler = runner.create_sampler(SamplingParams(temperature=0))
    rows = (Row(0, 0, (65,), 1, sampler, logprobs=0), Row(1, 0, (65,), 1, sampler, logprobs=3))
    result = runner.run(Batch(rows))
    runner.truncate(0, 0)
    runner.truncate(1, 0)
    assert result.rows[0].logprobs == () and len(result.rows[1].logprobs[0].top) == 3
