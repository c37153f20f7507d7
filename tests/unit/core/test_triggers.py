"""A constraint with triggers sleeps until one of them was generated, and applies from right after it."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.testing import FakeVocabulary
from cllm.testing.scripted import TURN
from cllm.text.structured_output import GrammarCompiler, TriggerWatch
from cllm.types import ConstraintKind, ConstraintSpec, FinishReason, ReasoningMarks
from tests.driver.written import PROMPT, WideVocabulary, answer
from tests.profiles import examples

VOCABULARY = WideVocabulary()


def digits(*triggers: str, source: str = "[0-9]{3}!") -> ConstraintSpec:
    return ConstraintSpec(ConstraintKind.REGEX, source, triggers)


def test_it_sleeps_until_the_trigger_and_applies_from_right_after_it() -> None:
    text, reason, driver = answer(b"free 12 text<go>then more", digits("<go>"))
    assert re.fullmatch(r"free 12 text<go>[0-9]{3}!", text) and reason is FinishReason.STOP
    masked = [row.position for batch in driver.runner.batches for row in batch.rows if row.mask is not None]
    assert min(masked) == len(PROMPT) + len("free 12 text<go>") - 1, "it costs nothing while it sleeps"


def test_without_the_trigger_the_answer_is_free() -> None:
    text, reason, driver = answer(b"free <g text", digits("<go>", "</x>"))
    assert text == "free <g text" and reason is FinishReason.STOP
    assert all(row.mask is None for batch in driver.runner.batches for row in batch.rows)


def test_a_control_token_is_a_trigger_by_its_spelling() -> None:
    text, _, _ = answer([*b"think", TURN, *b"abc"], digits("<|x|>"))
    assert re.fullmatch(r"think[0-9]{3}!", text), "what it is spelled is part of the text only on demand"
    text, _, _ = answer([*b"think", TURN, *b"abc"], digits("k<|x|>a", source="X"), markers=("<|x|>",))
    assert text == "think<|x|>aX"


@pytest.mark.parametrize(
    ("token", "source", "expected"),
    [
        (b"go>{", r'\{"a":[0-9]\}', r'<go>\{"a":[0-9]\}'),  # the rest of the token fits
        (b"go>{", "[0-9]{3}!", "<go>[0-9]{3}!"),  # it does not: the token is cut
        (b"o>\n\n", "[0-9]{3}!", "<go>[0-9]{3}!"),
        (b">7", "[0-9]{3}!", "<go>7[0-9]{2}!"),
    ],
)
def test_a_token_that_goes_on_after_the_trigger(token: bytes, source: str, expected: str) -> None:
    before = b"<go>"[: b"<go>".index(token[:1])]
    written = [*b"x", *before, VOCABULARY.wide(token), *b"yyy"]
    text, reason, driver = answer(written, digits("<go>", source=source))
    assert re.fullmatch("x" + expected, text) and reason is FinishReason.STOP
    assert driver.usage("r0").completion_tokens == len(driver.answers["r0"].tokens)


def test_a_cut_token_takes_no_more_tokens_than_there_are() -> None:
    written = [*b"<", VOCABULARY.wide(b"go>{")]
    text, reason, _ = answer(written, digits("<go>"), max_tokens=3)
    assert text == "<go" and reason is FinishReason.LENGTH


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_drafts_stay_on_until_the_trigger(wrong: float) -> None:
    written = b"a long free text, and then <go>12 which is no number" * 2
    alone, _, _ = answer(written, digits("<go>"))
    text, _, driver = answer(written, digits("<go>"), drafts=wrong)
    assert text == alone
    work = driver.usage("r0")
    assert work.accepted_tokens >= (20 if not wrong else 5) and work.steps < 20 + 30 * bool(wrong)
    after = len(PROMPT) + written.index(b"<go>") + len(b"<go>") - 1
    rows = [row for batch in driver.runner.batches for row in batch.rows]
    assert all(row.outputs == 1 for row in rows if row.position >= after), "no drafts under the grammar"
    assert all(row.position + len(row.tokens) <= after + 1 for row in rows if row.outputs > 1)


def test_an_awake_one_is_the_same_as_without_triggers() -> None:
    spec = digits("")
    text, _, _ = answer(b"free", spec)
    assert re.fullmatch(r"[0-9]{3}!", text)


def test_triggers_share_a_compiled_grammar() -> None:
    compiler = GrammarCompiler(VOCABULARY)
    for spec in (digits(), digits("a"), digits("b")):
        compiler.compile(spec)
    assert list(compiler._cached) == [digits()]


SMALL = st.text(alphabet="ab<", min_size=1, max_size=4)


@settings(deadline=None, max_examples=examples(100))
@given(text=st.text(alphabet="ab<", max_size=40), triggers=st.lists(SMALL, min_size=1, max_size=3))
def test_the_watch_finds_what_a_search_finds(text: str, triggers: list[str]) -> None:
    ends = [at + len(trigger) for trigger in triggers if (at := text.find(trigger)) >= 0]
    watch = TriggerWatch(triggers, VOCABULARY)
    tokens = list(text.encode())
    assert watch.count_before(tokens) == (min(ends) - 1 if ends else len(tokens))
    found = next((place for place, token in enumerate(tokens) if watch.push(token) is not None), None)
    assert found == (min(ends) - 1 if ends else None)


@pytest.mark.parametrize("inside", [False, True])
def test_a_trigger_inside_the_reasoning_does_not_count(inside: bool) -> None:
    spec = msgspec.structs.replace(
        digits("<go>"), reasoning=ReasoningMarks(("<think>",), ("</think>",), inside)
    )
    begin = b"" if inside else b"<think>"
    written = begin + b"I may say <go> now</think>no <think><go></think>so<go>then more"
    expected = begin.decode() + "I may say <go> now</think>no <think><go></think>so<go>"
    for drafts in (None, 0.0, 0.3):
        text, reason, _ = answer(written, spec, max_tokens=100, drafts=drafts)
        assert re.fullmatch(re.escape(expected) + "[0-9]{3}!", text) and reason is FinishReason.STOP


def test_marks_in_one_token_count_one_after_the_other() -> None:
    class Long(FakeVocabulary):
        def piece(self, token: int) -> bytes:
            return b"x</think>y<go>zz" if token == ord("L") else super().piece(token)

    marks = ReasoningMarks(("<think>",), ("</think>",), inside=True)
    watch = TriggerWatch(("<go>",), Long(), marks)
    assert watch.count_before([*b"<go>", ord("L")]) == 4
    assert [watch.push(token) for token in (*b"<go>", ord("L"))] == [None] * 4 + [2]
