"""How a family of models writes tool calls: what every tool_format says about itself, and what they share."""

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
    """A function the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = {}

    @property
    def schema(self) -> Mapping[str, Any]:
        return self.parameters or NO_PARAMETERS

    def for_template(self) -> dict[str, Any]:
        """As published chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


class ToolFormat:
    """One family's way. Stateless; the subclasses differ in what they declare.

    A call is a JSON object between `opening` and `closing`. Where `bare` is set, an answer that begins with
    such an object is a call without any opening. `forced_opening` is put at the end of the prompt when a
    call is demanded: the grammar takes over behind it.
    """

    name: ClassVar[str]
    opening: ClassVar[str] = ""
    closing: ClassVar[str] = ""
    bare: ClassVar[bool] = False
    named_opening: ClassVar[str] = ""  # stands between a name and its arguments, where no object holds both
    argument_key: ClassVar[str] = "arguments"
    forced_opening: ClassVar[str] = ""
    before: ClassVar[str] = ""  # forced calls: before the first, between two, after the last
    between: ClassVar[str] = "\n"
    after: ClassVar[str] = ""
    separators: ClassVar[tuple[str, ...]] = ()  # may stand around calls, and mean nothing
    markers: ClassVar[tuple[str, ...]] = ()  # may be control tokens, which have no text of their own
    template_takes_tools: ClassVar[bool] = True

    def suits(self, template: str) -> bool:
        """Was this chat template written for it?"""
        raise NotImplementedError

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The conversation as the template wants it: arguments as objects, results with their tool's name."""
        names = {
            call["id"]: call["function"]["name"]
            for message in messages
            for call in message.get("tool_calls") or ()
        }
        return [_prepared(message, names) for message in messages]

    def forced(self, tools: Sequence[Tool], *, parallel: bool) -> ConstraintSpec:
        """A grammar of nothing but calls of these tools, each with arguments that fit its schema."""
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
                    self.argument_key: _moved(
                        _closed(tool.schema), f"#{place}/properties/{self.argument_key}"
                    ),
                },
                "required": ["name", self.argument_key],
                "additionalProperties": False,
            }
            for tool, place in zip(tools, places, strict=True)
        ]
        # Blanks as models were trained to write them, and no others: they could go on for ever.
        style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "x-guidance": style}


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments of a tool that takes none are `{}`: without this, any object fits, of any length."""
    empty = not schema.get("properties") and schema.keys() <= {"type", "properties", "required", "title"}
    return {**schema, "additionalProperties": False} if empty else schema


def _moved(schema: Any, place: str) -> Any:
    """A schema that now lies at `place` in another: what it refers to moves along."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    return [_moved(item, place) for item in schema] if isinstance(schema, list) else schema


def _prepared(message: Message, names: Mapping[str, str]) -> Message:
    prepared = {**message, "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        prepared["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": arguments_of(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    if message["role"] == "tool":
        prepared.setdefault("name", names.get(message.get("tool_call_id", ""), "tool"))
    return prepared


def arguments_of(text: str) -> Any:
    """Arguments as an object, if they are one; the text itself otherwise."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
