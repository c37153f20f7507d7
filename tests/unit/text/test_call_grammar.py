"""Forced calls: in every format they can be written, they parse, and their arguments fit the schemas."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.errors import InvalidRequest
from cllm.limits import MAX_SOURCE
from cllm.testing import FakeVocabulary
from cllm.text.call_grammar import MIN_CALLS, make_call_grammar
from cllm.text.chat_format import DECLARED, CallStyle, ChatFormat, Tool, WrittenCall, write_calls
from cllm.text.output_parser import OutputParser
from cllm.text.structured_output import GrammarCompiler, MaskBuilder
from cllm.types import ConstraintSpec, FinishReason
from tests.driver.masks import takes_text
from tests.driver.turns import Parts, collect
from tests.profiles import examples
from tests.unit.text.formats import FORMATS
from tests.unit.text.test_output_parser import each_format, events_of
from tests.unit.text.test_structured_output import answer, text

COMPILER, MASKS = GrammarCompiler(FakeVocabulary()), MaskBuilder(FakeVocabulary.size)
PLACE = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
WEATHER = Tool(
    "weather",
    "Says how it is",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            "unit": {"enum": ["C", "F"]},
            "where": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "unit", "where"],
        "additionalProperties": False,
        "$defs": {"place": PLACE},
    },
)
NOTHING = Tool("now")
SUNNY = {"city": "Bern", "unit": "C", "where": {"x": 4}}


def grammar(chat_format: ChatFormat, tools: list[Tool], *, parallel: bool = True) -> ConstraintSpec:
    spec = make_call_grammar(chat_format, tools, parallel=parallel)
    assert spec is not None
    return spec


def takes(spec: ConstraintSpec, written: str) -> bool:
    """True when the grammar lets this be written and may end after it."""
    return takes_text(MASKS, COMPILER.compile(spec), written)


def spell(chat_format: ChatFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    made = [WrittenCall(name, arguments, "abcdefgh1") for name, arguments in calls]
    return write_calls(chat_format.calls, made).removeprefix(chat_format.lead)


@each_format
def test_the_grammar_takes_what_fits_and_nothing_else(chat_format: ChatFormat) -> None:
    spec = grammar(chat_format, [WEATHER, NOTHING])
    sunny: tuple[str, dict[str, Any]] = ("weather", SUNNY)
    now: tuple[str, dict[str, Any]] = ("now", {})
    assert takes(spec, spell(chat_format, sunny))
    assert takes(spec, spell(chat_format, now))
    several = spell(chat_format, sunny, now, sunny)
    assert takes(spec, several) is not chat_format.one_call
    assert takes(grammar(chat_format, [WEATHER, NOTHING], parallel=False), spell(chat_format, now))
    assert not takes(grammar(chat_format, [WEATHER, NOTHING], parallel=False), several)
    assert not takes(spec, "")
    assert not takes(spec, "Sure! " + spell(chat_format, now))
    assert not takes(spec, spell(chat_format, ("other", {})))
    assert not takes(spec, spell(chat_format, ("weather", {"city": "Bern"})))
    assert not takes(spec, spell(chat_format, ("weather", {**SUNNY, "unit": "K"})))
    assert not takes(spec, spell(chat_format, ("weather", {**SUNNY, "where": {"x": 10}}))), "$ref is followed"
    assert not takes(grammar(chat_format, [NOTHING]), spell(chat_format, sunny))
    assert not takes(grammar(chat_format, [NOTHING]), spell(chat_format, ("now", {"x": 1}))), "it takes none"


@settings(deadline=None, max_examples=examples(8))
@given(seed=st.integers(0, 1000), single=st.booleans(), parallel=st.booleans())
@each_format
def test_whatever_the_model_wants_its_calls_parse_and_fit(
    chat_format: ChatFormat, seed: int, single: bool, parallel: bool
) -> None:
    tools = [WEATHER] if single else [WEATHER, NOTHING]
    (outputs,) = answer(grammar(chat_format, tools, parallel=parallel), seed=seed, max_tokens=700)
    reader = OutputParser(chat_format, tools, forced=True, parallel=parallel)
    parts = collect(events_of(reader, [output.text for output in outputs]))
    assert parts.calls and (len(parts.calls) == 1 or parallel), text(outputs)
    calls = parts.calls
    if outputs[-1].finish_reason is FinishReason.STOP:
        assert parts == Parts("", "", calls), text(outputs)
    else:
        calls = calls[:-1]  # the last may be cut short
    for name, arguments in calls:
        (tool,) = (tool for tool in tools if tool.name == name)
        jsonschema.validate(arguments, dict(tool.schema))


@each_format
def test_a_hundred_tools(chat_format: ChatFormat) -> None:
    tools = [Tool(f"tool_{index}", "x" * 50, WEATHER.parameters) for index in range(100)]
    spec = grammar(chat_format, tools)
    assert takes(spec, spell(chat_format, ("tool_99", SUNNY)))
    assert not takes(spec, spell(chat_format, ("tool_100", SUNNY)))


@each_format
def test_calls_are_bounded_by_the_tools_there_are(chat_format: ChatFormat) -> None:
    if chat_format.one_call:
        return
    spec = grammar(chat_format, [NOTHING])
    assert takes(spec, spell(chat_format, *[("now", {})] * MIN_CALLS))
    assert not takes(spec, spell(chat_format, *[("now", {})] * (MIN_CALLS + 1)))


@each_format
def test_calls_that_are_not_forced_are_constrained_from_their_opening_on(chat_format: ChatFormat) -> None:
    spec = make_call_grammar(chat_format, [WEATHER, NOTHING], parallel=True, forced=False)
    if chat_format.calls.bare or chat_format is FORMATS["muse"]:
        assert spec is None
        return
    assert spec is not None
    written = spell(chat_format, ("weather", SUNNY))
    before, found, rest = written.partition(spec.triggers[0])
    assert found and not before and takes(spec, rest)
    assert not takes(spec, rest.replace("weather", "whether"))


@pytest.mark.parametrize("name", ["hermes", "mistral", "ministral", "llama", "generic"])
def test_parameters_that_cannot_be_honoured_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        COMPILER.compile(grammar(FORMATS[name], [Tool("f", "", {"$ref": "#/$defs/nowhere"})]))


@pytest.mark.parametrize("name", ["hermes", "llama", "generic"])
def test_a_tool_that_nothing_satisfies_leaves_the_others_theirs(name: str) -> None:
    bad = Tool("bad", "", {"type": "object", "properties": {"x": False}, "required": ["x"]})
    spec = grammar(FORMATS[name], [bad, WEATHER])
    assert takes(spec, spell(FORMATS[name], ("weather", SUNNY)))


@each_format
def test_names_and_keys_that_need_care(chat_format: ChatFormat) -> None:
    by_name = chat_format.calls.style in (CallStyle.PYTHON, CallStyle.GEMMA, CallStyle.TAGGED)
    key = "a.b" if by_name else 'a"b\\'
    schema = {"type": "object", "properties": {key: {"const": "é\n"}}, "required": [key]}
    tool = Tool("a.b-c_d", "", {**schema, "additionalProperties": False})
    value = "é\n" if chat_format.calls.style is not CallStyle.PYTHON else "é"
    if chat_format.calls.style is CallStyle.PYTHON:
        tool = Tool(tool.name, "", {**tool.parameters, "properties": {key: {"type": "string"}}})
    assert takes(grammar(chat_format, [tool]), spell(chat_format, (tool.name, {key: value})))


def test_control_tokens_are_written_as_tokens() -> None:
    known = FORMATS["kimi"]
    tokens = {"<|tool_calls_section_begin|>": 300, "<|tool_call_end|>": 301}
    made = ChatFormat(calls=known.calls, tokens=tuple(tokens.items()))
    spec = grammar(made, [NOTHING])
    assert "<[300]>" in spec.source and "<[301]>" in spec.source
    assert "section_begin" not in spec.source and "<|tool_call_argument_begin|>" in spec.source


def test_no_grammar_where_a_text_may_start_like_a_call() -> None:
    formats = dict(DECLARED)
    for mark in ("<|start|>assistant to=user<|message|>", "<|end_header_id|>\n\n>>>all\n"):
        assert make_call_grammar(formats[mark], [NOTHING], parallel=True, forced=False) is None
        assert make_call_grammar(formats[mark], [NOTHING], parallel=True) is not None


WIDE = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 12} for n in range(9)}
LARGE = {"$defs": {"9": {"type": "string", "description": "x" * 100_000}}}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {**WIDE, "9": {"enum": [1]}}},
        {"properties": {f"p{n}": {"$ref": "#/$defs/9"} for n in range(1000)}, **LARGE},
        {"properties": {f"p{n}": {} for n in range(1000)}},
        {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}, {"type": "null"}]}}},
    ],
    ids=["alternatives", "definitions", "optional arguments", "recursive"],
)
def test_a_grammar_of_calls_is_never_larger_than_its_limits(name: str, schema: dict[str, Any]) -> None:
    """Schemas that refer to each other are written out in some formats: twelve to the ninth were."""
    try:
        spec = make_call_grammar(FORMATS[name], [Tool("a", "", schema)], parallel=True)
    except InvalidRequest as error:
        assert error.field == "tools" and "the limit is" in error.message
    else:
        assert spec is not None and len(spec.source) < 16 * MAX_SOURCE
