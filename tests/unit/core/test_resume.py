"""An answer goes on in another engine from any place: the same text, the same end, nothing said twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from cllm.errors import EngineError
from cllm.testing.scripted import END_TOKEN, TURN
from cllm.types import (
    ConstraintKind,
    ConstraintSpec,
    FinishReason,
    Prompt,
    ReasoningLimit,
    ReasoningMarks,
    Request,
)
from tests.driver.engine import Answer, StepDriver
from tests.driver.written import PROMPT, WideVocabulary, WrittenRunner, foresight

LIST = '{"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 4, "maxItems": 4}'
THINKING = ReasoningLimit(budget=9, closing=tuple(b"</t>"), opening=tuple(b"<t>"), inside=True)


def spec(kind: ConstraintKind, source: str, *triggers: str, **fields: Any) -> ConstraintSpec:
    return ConstraintSpec(kind, source, triggers, **fields)


def wide(text: bytes) -> int:
    return WideVocabulary().wide(text)


CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "plain": ([*b"some words and some more"], {}),
    "length": ([*b"some words and some more"], {"max_tokens": 20}),
    "multi-byte": ([*"né à 東京 🙂 fin".encode()], {}),
    "broken characters": ([*b"a\xc3b\xe2\x82c\xff\xf0\x9f", *"é".encode(), *b"\xe2\x82"], {}),
    "stop string": ([*b"STO ST STOSTOP not seen"], {"stop": ("STOP", "STORE")}),
    "stop string of several bytes": ([*"é à éàé fin".encode()], {"stop": ("éàé",)}),
    "stop string that never comes": ([*b"almost STO"], {"stop": ("STOP",)}),
    "stop token": ([*b"some words", TURN, *b"not seen"], {"stop_token_ids": (TURN,), "min_tokens": 4}),
    "least length": ([*b"abc", END_TOKEN, *b"defgh", END_TOKEN], {"min_tokens": 9}),
    "markers": ([*b"a", TURN, *b"b", TURN, *b"c"], {"markers": ("<|x|>",)}),
    "regular expression": (
        [*b"0123456789abcdefghij"],
        {"constraint": spec(ConstraintKind.REGEX, "[a-f]{16}")},
    ),
    "forced tokens": ([*b"0123456789" * 4], {"constraint": spec(ConstraintKind.JSON_SCHEMA, LIST)}),
    "trigger": ([*b"say <go>12345 and 6"], {"constraint": spec(ConstraintKind.REGEX, "[0-9]{4}!", "<go>")}),
    "trigger and more": (
        [*b"say <", wide(b"go>{"), *b"123"],
        {"constraint": spec(ConstraintKind.REGEX, r"\{[0-9]{4}", "<go>")},
    ),
    "trigger in a token that is cut": (
        [*b"say <g", wide(b"o>\n\n"), *b"12345"],
        {"constraint": spec(ConstraintKind.REGEX, "[0-9]{4}!", "<go>")},
    ),
    "reasoning budget": ([*b"xxxxxxxxxxxxxxxxyy<t>zzz"], {"reasoning": THINKING}),
    "trigger after reasoning": (
        [*b"x<go>xxxxxxx</t>y<go>1234567"],
        {
            "constraint": spec(
                ConstraintKind.REGEX,
                "[0-9]{4}",
                "<go>",
                reasoning=ReasoningMarks(("<t>",), ("</t>",), inside=True),
            ),
        },
    ),
    "ends ignored": ([*b"abcdefgh"], {"sampling": {"ignore_eos": True}, "max_tokens": 8}),
}


def make_request(fields: dict[str, Any], **more: Any) -> Request:
    return msgspec.convert(
        {"id": "r", "prompt": Prompt(PROMPT), "max_tokens": 40, **fields, **more},
        Request,
        from_attributes=True,
    )


class Engines:
    """Engines that write the same answer; each goes on where the one before it ended."""

    def __init__(self, written: list[int], *, drafts: bool = False) -> None:
        self._answers = {PROMPT: written}
        self._options: dict[str, Any] = {"new_drafter": foresight(self._answers, 0.4)} if drafts else {}

    def start(self, *requests: Request) -> StepDriver:
        driver = StepDriver(WrittenRunner(self._answers, sequences=4), **self._options)
        driver.submit(*requests)
        return driver

    def run(self, request: Request) -> Answer:
        return self.start(request).finish()[request.id]

    def run_outputs(self, request: Request) -> list[Answer]:
        """The answer after each step that added to it; the last is the whole."""
        driver = self.start(request)
        seen: list[Answer] = []
        while not seen or seen[-1].finish_reason is None:
            driver.step()
            if driver.answers["r"].tokens:
                seen.append(replace(driver.answers["r"]))
        return seen

    def check(self, request: Request, places: Sequence[Answer], whole: Answer) -> None:
        """Resumed from each place, it gives the rest of the whole."""
        resumed = [
            msgspec.structs.replace(request, id=f"r{number}", generated_prefix=said.tokens)
            for number, said in enumerate(places)
        ]
        answers = self.start(*resumed).finish()
        for said, rest in zip(places, answers.values(), strict=True):
            assert said.text + rest.text == whole.text
            assert said.tokens + rest.tokens == whole.tokens
            assert said.logprobs + rest.logprobs == whole.logprobs
            assert rest.finish_reason is whole.finish_reason and rest.error_code is None
            assert rest.work.completion_tokens == whole.work.completion_tokens
            assert rest.work.prompt_tokens == whole.work.prompt_tokens


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("logprobs", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_from_every_place(case: str, logprobs: int, drafts: bool) -> None:
    written, fields = CASES[case]
    engines, request = Engines(written, drafts=drafts), make_request(fields, logprobs=logprobs)
    *places, whole = engines.run_outputs(request)
    assert len(places) >= (2 if drafts else 4)
    engines.check(request, places, whole)


def test_twice() -> None:
    written, fields = CASES["stop string"]
    engines, request = Engines(written), make_request(fields)
    *places, whole = engines.run_outputs(request)
    first = places[3]
    second = engines.run_outputs(msgspec.structs.replace(request, generated_prefix=first.tokens))[2]
    engines.check(request, [Answer(first.text + second.text, first.tokens + second.tokens)], whole)


def test_the_prompt_is_scored_once() -> None:
    engines, request = (
        Engines([*b"some words"]),
        make_request({"prompt_logprobs": 1, "logprobs": 1}),
    )
    driver = engines.start(request)
    while not driver.answers["r"].tokens:
        driver.step()
    said = driver.answers["r"]
    assert len(said.prompt_logprobs) == len(PROMPT)
    rest = engines.run(msgspec.structs.replace(request, generated_prefix=said.tokens))
    assert rest.prompt_logprobs == () and said.text + rest.text == "some words"
    assert len(rest.logprobs) == len(rest.tokens) + 1, "that of the end token comes, too"


def test_one_that_is_preempted_later_is_not_resumed_again() -> None:
    """It has its sampler and its detokenizer; only its KV is gone."""
    answers = {PROMPT: [*"né à 東京 fin".encode()], (1, 2, 3): [*b"another answer that is long"]}
    driver = StepDriver(WrittenRunner(answers, sequences=2, cells=40, unified=True), swap_space_mb=0)
    driver.submit(
        Request(id="other", prompt=Prompt((1, 2, 3)), max_tokens=40),
        make_request({"generated_prefix": tuple("né à 東".encode())[:-1]}),
    )
    driver.finish()
    assert driver.text("r") == "東京 fin" and driver.text("other") == "another answer that is long"


def test_what_the_grammar_would_not_have_written_is_an_error() -> None:
    engines = Engines([*b"abcdef"])
    request = make_request(
        {"constraint": spec(ConstraintKind.REGEX, "[a-f]{16}")}, generated_prefix=tuple(b"xyz")
    )
    answer = engines.run(request)
    assert answer.finish_reason is FinishReason.ERROR and answer.text == ""
    ended = make_request({}, generated_prefix=(*b"abc", END_TOKEN, *b"d"))
    assert engines.run(ended).error_code == EngineError.code
