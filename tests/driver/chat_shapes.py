"""Shapes of conversations that agents send, for every chat template."""

from __future__ import annotations

from typing import Any, NamedTuple

from cllm.chat.conversation import Conversation, normalize_messages
from cllm.text.chat_format import Tool
from cllm.text.prompt import Chat

Message = dict[str, Any]
CITY = {"city": {"type": "string", "description": "Its name"}}
TOOLS = (
    Tool(
        *("get_weather", "The weather in a city"),
        {"type": "object", "properties": CITY, "required": ["city"]},
    ),
    Tool("now", "The time", {}),
)


class Shape(NamedTuple):
    """Messages as a client sends them, and words of them that no template may lose."""

    messages: list[Message]
    words: str
    tools: tuple[Tool, ...] = ()

    def chat(self, **options: Any) -> Chat:
        """What the tokenizer gets of it."""
        conversation = Conversation(
            messages=normalize_messages(self.messages), tools=self.tools, options=options
        )
        return conversation.for_template()


def say(role: str, text: Any, **more: Any) -> Message:
    return {"role": role, "content": text, **more}


def call(name: str, arguments: Any, call_id: str | None = "call_0123456789abcdef") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = say("system", "Sirius: be brief.")
ASK = say("user", "Altair asks: how is it?")
ANSWER = say("assistant", "Vega answers.")
MORE = say("user", "Deneb asks more.")
WEATHER = call("get_weather", '{"city": "Rigel"}')
NOW = call("now", "{}", "call_2")
CALLING = say("assistant", None, tool_calls=[WEATHER])
RESULT = say("tool", "Pollux: rain", tool_call_id="call_0123456789abcdef")
SECOND = say("tool", "Castor: noon", tool_call_id="call_2")
LATER = say("system", "Antares: a reminder.")
THINKING = say("assistant", "Vega answers.", reasoning_content="Mira thinks.")
BROKEN = call("get weather!", '{"city": "Rigel', None)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}

SHAPES = {
    "system": Shape([SYSTEM, ASK, ANSWER, MORE], "Sirius Altair Vega Deneb"),
    "mid-system": Shape([SYSTEM, ASK, LATER, ANSWER, LATER, MORE], "Sirius Altair Antares Vega Deneb"),
    "tools": Shape([SYSTEM, ASK], "Sirius Altair get_weather", TOOLS),
    "two calls": Shape(
        [ASK, say("assistant", "", tool_calls=[WEATHER, NOW]), RESULT, SECOND, ANSWER, MORE],
        "Altair get_weather Rigel now Pollux Castor Vega Deneb",
        TOOLS,
    ),
    "results": Shape([SYSTEM, ASK, CALLING, RESULT], "Sirius Altair get_weather Rigel Pollux", TOOLS),
    "text beside results": Shape(
        [ASK, CALLING, RESULT, MORE, LATER], "Altair get_weather Rigel Pollux Deneb Antares", TOOLS
    ),
    "thoughts": Shape(
        [ASK, THINKING, MORE, {**CALLING, "reasoning_content": "Mira thinks."}, RESULT],
        "Altair Vega Deneb get_weather Rigel Pollux",
        TOOLS,
    ),
    "continuation": Shape([SYSTEM, ASK, ANSWER], "Sirius Altair Vega"),
    "broken arguments": Shape(
        [
            ASK,
            say("assistant", "", tool_calls=[BROKEN, call("now", None, None)]),
            say("tool", "Pollux"),
            MORE,
        ],
        "Altair Rigel Pollux Deneb",
        TOOLS,
    ),
    "images left out": Shape(
        [say("user", [{"type": "text", "text": "Altair asks"}, IMAGE]), ANSWER, MORE],
        "Altair left Vega Deneb",
    ),
    "two users in a row": Shape([SYSTEM, ASK, MORE, ANSWER, ANSWER, ASK], "Sirius Altair Deneb Vega"),
    "assistant first": Shape([ANSWER, say("assistant", ""), RESULT, ASK], "Vega Pollux Altair"),
}
# A conversation that has all of them, one turn after the other.
GROWING = [
    *(SYSTEM, ASK, ANSWER, LATER, MORE, say("assistant", "Vega, again.")),
    *(say("user", "Two in"), say("user", "a row."), CALLING, RESULT, say("user", "Text beside it.")),
    say("assistant", "", tool_calls=[call("get_weather", "{broken", "call_3"), call("now", {}, "call_4")]),
    say("tool", "Bellatrix", tool_call_id="call_3"),
    say("tool", "Alnitak", tool_call_id="call_4"),
    say("system", "Antares, after results."),
    say("assistant", "Done."),
    say("tool", "Mintaka: a result of no call", tool_call_id="call_9"),
    say("user", "Thanks."),
]
