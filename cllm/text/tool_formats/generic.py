"""Generic tool-call format, for chat templates without tools: instructions in words, calls as JSON lines."""

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

# The error by which templates refuse a system message.
_NO_SYSTEM = re.compile(r"""raise_exception\(\s*["'][^"']*\bsystem\b""", re.IGNORECASE)


class Generic(ToolFormat):
    """Describes the tools in the system message; a call is a JSON object on a line of its own."""

    name = "generic"
    bare = True
    template_takes_tools = False
    separators = ("[", "]", ",", ";")

    def __init__(self, template: str = "") -> None:
        self._takes_system = _NO_SYSTEM.search(template) is None

    def matches(self, template: str) -> bool:
        return True

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Tools go into the system message (or the first), calls into text, results into user messages."""
        prepared: list[Message] = []
        for message in super().prepare(messages, tools):
            calls = message.pop("tool_calls", None) or []
            content = message["content"]
            if calls:
                lines = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
                content = "\n".join([content, *lines] if content else lines)
            if message["role"] == "tool":
                content = f"Result of {message['name']}: {content}"
                if prepared and prepared[-1].get("results"):
                    prepared[-1]["content"] += f"\n{content}"
                    continue
                prepared.append({"role": "user", "content": content, "results": True})
            else:
                prepared.append({**message, "content": content})
        for message in prepared:
            message.pop("results", None)
        return self._with_instructions(prepared, tools) if tools else prepared

    def _with_instructions(self, prepared: list[Message], tools: Sequence[Tool]) -> list[Message]:
        described = (json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)
        text = INSTRUCTIONS.format(tools="\n".join(described))
        if prepared and prepared[0]["role"] == "system":
            return [{**prepared[0], "content": f"{prepared[0]['content']}\n\n{text}"}, *prepared[1:]]
        if prepared and prepared[0]["role"] == "user" and not self._takes_system:
            return [{**prepared[0], "content": f"{text}\n\n{prepared[0]['content']}"}, *prepared[1:]]
        return [{"role": "system", "content": text}, *prepared]
