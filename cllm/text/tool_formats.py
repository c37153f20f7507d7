"""Tool-call formats of model families; the chat template decides which one applies."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from cllm.types import ConstraintKind, ConstraintSpec

Message = dict[str, Any]
MAX_CALLS = 16  # in one forced answer
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
INSTRUCTIONS = """\
You can call these tools, described as JSON:
{tools}
To call one, answer with nothing but a JSON object on a line of its own: \
{{"name": "the tool's name", "arguments": {{its arguments}}}}. If no tool is needed, answer in words."""

# The error by which templates refuse a system message.
_NO_SYSTEM = re.compile(r"""raise_exception\(\s*["'][^"']*\bsystem\b""", re.IGNORECASE)


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
        return self.opening in template

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
        key = self.argument_key
        calls: list[dict[str, Any]] = []
        for tool, place in zip(tools, places, strict=True):
            arguments = _relocate(_forbid_extra_arguments(tool.schema), f"#{place}/properties/{key}")
            properties = {"name": {"const": tool.name}, key: arguments}
            required = {"required": ["name", key], "additionalProperties": False}
            calls.append({"type": "object", "properties": properties, **required})
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
            {"id": call["id"], "type": "function", "function": _parse_function(call["function"])}
            for call in calls
        ]
    if message["role"] == "tool":
        prepared.setdefault("name", names.get(message.get("tool_call_id", ""), "tool"))
    return prepared


def _parse_function(function: Mapping[str, Any]) -> dict[str, Any]:
    """Name and arguments, these as an object; text that is no JSON object stays text."""
    arguments = function["arguments"]
    parsed = parse_object(arguments or "{}")
    return {"name": function["name"], "arguments": arguments if parsed is None else parsed}


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Hermes(ToolFormat):
    """Hermes, Qwen and others: `<tool_call>{"name": …, "arguments": …}</tool_call>`."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    forced_opening = "<tool_call>\n"
    between = "\n</tool_call>\n<tool_call>\n"
    after = "\n</tool_call>"
    markers = ("<tool_call>", "</tool_call>")


class Llama3(ToolFormat):
    """Llama 3: `{"name": …, "parameters": …}`, with or without `<|python_tag|>` before it."""

    opening = "<|python_tag|>"
    bare = True
    argument_key = "parameters"
    between = "; "
    separators = ("[", "]", ",", ";")
    markers = ("<|python_tag|>",)

    def matches(self, template: str) -> bool:
        return "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template)

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Split messages of several calls: the template takes one call a message, followed by its result."""
        prepared = super().prepare(messages, tools)
        results = {message.get("tool_call_id"): message for message in prepared if message["role"] == "tool"}
        split: list[Message] = []
        for message in prepared:
            calls = message.get("tool_calls") or []
            if len(calls) < 2:
                if message["role"] != "tool" or message.get("tool_call_id") in results:
                    split.append(message)
                continue
            for call in calls:
                split.append({**message, "tool_calls": [call]})
                if (result := results.pop(call["id"], None)) is not None:
                    split.append(result)
        return split


class Mistral(ToolFormat):
    """Mistral: `[TOOL_CALLS][{"name": …, "arguments": …}]`, or `[TOOL_CALLS]name[ARGS]{…}`."""

    opening = "[TOOL_CALLS]"
    named_opening = "[ARGS]"
    forced_opening = "[TOOL_CALLS]"
    before = "["
    between = ", "
    after = "]"
    separators = ("[", "]", ",")
    markers = ("[TOOL_CALLS]", "[ARGS]")

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The templates accept only call ids of nine letters or digits."""
        prepared = super().prepare(messages, tools)
        for message in prepared:
            for call in message.get("tool_calls") or []:
                call["id"] = _shorten(call["id"])
            if "tool_call_id" in message:
                message["tool_call_id"] = _shorten(message["tool_call_id"])
        return prepared


def _shorten(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


class Generic(ToolFormat):
    """Describes the tools in the system message; a call is a JSON object on a line of its own."""

    bare = True
    template_takes_tools = False
    separators = ("[", "]", ",", ";")

    def __init__(self, template: str = "") -> None:
        self._takes_system = _NO_SYSTEM.search(template) is None

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Tools go into the system message (or the first), calls into text, results into user messages."""
        prepared: list[Message] = []
        after_result = False
        for message in super().prepare(messages, tools):
            calls = message.pop("tool_calls", None) or ()
            lines = (json.dumps(call["function"], ensure_ascii=False) for call in calls)
            content = message["content"]
            if is_result := message["role"] == "tool":
                message, content = {"role": "user"}, f"Result of {message['name']}: {content}"
            if is_result and after_result:
                prepared[-1]["content"] += f"\n{content}"
            else:
                prepared.append({**message, "content": "\n".join(filter(None, (content, *lines)))})
            after_result = is_result
        return self._with_instructions(prepared, tools) if tools else prepared

    def _with_instructions(self, prepared: list[Message], tools: Sequence[Tool]) -> list[Message]:
        described = (json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)
        text = INSTRUCTIONS.format(tools="\n".join(described))
        if prepared and prepared[0]["role"] == "system":
            return [{**prepared[0], "content": f"{prepared[0]['content']}\n\n{text}"}, *prepared[1:]]
        if prepared and prepared[0]["role"] == "user" and not self._takes_system:
            return [{**prepared[0], "content": f"{text}\n\n{prepared[0]['content']}"}, *prepared[1:]]
        return [{"role": "system", "content": text}, *prepared]


def get_tool_format(template: str | None) -> ToolFormat:
    """The format that the chat template was written for; templates without tools get the generic one."""
    template = template or ""
    formats: tuple[ToolFormat, ...] = (Mistral(), Hermes(), Llama3(), Generic(template))
    return next(tool_format for tool_format in formats if tool_format.matches(template))
