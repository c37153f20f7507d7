"""Neutral messages put together from the smaller pieces that some APIs send them in."""

from __future__ import annotations

from typing import Any

JOINT = "\n"  # between texts that become one message


class Turns:
    """Messages as `Conversation` takes them, built piece by piece.

    Calls and thoughts belong to the assistant's message beside them. System texts in a row are one message:
    templates know no second. With `combine`, so are texts in a row by anybody else.
    """

    def __init__(self, *, combine: bool = False) -> None:
        self.messages: list[dict[str, Any]] = []
        self._combine = combine

    def say(self, role: str, text: str) -> None:
        """Somebody's words."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != role or not (self._combine or role == "system" or _only_thoughts(last)):
            self.messages.append({"role": role, "content": text})
        else:
            last["content"] = JOINT.join(filter(None, (last["content"], text)))

    def think(self, text: str) -> None:
        """The assistant's thoughts, before the words or calls that they led to."""
        turn = self._assistant()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """The assistant called a tool; `arguments` is JSON text."""
        calls = self._assistant().setdefault("tool_calls", [])
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        """What a call returned."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _assistant(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _only_thoughts(message: dict[str, Any]) -> bool:
    return bool(message.get("reasoning_content")) and not message["content"] and "tool_calls" not in message
