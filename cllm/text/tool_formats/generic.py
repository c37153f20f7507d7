"""For templates that know nothing of tools: they are described in words, and a call is a line of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from cllm.text.tool_formats.base import Message, Tool, ToolFormat

INSTRUCTIONS = """\
You can call these tools, described as JSON:
{tools}
To call one, answer with nothing but a JSON object on a line of its own: \
{{"name": "the tool's name", "arguments": {{its arguments}}}}. If no tool is needed, answer in words."""


# How templates that take no system message say so.
_NO_SYSTEM = re.compile(r"""raise_exception\(\s*["'][^"']*\bsystem\b""", re.IGNORECASE)


class Generic(ToolFormat):
    name = "generic"
    bare = True
    template_takes_tools = False
    separators = ("[", "]", ",", ";")

    def __init__(self, template: str = "") -> None:
        self._takes_system = _NO_SYSTEM.search(template) is None

    def suits(self, template: str) -> bool:
        return True

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Tools go into the system message (or the first); calls become text, results the user's words."""
        turns: list[Message] = []
        for message in super().prepare(messages, tools):
            calls = message.pop("tool_calls", None) or []
            content = message["content"]
            if calls:
                lines = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
                content = "\n".join([content, *lines] if content else lines)
            if message["role"] == "tool":
                content = f"Result of {message['name']}: {content}"
                if turns and turns[-1].get("results"):
                    turns[-1]["content"] += f"\n{content}"
                    continue
                turns.append({"role": "user", "content": content, "results": True})
            else:
                turns.append({**message, "content": content})
        for turn in turns:
            turn.pop("results", None)
        return self._with_instructions(turns, tools) if tools else turns

    def _with_instructions(self, turns: list[Message], tools: Sequence[Tool]) -> list[Message]:
        described = (json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)
        text = INSTRUCTIONS.format(tools="\n".join(described))
        if turns and turns[0]["role"] == "system":
            return [{**turns[0], "content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
        if turns and turns[0]["role"] == "user" and not self._takes_system:
            return [{**turns[0], "content": f"{text}\n\n{turns[0]['content']}"}, *turns[1:]]
        return [{"role": "system", "content": text}, *turns]
