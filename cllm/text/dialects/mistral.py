"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": …}, …]`, lately `[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from cllm.text.dialects.base import Dialect, Message, Tool


class Mistral(Dialect):
    name = "mistral"
    opening = "[TOOL_CALLS]"
    named_opening = "[ARGS]"
    forced_opening = "[TOOL_CALLS]"
    before = "["
    between = ", "
    after = "]"
    markers = ("[TOOL_CALLS]", "[ARGS]")

    def suits(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Its templates refuse ids that are not nine letters or digits."""
        prepared = super().prepare(messages, tools)
        for message in prepared:
            for call in message.get("tool_calls") or []:
                call["id"] = _short(call["id"])
            if "tool_call_id" in message:
                message["tool_call_id"] = _short(message["tool_call_id"])
        return prepared


def _short(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
