"""Calls whose arguments stand in tags: what looks like the end of a value and is not; values by schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cllm.text.chat_format import ChatFormat, Tool, WrittenCall, write_calls
from cllm.text.output_parser import OutputParser
from tests.driver.turns import collect, get_family
from tests.unit.text.formats import FORMATS


def read(chat_format: ChatFormat, parameters: dict[str, Any], written: str, size: int) -> Any:
    """The arguments of the one call in a text that comes in pieces of a size."""
    tool = Tool("look", "", {"type": "object", "properties": parameters})
    parser = OutputParser(chat_format, [tool], forced=True)
    events = [event for at in range(0, len(written), size) for event in parser.feed(written[at : at + size])]
    _, text, calls = collect([*events, *parser.finish()])
    assert text == "" and len(calls) == 1
    return calls[0][1]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("name", ["coder", "glm"])
def test_a_closing_in_a_string_of_json_is_a_part_of_it(name: str, size: int) -> None:
    closing = FORMATS[name].calls.value_closing.strip()
    arguments = {"map": {f"a{closing}": f'{closing}"b\\', "c": [closing]}, "last": "x"}
    written = write_calls(FORMATS[name].calls, [WrittenCall("look", arguments)])
    parameters = {"map": {"type": "object"}, "last": {"type": "string"}}
    assert read(FORMATS[name], parameters, written, size) == arguments


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_nested_tags_may_have_the_name_of_their_argument(size: int) -> None:
    known = get_family("MiniMax-M3").format
    inner = {"type": "object", "properties": {"path": {"type": "string"}, "items": {"type": "array"}}}
    arguments = {"path": {"path": "7", "items": []}, "name": "b"}
    written = write_calls(known.calls, [WrittenCall("look", arguments)])
    parameters = {"path": inner, "name": {"type": "string"}}
    assert read(known, parameters, written, size) == arguments, "by the schema: a text, and an empty list"


def test_gemmas_values_may_hold_json() -> None:
    known = FORMATS["gemma"]
    written = write_calls(known.calls, [WrittenCall("look", {"map": "HERE", "b": 1})])
    for value in ('["}],\\"", {"a b": "]"}]', '{"x": "y:{"}'):
        text = written.replace('<|"|>HERE<|"|>', value)
        assert text != written
        assert read(known, {"map": {}, "b": {}}, text, 3) == {"map": json.loads(value), "b": 1}
