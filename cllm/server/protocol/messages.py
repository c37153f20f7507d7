"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from cllm.chat.conversation import JOINT, Conversation, Turns
from cllm.errors import InvalidRequest
from cllm.server.blocks import Begun, Block, BlockAnswer, BlockEvent, BlockKind, Event, Grew
from cllm.server.errors import failure_body
from cllm.server.protocol.base import (
    UNSUPPORTED_MEDIA,
    Body,
    ConstrainedBody,
    JsonObject,
    NullableBody,
    StopText,
    Text,
    ToolDescription,
    check_tools,
    kinds,
)
from cllm.text.output_parser import OutputEvent
from cllm.text.tool_formats import Tool
from cllm.types import FinishReason, RequestOutput

MAX_MESSAGES = 4096
MAX_TOOLS = 512


class UserMessage(Body):
    role: Literal["user"] = Field(description="Who speaks")
    content: Text | Annotated[list[UserBlock], Field(max_length=MAX_BLOCKS)] = Field(
        description="Text, or blocks: text and results of tools",
        examples=["What is AI?", [{"type": "text", "text": "What is AI?"}]],
    )


class AssistantMessage(Body):
    role: Literal["assistant"] = Field(description="Who speaks")
    content: Text | Annotated[list[AssistantBlock], Field(max_length=MAX_BLOCKS)] = Field(
        description="Text, or blocks: text, calls of tools, thoughts",
        examples=["AI is", [{"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}]],
    )


class SystemMessage(Body):
    role: Literal["system"] = Field(description="Instructions, where the template takes them")
    content: Text | Texts = Field(description="Text, or blocks of text", examples=["Be brief."])


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class ClientTool(Body):
    """`cache_control` is ignored."""

    type: Literal["custom"] = Field("custom", description="May be left out; server tools are refused")
    name: ToolName = Field(
        description="Letters, digits, `_`, `-` and `.`, at most 128", examples=["get_weather"]
    )
    description: ToolDescription = None
    input_schema: JsonObject = Field(
        description="JSON schema of its arguments",
        examples=[{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}],
    )

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.input_schema)


_NO_SERVER_TOOLS = {"": "this server runs no tools of its own, it only asks for calls of yours"}


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"] = Field(
        description="Whether a tool may (`auto`), must (`any`, `tool`) or must not (`none`) be called"
    )
    name: ToolName | None = Field(None, description="With `tool`: which one", examples=["get_weather"])
    disable_parallel_tool_use: bool = Field(False, description="At most one call in an answer")

    @model_validator(mode="after")
    def _consistent(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name belongs to the type tool, and is needed there")
        return self


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description="The template's `enable_thinking`; left out: as the template has it"
    )
    budget_tokens: int | None = Field(
        None, ge=1, description="Not enforced: thoughts count towards `max_tokens`, which is", examples=[1024]
    )


class Metadata(Body):
    user_id: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Ignored", examples=["somebody"]
    )


class JsonFormat(Body):
    type: Literal["json_schema"] = Field(description="Always `json_schema`")
    schema_: JsonObject = Field(
        alias="schema",
        description="What the answer validates against",
        examples=[{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}],
    )


class OutputConfig(Body):
    effort: Annotated[str, Field(max_length=32)] | None = Field(
        None, description="A variable for the chat template: `reasoning_effort`", examples=["low"]
    )
    format: JsonFormat | None = Field(
        None,
        description="A schema for the answer",
        examples=[{"type": "json_schema", "schema": {"type": "object"}}],
    )


class CountBody(NullableBody, ConstrainedBody):
    """`POST /v1/messages/count_tokens`: everything that makes the prompt."""

    form = "output_config.format"

    model: Identifier | None = Field(
        None, description="Any plain name is served by the loaded model", examples=["any"]
    )
    messages: list[Message] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="The conversation; if the assistant's words end it, they are continued",
        examples=[[{"role": "user", "content": "What is AI?"}]],
    )
    system: Text | Texts | None = Field(
        None, description="Instructions: text, or blocks of text", examples=["Be brief."]
    )
    tools: (
        Annotated[
            list[Annotated[ClientTool, kinds("custom", default="custom", why=_NO_SERVER_TOOLS)]],
            Field(max_length=MAX_TOOLS),
        ]
        | None
    ) = Field(
        None,
        description="Tools the model may call",
        examples=[[{"name": "now", "input_schema": {"type": "object"}}]],
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="Whether one may or must be called, or which; forced calls always fit their schema",
        examples=[{"type": "auto"}],
    )
    thinking: Thinking | None = Field(
        None, description="Whether the model thinks before it answers", examples=[{"type": "disabled"}]
    )
    output_config: OutputConfig | None = Field(
        None, description="A schema for the answer; effort", examples=[{"effort": "low"}]
    )
    temperature: float = Field(0.8, ge=0, le=1, description="0 is greedy")
    chat_template_kwargs: Annotated[JsonObject, Field(max_length=32)] | None = Field(
        None,
        description="Variables for the chat template. Not in Anthropic's",
        examples=[{"enable_thinking": False}],
    )

    model_config = ConfigDict(
        json_schema_extra={"example": {"messages": [{"role": "user", "content": "What is AI?"}]}}
    )

    @model_validator(mode="after")
    def _tools_are_named(self) -> CountBody:
        wanted = self.tool_choice
        check_tools(
            [tool.name for tool in self.tools or ()],
            [wanted.name] if wanted is not None and wanted.name is not None else (),
            demanded="any" if wanted is not None and wanted.type == "any" else "",
        )
        return self

    def form_schema(self) -> dict[str, Any] | None:
        wanted = self.output_config.format if self.output_config is not None else None
        return None if wanted is None else wanted.schema_

    def conversation(self) -> Conversation:
        """In neutral words. Raises InvalidRequest."""
        wanted = self.tool_choice
        kind = "auto" if wanted is None else wanted.type
        tools = () if kind == "none" else tuple(tool.tool() for tool in self.tools or ())
        if wanted is not None and wanted.name is not None:
            tools = tuple(tool for tool in tools if tool.name == wanted.name)
        return Conversation(
            messages=tuple(self._turns().messages),
            tools=tools,
            forced=kind in ("any", "tool"),
            parallel=kind != "tool" and not (wanted is not None and wanted.disable_parallel_tool_use),
            options=self._options(),
            think=self.thinking is None or self.thinking.type != "disabled",
        )

    def _turns(self) -> Turns:
        turns = Turns(combine=True)
        if system := text_of(self.system):
            turns.say("system", system)
        for message in self.messages:
            if isinstance(message.content, str):
                turns.say(message.role, message.content)
            elif isinstance(message, SystemMessage):
                turns.say(message.role, text_of(message.content))
            else:
                for block in message.content:
                    block.add_to(turns, message.role)
        if not turns.messages:
            raise InvalidRequest("messages: there is nothing to answer in them", "messages")
        return turns

    def _options(self) -> dict[str, Any]:
        options = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            options.setdefault("enable_thinking", self.thinking.type != "disabled")
        if self.output_config is not None and self.output_config.effort is not None:
            options.setdefault("reasoning_effort", self.output_config.effort)
        return options


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1, description="Most tokens to generate, thoughts included", examples=[64])
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = Field(
        None, description="Texts that end the answer; they are not part of it", examples=[["\n\n"]]
    )
    stream: bool = Field(False, description="Answer as server-sent events")
    metadata: Metadata | None = Field(None, description="Ignored", examples=[{"user_id": "somebody"}])

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"max_tokens": 64, "messages": [{"role": "user", "content": "What is AI?"}]}
        }
    )


MAX_BLOCKS = 4096
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
Identifier = Annotated[str, Field(max_length=256)]
_EYELESS = {"image": UNSUPPORTED_MEDIA, "document": UNSUPPORTED_MEDIA}


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
    Field(max_length=MAX_BLOCKS),
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


ROUTE = "/v1/messages"


class MessageAnswer(BlockAnswer):
    """One message."""

    def __init__(self, message_id: str, model: str, prompt_tokens: int) -> None:
        super().__init__()
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens

    def start(self) -> list[Event]:
        return [{"type": "message_start", "message": self.body()}, {"type": "ping"}]

    def add(self, events: Sequence[OutputEvent], delta: RequestOutput) -> list[Event]:
        told = [_told(event) for event in self._blocks.add(events, delta)]
        if delta.error is not None:
            return [*told, failure_body(ROUTE, delta.error)]
        if delta.finish_reason is not None:
            told.append({"type": "message_delta", "delta": self._end(), "usage": self._usage()})
            told.append({"type": "message_stop"})
        return told

    def body(self) -> dict[str, Any]:
        content = [_content(block) for block in self._blocks.blocks]
        return {**self._head, "content": content, **self._end(), "usage": self._usage()}

    def _end(self) -> dict[str, Any]:
        return {"stop_reason": self._stop_reason, "stop_sequence": self._blocks.stop}

    @property
    def _stop_reason(self) -> str | None:
        reason = self._blocks.finish_reason
        if reason is None:
            return None
        if reason is not FinishReason.STOP:
            return "max_tokens"
        if self._blocks.stop is not None:
            return "stop_sequence"
        return "tool_use" if self._blocks.called else "end_turn"

    def _usage(self) -> dict[str, Any]:
        """Input tokens are those that had to be read: what came from the cache is counted beside them."""
        usage = self._blocks.usage
        cached = usage.cached_tokens if usage is not None else 0
        return {
            "input_tokens": self._prompt_tokens - cached,
            "output_tokens": usage.completion_tokens if usage is not None else 0,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }


def _content(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.THOUGHTS:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case BlockKind.WORDS:
            return {"type": "text", "text": block.text}
        case BlockKind.CALL:
            call = {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name}
            return {**call, "input": _object(block.text)}


def _object(text: str) -> dict[str, Any]:
    """Arguments as an object; none where they are not one, as when the answer was cut off within them."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _told(event: BlockEvent) -> Event:
    """A block's event in Anthropic's words."""
    block = event.block
    if isinstance(event, Begun):
        empty = _content(Block(block.index, block.kind, block.id, block.name))
        return {"type": "content_block_start", "index": block.index, "content_block": empty}
    if isinstance(event, Grew):
        return {"type": "content_block_delta", "index": block.index, "delta": _delta(event)}
    return {"type": "content_block_stop", "index": block.index}


def _delta(event: Grew) -> dict[str, Any]:
    match event.block.kind:
        case BlockKind.THOUGHTS:
            return {"type": "thinking_delta", "thinking": event.text}
        case BlockKind.WORDS:
            return {"type": "text_delta", "text": event.text}
        case BlockKind.CALL:
            return {"type": "input_json_delta", "partial_json": event.text}
