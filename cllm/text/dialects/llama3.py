"""Llama 3.1 and later: the answer is `{"name": …, "parameters": …}`, `; ` between several."""

from __future__ import annotations

from collections.abc import Sequence

from cllm.text.dialects.base import Dialect, Message, Tool


class Llama3(Dialect):
    name = "llama3"
    opening = "<|python_tag|>"
    bare = True
    argument_key = "parameters"
    between = "; "
    markers = ("<|python_tag|>",)

    def suits(self, template: str) -> bool:
        return "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template)

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Its template takes one call a message: several become turns of their own, each with its result."""
        prepared = super().prepare(messages, tools)
        results = {message.get("tool_call_id"): message for message in prepared if message["role"] == "tool"}
        turns: list[Message] = []
        for message in prepared:
            calls = message.get("tool_calls") or []
            if len(calls) < 2:
                if message["role"] != "tool" or message.get("tool_call_id") in results:
                    turns.append(message)
                continue
            for call in calls:
                turns.append({**message, "tool_calls": [call]})
                if (result := results.pop(call["id"], None)) is not None:
                    turns.append(result)
        return turns
