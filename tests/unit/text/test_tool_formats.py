"""Conversations with tool calls, prepared for what a template takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cllm.text.chat_format import Tool
from cllm.text.tool_formats import Generic, Llama3, Mistral, ToolFormat

FORMATS: tuple[ToolFormat, ...] = (ToolFormat(), Mistral(), Llama3(), Generic())
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
