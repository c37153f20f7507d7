"""Reasoning budgets, least lengths and stop tokens: what an answer must, and must not, go on with."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.core import prefill_budget, token_masks
from cllm.core.sequence import Sequence
from cllm.core.stopping import ReasoningBudget, Stopping
from cllm.testing.scripted import END_TOKEN, next_token
from cllm.types import ConstraintKind, ConstraintSpec, FinishReason, Prompt, ReasoningLimit, Request
from tests.driver.engine import StepDriver
from tests.driver.fake_runner import FakeRunner
from tests.driver.written import PROMPT, WrittenRunner, answer, foresight
from tests.profiles import examples

OPENING, CLOSING = tuple(b"<t>"), tuple(b"</t>")


def limit(budget: int, *, inside: bool = True) -> ReasoningLimit:
    return ReasoningLimit(budget=budget, closing=CLOSING, opening=OPENING, inside=inside)


@pytest.mark.parametrize("drafts", [None, 0.0, 0.3])
@pytest.mark.parametrize("logprobs", [0, 1])
@pytest.mark.parametrize(
    ("written", "reasoning", "expected"),
    [
        (b"xxxxxxxxxxxxyy", limit(5), "xxxxx</t>xxxyy"),
        (b"xxxxxxxxxxxxyy", limit(0), "</t>xxxxxxxxyy"),
        (b"xxx</t>yyy", limit(5), "xxx</t>yyy"),
        (b"xxx</t>yyy", limit(3), "xxx</t>yyy"),
        (b"xxx</t>yyy", limit(4), "xxx</t>yyy"),  # its marker is half written when the budget is spent
        (b"xxxx</uuuy", limit(6), "xxxx</t>uy"),
        (b"say <t>xxxxxxxxxxy", limit(3, inside=False), "say <t>xxx</t>xxxy"),
        (b"say xxxxxxxx", limit(3, inside=False), "say xxxxxxxx"),
        (b"<t>xx</t>y<t>xxxxxxxx", limit(3, inside=False), "<t>xx</t>y<t>x</t>xxx"),
        (b"xxxxxxxxx<t>zzzzzz", limit(3), "xxx</t>xx<t></t>zz"),
    ],
)
def test_reasoning_ends_with_its_budget(
    written: bytes, reasoning: ReasoningLimit, expected: str, logprobs: int, drafts: float | None
) -> None:
    text, reason, driver = answer(written, drafts=drafts, reasoning=reasoning, logprobs=logprobs)
    assert text == expected and reason is FinishReason.STOP
    if logprobs:
        found = driver.answers["r0"]
        assert [entry.token for entry in found.logprobs] == list(found.tokens)


def test_the_closing_marker_is_not_sampled_token_by_token() -> None:
    _, _, driver = answer(b"x" * 20, reasoning=limit(5), speculate=False)
    alone = answer(b"x" * 20, speculate=False)[2]
    assert driver.usage("r0").steps == alone.usage("r0").steps - len(CLOSING)


def test_the_end_of_the_answer_comes_first() -> None:
    text, reason, _ = answer(b"x" * 20, max_tokens=7, reasoning=limit(5))
    assert text == "xxxxx</" and reason is FinishReason.LENGTH
    text, reason, _ = answer(b"xxx", reasoning=limit(5))
    assert text == "xxx" and reason is FinishReason.STOP


@pytest.mark.parametrize("drafts", [None, 0.0])
@pytest.mark.parametrize(("budget", "expected"), [(3, "xxx</t>[0-9]{2}!"), (9, "xxxxx</t>[0-9]{2}!")])
def test_the_forced_marker_wakes_a_constraint(budget: int, expected: str, drafts: float | None) -> None:
    spec = ConstraintSpec(ConstraintKind.REGEX, "[0-9]{2}!", ("</t>",))
    text, _, _ = answer(b"xxxxx</t>yyyyyy", drafts=drafts, reasoning=limit(budget), constraint=spec)
    assert re.fullmatch(expected, text)


def test_a_grammar_that_is_awake_goes_before_the_budget() -> None:
    spec = ConstraintSpec(ConstraintKind.REGEX, "[0-9]{9}", ("<call>",))
    text, _, _ = answer(b"x<call>yyyyyyyyyyyyyy", reasoning=limit(9), constraint=spec)
    assert re.fullmatch("x<call>[0-9]{9}", text)
    early = ConstraintSpec(ConstraintKind.REGEX, "[0-9]{2}!", ("<",))  # before the whole marker is there
    text, _, _ = answer(b"x" * 20, reasoning=limit(2), constraint=early)
    assert re.fullmatch("xx<[0-9]{2}!", text)


@settings(deadline=None, max_examples=examples(60))
@given(
    written=st.text(alphabet="x<t/>", max_size=40),
    budget=st.integers(0, 8),
    inside=st.booleans(),
    seed=st.integers(0, 3),
)
def test_the_budget_is_never_exceeded(written: str, budget: int, inside: bool, seed: int) -> None:
    answers = {PROMPT: list(written.encode())}
    reasoning = limit(budget, inside=inside)
    texts = []
    for options in ({}, {"new_drafter": foresight(answers, 0.2, seed)}):
        driver = StepDriver(WrittenRunner(answers), **options)  # type: ignore[arg-type]
        driver.add(PROMPT, 60, reasoning=reasoning)
        driver.finish()
        texts.append(driver.text("r0"))
    text = texts[0]
    assert texts[1] == text
    spent = 0
    while inside or "<t>" in text:
        if not inside:
            text = text.partition("<t>")[2]
        thought, _, text = text.partition("</t>")
        spent += len(thought)
        inside = False
    assert spent <= budget


def test_a_budget_without_markers_in_the_answer_is_left_alone() -> None:
    budget = ReasoningBudget(ReasoningLimit(budget=0, closing=CLOSING, inside=False))
    for _ in range(5):
        budget.follow(OPENING)
    assert budget.due == []


# Least lengths and stop tokens ------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [None, 0.0])
def test_an_end_token_comes_after_the_least_length(drafts: float | None) -> None:
    text, reason, driver = answer(b"abc", min_tokens=8, max_tokens=20, drafts=drafts)
    assert text.startswith("abc") and reason is FinishReason.STOP
    assert len(driver.answers["r0"].tokens) == 8
    assert answer(b"abcdef", min_tokens=4, drafts=drafts)[0] == "abcdef"
    assert answer(b"abc", min_tokens=9, max_tokens=5)[1] is FinishReason.LENGTH


@pytest.mark.parametrize("drafts", [None, 0.0])
def test_a_stop_token_ends_the_answer_and_is_no_part_of_it(drafts: float | None) -> None:
    text, reason, driver = answer(b"abcdef", stop_token_ids=(ord("d"),), drafts=drafts)
    assert text == "abc" and reason is FinishReason.STOP
    assert driver.answers["r0"].tokens == tuple(b"abc")
    text, _, _ = answer(b"dbcdef", stop_token_ids=(ord("d"),), min_tokens=2, drafts=drafts)
    assert text[1:] == "bc" and text[0] != "d", "it is not sampled before the least length"


def test_a_grammar_may_end_before_the_least_length() -> None:
    spec = ConstraintSpec(ConstraintKind.REGEX, "[0-9]{1,6}")
    assert len(answer([ord("1"), END_TOKEN], constraint=spec, min_tokens=4)[0]) == 4
    assert answer(b"12", constraint=ConstraintSpec(ConstraintKind.REGEX, "12"), min_tokens=4)[0] == "12"


@pytest.mark.parametrize("cache_mb", [0, 8])
def test_no_tokens_at_all_computes_the_prompt_and_keeps_it(cache_mb: int) -> None:
    prompt = tuple(bytes(range(100)))
    driver = StepDriver(WrittenRunner({prompt: b"abc"}), cache_mb=cache_mb)
    driver.add(prompt, 0)
    driver.finish()
    work = driver.usage("r0")
    assert driver.outcome("r0") is FinishReason.LENGTH and driver.text("r0") == ""
    assert work.completion_tokens == 0 and work.decoded_tokens == len(prompt)
    driver.add(prompt, 3)
    driver.finish()
    assert driver.text("r1") == "abc"
    assert driver.usage("r1").cached_tokens == (len(prompt) - 1 if cache_mb else 0)


# What masks cost --------------------------------------------------------------------------------------


class TimedMasks:
    """A mask builder whose masks take as long as their constraints say, by a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def masks(self, costs: list[float]) -> list[npt.NDArray[np.bool_]]:
        self.now += sum(costs)
        return [np.ones(258, np.bool_) for _ in costs]


def test_each_sequence_pays_for_its_own_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, timed = FakeRunner(), TimedMasks()
    monkeypatch.setattr(token_masks, "time", timed)
    masks = token_masks.TokenMasks(runner.vocabulary)
    monkeypatch.setattr(masks, "_grammars", timed)
    costs = {"slow": 0.1, "quick": 1e-5, "other": 2e-5}
    sequences = []
    monkeypatch.setattr(Stopping, "grammar", property(lambda self: costs[self._request.id]))
    for name in costs:
        sequences.append(Sequence(Request(id=name, prompt=Prompt((1,)), max_tokens=4), 64))
    for _ in range(3):
        found, failed = masks.build(sequences, dict.fromkeys(costs, 1))
        assert len(found) == 3 and not failed
        assert sequences[0].mask_s == pytest.approx(0.1)
        assert max(each.mask_s for each in sequences[1:]) < 1e-4


# Log-probabilities of the prompt ----------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("length", [1, 2, 40, 200])
@pytest.mark.parametrize("sequences", [1, 3])
def test_prompt_logprobs_come_once_and_are_those_of_the_prompt(
    max_tokens: int, length: int, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_budget, "SCORED_LOGITS", 258 * 17)
    prompt = list(b"It ")[:length]
    while len(prompt) < length:  # some tokens are what the model would have said
        prompt.append(next_token(prompt, ends=False) if len(prompt) % 3 else len(prompt) % 90)
    driver = StepDriver(FakeRunner(sequences=3, cells=1024), cache_mb=8)
    for _ in range(2):  # the second finds nothing to reuse
        for _ in range(sequences):
            driver.add(prompt, max_tokens, prompt_logprobs=2, ignore_eos=True)
        driver.finish()
    scored = [len(row.scored) for batch in driver.runner.batches for row in batch.rows]
    assert max(scored) <= 18 and (length < 40 or max(scored) > 5)
    expected = [
        0.0 if next_token(prompt[:place]) == token else -1.0 for place, token in enumerate(prompt) if place
    ]
    for found in driver.answers.values():
        assert [entry.token for entry in found.prompt_logprobs] == prompt
        assert [entry.logprob for entry in found.prompt_logprobs] == [0.0, *expected]
        assert found.prompt_logprobs[0].top == ()
        assert all(len(entry.top) == 2 for entry in found.prompt_logprobs[1:])
        assert found.prompt_logprobs[0].pieces == (bytes(prompt[:1]),)
        assert len(found.tokens) == max_tokens and found.work.cached_tokens == 0


def test_scored_tokens_are_spelled_as_they_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_budget, "SCORED_LOGITS", 258 * 20)
    driver = StepDriver(FakeRunner(sequences=1, cells=1024))
    spelled: list[int] = []
    piece = driver.runner.vocabulary.piece

    def spell(token: int) -> bytes:
        spelled.append(token)
        return piece(token)

    monkeypatch.setattr(driver.runner.vocabulary, "piece", spell)
    driver.add(bytes(range(200)), 4, prompt_logprobs=3, ignore_eos=True)
    counts = []
    while driver.requests and not driver.answers["r0"].finish_reason:
        spelled.clear()
        driver.step()
        counts.append(len(spelled))
    assert sum(counts) >= 4 * 199 and max(counts) <= 4 * 20 + 2


def test_a_preempted_prompt_is_scored_once() -> None:
    driver = StepDriver(FakeRunner(sequences=2, cells=120, unified=True), swap_space_mb=0)
    for number in range(2):
        driver.add(b"%d" % number + bytes(range(50)), 40, prompt_logprobs=1, ignore_eos=True)
    driver.finish()
    assert sum(stats.preemptions for stats in driver.stats) > 0
    for found in driver.answers.values():
        assert len(found.prompt_logprobs) == 51 and len(found.tokens) == 40
