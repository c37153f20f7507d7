"""Samplers that rewrite logits: bias, penalties, DRY."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cllm.backend.llama.runner import LlamaRunner
from cllm.types import FinishReason, SamplingParams
from tests.contract.sampler_draws import (
    A,
    B,
    C,
    D,
    Logits,
    draws,
    row_of,
)
from tests.driver.engine import StepDriver, Tokens, ask, words
from tests.tiny_models import END_OF_TEXT, TURN_END


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_bias_forces_and_forbids(runner: LlamaRunner, logits: Logits, temperature: float) -> None:
    best = int(logits.argmax())
    assert set(draws(runner, logits, 50, temperature=temperature, logit_bias=((C, 100.0),))) == {C}
    assert best not in draws(runner, logits, 200, temperature=temperature, logit_bias=((best, -100.0),))


def test_a_forced_end_ends_unless_ends_are_ignored(runner: LlamaRunner) -> None:
    driver = StepDriver(runner)
    forced = tuple((token, 100.0) for token in (END_OF_TEXT, TURN_END))
    driver.submit(
        ask("ends", words(1, 5), 10, logit_bias=forced),
        ask("greedy", words(1, 5), 10, logit_bias=forced, ignore_eos=True),
        ask("drawn", words(1, 5), 10, temperature=1.0, logit_bias=forced, ignore_eos=True),
    )
    answers = driver.finish()
    assert (answers["ends"].tokens, answers["ends"].finish_reason) == ((), FinishReason.STOP)
    for name in ("greedy", "drawn"):
        assert answers[name].finish_reason is FinishReason.LENGTH and len(answers[name].tokens) == 10
        assert not {END_OF_TEXT, TURN_END} & set(answers[name].tokens)


@settings(max_examples=60, deadline=None)
@given(
    history=st.lists(st.sampled_from([A, B, C, D]), max_size=12),
    last=st.integers(1, 14),
    repetition=st.floats(0.5, 3),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
)
def test_penalties_rewrite_logits_as_documented(
    runner: LlamaRunner,
    history: list[int],
    last: int,
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    row = row_of(A=2.0, B=1.0, C=-1.0, D=-2.0)
    expected = row.astype(np.float64)
    for token, count in Counter(history[-last:]).items():
        expected[token] *= repetition if expected[token] < 0 else 1 / repetition
        expected[token] -= count * frequency + presence
    best, second = np.sort(expected)[::-1][:2]
    assume(best - second > 1e-3)
    (found,) = draws(
        runner,
        row,
        1,
        history=history,
        temperature=0,
        penalty_last_n=last,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    assert found == expected.argmax()


@pytest.mark.parametrize("parameters", [{"frequency_penalty": 2.0}, {"repetition_penalty": 10.0}])
def test_penalties_see_the_prompt(runner: LlamaRunner, parameters: dict[str, Any]) -> None:
    driver = StepDriver(runner)
    favoured = ((C, 30.0),)
    driver.submit(
        ask("seen", (C,) * 30, 1, logit_bias=favoured, **parameters),
        ask("unseen", (D,) * 30, 1, logit_bias=favoured, **parameters),
        ask("out of sight", (*(C,) * 30, D), 1, logit_bias=favoured, penalty_last_n=1, **parameters),
    )
    answers = driver.finish()
    assert answers["seen"].tokens != (C,)
    assert answers["unseen"].tokens == answers["out of sight"].tokens == (C,)


@pytest.mark.parametrize(
    ("history", "multiplier", "expected"),
    [
        ((A, B, C, A, B), 0.8, D),  # "AB" would be continued as before: C loses 0.8 · 1.75⁰
        ((A, B, C, A, B), 0.3, C),  # not enough to make up the difference
        ((D, A, B, C, D, A, B), 0.3, D),  # three repeated: 0.3 · 1.75¹
        ((B, C, B), 0.8, C),  # one repeated: shorter than allowed
        ((A, B, D, A, C), 0.8, C),  # nothing repeated
        ((), 0.8, C),
    ],
)
def test_dry_penalises_what_would_go_on_with_a_repetition(
    runner: LlamaRunner, history: Tokens, multiplier: float, expected: int
) -> None:
    row = row_of(C=2.0, D=1.5)
    assert draws(runner, row, 1, history=history, temperature=0, dry_multiplier=multiplier) == [expected]


def test_dry_stops_at_a_sequence_breaker_and_at_the_end_of_its_lookback(runner: LlamaRunner) -> None:
    row, history = row_of(C=2.0, D=1.5), (A, B, C, A, B)

    def chosen(**dry: Any) -> int:
        return draws(runner, row, 1, history=history, temperature=0, dry_multiplier=0.8, **dry)[0]

    assert chosen() == chosen(dry_sequence_breakers=()) == D
    assert chosen(dry_sequence_breakers=("B",)) == C
    assert chosen(dry_penalty_last_n=4) == C
    assert chosen(dry_allowed_length=3) == C


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


# llama.cpp allocates what it is asked to look back on; the route allows 2³¹ − 1: 8 GiB, for DRY 16.
@pytest.mark.parametrize("get_lookback", [{"penalty_last_n": 2**25}, {"dry_penalty_last_n": 2**24}])
def test_no_request_can_make_a_sampler_that_is_larger_than_the_context(
    runner: LlamaRunner, get_lookback: dict[str, int]
) -> None:
    before = resident_mib()
    sampler = runner.create_sampler(
        SamplingParams(repetition_penalty=1.1, dry_multiplier=0.5, **get_lookback)  # type: ignore[arg-type]
    )
    grown = resident_mib() - before
    sampler.close()
    assert grown < 16


# Clones ----------------------------------------------------------------------------------------------
