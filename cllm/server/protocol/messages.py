"""Requests and responses of `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from cllm.chat.conversation import (
    MESSAGE_JOINT,
    Conversation,
    MessageBuilder,
    ToolChoice,
    count_answered,
    note_media,
)
from cllm.errors import InvalidRequest
from cllm.server.blocks import StreamEvent
from cllm.server.protocol import chat
from cllm.server.protocol.base import (
    Body,
    JsonObject,
    JsonValue,
    ModelName,
    StopText,
    Text,
    TokenLimit,
    ToolDescription,
    skip_tools,
)
from cllm.server.protocol.completions import Effort, ReasoningBudget
from cllm.server.protocol.sampling import ConstrainedBody
from cllm.text.chat_format import Tool

log = logging.getLogger(__name__)
BILLING_HEADER = "x-anthropic-billing-header:"
MAX_MESSAGES = MAX_TOOLS = MAX_BLOCKS = 4096
_KNOWN = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
_OTHER: dict[str, Any] = {"not": {"enum": [*_KNOWN, "mcp_tool_use", "mcp_tool_result"]}}


class TextBlock(Body):
    """`cache_control` and `citations` are ignored: prefixes are always cached."""

    type: Literal["text"] = Field(description="Always `text`")
    text: Text = Field(description="The text; control tokens in it stay plain text", examples=[chat.QUESTION])

    def add_to(self, builder: MessageBuilder, role: str) -> None:
        builder.add_text(role, self.text)


class OtherBlock(Body):
    """A block that is no text, or of a tool that Anthropic's servers execute. A note replaces it."""

    type: Text = Field(description="`image`, `document` …", examples=["image"], json_schema_extra=_OTHER)
    source: JsonValue = Field(None, description="A document's text is taken", examples=[{"data": "x"}])
    content: JsonValue = Field(None, description="Text blocks of a search result are taken", examples=[[]])

    @property
    def text(self) -> str:
        """The text of a document or a search result, else a note."""
        source = self.source if isinstance(self.source, dict) else {}
        found = [source.get("data")] if source.get("type") == "text" else []
        content = self.content if isinstance(self.content, list) else []
        found += [block.get("text") for block in content if isinstance(block, dict)]
        return MESSAGE_JOINT.join(text for text in found if isinstance(text, str)) or note_media(self.type)

    def add_to(self, builder: MessageBuilder, role: str) -> None:
        if self.type.startswith("server_tool") or self.type.endswith("_tool_result"):
            log.debug("skipped a block of type %.64r: another server's tool", self.type)
            return
        if self.text == note_media(self.type):
            builder.check_media(role, self.type)
        builder.add_text(role, self.text)


def _block_kind(*known: str) -> Discriminator:
    """Tells blocks apart by their type; all that are not `known` are `other`."""

    def find(block: Any) -> str:
        kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
        kind = str(kind).removeprefix("mcp_")  # a call that another server made
        return kind if kind in known else "other"

    return Discriminator(find)


Other = Annotated[OtherBlock, Tag("other")]
TextOrOther = Annotated[Annotated[TextBlock, Tag("text")] | Other, _block_kind("text")]
Texts = Annotated[list[TextOrOther], Field(max_length=MAX_BLOCKS)]


def join_text(content: str | list[TextBlock | OtherBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return MESSAGE_JOINT.join(block.text for block in content)


def join_system(content: str | list[TextBlock | OtherBlock] | None) -> str:
    """The text of a system prompt, each block without Claude Code's billing header.

    That line is for Anthropic's accounting and differs by session. Left in front, it would change the
    prefix of a prompt that is otherwise the same.
    """
    blocks = [content] if isinstance(content, str) else [block.text for block in content or ()]
    return MESSAGE_JOINT.join(filter(None, map(_drop_billing_header, blocks)))


def _drop_billing_header(text: str) -> str:
    if not text.startswith(BILLING_HEADER):
        return text
    log.debug("dropped the line %s at the beginning of a system block", BILLING_HEADER.rstrip(":"))
    return text.partition("\n")[2]


class ToolUseBlock(Body):
    """An earlier tool call of the assistant."""

    type: Literal["tool_use", "mcp_tool_use"] = Field(description="Always `tool_use`")
    id: chat.CallId = None
    name: chat.CalledName
    input: chat.Arguments = "{}"

    def add_to(self, builder: MessageBuilder, role: str) -> None:
        builder.add_tool_call(self.id, self.name, self.input)


class ToolResultBlock(Body):
    """The result of a tool call."""

    type: Literal["tool_result", "mcp_tool_result"] = Field(description="Always `tool_result`")
    tool_use_id: Text | None = Field(None, description="The call that this answers", examples=["toolu_1"])
    content: Text | Texts | None = Field(
        None, description="Text, or blocks of text", examples=["Rain", [{"type": "text", "text": "Rain"}]]
    )
    is_error: bool | None = Field(
        None, description="The call failed: `Error: ` is put before the content", examples=[False]
    )

    def add_to(self, builder: MessageBuilder, role: str) -> None:
        text = join_text(self.content)
        builder.add_tool_result(self.tool_use_id, f"Error: {text}" if self.is_error else text)


class ThinkingBlock(Body):
    """Earlier reasoning of the assistant, for templates that repeat it."""

    type: Literal["thinking"] = Field(description="Always `thinking`")
    thinking: Text = Field(description="The reasoning", examples=[chat.REASONING])
    signature: Text | None = Field(
        None, description="Of any server, or none: taken as it comes, not checked", examples=["bm9uZQ=="]
    )

    def add_to(self, builder: MessageBuilder, role: str) -> None:
        if self.thinking:
            builder.add_reasoning(self.thinking)


class RedactedThinkingBlock(Body):
    type: Literal["redacted_thinking"] = Field(description="Ignored: its content is encrypted")

    def add_to(self, builder: MessageBuilder, role: str) -> None:
        """Nothing to add."""


UserBlock = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[ToolResultBlock, Tag("tool_result")] | Other,
    _block_kind("text", "tool_result"),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Other,
    _block_kind(*_KNOWN),
]


class UserMessage(Body):
    role: Literal["user"] = Field(description="The author")
    content: Text | Annotated[list[UserBlock], Field(max_length=MAX_BLOCKS)] = Field(
        description="Text, or blocks: text and tool results",
        examples=[chat.QUESTION, [{"type": "text", "text": chat.QUESTION}]],
    )


class AssistantMessage(Body):
    role: Literal["assistant"] = Field(description="The author")
    content: Text | Annotated[list[AssistantBlock], Field(max_length=MAX_BLOCKS)] = Field(
        description="Text, or blocks: text, tool calls, reasoning",
        examples=["AI is", [{"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}]],
    )


class SystemMessage(Body):
    role: Literal["system"] = Field(description="Instructions, where the template takes them")
    content: Text | Texts = Field(description="Text, or blocks of text", examples=["Be brief."])


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class ClientTool(Body):
    """`cache_control` is ignored."""

    type: Literal["custom"] | None = Field("custom", description="May be left out", examples=["custom"])
    name: chat.FunctionName = Field(description="Letters, digits, `_`, `-` and `.`, at most 256")
    description: ToolDescription = None
    input_schema: JsonObject = Field(description="JSON schema of its arguments", examples=[chat.PARAMETERS])

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.input_schema)


class ToolChoiceBody(Body):
    type: Literal["auto", "any", "tool", "none"] = Field(description="`any`, `tool`: one must be called")
    name: chat.FunctionName | None = Field(
        None, description="With `tool`: its name", examples=["get_weather"]
    )
    disable_parallel_tool_use: bool = Field(False, description="At most one call in an answer")

    @model_validator(mode="after")
    def _consistent(self) -> ToolChoiceBody:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is required with type tool, and with no other")
        return self


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"] = Field(description="The template's `enable_thinking`")
    budget_tokens: ReasoningBudget = None


class Metadata(Body):
    user_id: str | None = Field(None, max_length=1024, description="Ignored", examples=["ann"])


class JsonFormat(Body):
    type: Literal["json_schema"] = Field(description="Always `json_schema`")
    schema_: JsonObject = Field(alias="schema", description="Of the answer", examples=[chat.SCHEMA])


class OutputConfig(Body):
    effort: Effort = Field(None, description="A variable for the chat template: `reasoning_effort`")
    format: JsonFormat | None = Field(
        None, description="A schema for the answer", examples=[{"type": "json_schema", "schema": {}}]
    )


Tools = Annotated[list[ClientTool], Field(max_length=MAX_TOOLS), skip_tools("custom", default="custom")]


class CountBody(ConstrainedBody):
    """`POST /v1/messages/count_tokens`: the fields that make the prompt."""

    form = "output_config.format"

    model: ModelName = None
    messages: list[Message] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="The conversation; an assistant message at its end is continued",
        examples=[chat.MESSAGES],
    )
    system: Text | Texts | None = Field(None, description="Instructions", examples=["Be brief."])
    tools: Tools | None = Field(
        None, description="Tools the model may call", examples=[[{"name": "now", "input_schema": {}}]]
    )
    tool_choice: ToolChoiceBody | None = Field(
        None, description=chat.TOOL_CHOICE, examples=[{"type": "auto"}]
    )
    thinking: Thinking | None = Field(
        None, description="Reasoning, on or off", examples=[{"type": "disabled"}]
    )
    output_config: OutputConfig | None = Field(
        None, description="Schema, effort", examples=[{"effort": "low"}]
    )
    output_format: JsonFormat | None = Field(
        None, description="`output_config.format` by its older name", examples=[None]
    )
    temperature: float = Field(0.8, ge=0, le=1, description="0 is greedy")
    chat_template_kwargs: chat.TemplateOptions = None

    model_config = ConfigDict(json_schema_extra={"example": {"messages": chat.MESSAGES}})

    @model_validator(mode="after")
    def _check_tools(self) -> CountBody:
        self._choice.check([tool.name for tool in self.tools or ()])
        return self

    @property
    def _choice(self) -> ToolChoice:
        if (wanted := self.tool_choice) is None:
            return ToolChoice()
        parallel = not wanted.disable_parallel_tool_use
        if wanted.name is not None:
            return ToolChoice(mode="required", names=(wanted.name,), parallel=False)
        if wanted.type == "any":
            return ToolChoice(mode="required", parallel=parallel)
        return ToolChoice(mode="none" if wanted.type == "none" else "auto", parallel=parallel)

    def form_schema(self) -> dict[str, Any] | None:
        wanted = self.output_config.format if self.output_config is not None else None
        wanted = wanted or self.output_format
        return None if wanted is None else wanted.schema_

    def conversation(self) -> Conversation:
        """The conversation in the terms of `cllm.chat`. Raises InvalidRequest."""
        return Conversation(
            messages=tuple(self._build_messages()),
            options=self._options(),
            think=self.thinking is None or self.thinking.type != "disabled",
            reasoning_budget=self.thinking.budget_tokens if self.thinking is not None else None,
            **self._choice.apply([tool.tool() for tool in self.tools or ()]),
        )

    def _build_messages(self) -> list[dict[str, Any]]:
        builder = MessageBuilder("messages", combine=True)
        answered = count_answered([message.role for message in self.messages])
        if system := join_system(self.system):
            builder.add_text("system", system)
        for index, message in enumerate(self.messages):
            builder.answered = index < answered
            if isinstance(message, SystemMessage):
                if system := join_system(message.content):
                    builder.add_text(message.role, system)
            elif isinstance(message.content, str):
                builder.add_text(message.role, message.content)
            else:
                for block in message.content:
                    block.add_to(builder, message.role)
        if not builder.messages:
            raise InvalidRequest("messages: they have no content", "messages")
        return builder.messages

    def _options(self) -> dict[str, Any]:
        options = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            options.setdefault("enable_thinking", self.thinking.type != "disabled")
        if self.output_config is not None and self.output_config.effort is not None:
            options.setdefault("reasoning_effort", self.output_config.effort)
        return options


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: TokenLimit = Field(
        description="Maximum tokens to generate, reasoning included; -1: as many as fit", examples=[64]
    )
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = Field(
        None, description="Stop strings; they are not part of the answer", examples=[["\n\n"]]
    )
    stream: bool = Field(False, description="Answer as server-sent events")
    metadata: Metadata | None = Field(None, description="Ignored", examples=[{"user_id": "ann"}])

    model_config = ConfigDict(json_schema_extra={"example": {"max_tokens": 64, "messages": chat.MESSAGES}})


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str = ""


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of an answer."""

    thinking: str = ""
    signature: str = ""


class ToolUseContent(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool call of an answer."""

    id: str
    name: str
    input: dict[str, Any] = {}


Content = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(msgspec.Struct):
    """Tokens of a call. Those from the prefix cache are not input tokens, they are counted apart."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageEnding(msgspec.Struct):
    """Why an answer ended; null while it runs."""

    stop_reason: str | None = None
    stop_sequence: str | None = None


class MessageResponse(MessageEnding, kw_only=True):
    """The response of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    usage: MessageUsage


EXAMPLE = MessageResponse(
    id="msg_8f0c2d7e",
    model="SmolLM2-135M-Instruct",
    content=[TextContent("AI is …")],
    stop_reason="end_turn",
    usage=MessageUsage(4, 3),
)


class TokenCount(msgspec.Struct):
    """The response of `/v1/messages/count_tokens`."""

    input_tokens: int


class ContentDelta(msgspec.Struct):
    """More of a content block."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET


class MessageEvent(StreamEvent):
    """One event of a stream."""

    message: MessageResponse | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Content | UnsetType = UNSET
    delta: ContentDelta | MessageEnding | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    error: dict[str, Any] | UnsetType = UNSET
