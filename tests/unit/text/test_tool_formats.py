"""Dialects: chosen by the template, conversations prepared for it, and forced calls that always parse."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.errors import InvalidRequest
from cllm.testing import END_TOKEN, FakeVocabulary
from cllm.text.output_parser import OutputParser
from cllm.text.structured_output import GrammarCompiler
from cllm.text.tool_formats import Generic, Hermes, Llama3, Mistral, Tool, ToolFormat, get_tool_format
from cllm.types import FinishReason
from tests.profiles import examples
from tests.unit.text.test_output_parser import Parts, events_of, joined
from tests.unit.text.test_structured_output import answer, text

COMPILER = GrammarCompiler(FakeVocabulary())
FORMATS: tuple[ToolFormat, ...] = (Hermes(), Mistral(), Llama3(), Generic())
each_dialect = pytest.mark.parametrize(
    "tool_format", FORMATS, ids=lambda tool_format: type(tool_format).__name__
)

WEATHER = Tool(
    "weather",
    "Says how it is",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "unit": {"enum": ["C", "F"]},
            "where": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "unit", "where"],
        "additionalProperties": False,
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
)
NOTHING = Tool("now")
SUNNY = {"city": "Bern", "unit": "C", "where": {"x": 4}}


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        (None, Generic),
        ("{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}", Generic),
        ("… return a json object within <tool_call></tool_call> tags …", Hermes),
        ("{{ '[TOOL_CALLS] [' }}{{ '[AVAILABLE_TOOLS]' }}", Mistral),
        ("{{ '<|python_tag|>' + call.name }}", Llama3),
        ("""{% if role == "ipython" %}{"name": name, "parameters": {}}{% endif %}""", Llama3),
        ("<start_of_turn>{{ m.role }}{{ raise_exception('System role not supported') }}", Generic),
    ],
)
def test_the_template_chooses(template: str | None, kind: type[ToolFormat]) -> None:
    assert type(get_tool_format(template)) is kind


# Conversations ------------------------------------------------------------------------------------

CALLS: list[dict[str, Any]] = [
    {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": json.dumps(SUNNY)}},
    {"id": "call_b", "type": "function", "function": {"name": "now", "arguments": ""}},
]
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": "sunny", "tool_call_id": "call_a"},
    {"role": "tool", "content": "noon", "tool_call_id": "call_b"},
    {"role": "assistant", "content": "Fine."},
]


@each_dialect
def test_what_was_sent_is_not_changed_and_nothing_of_it_is_lost(tool_format: ToolFormat) -> None:
    before = json.dumps(TALK)
    prepared = tool_format.prepare(TALK, [WEATHER, NOTHING])
    assert json.dumps(TALK) == before
    shown = json.dumps(prepared)
    for word in ("How is it?", "Bern", "sunny", "noon", "Fine.", "weather", "now"):
        assert word in shown, word
    assert all(isinstance(message["content"], str) for message in prepared), "templates add texts up"


@pytest.mark.parametrize("tool_format", FORMATS[:3], ids=lambda tool_format: type(tool_format).__name__)
def test_templates_get_objects_and_names(tool_format: ToolFormat) -> None:
    prepared = tool_format.prepare(TALK, [])
    calls = [call for message in prepared for call in message.get("tool_calls") or []]
    assert [call["function"]["arguments"] for call in calls] == [SUNNY, {}]
    results = [message for message in prepared if message["role"] == "tool"]
    assert [result["name"] for result in results] == ["weather", "now"]
    assert [result["tool_call_id"] for result in results] == [call["id"] for call in calls]


def test_mistral_gets_short_ids_and_keeps_those_that_are() -> None:
    prepared = Mistral().prepare(TALK, [])
    ids = [call["id"] for call in prepared[1]["tool_calls"]]
    assert len(set(ids)) == 2 and all(len(one) == 9 and one.isalnum() for one in ids)
    kept = {"role": "tool", "content": "", "tool_call_id": "abc123XYZ"}
    assert Mistral().prepare([kept], [])[0]["tool_call_id"] == "abc123XYZ"


def test_llama_gets_one_call_a_turn_each_with_its_result() -> None:
    prepared = Llama3().prepare(TALK, [])
    assert [message["role"] for message in prepared] == [
        *("user", "assistant", "tool", "assistant", "tool", "assistant"),
    ]
    assert all(len(message.get("tool_calls") or [1]) == 1 for message in prepared)
    stray = {"role": "tool", "content": "x", "tool_call_id": "unknown"}
    assert stray["content"] in json.dumps(Llama3().prepare([*TALK, stray], []))


def test_the_generic_way_is_all_text() -> None:
    tools = [WEATHER, NOTHING]
    prepared = Generic().prepare(TALK, tools)
    assert [message["role"] for message in prepared] == ["system", "user", "assistant", "user", "assistant"]
    assert '"name": "weather"' in prepared[0]["content"] and "Says how it is" in prepared[0]["content"]
    assert prepared[3]["content"] == "Result of weather: sunny\nResult of now: noon"
    brief = Generic().prepare([{"role": "system", "content": "Be brief."}, *TALK], tools)
    assert brief[0]["content"].startswith("Be brief.\n\nYou can call")
    assert Generic().prepare(TALK, [])[0]["role"] == "user", "no tools, no instructions"
    first, *_ = Generic("{{ raise_exception('System role not supported') }}").prepare(TALK, tools)
    assert first["role"] == "user" and first["content"].endswith("How is it?")


@pytest.mark.parametrize("arguments", ["not json", "[1]", '"text"', "7"])
@each_dialect
def test_arguments_that_are_no_object_stay_text(tool_format: ToolFormat, arguments: str) -> None:
    call = {"id": "call00001", "function": {"name": "now", "arguments": arguments}}
    prepared = tool_format.prepare([{"role": "assistant", "content": "", "tool_calls": [call]}], [])
    (message,) = prepared
    found = message.get("tool_calls") or [{"function": json.loads(message["content"])}]
    assert found[0]["function"]["arguments"] == arguments


# Forced calls -------------------------------------------------------------------------------------


def accepts(tool_format: ToolFormat, tools: list[Tool], written: str, *, parallel: bool = True) -> bool:
    """True when the grammar lets this be written and may end after it."""
    constraint = COMPILER.compile(tool_format.make_call_grammar(tools, parallel=parallel))
    for token in written.encode():
        if constraint.complete or not constraint.mask()[token]:
            return False
        constraint.accept(token)
    return constraint.complete or bool(constraint.mask()[END_TOKEN])


def call(tool_format: ToolFormat, name: str, arguments: Any) -> str:
    return json.dumps({"name": name, tool_format.argument_key: arguments})


def forced(tool_format: ToolFormat, *calls: str) -> str:
    return tool_format.before + tool_format.between.join(calls) + tool_format.after


@each_dialect
def test_the_grammar_takes_what_fits_and_nothing_else(tool_format: ToolFormat) -> None:
    tools = [WEATHER, NOTHING]
    sunny, now = call(tool_format, "weather", SUNNY), call(tool_format, "now", {})
    assert accepts(tool_format, tools, forced(tool_format, sunny))
    assert accepts(tool_format, tools, forced(tool_format, now))
    assert accepts(tool_format, tools, forced(tool_format, sunny, now, sunny))
    assert accepts(tool_format, tools, forced(tool_format, now), parallel=False)
    assert not accepts(tool_format, tools, forced(tool_format, sunny, now), parallel=False)
    assert not accepts(tool_format, tools, "")
    assert not accepts(tool_format, tools, "Sure! " + forced(tool_format, now))
    assert not accepts(tool_format, tools, forced(tool_format, call(tool_format, "other", {})))
    assert not accepts(
        tool_format, tools, forced(tool_format, call(tool_format, "weather", {"city": "Bern"}))
    )
    assert not accepts(
        tool_format, tools, forced(tool_format, call(tool_format, "weather", {**SUNNY, "unit": "K"}))
    )
    wrong = {**SUNNY, "where": {"x": 10}}
    assert not accepts(tool_format, tools, forced(tool_format, call(tool_format, "weather", wrong))), (
        "$ref is followed"
    )
    assert not accepts(tool_format, [NOTHING], forced(tool_format, sunny))
    assert not accepts(tool_format, [NOTHING], forced(tool_format, call(tool_format, "now", {"x": 1}))), (
        "it takes none"
    )


@settings(deadline=None, max_examples=examples(25))
@given(seed=st.integers(0, 1000), single=st.booleans(), parallel=st.booleans())
@each_dialect
def test_whatever_the_model_wants_its_calls_parse_and_fit(
    tool_format: ToolFormat, seed: int, single: bool, parallel: bool
) -> None:
    tools = [WEATHER] if single else [WEATHER, NOTHING]
    (deltas,) = answer(tool_format.make_call_grammar(tools, parallel=parallel), seed=seed, max_tokens=500)
    reader = OutputParser(tool_format, [tool.name for tool in tools], calling=True, parallel=parallel)
    parts = joined(events_of(reader, [delta.text for delta in deltas]))
    assert parts.calls and (len(parts.calls) == 1 or parallel)
    calls = parts.calls
    if deltas[-1].finish_reason is FinishReason.STOP:
        assert parts == Parts("", "", calls), text(deltas)
    else:
        assert parallel
        calls = calls[:-1]  # the last may be cut short
    for name, arguments in calls:
        (tool,) = (tool for tool in tools if tool.name == name)
        jsonschema.validate(arguments, dict(tool.schema))


@each_dialect
def test_a_hundred_tools(tool_format: ToolFormat) -> None:
    tools = [Tool(f"tool_{index}", "x" * 50, WEATHER.parameters) for index in range(100)]
    assert accepts(tool_format, tools, forced(tool_format, call(tool_format, "tool_99", SUNNY)))
    assert not accepts(tool_format, tools, forced(tool_format, call(tool_format, "tool_100", SUNNY)))


@each_dialect
def test_parameters_that_cannot_be_honoured_are_refused(tool_format: ToolFormat) -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        COMPILER.compile(
            tool_format.make_call_grammar([Tool("f", "", {"$ref": "#/$defs/nowhere"})], parallel=True)
        )


@each_dialect
def test_names_and_keys_that_need_care(tool_format: ToolFormat) -> None:
    schema = {"type": "object", "properties": {'a"b\\': {"const": "é\n"}}, "required": ['a"b\\']}
    tool = Tool("a.b-c_d", "", {**schema, "additionalProperties": False})
    written = json.dumps({"name": tool.name, tool_format.argument_key: {'a"b\\': "é\n"}}, ensure_ascii=False)
    assert accepts(tool_format, [tool], forced(tool_format, written))
