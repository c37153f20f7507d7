"""Hermes, Qwen and many who follow them: `<tool_call>{"name": …, "arguments": …}</tool_call>`."""

from __future__ import annotations

from cllm.text.dialects.base import Dialect


class Hermes(Dialect):
    name = "hermes"
    opening = "<tool_call>"
    closing = "</tool_call>"
    forced_opening = "<tool_call>\n"
    between = "\n</tool_call>\n<tool_call>\n"
    after = "\n</tool_call>"
    markers = ("<tool_call>", "</tool_call>")

    def suits(self, template: str) -> bool:
        return "<tool_call>" in template
