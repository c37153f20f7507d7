"""Budgets, triggers, masks and scores in any mixture: drafts, failures and preemption change no answer."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cllm.backend.base import StepStatus
from cllm.types import ConstraintKind, ConstraintSpec, FinishReason, ReasoningLimit
from tests.driver.engine import Answer, StepDriver
from tests.driver.written import Tokens, WrittenRunner, foresight
from tests.profiles import examples

Asked = tuple[Tokens, int, dict[str, Any]]
BYTES = b"xy<t/>go12"
WIDE = (257, 258, 259, 260, 261)
TRIGGERS = ("</t>", "go>", "<|x|>", "1")


def make_request(source: random.Random, number: int) -> tuple[Asked, list[int]]:
    """A prompt, its limit and some of the fields; and what the model wants to answer."""
    prompt = tuple(b"%d" % number + bytes(source.randrange(97, 110) for _ in range(source.randint(0, 40))))
    written: list[int] = []
    for _ in range(source.randint(0, 40)):
        written.append(source.choice([*BYTES, *WIDE]))
        written += source.choice([b"</t>", b"<t>"]) if source.random() < 0.2 else b""
    limit = ReasoningLimit(
        budget=source.randint(0, 9),
        closing=tuple(b"</t>"),
        opening=tuple(b"<t>"),
        inside=source.random() < 0.5,
    )
    triggers = tuple(source.sample(TRIGGERS, source.randint(1, 2)))
    fields = {
        "reasoning": limit,
        "constraint": ConstraintSpec(ConstraintKind.REGEX, "[0-9]{3,9}!", triggers),
        "logprobs": 1,
        "prompt_logprobs": 2,
        "min_tokens": source.randint(1, 9),
        "stop_token_ids": (ord("g"),),
        "prediction": tuple(written[:20]),
    }
    chosen = {name: value for name, value in fields.items() if source.random() < 0.4}
    return (prompt, source.choice([0, 3, 30, 60]), chosen), written


def answer(asked: list[Asked], written: dict[Tokens, list[int]], seed: int, mode: str) -> list[Answer]:
    """All requests at once: plainly, or with steps that fail, with drafts, in one pool of cells."""
    source = random.Random(seed)

    def fail(number: int, name: str) -> StepStatus | None:
        failing = name == "collect" and mode != "plain" and source.random() < 0.08
        return source.choice([StepStatus.NO_ROOM, StepStatus.ABORTED]) if failing else None

    options = {"new_drafter": foresight(written, 0.2, seed)} if mode == "drafts" else {}
    runner = WrittenRunner(written, sequences=3, cells=400, unified=mode == "unified", fail=fail)
    driver = StepDriver(
        runner,
        cache_mb=0 if mode == "plain" else 8,
        swap_space_mb=source.choice([0, 64]),
        draft_tokens=0 if mode == "plain" else 6,
        **options,  # type: ignore[arg-type]
    )
    names = [driver.add(prompt, max_tokens, **fields) for prompt, max_tokens, fields in asked]
    driver.finish()
    return [driver.answers[name] for name in names]


@pytest.mark.parametrize("seed", range(examples(30)))
def test_answers_are_those_without_drafts_and_failures(seed: int) -> None:
    source = random.Random(seed)
    asked, written = [], {}
    for number in range(source.randint(1, 3)):
        request, wanted = make_request(source, number)
        asked.append(request)
        written[request[0]] = wanted
    plain = answer(asked, written, seed, "plain")
    for mode in ("drafts", "unified"):
        for expected, found in zip(plain, answer(asked, written, seed, mode), strict=True):
            early = found.tokens != expected.tokens or expected.finish_reason is not FinishReason.LENGTH
            if found.finish_reason is FinishReason.LENGTH and (early or not found.prompt_logprobs):
                assert expected.text.startswith(found.text)  # alone without room it ends early
                continue
            assert (found.text, found.tokens) == (expected.text, expected.tokens)
            assert found.prompt_logprobs == expected.prompt_logprobs
            assert [entry.token for entry in found.logprobs] == [entry.token for entry in expected.logprobs]
