"""Tool-call formats that chat templates declare themselves: Hermes (and Qwen), Llama 3, Mistral."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from cllm.text.tool_formats.base import Message, Tool, ToolFormat


class Hermes(ToolFormat):
    """Hermes, Qwen and others: `<tool_call>{"name": …, "arguments": …}</tool_call>`."""

    name = "hermes"
    opening = "<tool_call>"
    closing = "</tool_call>"
    forced_opening = "<tool_call>\n"
    between = "\n</tool_call>\n<tool_call>\n"
    after = "\n</tool_call>"
    markers = ("<tool_call>", "</tool_call>")

    def matches(self, template: str) -> bool:
        return "<tool_call>" in template


class Llama3(ToolFormat):
    """Llama 3: `{"name": …, "parameters": …}`, with or without `<|python_tag|>` before it."""

    name = "llama3"
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

    name = "mistral"
    opening = "[TOOL_CALLS]"
    named_opening = "[ARGS]"
    forced_opening = "[TOOL_CALLS]"
    before = "["
    between = ", "
    after = "]"
    separators = ("[", "]", ",")
    markers = ("[TOOL_CALLS]", "[ARGS]")

    def matches(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template

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
