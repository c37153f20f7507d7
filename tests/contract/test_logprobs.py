"""Logprobs are the model's own: a log-softmax of the raw logits, whatever the samplers did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from cllm.backend.base import Batch, Row, StepStatus
from cllm.backend.llama.runner import LlamaRunner
from cllm.core import prefill_budget
from cllm.types import SamplingParams, TokenLogprob
from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import NATIVE, open_runner
from tests.driver.runner import native
from tests.tiny_models import VOCABULARY

CLOSE = 1e-3
ROUNDING = 0.05  # a prompt in chunks against the same token by token, f16 cells


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
    raw = runner.logits(len(rows)).astype(np.float64)  # greedy leaves them as they are
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


# Prompts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs_are_the_models_own(
    runner: LlamaRunner, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three prompts at once, computed in chunks; against llama.cpp's logits after each token alone."""
    monkeypatch.setattr(prefill_budget, "SCORED_LOGITS", 11 * VOCABULARY)
    driver = StepDriver(runner, cache_mb=8)
    prompts = [words(seed, length) for seed, length in ((0, 7), (1, 40), (1, 33))]
    requests = [
        msgspec.structs.replace(ask(f"r{number}", prompt, max_tokens), prompt_logprobs=3)
        for number, prompt in enumerate(prompts)
    ]
    driver.submit(*requests)
    driver.finish()
    driver.prefix_cache.clear()
    assert max(len(row.scored) for batch in driver.runner.batches for row in batch.rows) <= 12
    for answer, prompt in zip(driver.answers.values(), prompts, strict=True):
        assert tuple(entry.token for entry in answer.prompt_logprobs) == prompt
        assert answer.work.cached_tokens == 0 and len(answer.tokens) == max_tokens
        expected = _score_one_by_one(runner, prompt)
        for entry, (logprob, best) in zip(answer.prompt_logprobs[1:], expected, strict=True):
            assert abs(entry.logprob - logprob) < ROUNDING
            assert len(entry.top) == 3 and abs(entry.top[0][1] - best) < ROUNDING


def test_scoring_is_part_of_the_step_and_not_of_a_rows_sampler(runner: LlamaRunner) -> None:
    row = Row(0, 0, words(1, 40), 0, None, scored=words(2, 40), scored_top=20)
    result = runner.run(Batch((row,)))
    runner.truncate(0, 0)
    assert len(result.rows[0].scored) == 40 and result.rows[0].sample_s == 0 < result.sample_s


def _score_one_by_one(runner: LlamaRunner, prompt: tuple[int, ...]) -> list[tuple[float, float]]:
    """For each token but the first: its log-probability, and that of the likeliest."""
    sampler = runner.create_sampler(SamplingParams(temperature=0))
    found = []
    for place, token in enumerate(prompt[:-1]):
        row = Row(0, place, (token,), 1, sampler, logprobs=VOCABULARY)
        (outcome,) = runner.run(Batch((row,))).rows
        likely = dict(outcome.logprobs[0].top)
        found.append((likely[prompt[place + 1]], max(likely.values())))
    runner.truncate(0, 0)
    sampler.close()
    return found
