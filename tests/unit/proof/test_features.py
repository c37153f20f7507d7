"""What `proof.features` asks, and what it lets pass."""

from __future__ import annotations

from typing import Any

import pytest

from proof.features import (
    COUNTERS,
    Asker,
    GreedyAnswer,
    Verdict,
    compare,
    evaluate,
    find_faults,
    make_prompts,
)

ALONE = GreedyAnswer(("a", "b", "c"), (1.0, 0.01, 2.0), "length")


class Further(Asker):
    """Says how near another token came where the answer alone had ended."""

    def __init__(self, margin: float) -> None:
        self.margin = margin
        self.asked: list[dict[str, Any]] = []

    def ask(self, prompt: str, max_tokens: int, **fields: Any) -> GreedyAnswer:
        self.asked.append({"max_tokens": max_tokens, **fields})
        return GreedyAnswer(("?",) * max_tokens, (1.0,) * (max_tokens - 1) + (self.margin,), "length")


def test_prompts_are_the_same_every_time_and_many_come_again_or_begin_alike() -> None:
    prompts = make_prompts(500)
    assert prompts == make_prompts(500) and len(prompts) == 500
    assert 250 < len(set(prompts)) < 450
    beginnings = {prompt[:150] for prompt in prompts if len(prompt) > 200}
    assert len(beginnings) < 150
    assert min(map(len, prompts)) < 30 and max(map(len, prompts)) > 1000


@pytest.mark.parametrize(
    ("tokens", "reason", "place"),
    [
        (("a", "b", "c"), "length", None),
        (("a", "x", "c"), "length", 1),
        (("x", "b", "c"), "length", 0),
        (("a", "b"), "stop", 2),
        (("a", "b", "c"), "stop", 3),
        (("a", "b", "c", "d"), "length", 3),
    ],
)
def test_where_two_answers_part(tokens: tuple[str, ...], reason: str, place: int | None) -> None:
    assert compare(GreedyAnswer(tokens, (1.0,) * len(tokens), reason), ALONE) == place


@pytest.mark.parametrize(
    ("tokens", "reason", "allowed"),
    [
        (("a", "b", "c"), "length", True),
        (("a", "x", "c"), "length", True),  # 0.01 apart
        (("x", "b", "c"), "length", False),  # 1.0 apart
        (("a", "b"), "stop", False),  # ended where alone it did not, 2.0 apart
        (("a",), "stop", True),
    ],
)
def test_only_ties_are_allowed(tokens: tuple[str, ...], reason: str, allowed: bool) -> None:
    answer = GreedyAnswer(tokens, (1.0,) * len(tokens), reason)
    assert evaluate(Further(0.0), "p", answer, ALONE).allowed() is allowed


@pytest.mark.parametrize(("margin", "allowed"), [(0.01, True), (0.06, False)])
def test_an_end_alone_that_was_not_taken_is_looked_into(margin: float, allowed: bool) -> None:
    asker = Further(margin)
    longer = GreedyAnswer(("a", "b", "c", "d"), (1.0,) * 4, "length")
    verdict = evaluate(asker, "p", longer, GreedyAnswer(ALONE.tokens, ALONE.margins, "stop"))
    assert verdict == Verdict(3, margin) and verdict.allowed() is allowed
    assert asker.asked == [{"max_tokens": 4, "ignore_eos": True, "cache_prompt": False}]


def test_what_fails_the_run() -> None:
    used, unused = dict.fromkeys(COUNTERS, 3.0), dict.fromkeys(COUNTERS, 0.0)
    good = [Verdict(), Verdict(4, 0.04)]
    assert find_faults(["p", "q"], good, used, unused, 0.05) == []
    (fault,) = find_faults(["p", "q"], [Verdict(), Verdict(4, 0.3)], used, unused, 0.05)
    assert "prompt 1" in fault and "token 4" in fault and "0.300" in fault
    assert "never used" in find_faults(["p", "q"], good, unused, unused, 0.05)[0]
    assert "that is off" in find_faults(["p", "q"], good, used, used, 0.05)[0]
