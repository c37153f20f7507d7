"""The content blocks of `/v1/messages`: what was said, called, returned and thought so far."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from cllm.server.kinds import NO_EYES, kinds
from cllm.server.schema import Body, JsonObject, Text
from cllm.server.turns import JOINT, Turns

MOST_BLOCKS = 4096
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
Identifier = Annotated[str, Field(max_length=256)]
_EYELESS = {"image": NO_EYES, "document": NO_EYES}


class TextBlock(Body):
    """`cache_control` and `citations` are ignored: prefixes are cached without being asked."""

    type: Literal["text"] = Field(description="Always `text`")
    text: Text = Field(
        description="The text; control tokens spelled in it stay plain text", examples=["What is AI?"]
    )

    def add_to(self, turns: Turns, role: str) -> None:
        turns.say(role, self.text)


Texts = Annotated[
    list[Annotated[TextBlock, kinds("text", why=_EYELESS)]],
    Field(max_length=MOST_BLOCKS),
]


def text_of(content: str | list[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return JOINT.join(block.text for block in content)


class ToolUseBlock(Body):
    """A call the assistant made earlier."""

    type: Literal["tool_use"] = Field(description="Always `tool_use`")
    id: Identifier = Field(description="As the answer that made it gave it", examples=["toolu_1"])
    name: ToolName = Field(description="The tool that was called", examples=["get_weather"])
    input: JsonObject = Field(default={}, description="Its arguments", examples=[{"city": "Bern"}])

    def add_to(self, turns: Turns, role: str) -> None:
        turns.call(self.id, self.name, json.dumps(self.input, ensure_ascii=False))


class ToolResultBlock(Body):
    """What such a call returned."""

    type: Literal["tool_result"] = Field(description="Always `tool_result`")
    tool_use_id: Identifier = Field(description="Which call this answers", examples=["toolu_1"])
    content: Text | Texts | None = Field(
        None,
        description="Text, or blocks of text",
        examples=["12 degrees, rain", [{"type": "text", "text": "12 degrees, rain"}]],
    )
    is_error: bool = Field(False, description="The call failed: the model reads `Error: ` before the content")

    def add_to(self, turns: Turns, role: str) -> None:
        text = text_of(self.content)
        turns.result(self.tool_use_id, f"Error: {text}" if self.is_error else text)


class ThinkingBlock(Body):
    """What the assistant thought earlier, for templates that repeat it."""

    type: Literal["thinking"] = Field(description="Always `thinking`")
    thinking: Text = Field(description="The thoughts", examples=["The user wants to know what AI is."])
    signature: Text = Field("", description="Ignored: thoughts are not signed here", examples=[""])

    def add_to(self, turns: Turns, role: str) -> None:
        if self.thinking:
            turns.think(self.thinking)


class RedactedThinkingBlock(Body):
    type: Literal["redacted_thinking"] = Field(description="Ignored: nobody here can read it")

    def add_to(self, turns: Turns, role: str) -> None:
        """Nothing to add."""


UserBlock = Annotated[
    TextBlock | ToolResultBlock,
    Field(discriminator="type"),
    kinds("text", "tool_result", why=_EYELESS),
]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
    kinds("text", "tool_use", "thinking", "redacted_thinking", why=_EYELESS),
]
