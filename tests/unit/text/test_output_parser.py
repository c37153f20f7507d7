"""Answers taken apart: in every tool_format, in any pieces, and nothing of a malformed one is lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cllm.text.output_parser import (
    ContentText,
    OutputEvent,
    OutputParser,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from cllm.text.tool_formats import Generic, Hermes, Llama3, Mistral, ToolFormat
from tests.profiles import examples

NAMES = ("look", "get.weather", "add-2", "f_")
FORMATS: tuple[ToolFormat, ...] = (Hermes(), Mistral(), Llama3(), Generic())


class Parts(NamedTuple):
    """An answer, taken apart."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[tuple[str, Any], ...] = ()


def events_of(reader: OutputParser, pieces: Sequence[str]) -> list[OutputEvent]:
    return [event for piece in pieces for event in reader.feed(piece)] + reader.finish()


def joined(events: Sequence[OutputEvent]) -> Parts:
    """The events put together; arguments are parsed where they can be."""
    reasoning = text = ""
    calls: list[list[str]] = []
    for event in events:
        match event:
            case ReasoningText(piece):
                reasoning += piece
            case ContentText(piece):
                text += piece
            case ToolCallStart(index, name):
                assert index == len(calls), "calls are numbered in their order"
                calls.append([name, ""])
            case ToolCallArguments(index, piece):
                assert index == len(calls) - 1, "arguments belong to the last call"
                calls[index][1] += piece
    return Parts(reasoning, text, tuple((name, _parsed(arguments)) for name, arguments in calls))


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def cut(data: st.DataObject, text: str) -> list[str]:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=10).map(sorted))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[{|"), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.text(max_size=8).filter(str.isprintable),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(["city", "n", "x y"]), VALUES)),
    max_size=3,
)


def spelled(tool_format: ToolFormat, parts: Parts, *, new_style: bool) -> str:
    """The answer as a model of this family writes it."""
    objects = [
        json.dumps({"name": name, tool_format.argument_key: arguments}, ensure_ascii=False)
        for name, arguments in parts.calls
    ]
    text = f"<think>\n{parts.reasoning}\n</think>\n\n" if parts.reasoning else ""
    text += parts.text
    if not objects:
        return text
    match tool_format:
        case Hermes():
            return text + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in objects)
        case Mistral() if new_style:
            named = (f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in parts.calls)
            return text + "".join(named)
        case Mistral():
            return f"{text}[TOOL_CALLS][{', '.join(objects)}]"
        case Llama3():
            return text + ("<|python_tag|>" if parts.text or new_style else "") + "; ".join(objects)
        case _:
            return text + ("[" + ", ".join(objects) + "]" if new_style else "\n".join(objects))


@settings(deadline=None)
@given(
    data=st.data(),
    reasoning=PLAIN.map(str.strip),
    text=PLAIN.map(str.strip),
    calls=CALLS,
    style=st.booleans(),
)
@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda tool_format: type(tool_format).__name__)
def test_the_parts_come_back(
    tool_format: ToolFormat,
    data: st.DataObject,
    reasoning: str,
    text: str,
    calls: list[tuple[str, dict[str, Any]]],
    style: bool,
) -> None:
    if isinstance(tool_format, Generic) and calls:
        text = ""  # its calls are whole answers
    parts = Parts(reasoning, text, tuple(calls))
    answer = spelled(tool_format, parts, new_style=style)
    reader = OutputParser(tool_format, NAMES)
    assert joined(events_of(reader, cut(data, answer))) == parts


@settings(deadline=None)
@given(data=st.data(), reasoning=PLAIN.map(str.strip), text=PLAIN.map(str.strip))
def test_reasoning_that_the_prompt_opened_and_reasoning_that_stays_in_the_text(
    data: st.DataObject, reasoning: str, text: str
) -> None:
    answer = f"{reasoning}\n</think>\n\n{text}"
    assert joined(events_of(OutputParser(thinking=True), cut(data, answer))) == Parts(reasoning, text)
    plain = f"<think>{answer}"
    assert joined(events_of(OutputParser(reasoning=False), cut(data, plain))) == Parts("", plain)


FRAGMENTS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *('{"name": "look", "arguments": {"a": 1}}', '{"name": "look", "parameters": {', '{"name": ', "{", "}"),
    *('"look"', "look", "[", "]", ",", ";", " ", "\n", '"', "\\", "<", "tool", '{"answer": 4}', "null"),
)
SOUP = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@settings(deadline=None, max_examples=examples(300))
@given(data=st.data(), soup=SOUP, tool_format=st.sampled_from([None, *FORMATS]), flags=st.integers(0, 7))
def test_pieces_never_matter(
    data: st.DataObject, soup: str, tool_format: ToolFormat | None, flags: int
) -> None:
    def read(pieces: list[str]) -> Parts:
        reader = OutputParser(
            tool_format, NAMES, thinking=bool(flags & 1), parallel=bool(flags & 2), reasoning=bool(flags & 4)
        )
        return joined(events_of(reader, pieces))

    whole = read([soup])
    assert read(cut(data, soup)) == whole
    assert read(list(soup)) == whole
    assert len(whole.calls) <= 1 or flags & 2


@settings(deadline=None, max_examples=examples(300))
@given(soup=SOUP.filter(lambda soup: "<think>" not in soup), tool_format=st.sampled_from([None, *FORMATS]))
@example(soup='  <tool_call>\n{"nam', tool_format=FORMATS[0])
@example(soup="text [TOOL_CALLS][", tool_format=FORMATS[1])
@example(soup="<|python_tag|>", tool_format=FORMATS[2])
def test_an_answer_without_a_call_is_all_text(soup: str, tool_format: ToolFormat | None) -> None:
    parts = joined(events_of(OutputParser(tool_format, NAMES), list(soup)))
    if not parts.calls:
        assert parts.text == soup


@settings(deadline=None, max_examples=examples(300))
@given(
    fragments=st.lists(st.sampled_from([*FRAGMENTS, "WORD"]), max_size=14),
    tool_format=st.sampled_from(FORMATS),
)
def test_no_word_is_lost(fragments: list[str], tool_format: ToolFormat) -> None:
    words = [f"w{index}w" for index, fragment in enumerate(fragments) if fragment == "WORD"]
    names = iter(words)
    soup = "".join(next(names) if fragment == "WORD" else fragment for fragment in fragments)
    parts = joined(events_of(OutputParser(tool_format, NAMES), [soup]))
    found = f"{parts.reasoning} {parts.text} {parts.calls}"
    assert [word for word in words if word not in found] == []


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda tool_format: type(tool_format).__name__)
def test_a_list_of_bare_calls_may_be_nested_and_come_in_pieces(tool_format: ToolFormat) -> None:
    answer = f" [ [{json.dumps({'name': 'look', tool_format.argument_key: {'n': 1}})}]]"
    reader = OutputParser(tool_format, NAMES)
    assert joined(events_of(reader, list(answer))).calls == (
        (("look", {"n": 1}),) if tool_format.bare else ()
    )


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda tool_format: type(tool_format).__name__)
def test_one_call_is_kept_where_only_one_is_wanted(tool_format: ToolFormat) -> None:
    parts = Parts("", "", (("look", {"n": 1}), ("f_", {"n": 2}), ("f_", {"n": 3})))
    answer = spelled(tool_format, parts, new_style=False)
    for pieces in ([answer], list(answer)):
        assert joined(events_of(OutputParser(tool_format, NAMES, parallel=False), pieces)) == Parts(
            "", "", parts.calls[:1]
        )


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda tool_format: type(tool_format).__name__)
def test_forced_calls_begin_where_the_prompt_ended(tool_format: ToolFormat) -> None:
    objects = [json.dumps({"name": name, tool_format.argument_key: {"n": 1}}) for name in NAMES]
    answer = tool_format.before + tool_format.between.join(objects) + tool_format.after
    parts = joined(events_of(OutputParser(tool_format, NAMES, calling=True), list(answer)))
    assert parts == Parts("", "", tuple((name, {"n": 1}) for name in NAMES))


def test_arguments_are_told_while_they_are_written() -> None:
    reader = OutputParser(Hermes(), NAMES)
    assert reader.feed('Hm.\n<tool_call>\n{"name": "look", "argum') == [
        ContentText("Hm."),
        ToolCallStart(0, "look"),
    ]
    assert reader.feed('ents": {"a": ') == [ToolCallArguments(0, '{"a": ')]
    assert reader.feed("1}}\n</tool_call>") == [ToolCallArguments(0, "1}")]
    assert reader.finish() == []


def test_json_that_is_no_call_is_not_held_back() -> None:
    reader = OutputParser(Generic(), NAMES)
    assert reader.feed('{"answer": ') == [ContentText('{"answer": ')]
    reader = OutputParser(Generic(), NAMES)
    assert reader.feed('{"name": "someone", ') == [ContentText('{"name": "someone", ')], "not a tool"
