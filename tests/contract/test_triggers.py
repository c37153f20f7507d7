"""Reasoning budgets and constraints that wait for a trigger, on llama.cpp: with drafts as without."""

from __future__ import annotations

import re

import msgspec
import pytest

from cllm.types import ConstraintKind, ConstraintSpec, FinishReason, ReasoningLimit
from tests.driver.engine import StepDriver, ask, words
from tests.driver.kinds import DENSE, HYBRID_ROLLBACK, Kind, Opened
from tests.driver.runner import text_of

KINDS = (DENSE, Kind("dense", unified=True), HYBRID_ROLLBACK)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_reasoning_ends_and_the_answer_fits(kind: Kind, opened: Opened) -> None:
    """Three at once, whose prompts repeat themselves: prompt lookup drafts for all of them."""
    runner = opened(kind)
    closing = tuple(runner.vocabulary.tokenize("</think>", add_special=False, parse_special=True))
    spec = ConstraintSpec(ConstraintKind.REGEX, " [0-9]{3}!", ("</think>",))
    answers = []
    for speculate in (True, False):
        driver = StepDriver(runner)
        for number, budget in enumerate((0, 7, 20)):
            driver.submit(
                msgspec.structs.replace(
                    ask(f"r{number}", words(number, 9) * 3, 60, logprobs=0, ignore_eos=True),
                    constraint=spec,
                    reasoning=ReasoningLimit(budget=budget, closing=closing, inside=True),
                    speculate=speculate,
                )
            )
        answers.append(driver.finish())
        drafted = sum(answer.work.drafted_tokens for answer in answers[-1].values())
        assert not drafted or speculate
    for number, budget in enumerate((0, 7, 20)):
        one, other = (found[f"r{number}"] for found in answers)
        assert one.finish_reason is other.finish_reason is FinishReason.STOP
        assert one.tokens[budget : budget + len(closing)] == closing
        assert re.fullmatch(r" [0-9]{3}!", text_of(runner.vocabulary, one.tokens[budget + len(closing) :]))
        if number == 0:
            assert one.tokens == other.tokens, "nothing was near a tie"
