"""Tool-call formats of model families; the chat template decides which one applies."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cllm.text.chat_format import GENERIC, ChatFormat, Tool

Message = dict[str, Any]
INSTRUCTIONS = """\
You can call these tools, described as JSON:
{tools}
To call one, answer with nothing but a JSON object on a line of its own: \
{{"name": "the tool's name", "arguments": {{its arguments}}}}. If no tool is needed, answer in words."""

# The error by which templates refuse a system message.
_NO_SYSTEM = re.compile(r"""raise_exception\(\s*["'][^"']*\bsystem\b""", re.IGNORECASE)


class ToolFormat:
    """What a template takes of earlier tool calls. Stateless."""

    template_takes_tools: ClassVar[bool] = True

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Messages for the template: call arguments as objects, results with the name of their tool."""
        names = {
            call["id"]: call["function"]["name"]
            for message in messages
            for call in message.get("tool_calls") or ()
        }
        return [_prepare(message, names) for message in messages]


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


class Llama3(ToolFormat):
    """One call a message."""

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
    """Short ids."""

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

    template_takes_tools = False

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


def get_tool_format(chat_format: ChatFormat, template: str | None) -> ToolFormat:
    """What the template takes; those that describe no tools, or write no calls, get the generic one."""
    if not chat_format.takes_tools or chat_format.calls == GENERIC.calls:
        return Generic(template or "")
    if "[TOOL_CALLS]" in chat_format.calls.start:
        return Mistral()
    return Llama3() if chat_format.one_call else ToolFormat()
