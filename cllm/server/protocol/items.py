"""What `/v1/responses` takes: the items of its input, and its tools."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from cllm.chat.conversation import MESSAGE_JOINT, TEXT_PARTS, MessageBuilder, note_media, write_arguments
from cllm.server.protocol import chat
from cllm.server.protocol.base import Body, JsonObject, JsonValue, Text, ToolDescription, skip_tools
from cllm.server.protocol.chat import MAX_MESSAGES, MAX_TOOLS, FunctionBody, FunctionName
from cllm.text.chat_format import Tool

log = logging.getLogger(__name__)
CUSTOM_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
CALLABLE = skip_tools("function", "custom", default="function")


class FunctionTool(FunctionBody):
    type: Literal["function"] = Field(description="Always `function`")


class CustomTool(Body):
    """A tool whose argument is a text. The model sees a function with the argument `input`."""

    type: Literal["custom"] = Field(description="Always `custom`")
    name: FunctionName = Field(description="Letters, digits, `_`, `-` and `.`, at most 256")
    description: ToolDescription = None
    format: dict[str, Any] | None = Field(
        None, description="A grammar in it is shown to the model, not enforced", examples=[{"type": "text"}]
    )

    def tool(self) -> Tool:
        grammar = (self.format or {}).get("definition")
        described = (self.description, grammar and f"The input follows this grammar:\n{grammar}")
        return Tool(self.name, "\n\n".join(filter(None, described)), CUSTOM_INPUT)


ResponseTool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]
ResponseTools = Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS), CALLABLE]


class ItemPart(Body):
    """A part of a message. In the history, what is no text is replaced by a note."""

    type: Annotated[Text, Field(max_length=64)] = Field(
        description="`input_text`, `output_text`, `text`, `refusal`; else refused in the last question",
        examples=["input_text"],
    )
    text: Text | None = Field(None, description="The text of this part", examples=[chat.QUESTION])
    refusal: Text | None = Field(None, description="The text of a refusal", examples=["Rather not."])

    @property
    def is_text(self) -> bool:
        return self.type in TEXT_PARTS

    @model_validator(mode="after")
    def _has_text(self) -> ItemPart:
        if self.is_text and self.text is None and self.refusal is None:
            raise ValueError("'text' is missing")
        return self


Parts = Annotated[list[ItemPart], Field(max_length=MAX_MESSAGES)]


def join_text(content: str | list[ItemPart]) -> str:
    if isinstance(content, str):
        return content
    return MESSAGE_JOINT.join(
        (part.text or part.refusal or "") if part.is_text else note_media(part.type) for part in content
    )


class MessageItem(Body):
    type: Literal["message"] | None = Field("message", description="May be left out", examples=["message"])
    role: Literal["system", "developer", "user", "assistant"] = Field(description="The author")
    content: Text | Parts = Field(
        description="Text, or parts of text; the text of control tokens stays plain text",
        examples=[chat.QUESTION, [{"type": "input_text", "text": chat.QUESTION}]],
    )

    def add_to(self, builder: MessageBuilder) -> None:
        role = "system" if self.role == "developer" else self.role
        for part in self.content if isinstance(self.content, list) else ():
            if not part.is_text:
                builder.check_media(role, part.type)
        builder.add_text(role, join_text(self.content))


class CallItem(Body):
    """An earlier tool call of the assistant, of any type. Calls that a server executed have no id."""

    type: Annotated[Text, Field(pattern="_call$")] = Field(
        description="`function_call`, `custom_tool_call` …", examples=["function_call"]
    )
    call_id: Text | None = Field(None, description="The id from the response", examples=["call_1"])
    name: Text | None = Field(None, description="The tool that was called", examples=["get_weather"])
    arguments: chat.Arguments | None = Field(
        None, description="Its arguments, as JSON text or as an object", examples=["{}"]
    )
    input: JsonValue = Field(None, description="The argument of a custom tool", examples=["ls"])
    action: JsonValue = Field(None, description="What another tool did", examples=[{"command": ["ls"]}])

    def add_to(self, builder: MessageBuilder) -> None:
        arguments = self.arguments
        if arguments is None:
            arguments = write_arguments({"input": self.input} if self.action is None else self.action)
        builder.add_tool_call(self.call_id, self.name or self.type.removesuffix("_call"), arguments)


class CallOutputItem(Body):
    """The result of a tool call."""

    type: Annotated[Text, Field(pattern="_call_output$")] = Field(
        description="`function_call_output`, `custom_tool_call_output` …", examples=["function_call_output"]
    )
    call_id: Text | None = Field(None, description="The call that this answers", examples=["call_1"])
    output: Text | Parts | JsonObject | None = Field(
        None, description="Text, or parts of text", examples=["12 degrees, rain"]
    )

    def add_to(self, builder: MessageBuilder) -> None:
        output = self.output or ""
        text = write_arguments(output) if isinstance(output, dict) else join_text(output)
        builder.add_tool_result(self.call_id, text)


class ReasoningPart(Body):
    type: Literal["reasoning_text", "summary_text"] = Field(description="The reasoning or its summary")
    text: Text = Field(description="The text of this part", examples=[chat.REASONING])


ReasoningParts = Annotated[
    Annotated[list[ReasoningPart], Field(max_length=MAX_MESSAGES)] | None,
    Field(examples=[[{"type": "reasoning_text", "text": chat.REASONING}]]),
]


class ReasoningItem(Body):
    """Earlier reasoning of the assistant, for templates that repeat it."""

    type: Literal["reasoning"] = Field(description="Always `reasoning`")
    content: ReasoningParts = Field(None, description="The reasoning")
    summary: ReasoningParts = Field(None, description="Used where there is no `content`")

    def add_to(self, builder: MessageBuilder) -> None:
        if text := "".join(part.text for part in self.content or self.summary or ()):
            builder.add_reasoning(text)


def _item_kind(item: Any) -> str:
    kind = str((item.get("type") if isinstance(item, dict) else getattr(item, "type", None)) or "message")
    if kind.endswith("_call_output"):
        return "output"
    return "call" if kind.endswith("_call") else kind


def _skip_items(value: Any) -> Any:
    """Without items that say nothing here: references, and calls that another server executed."""
    if not isinstance(value, list):
        return value
    taken = []
    for item in value:
        kind = _item_kind(item)
        if kind in ("message", "output", "reasoning") or (kind == "call" and item.get("call_id")):
            taken.append(item)
        else:
            log.debug("skipped an item of type %.64r: it says nothing to this model", item.get("type"))
    return taken


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("call")]
    | Annotated[CallOutputItem, Tag("output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_kind),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(_skip_items)]
