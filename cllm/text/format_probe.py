"""Format probe: conversations of unmistakable words, as a chat template renders them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cllm.errors import InvalidRequest
from cllm.text.chat_format import Tool

Message = dict[str, Any]
Render = Callable[..., str]
USER, TEXT, REASON = "xquser", "xqtext", "xqreason"
NAMES, IDS = ("xqtoola", "xqtoolb"), ("xqcalla01", "xqcallb02")
KEYS, VALUES = ("xqkeya", "xqkeyb", "xqkeyc"), ("xqvala", "xqvalb", "xqvalc")
FIELDS = ("reasoning_content", "reasoning", "thinking")
# One value of each JSON type; nothing of them is a word of the markers.
TYPED: Mapping[str, Any] = {
    "string": VALUES[0],
    "integer": 90817,
    "number": 908.17,
    "boolean": True,
    "object": {"xqdeep": VALUES[1]},
    "array": [VALUES[1]],
    "null": None,
}


class Probe:
    """Renders probe conversations; finds out on its way which messages the template takes."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.argument_text = False
        self._content: str | None = ""  # of messages that only call
        self.tools = [_tool(name) for name in NAMES]
        self._tools = tools = [tool.for_template() for tool in self.tools]
        self.prompt = self._tail([], add_generation_prompt=True)
        self.text = self._tail([assistant(TEXT)])
        self.takes_tools = NAMES[0] in (self._try([], tools=tools) or "").replace(USER, "")
        self.call, self.calls = self._find_calls()
        self.one_call = not self.calls

    def _find_calls(self) -> tuple[str, str]:
        for self.argument_text in (False, True):
            for self._content in ("", None):
                call = self.calling(1)
                if NAMES[0] in call and call.count('\\"') == 0:
                    calls = self.calling(2)
                    return call, calls if NAMES[1] in calls else ""
        self.argument_text, self._content = False, ""
        return "", ""

    def calling(self, count: int, **fields: Any) -> str:
        """A message of one or two calls."""
        arguments = ({KEYS[0]: VALUES[0], KEYS[1]: VALUES[1]}, {KEYS[2]: VALUES[2]})
        calls = [self._call(number, arguments[number]) for number in range(count)]
        return self._tail([{**assistant(self._content), "tool_calls": calls, **fields}])

    def calling_with(self, arguments: Mapping[str, Any]) -> str:
        return self._tail([{**assistant(self._content), "tool_calls": [self._call(0, arguments)]}])

    def saying(self, text: Any, **fields: Any) -> str:
        return self._tail([{**assistant(text), **fields}])

    def _call(self, number: int, arguments: Mapping[str, Any]) -> Message:
        given = json.dumps(arguments) if self.argument_text else dict(arguments)
        function = {"name": NAMES[number], "arguments": given}
        return {"id": IDS[number], "type": "function", "function": function}

    def _tail(self, messages: Sequence[Message], **options: Any) -> str:
        """What follows the user's word; empty where the template refuses."""
        rendered = self._try(messages, tools=self._tools, **options) or self._try(messages, **options) or ""
        return rendered.rpartition(USER)[2]

    def _try(self, messages: Sequence[Message], **options: Any) -> str:
        given = {"messages": [{"role": "user", "content": USER}, *messages], "tools": None, **options}
        given.setdefault("add_generation_prompt", False)
        switches = {"enable_thinking": True, "thinking": True}
        known = {"functions": json.dumps(given["tools"]), "datetime": "now", "date_string": "now"}
        try:
            return self._render(**{**known, **switches, **given})
        except InvalidRequest:
            return ""

    @property
    def rendered(self) -> str:
        """Everything that a declared format may be chosen by."""
        whole = self._try([], tools=self._tools, add_generation_prompt=True)
        return "\n".join((whole, self.text, self.call, self.saying(TEXT, thinking=REASON)))


def assistant(content: Any) -> Message:
    return {"role": "assistant", "content": content}


def _tool(name: str) -> Tool:
    properties = {key: {"type": "string", "description": "d"} for key in KEYS}
    return Tool(name, "d", {"type": "object", "properties": properties, "required": [KEYS[0]]})
