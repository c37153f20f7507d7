"""Base of the tool-call formats: what each declares, the grammar of forced calls, message preparation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from cllm.types import ConstraintKind, ConstraintSpec

Message = dict[str, Any]
MAX_CALLS = 16  # in one forced answer
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


class ToolFormat:
    """Tool-call format of one model family. Stateless; subclasses differ in what they declare.

    A call is a JSON object between `opening` and `closing`. With `bare`, an answer that starts with such an
    object is a call without any opening. `forced_opening` ends the prompt when a call is required; the
    grammar applies from there.
    """

    name: ClassVar[str]
    opening: ClassVar[str] = ""
    closing: ClassVar[str] = ""
    bare: ClassVar[bool] = False
    named_opening: ClassVar[str] = ""  # between a name and its arguments, where no object holds both
    argument_key: ClassVar[str] = "arguments"
    forced_opening: ClassVar[str] = ""
    before: ClassVar[str] = ""  # of forced calls: before the first, between two, after the last
    between: ClassVar[str] = "\n"
    after: ClassVar[str] = ""
    separators: ClassVar[tuple[str, ...]] = ()  # allowed around calls, without a meaning
    markers: ClassVar[tuple[str, ...]] = ()  # possibly control tokens, which have no text
    template_takes_tools: ClassVar[bool] = True

    def matches(self, template: str) -> bool:
        """Whether the chat template was written for this format."""
        raise NotImplementedError

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Messages for the template: call arguments as objects, results with the name of their tool."""
        names = {
            call["id"]: call["function"]["name"]
            for message in messages
            for call in message.get("tool_calls") or ()
        }
        return [_prepare(message, names) for message in messages]

    def make_call_grammar(self, tools: Sequence[Tool], *, parallel: bool) -> ConstraintSpec:
        """Grammar of forced calls: only calls of these tools, with arguments valid by their schemas."""
        schema = json.dumps(self._schema(tools))
        more = f"(BETWEEN call){{0,{MAX_CALLS - 1}}}" if parallel else ""
        parts = [
            f"start: {'BEFORE' if self.before else ''} call {more} {'AFTER' if self.after else ''}",
            f"call: %json {schema}",
        ]
        for terminal, text in (("BEFORE", self.before), ("BETWEEN", self.between), ("AFTER", self.after)):
            if text:
                parts.append(f"{terminal}: {json.dumps(text)}")
        return ConstraintSpec(ConstraintKind.TOOLS, "\n".join(parts))

    def _schema(self, tools: Sequence[Tool]) -> dict[str, Any]:
        places = [f"/anyOf/{index}" for index in range(len(tools))] if len(tools) > 1 else [""]
        calls: list[dict[str, Any]] = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    self.argument_key: _relocate(
                        _forbid_extra_arguments(tool.schema), f"#{place}/properties/{self.argument_key}"
                    ),
                },
                "required": ["name", self.argument_key],
                "additionalProperties": False,
            }
            for tool, place in zip(tools, places, strict=True)
        ]
        # Only the blanks that models were trained to write: free whitespace could go on without end.
        style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "x-guidance": style}


def _forbid_extra_arguments(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Close the schema of a tool without parameters: otherwise any object of any length is valid."""
    empty = not schema.get("properties") and schema.keys() <= {"type", "properties", "required", "title"}
    return {**schema, "additionalProperties": False} if empty else schema


def _relocate(schema: Any, place: str) -> Any:
    """Embed a schema at `place` of another one: its local references are adjusted."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _relocate(value, place)
            for key, value in schema.items()
        }
    return [_relocate(item, place) for item in schema] if isinstance(schema, list) else schema


def _prepare(message: Message, names: Mapping[str, str]) -> Message:
    prepared = {**message, "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        prepared["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": _parse_arguments(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    if message["role"] == "tool":
        prepared.setdefault("name", names.get(message.get("tool_call_id", ""), "tool"))
    return prepared


def _parse_arguments(text: str) -> Any:
    """Arguments as an object; text that is no JSON object stays text."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
