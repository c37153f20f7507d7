"""Answers taken apart: in every format, in any pieces, and nothing of a malformed one is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cllm.text.chat_format import ChatFormat, Slot, Tool, WrittenCall, write_calls
from cllm.text.output_parser import (
    ContentText,
    OutputEvent,
    OutputParser,
    ToolCallArguments,
    ToolCallStart,
)
from tests.driver.turns import Parts, collect
from tests.profiles import examples
from tests.unit.text.formats import FORMATS, TOOLS

NAMES = tuple(tool.name for tool in TOOLS)
each_format = pytest.mark.parametrize("chat_format", FORMATS.values(), ids=FORMATS.keys())


def events_of(reader: OutputParser, pieces: Sequence[str]) -> list[OutputEvent]:
    return [event for piece in pieces for event in reader.feed(piece)] + reader.finish()


def cut(data: st.DataObject, text: str) -> list[str]:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=10).map(sorted))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[{|>"), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.just("so"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)
WORDS = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="<[{|>'\"\\"), max_size=8)
ARGUMENTS = st.fixed_dictionaries({}, optional={"city": WORDS, "n": VALUES, "x_y": VALUES})
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), max_size=3)


def spelled(chat_format: ChatFormat, parts: Parts) -> str:
    """The answer as a model of this format writes it."""
    known = chat_format
    opening, closing = known.reasoning_openings[0], known.reasoning_closings[0]
    if not known.exact:
        opening, closing = f"{opening}\n", f"\n{closing}\n\n"
    answer = f"{opening}{parts.reasoning}{closing}" if parts.reasoning else ""
    if parts.text:
        wrap = known.text_openings[:1], known.text_closings[:1]
        answer += "".join(wrap[0]) + parts.text + "".join(wrap[1])
    if parts.calls:
        calls = [WrittenCall(name, arguments, "abcdefgh1") for name, arguments in parts.calls]
        answer += known.calls.before * bool(parts.text) + write_calls(known.calls, calls)
    return answer.removeprefix(known.lead)


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data(), reasoning=PLAIN.map(str.strip), text=PLAIN, calls=CALLS)
@each_format
def test_the_parts_come_back(
    chat_format: ChatFormat,
    data: st.DataObject,
    reasoning: str,
    text: str,
    calls: list[tuple[str, dict[str, Any]]],
) -> None:
    text = text if text.strip() else ""
    if chat_format.calls.bare and calls:
        text = ""  # its calls are whole answers
    if not chat_format.exact and reasoning:
        text = text.lstrip()
    if chat_format.one_call:
        calls = calls[:1]
    parts = Parts(reasoning, text, tuple(calls))
    reader = OutputParser(chat_format, TOOLS)
    assert collect(events_of(reader, cut(data, spelled(chat_format, parts)))) == parts


@settings(deadline=None)
@given(data=st.data(), reasoning=PLAIN.map(str.strip), text=PLAIN.map(str.strip))
def test_reasoning_that_the_prompt_opened_and_reasoning_that_stays_in_the_text(
    data: st.DataObject, reasoning: str, text: str
) -> None:
    answer = f"{reasoning}\n</think>\n\n{text}"
    assert collect(events_of(OutputParser(thinking=True), cut(data, answer))) == Parts(reasoning, text)
    plain = f"<think>{answer}"
    assert collect(events_of(OutputParser(reasoning=False), cut(data, plain))) == Parts("", plain)


@each_format
def test_a_second_block_of_reasoning_is_reasoning_too(chat_format: ChatFormat) -> None:
    opening, closing = chat_format.reasoning_openings[0].strip(), chat_format.reasoning_closings[0].strip()
    if chat_format.text_openings:
        return  # there, text is marked as well
    answer = f"{opening}one{closing}\nSo.\n{opening}two{closing}\nThen {opening} is a tag."
    parts = collect(events_of(OutputParser(chat_format), list(answer)))
    assert parts.reasoning == "onetwo"
    assert parts.text.split() == ["So.", "Then", opening, "is", "a", "tag."]


FRAGMENTS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *('{"name": "look", "arguments": {"a": 1}}', '{"name": "look", "parameters": {', '{"name": ', "{", "}"),
    *('"look"', "look", "[", "]", ",", ";", " ", "\n", '"', "\\", "<", "tool", '{"answer": 4}', "null"),
    *("<function=look>", "<parameter=city>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "n"),
    *("<arg_value>", "</arg_value>", "<|tool_call_start|>", "look(", "city='a'", ")", "call:look{", '<|"|>'),
    *("<|start|>assistant", "<|channel|>final<|message|>", " to=functions.look", "<|message|>", "<|end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"),
)
SOUP = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
JSON_FORMATS = [FORMATS[name] for name in ("generic", "hermes", "loose", "mistral", "llama")]


@settings(deadline=None, max_examples=examples(600))
@given(
    data=st.data(), soup=SOUP, chat_format=st.sampled_from(list(FORMATS.values())), flags=st.integers(0, 31)
)
def test_pieces_never_matter(data: st.DataObject, soup: str, chat_format: ChatFormat, flags: int) -> None:
    def read(pieces: list[str]) -> Parts:
        reader = OutputParser(
            chat_format,
            TOOLS if flags & 8 else (),
            thinking=bool(flags & 1),
            parallel=bool(flags & 2),
            reasoning=bool(flags & 4),
            forced=bool(flags & 16) and bool(flags & 8),
        )
        return collect(events_of(reader, pieces))

    whole = read([soup])
    assert read(cut(data, soup)) == whole
    assert read(list(soup)) == whole
    assert len(whole.calls) <= 1 or flags & 2


@pytest.mark.parametrize("name", ["harmony", "ministral", "muse", "kimi"])
@pytest.mark.parametrize("length", (240, 254, 256, 258, 270, 300))
def test_what_is_too_far_away_does_not_depend_on_the_pieces(name: str, length: int) -> None:
    """Between a name and its arguments, and in an id, a bounded number of characters may stand."""
    chat_format = FORMATS[name]
    written = write_calls(chat_format.calls, [WrittenCall("look", {"a": 1}, "abcdefgh1")])
    for mark in ("look", chat_format.calls.opening[:24]):
        soup = written.replace(mark, mark + "x " * (length // 2), 1)
        readings = [
            collect(events_of(OutputParser(chat_format, TOOLS), pieces))
            for pieces in ([soup], list(soup), [soup[:100], soup[100:]])
        ]
        assert readings[0] == readings[1] == readings[2]


@settings(deadline=None, max_examples=examples(300))
@given(
    soup=SOUP.filter(lambda soup: "think>" not in soup),
    chat_format=st.sampled_from([each for each in FORMATS.values() if not each.text_openings]),
)
@example(soup='  <tool_call>\n{"nam', chat_format=FORMATS["hermes"])
@example(soup="text [TOOL_CALLS][", chat_format=FORMATS["mistral"])
@example(soup="<|python_tag|>", chat_format=FORMATS["llama"])
@example(soup="</tool_call>\n<tool_call>", chat_format=FORMATS["hermes"])
def test_an_answer_without_a_call_is_all_text(soup: str, chat_format: ChatFormat) -> None:
    parts = collect(events_of(OutputParser(chat_format, TOOLS), list(soup)))
    if not parts.calls:
        assert parts.text == soup


@settings(deadline=None, max_examples=examples(300))
@given(
    fragments=st.lists(st.sampled_from([*FRAGMENTS, "WORD"]), max_size=14),
    chat_format=st.sampled_from(JSON_FORMATS),
)
def test_no_word_is_lost(fragments: list[str], chat_format: ChatFormat) -> None:
    words = [f"w{index}w" for index, fragment in enumerate(fragments) if fragment == "WORD"]
    names = iter(words)
    soup = "".join(next(names) if fragment == "WORD" else fragment for fragment in fragments)
    parts = collect(events_of(OutputParser(chat_format, TOOLS), [soup]))
    found = f"{parts.reasoning} {parts.text} {parts.calls}"
    assert [word for word in words if word not in found] == []


@each_format
def test_a_list_of_bare_calls_may_be_nested_and_come_in_pieces(chat_format: ChatFormat) -> None:
    (key,) = (key for key, slot in chat_format.calls.keys if slot == Slot.ARGUMENTS)
    answer = f" [ [{json.dumps({'name': 'look', key: {'n': 1}})}]]"
    reader = OutputParser(chat_format, TOOLS)
    wanted = (("look", {"n": 1}),) if chat_format.calls.bare else ()
    assert collect(events_of(reader, list(answer))).calls == wanted


@each_format
def test_one_call_is_kept_where_only_one_is_wanted(chat_format: ChatFormat) -> None:
    parts = Parts("", "", (("look", {"n": 1}), ("f_", {"n": 2}), ("f_", {"n": 3})))
    answer = spelled(chat_format, parts)
    for pieces in ([answer], list(answer)):
        assert collect(events_of(OutputParser(chat_format, TOOLS, parallel=False), pieces)) == Parts(
            "", "", parts.calls[:1]
        )


@each_format
def test_a_forced_answer_has_no_call_twice(chat_format: ChatFormat) -> None:
    if chat_format.one_call:
        return
    one, two = ("look", {"n": 1}), ("look", {"n": 2})
    none: tuple[str, Any] = ("f_", {})
    calls = (one, one, two, none, one, none)
    answer = spelled(chat_format, Parts("", "", calls))
    for pieces in ([answer], list(answer)):
        reader = OutputParser(chat_format, TOOLS, forced=True)
        assert collect(events_of(reader, pieces)) == Parts("", "", (one, two, none))


@each_format
def test_a_call_that_a_limit_cuts_is_never_content(chat_format: ChatFormat) -> None:
    parts = Parts("", "" if chat_format.calls.bare else "Hm.", (("look", {"city": "Bern", "n": 1}),))
    answer = spelled(chat_format, parts)
    start = 0 if chat_format.calls.bare else answer.index("Hm.") + 3
    for forced in (False, True) if not parts.text else (False,):
        for end in range(start, len(answer)):
            reader = OutputParser(chat_format, TOOLS, forced=forced)
            events = [event for piece in answer[:end] for event in reader.feed(piece)]
            found = collect(events + reader.finish(cut=True))
            assert found.text.strip() == parts.text, answer[:end]
            assert not found.calls or found.calls[0][0] == "look"


def test_blanks_are_kept_where_they_are_content() -> None:
    call = '\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    for text, wanted in (
        (f"Hm. \n{call}", "Hm. \n"),
        (f"Hm.{call}\n\nDone. ", "Hm.\n\nDone. "),
        (f"\n{call}\n", ""),
        ("  Hm.\n ", "  Hm.\n "),
        (" \n", " \n"),
    ):
        assert collect(events_of(OutputParser(FORMATS["hermes"], TOOLS), list(text))).text == wanted


@pytest.mark.parametrize("name", ["generic", "hermes", "coder", "python", "gemma", "harmony"])
def test_time_is_linear_in_the_text(name: str) -> None:
    chat_format = FORMATS[name]

    def seconds(filler: str, length: int) -> float:
        calls = (("look", {"city": f"a{filler * length}b"}),)
        parts = Parts("", "" if chat_format.calls.bare else "Hm", calls)
        answer = filler * length * bool(parts.text) + spelled(chat_format, parts)
        reader = OutputParser(chat_format, TOOLS)
        started = time.process_time()
        for character in answer:
            reader.feed(character)
        reader.finish()
        return time.process_time() - started

    for filler in (" ", "<"):
        short = min(seconds(filler, 250) for _ in range(3))
        assert seconds(filler, 4000) < 60 * short, "16 times the text; 256 times the work if quadratic"


def test_arguments_are_reported_while_they_are_written() -> None:
    reader = OutputParser(FORMATS["hermes"], TOOLS)
    assert reader.feed('Hm.\n<tool_call>\n{"name": "look", "argum') == [
        ContentText("Hm."),
        ToolCallStart(0, "look"),
    ]
    assert reader.feed('ents": {"a": ') == [ToolCallArguments(0, '{"a": ')]
    assert reader.feed("1}}\n</tool_call>") == [ToolCallArguments(0, "1}")]
    assert reader.finish() == []


def test_a_text_in_tags_is_passed_on_as_it_comes() -> None:
    reader = OutputParser(FORMATS["coder"], TOOLS)
    assert reader.feed("<tool_call>\n<function=look>\n<parameter=city>\nBe") == [
        ToolCallStart(0, "look"),
        ToolCallArguments(0, '{"city": "Be'),
    ]
    assert reader.feed('r"n\n') == [ToolCallArguments(0, 'r\\"n')]
    assert reader.feed("</parameter>\n<parameter=n>\n[1") == [ToolCallArguments(0, '", "n": ')]
    assert reader.feed("]\n</parameter>\n</function>") == [ToolCallArguments(0, "[1]}")]
    assert reader.feed("\n</tool_call>") + reader.finish() == []


def test_values_in_tags_follow_the_schema() -> None:
    kinds = {
        "text": ({"type": "string"}, "17", "17"),
        "number": ({"type": "number"}, "17", 17),
        "flag": ({"type": "boolean"}, "True", True),
        "maybe": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        "either": ({"type": ["string", "null"]}, "17", "17"),
        "kind": ({"enum": ["1", "2"]}, "1", "1"),
        "list": ({"type": "array"}, "['a', None]", ["a", None]),
        "linked": ({"$ref": "#/$defs/t"}, "3", "3"),
        "any": ({}, "a 1", "a 1"),
    }
    schema = {
        "properties": {key: kind for key, (kind, _, _) in kinds.items()},
        "$defs": {"t": {"type": "string"}},
    }
    written = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, (_, text, _) in kinds.items())
    answer = f"<tool_call>\n<function=look>\n{written}</function>\n</tool_call>"
    parts = collect(events_of(OutputParser(FORMATS["coder"], [Tool("look", "", schema)]), [answer]))
    assert parts.calls == (("look", {key: value for key, (_, _, value) in kinds.items()}),)


def test_a_list_of_python_calls_is_read_where_calls_have_no_opening() -> None:
    answer = "[look(city='Bern', n=[1, None]), f_()]"
    for chat_format in (FORMATS["llama"], FORMATS["generic"]):
        parts = collect(events_of(OutputParser(chat_format, TOOLS), list(answer)))
        assert parts == Parts("", "", (("look", {"city": "Bern", "n": [1, None]}), ("f_", {})))
    assert collect(events_of(OutputParser(FORMATS["llama"], TOOLS), ["[other(1)]"])).text == "[other(1)]"


def test_json_that_is_no_call_is_not_held_back() -> None:
    reader = OutputParser(FORMATS["generic"], TOOLS)
    assert reader.feed('{"answer": ') == [ContentText('{"answer":')]
    reader = OutputParser(FORMATS["generic"], TOOLS)
    assert reader.feed('{"name": "someone", ') == [ContentText('{"name": "someone",')], "not a tool"


@each_format
def test_forced_calls_may_come_after_reasoning(chat_format: ChatFormat) -> None:
    parts = Parts("hm", "", (("look", {"n": 1}),))
    answer = spelled(chat_format, parts)
    for pieces in ([answer], list(answer)):
        assert collect(events_of(OutputParser(chat_format, TOOLS, forced=True), pieces)) == parts
    opening = chat_format.reasoning_openings[0]
    inside = answer.partition(opening.removeprefix(chat_format.lead).strip())[2]
    if not chat_format.lead:
        reader = OutputParser(chat_format, TOOLS, forced=True, thinking=True)
        assert collect(events_of(reader, list(inside))) == parts
