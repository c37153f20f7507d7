"""Chat format: how one model writes its reasoning, its text and its tool calls. Data only.

`format_analysis` derives a format from a chat template, `output_parser` reads answers by it, `call_grammar`
constrains calls to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec


class Slot:
    """Characters of private use. In a marker they stand for what differs from call to call."""

    NAME, ARGUMENTS, ID, INDEX, KEY, TYPE = "\ue010\ue011\ue012\ue013\ue014\ue015"


GEMMA_QUOTE = '<|"|>'
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


class Tool(msgspec.Struct, frozen=True):
    """A tool: a function the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = {}

    @property
    def schema(self) -> Mapping[str, Any]:
        return self.parameters or NO_PARAMETERS

    def for_template(self) -> dict[str, Any]:
        """The shape that published chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


class CallStyle(StrEnum):
    """How one call is written, between its opening and its closing."""

    JSON = "json"  # an object that holds name and arguments: {"name": "f", "arguments": {"a": 1}}
    NAMED = "named"  # a name, a separator, an object of arguments
    TAGGED = "tagged"  # a name, then each argument in tags: strings as they are, other values as JSON
    PYTHON = "python"  # f(a=1, b='text')
    GEMMA = "gemma"  # f{a:1,b:<|"|>text<|"|>}


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Tool calls: `section_opening`, calls with `between` two of them, `section_closing`.

    A call is `opening`, what its style says, `closing`. Markers include the blanks that belong to them.
    """

    style: CallStyle = CallStyle.JSON
    section_opening: str = ""
    section_closing: str = ""
    opening: str = ""
    closing: str = ""
    between: str = "\n"
    before: str = ""  # blanks between a text and the calls that follow it
    other_openings: tuple[str, ...] = ()  # markers that start calls as well
    # Of JSON: its keys in order, each with a slot or a constant (JSON text).
    keys: tuple[tuple[str, str], ...] = (("name", Slot.NAME), ("arguments", Slot.ARGUMENTS))
    compact: bool = False  # JSON without blanks
    after_name: str = ""  # of NAMED and TAGGED
    # Of TAGGED: an argument is key_opening, key, key_closing, value, value_closing.
    key_opening: str = ""
    key_closing: str = ""
    value_closing: str = ""
    between_values: str = ""
    types: tuple[tuple[str, str], ...] = ()  # JSON type to the word in the TYPE slot of `key_closing`
    nested: str = ""  # the mark before each tag, where objects and lists are written in tags as well
    cdata: bool = False  # a text may stand in <![CDATA[…]]>

    @property
    def start(self) -> str:
        """The text that starts calls, up to the first slot."""
        return split_slots(self.section_opening + self.opening)[0]

    @property
    def bare(self) -> bool:
        """Calls have no opening: an answer that starts like a call is one."""
        return not self.start.strip(" \n[")


class ChatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How one model writes an answer, and what its chat template takes.

    Reasoning stands between one of its openings and the next closing. Text may have markers around it
    (`text_openings`, `text_closings`) that are not part of it. `lead` ends the prompt of an answer where
    markers start with it.
    """

    reasoning_openings: tuple[str, ...] = ("<think>",)
    reasoning_closings: tuple[str, ...] = ("</think>",)
    text_openings: tuple[str, ...] = ()
    text_closings: tuple[str, ...] = ()
    after_text: str = ""  # blanks between a text and the end of the answer
    lead: str = ""
    exact: bool = False  # blanks beside markers are known; else all blanks there have no meaning
    calls: CallFormat = CallFormat()
    # What the template takes.
    takes_tools: bool = False  # it describes tools to the model
    writes_calls: bool = False  # it writes the calls of earlier messages
    one_call: bool = False  # one call a message
    reasoning_field: str = ""  # the field of a message that holds reasoning; "parts": a part of its content
    # Of the vocabulary: control tokens in the markers by their text, and the tokens around reasoning.
    tokens: tuple[tuple[str, int], ...] = ()
    opening_ids: tuple[int, ...] = ()
    closing_ids: tuple[int, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The control tokens that an answer's text must show."""
        return tuple(text for text, _ in self.tokens)

    @property
    def marker_texts(self) -> tuple[str, ...]:
        """All markers, without slots."""
        calls = self.calls
        marked = (
            *self.reasoning_openings,
            *self.reasoning_closings,
            *self.text_openings,
            *self.text_closings,
            *(calls.section_opening, calls.section_closing, calls.opening, calls.closing, calls.between),
            *(calls.after_name, calls.key_opening, calls.key_closing, calls.value_closing, calls.nested),
            *calls.other_openings,
            *((GEMMA_QUOTE,) if calls.style is CallStyle.GEMMA else ()),
        )
        return tuple(part for marker in marked for part in split_slots(marker)[::2] if part.strip())


GENERIC = ChatFormat()
"""Of models whose template knows no tools: a call is a JSON object on a line of its own."""

# Formats that cannot be derived ----------------------------------------------------------------------

_FILE = msgspec.toml.decode(Path(__file__).with_name("formats.toml").read_bytes())
# By a text that the template renders.
DECLARED: tuple[tuple[str, ChatFormat], ...] = tuple(
    (each["rendered"], msgspec.convert(each, ChatFormat)) for each in _FILE["declared"]
)
DESCRIBED: tuple[tuple[str, CallFormat], ...] = tuple(
    (each["rendered"], msgspec.convert(each, CallFormat)) for each in _FILE["described"]
)

# Calls as text ------------------------------------------------------------------------------------------


def split_slots(marker: str) -> list[str]:
    """The literals of a marker and, between them, its slots."""
    return re.split("([\ue010-\ue015])", marker)


def first_piece(marker: str) -> str:
    """The first line of a marker, up to its first slot, without blanks."""
    return split_slots(marker.strip())[0].partition("\n")[0].strip()


class WrittenCall(msgspec.Struct, frozen=True):
    """A tool call to be written."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


def write_calls(form: CallFormat, calls: Sequence[WrittenCall]) -> str:
    """Calls as the model writes them."""
    written = (
        _fill(form.opening, call, number) + write_call(form, call, number) + _fill(form.closing, call, number)
        for number, call in enumerate(calls)
    )
    return form.section_opening + form.between.join(written) + form.section_closing


def write_call(form: CallFormat, call: WrittenCall, number: int = 0) -> str:
    """One call, without its opening and closing."""
    if form.style is CallStyle.JSON:
        arguments = {Slot.ARGUMENTS: call.arguments, Slot.NAME: call.name}
        values: dict[str, Any] = {**arguments, Slot.ID: call.id, Slot.INDEX: str(number)}
        filled = {
            (call.name if key == Slot.NAME else key): values[slot] if slot in values else json.loads(slot)
            for key, slot in form.keys
        }
        return dump_json(filled, compact=form.compact)
    name = call.name + _fill(form.after_name, call, number)
    if form.style is CallStyle.NAMED:
        return name + dump_json(call.arguments, compact=form.compact)
    items = list(call.arguments.items())
    if form.style is CallStyle.PYTHON:
        written = (f"{key}={write_python(value)}" for key, value in items)
        return f"{call.name}({', '.join(written)})"
    if form.style is CallStyle.GEMMA:
        return call.name + write_gemma(call.arguments)
    return name + form.between_values.join(_write_argument(form, key, value) for key, value in items)


def _fill(marker: str, call: WrittenCall, number: int) -> str:
    return marker.replace(Slot.NAME, call.name).replace(Slot.ID, call.id).replace(Slot.INDEX, str(number))


def _write_argument(form: CallFormat, key: str, value: Any) -> str:
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    closing = form.key_closing.replace(Slot.TYPE, dict(form.types).get(get_type(value), ""))
    if form.nested and isinstance(value, dict | list):
        written = _write_tags(form.nested, value)
    return f"{form.key_opening}{key}{closing}{written}{form.value_closing.replace(Slot.KEY, key)}"


def _write_tags(mark: str, value: Any) -> str:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else (("item", item) for item in value)
        return "".join(f"{mark}<{key}>{_write_tags(mark, item)}{mark}</{key}>" for key, item in items)
    return value if isinstance(value, str) else json.dumps(value)


def write_python(value: Any) -> str:
    """A literal as it stands in a Python call; lists and objects as JSON."""
    return dump_json(value) if isinstance(value, Mapping | list) else repr(value)


def write_gemma(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{write_gemma(item)}" for key, item in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write_gemma, value)) + "]"
    return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}" if isinstance(value, str) else json.dumps(value)


def dump_json(value: Any, *, compact: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":") if compact else (", ", ": "))


def get_type(value: Any) -> str:
    """The JSON type of a value; whole numbers are `integer`."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds[type(value)]
