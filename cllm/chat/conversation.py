"""Conversation: messages, tools and template options, from whichever API they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from cllm.text.chat_format import Tool
from cllm.text.tool_formats import ToolFormat
from cllm.workers.messages import Chat

MESSAGE_JOINT = "\n"  # between texts that become one message


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What the model replies to. Messages have `role`, `content` and, in OpenAI's shape, `tool_calls`
    (arguments as JSON text) and `tool_call_id`."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Tool, ...] = ()  # those that may be called
    forced: bool = False  # at least one must be called
    parallel: bool = True  # one reply may have several calls
    options: dict[str, Any] = {}  # variables of the chat template
    reasoning: bool = True  # False: reasoning stays in the text
    think: bool = True  # False: reasoning that the template opens is closed

    @property
    def prefill(self) -> str:
        """The text that the reply continues: that of an assistant's message at the end."""
        last = self.messages[-1]
        continued = last["role"] == "assistant" and not last.get("tool_calls")
        return str(last.get("content") or "") if continued else ""

    def for_template(self, tool_format: ToolFormat, *, constrained: bool = False) -> Chat:
        """The conversation as the chat template takes it; a constrained answer has no reasoning."""
        messages = self.messages[:-1] if self.prefill else self.messages
        shown = self.tools if tool_format.template_takes_tools else ()
        return Chat(
            messages=tuple(tool_format.prepare(messages, self.tools)),
            tools=tuple(tool.for_template() for tool in shown),
            options=self.options,
            prefill=self.prefill,
            think=self.think and not constrained and not self.prefill,
        )


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether tools may or must be called, and which."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()  # only these; empty: any
    parallel: bool = True

    def check(self, names: Sequence[str]) -> None:
        """Raises ValueError if names of tools repeat, or if a tool that must be called is missing."""
        if len(set(names)) < len(names):
            raise ValueError("tools: two tools have the same name")
        for name in self.names:
            if name not in names:
                raise ValueError(f"tool_choice: {name!r} is not among the tools")
        if self.mode == "required" and not names:
            raise ValueError("tool_choice: required needs tools")

    def apply(self, tools: Sequence[Tool]) -> dict[str, Any]:
        """The fields of `Conversation` that follow from the choice."""
        allowed = [] if self.mode == "none" else tools
        chosen = tuple(tool for tool in allowed if not self.names or tool.name in self.names)
        return {"tools": chosen, "forced": self.mode == "required", "parallel": self.parallel}


class MessageBuilder:
    """Messages of a `Conversation`, built piece by piece.

    Tool calls and reasoning belong to the assistant's message beside them. Consecutive system texts become
    one message, because templates take only one. With `combine`, so do consecutive texts of any role.
    """

    def __init__(self, *, combine: bool = False) -> None:
        self.messages: list[dict[str, Any]] = []
        self._combine = combine

    def add_text(self, role: str, text: str) -> None:
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != role or not (self._combine or role == "system" or _only_reasoning(last)):
            self.messages.append({"role": role, "content": text})
        else:
            last["content"] = MESSAGE_JOINT.join(filter(None, (last["content"], text)))

    def add_reasoning(self, text: str) -> None:
        """The assistant's reasoning, before the text or the calls that it led to."""
        message = self._assistant()
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def add_tool_call(self, call_id: str, name: str, arguments: str) -> None:
        """A call by the assistant; `arguments` is JSON text."""
        calls = self._assistant().setdefault("tool_calls", [])
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_tool_result(self, call_id: str, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _assistant(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _only_reasoning(message: dict[str, Any]) -> bool:
    return bool(message.get("reasoning_content")) and not message["content"] and "tool_calls" not in message


def normalize_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's shape as chat templates take it: plain text content, no `developer` role."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": content}


def make_template_options(given: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Variables of the chat template; a reasoning effort sets two, unless they are given."""
    options = dict(given or {})
    if effort is not None:
        options.setdefault("reasoning_effort", effort)
        options.setdefault("enable_thinking", effort != "none")
    return options
