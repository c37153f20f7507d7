"""A fake runner whose answers are written down, with a few tokens of more than one byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cllm.testing import FakeVocabulary
from cllm.testing.scripted import END_TOKEN, VOCABULARY_SIZE
from cllm.types import ConstraintSpec, FinishReason, SamplingParams
from tests.driver.engine import StepDriver
from tests.driver.fake_runner import FakeRunner

Tokens = tuple[int, ...]


class WideVocabulary(FakeVocabulary):
    """Bytes, and these tokens beside: `258` is the first of them."""

    WIDE = (b"go>{", b"o>\n\n", b">7", b"ab")
    size = VOCABULARY_SIZE + len(WIDE)

    def piece(self, token: int) -> bytes:
        wide = token - VOCABULARY_SIZE
        return self.WIDE[wide] if wide >= 0 else super().piece(token)

    def is_control(self, token: int) -> bool:
        return END_TOKEN <= token < VOCABULARY_SIZE

    def wide(self, text: bytes) -> int:
        return VOCABULARY_SIZE + self.WIDE.index(text)


class WrittenRunner(FakeRunner):
    """After a prompt it wants to write the answer written down for it, place by place, and then to end."""

    def __init__(self, answers: Mapping[Tokens, Sequence[int]], **options: Any) -> None:
        super().__init__(**{"batch_tokens": 64, "cells": 1024, "sequences": 2} | options)
        self.answers = answers
        self.vocabulary = WideVocabulary()

    def _next_token(self, memory: Sequence[int], params: SamplingParams) -> int:
        for prompt, answer in self.answers.items():
            if tuple(memory[: len(prompt)]) == prompt:
                place = len(memory) - len(prompt)
                return answer[place] if place < len(answer) else END_TOKEN
        raise AssertionError("no answer was written down")


class Foresight:
    """A drafter that knows what is written down; some of its tokens are wrong."""

    def __init__(self, answers: Mapping[Tokens, Sequence[int]], wrong: float, seed: int) -> None:
        self._answers = answers
        self._wrong = wrong
        self._source = random.Random(seed)

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        for prompt, answer in self._answers.items():
            if tuple(tokens[: len(prompt)]) == prompt:
                place = len(tokens) - len(prompt)
                known = answer[place : place + max_tokens]
                return [ord("?") if self._source.random() < self._wrong else token for token in known]
        return []


def foresight(
    answers: Mapping[Tokens, Sequence[int]], wrong: float = 0.0, seed: int = 0
) -> Callable[[], Foresight]:
    return lambda: Foresight(answers, wrong, seed)


PROMPT = tuple(b"a prompt")


def answer(
    written: Sequence[int],
    constraint: ConstraintSpec | None = None,
    max_tokens: int = 60,
    drafts: float | None = None,
    **fields: Any,
) -> tuple[str, FinishReason, StepDriver]:
    """The answer to one request whose model wants to write this, with drafts of which a part is wrong."""
    answers = {PROMPT: list(written)}
    options: dict[str, Any] = {"new_drafter": foresight(answers, drafts)} if drafts is not None else {}
    driver = StepDriver(WrittenRunner(answers), **options)
    name = driver.add(PROMPT, max_tokens, constraint=constraint, **fields)
    driver.finish()
    return driver.text(name), driver.outcome(name), driver
