"""Calls read character by character: what comes out is what a JSON parser would have found."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.text.call_parser import ObjectCallParser
from cllm.text.chat_format import ChatFormat, Tool, WrittenCall, write_calls
from cllm.text.output_parser import OutputParser
from tests.driver.turns import collect, get_family
from tests.unit.text.formats import FORMATS
from tests.unit.text.test_output_parser import cut

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LEAVES = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | TEXT
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=4)
STYLES = st.fixed_dictionaries(
    {"ensure_ascii": st.booleans(), "indent": st.sampled_from([None, 0, 2])},
    optional={"separators": st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")])},
)


def read(reader: ObjectCallParser, pieces: list[str]) -> tuple[str, str]:
    """What the reader takes for arguments, and what is left over."""
    arguments = rest = ""
    for piece in pieces:
        rest += reader.feed(piece) if not reader.done and not reader.failed else piece
        arguments += reader.take_arguments()
    return arguments, rest


@given(data=st.data(), name=TEXT, arguments=OBJECTS, style=STYLES, rest=TEXT)
def test_a_call_is_read_as_a_parser_would(
    data: st.DataObject, name: str, arguments: dict[str, Any], style: dict[str, Any], rest: str
) -> None:
    name_key = data.draw(st.sampled_from(["name", "function"]))
    arguments_key = data.draw(st.sampled_from(["arguments", "parameters", "args"]))
    others = data.draw(st.dictionaries(st.sampled_from(["id", "type", "x y"]), VALUES, max_size=2))
    items = data.draw(st.permutations([(name_key, name), (arguments_key, arguments), *others.items()]))
    source = json.dumps(dict(items), **style)
    reader = ObjectCallParser()
    found, left = read(reader, cut(data, source + rest))
    assert reader.done and not reader.failed
    assert reader.name == name
    assert json.loads(found) == arguments
    assert left == rest and reader.raw == source


@given(data=st.data(), arguments=OBJECTS, style=STYLES, rest=TEXT)
def test_arguments_alone_are_read_where_the_name_is_known(
    data: st.DataObject, arguments: dict[str, Any], style: dict[str, Any], rest: str
) -> None:
    reader = ObjectCallParser("known")
    found, left = read(reader, cut(data, json.dumps(arguments, **style) + rest))
    assert reader.done and json.loads(found) == arguments and left == rest


@given(data=st.data(), arguments=OBJECTS)
def test_arguments_written_as_a_string_of_json_are_unpacked(
    data: st.DataObject, arguments: dict[str, Any]
) -> None:
    source = json.dumps({"name": "f", "arguments": json.dumps(arguments)})
    found, _ = read(ObjectCallParser(), cut(data, source))
    assert json.loads(found) == arguments


def test_arguments_come_while_they_are_written_and_never_before_the_name() -> None:
    reader = ObjectCallParser()
    reader.feed('{"arguments": {"a": ')
    assert reader.take_arguments() == "", "no name yet"
    reader.feed('1}, "name": "f"')
    assert (reader.name, reader.take_arguments()) == ("f", '{"a": 1}')
    reader = ObjectCallParser()
    taken = []
    for character in '{"name": "f", "arguments": {"ab": [1]}}':
        reader.feed(character)
        taken.append(reader.take_arguments())
    assert [piece for piece in taken if piece] == list('{"ab": [1]}')


@pytest.mark.parametrize("bad", ["[", "x", '{"name" "f"}', "{name: 1}", '{"a": 1} x'[:0] + "}", "{1: 2}"])
def test_what_is_no_object_fails(bad: str) -> None:
    reader = ObjectCallParser()
    reader.feed(bad)
    assert reader.failed and not reader.done


def test_a_name_that_is_no_text_is_no_name() -> None:
    reader = ObjectCallParser()
    reader.feed('{"name": 1, "arguments": {}}')
    assert reader.done and reader.name is None


# Arguments in tags ------------------------------------------------------------------------------------


def read_arguments(chat_format: ChatFormat, parameters: dict[str, Any], written: str, size: int) -> Any:
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
    assert read_arguments(FORMATS[name], parameters, written, size) == arguments


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_nested_tags_may_have_the_name_of_their_argument(size: int) -> None:
    known = get_family("MiniMax-M3").format
    inner = {"type": "object", "properties": {"path": {"type": "string"}, "items": {"type": "array"}}}
    arguments = {"path": {"path": "7", "items": []}, "name": "b"}
    written = write_calls(known.calls, [WrittenCall("look", arguments)])
    parameters = {"path": inner, "name": {"type": "string"}}
    assert read_arguments(known, parameters, written, size) == arguments, (
        "by the schema: a text, and an empty list"
    )


def test_gemmas_values_may_hold_python_and_any_character() -> None:
    known = FORMATS["gemma"]
    written = write_calls(known.calls, [WrittenCall("look", {"map": "HERE", "b": 1})])
    text = written.replace('<|"|>HERE<|"|>', '{t:<|"|>😀<|"|>,y:True}')
    assert read_arguments(known, {"map": {}, "b": {}}, text, 3) == {"map": {"t": "😀", "y": True}, "b": 1}


def test_gemmas_values_may_hold_json() -> None:
    known = FORMATS["gemma"]
    written = write_calls(known.calls, [WrittenCall("look", {"map": "HERE", "b": 1})])
    for value in ('["}],\\"", {"a b": "]"}]', '{"x": "y:{"}'):
        text = written.replace('<|"|>HERE<|"|>', value)
        assert text != written
        assert read_arguments(known, {"map": {}, "b": {}}, text, 3) == {"map": json.loads(value), "b": 1}
