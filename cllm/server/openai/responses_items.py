"""The input items of `/v1/responses`: what was said, called, returned and thought so far."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cllm.server.kinds import NO_EYES, kinds
from cllm.server.openai.chat_schema import MOST_MESSAGES, FunctionName
from cllm.server.openai.schema import Name
from cllm.server.schema import Body, Text
from cllm.server.turns import Turns

_STATELESS = "nothing is stored here, so nothing can be referred to; send the items themselves"
_EYELESS = {"input_image": NO_EYES, "input_file": NO_EYES, "input_audio": NO_EYES}


class ItemText(Body):
    type: Literal["input_text", "output_text", "text"] = Field(description="Who wrote it does not matter")
    text: Text = Field(description="The text of this part", examples=["What is AI?"])


class RefusalPart(Body):
    type: Literal["refusal"] = Field(description="What the assistant refused with")
    refusal: Text = Field(description="The text of this part", examples=["I would rather not."])

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[
    ItemText | RefusalPart,
    Field(discriminator="type"),
    kinds("input_text", "output_text", "text", "refusal", why=_EYELESS),
]
Parts = Annotated[list[Part], Field(max_length=MOST_MESSAGES)]


def text_of(content: str | list[ItemText | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class MessageItem(Body):
    """Somebody's words."""

    type: Literal["message"] = Field("message", description="May be left out")
    role: Literal["system", "developer", "user", "assistant"] = Field(description="Who speaks")
    content: Text | Parts = Field(
        description="Text, or parts of text; control tokens spelled in it stay plain text",
        examples=["What is AI?", [{"type": "input_text", "text": "What is AI?"}]],
    )

    def add_to(self, turns: Turns) -> None:
        turns.say("system" if self.role == "developer" else self.role, text_of(self.content))


class FunctionCallItem(Body):
    """A call the assistant made earlier."""

    type: Literal["function_call"] = Field(description="Always `function_call`")
    call_id: Name = Field(description="As the answer that made it gave it", examples=["call_1"])
    name: FunctionName = Field(description="The tool that was called", examples=["get_weather"])
    arguments: Text = Field("{}", description="Its arguments as JSON text")

    def add_to(self, turns: Turns) -> None:
        turns.call(self.call_id, self.name, self.arguments)


class FunctionOutputItem(Body):
    """What such a call returned."""

    type: Literal["function_call_output"] = Field(description="Always `function_call_output`")
    call_id: Name = Field(description="Which call this answers", examples=["call_1"])
    output: Text | Parts = Field(description="Text, or parts of text", examples=["12 degrees, rain"])

    def add_to(self, turns: Turns) -> None:
        turns.result(self.call_id, text_of(self.output))


class Thought(Body):
    type: Literal["reasoning_text", "summary_text"] = Field(description="What kind of text it is")
    text: Text = Field(description="The text of this part", examples=["The user wants to know what AI is."])


class ReasoningItem(Body):
    """What the assistant thought earlier, for templates that repeat it."""

    type: Literal["reasoning"] = Field(description="Always `reasoning`")
    content: Annotated[list[Thought], Field(max_length=MOST_MESSAGES)] | None = Field(
        None,
        description="The thoughts",
        examples=[[{"type": "reasoning_text", "text": "A short answer will do."}]],
    )
    summary: Annotated[list[Thought], Field(max_length=MOST_MESSAGES)] | None = Field(
        None,
        description="Used where there is no `content`",
        examples=[[{"type": "summary_text", "text": "A short answer will do."}]],
    )

    def add_to(self, turns: Turns) -> None:
        if text := "".join(thought.text for thought in self.content or self.summary or ()):
            turns.think(text)


Item = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem,
    Field(discriminator="type"),
    kinds(
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        default="message",
        why={"item_reference": _STATELESS},
    ),
]
