"""Anthropic's dialect: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import base64
import hashlib
import logging
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request as HttpRequest

from cllm.chat import conversation as chats
from cllm.chat.reply import Block, BlockDelta, BlockEvent, BlockKind, BlockStart, ReplyBuilder
from cllm.chat.session import count_tokens, open_chat
from cllm.errors import CllmError
from cllm.frontend.async_calls import loaded
from cllm.limits import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS
from cllm.server.body import Body, ModelName, StopText, TokenLimit, run_in_turn
from cllm.server.dialect import Dialect, encode_named, get_status
from cllm.server.dialects.openai import bodies
from cllm.server.examples import make_example
from cllm.server.generation import GenerationBody
from cllm.server.sse import BlockRenderer, StreamEvent, encode_events, make_event
from cllm.server.submit import make_request, use_engine
from cllm.text.call_parser import parse_object
from cllm.text.chat_format import Tool
from cllm.types import FinishReason, RequestOutput

log = logging.getLogger(__name__)
ROUTE = "/v1/messages"
BILLING_HEADER = "x-anthropic-billing-header:"
_FIELDS = {  # of a block, by its type; a block of any other type is replaced by its text or a note
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "image": ("source",),
}
_NEEDED = {"text": "text", "tool_use": "name", "thinking": "thinking"}


class AnthropicDialect(Dialect):
    """For Anthropic's SDKs and Claude Code."""

    name = "Anthropic"
    about = "For Anthropic's SDKs."
    prefix = "/v1/messages/"
    types = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
    id_header = "request-id"

    def make_error(self, error: CllmError) -> Any:
        shown = {"type": self.get_type(get_status(error)), "message": error.message}
        return {"type": "error", "error": shown}

    def frame_error(self, error: CllmError) -> bytes:
        return encode_named("error", self.make_error(error))


anthropic = AnthropicDialect()


class ContentBlock(msgspec.Struct, Body, kw_only=True):
    """A block of a message: text, a tool call of the assistant or its result, or earlier reasoning.

    A note replaces a block that is no text. `cache_control`, `citations` and `signature` are ignored:
    prefixes are always cached.
    """

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: bodies.Arguments = "{}"
    tool_use_id: str | None = None
    content: str | Annotated[list[ContentBlock], Meta(max_length=MAX_MESSAGES)] | None = None
    source: bodies.JsonValue = None
    is_error: bool = False
    thinking: str | None = None

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        kind = value.get("type")
        if (fields := _FIELDS.get(str(kind).removeprefix("mcp_"))) is None:
            return {"type": kind, "text": _find_text(value)}
        return {name: value[name] for name in ("type", *fields) if name in value}

    def __post_init__(self) -> None:
        needed = _NEEDED.get(self.kind, "type")
        if getattr(self, needed) is None:
            raise ValueError(f"{needed!r} is missing")
        self.input = chats.write_arguments(self.input)

    @property
    def kind(self) -> str:
        """The type; a call that another server made is one like any other."""
        return self.type.removeprefix("mcp_")

    def show(self, builder: chats.MessageBuilder, role: str) -> str:
        """The text, or what is shown in its place. Raises InvalidRequest."""
        if self.text or self.kind == "text":
            return self.text or ""
        return builder.show_media(role, self.type, self.source)

    def add_to(self, builder: chats.MessageBuilder, role: str) -> None:
        """Add the block to the messages of a conversation. Raises InvalidRequest."""
        match self.kind if role == "assistant" or self.kind == "tool_result" else None:
            case "tool_use":
                builder.add_tool_call(self.id, self.name or "", self.input)
            case "tool_result":
                text = chats.join_texts(list_texts(self.content, builder, "tool"))
                builder.add_tool_result(self.tool_use_id, f"Error: {text}" if self.is_error else text)
            case "thinking":
                if self.thinking:
                    builder.add_reasoning(self.thinking)
            case "redacted_thinking":
                pass  # its content is encrypted
            case _ if self.type.startswith("server_tool") or self.type.endswith("_tool_result"):
                log.debug("skipped a block of type %.64r: another server's tool", self.type)
            case _:
                builder.add_text(role, self.show(builder, role))


def _find_text(block: dict[str, Any]) -> str:
    """The text of a document or a search result; "" of any other block."""
    source, content = block.get("source"), block.get("content")
    found = [source.get("data")] if isinstance(source, dict) and source.get("type") == "text" else []
    if isinstance(content, list):
        found += [part.get("text") for part in content if isinstance(part, dict)]
    return chats.MESSAGE_JOINT.join(text for text in found if isinstance(text, str))


Blocks = str | Annotated[list[ContentBlock], Meta(max_length=MAX_MESSAGES)]


def list_texts(content: Blocks | None, builder: chats.MessageBuilder, role: str) -> list[str]:
    if content is None or isinstance(content, str):
        return [content or ""]
    return [block.show(builder, role) for block in content]


def join_system(content: Blocks) -> str:
    """The text of a system prompt, each block without Claude Code's billing header.

    That line is for Anthropic's accounting and differs by session. Left in front, it would change the
    prefix of a prompt that is otherwise the same.
    """
    texts = list_texts(content, chats.MessageBuilder("system"), "system")
    for index, text in enumerate(texts):
        if text.startswith(BILLING_HEADER):
            log.debug("dropped the line %s at the beginning of a system block", BILLING_HEADER.rstrip(":"))
            texts[index] = text.partition("\n")[2]
    return chats.MESSAGE_JOINT.join(filter(None, texts))


class AnthropicMessage(msgspec.Struct, Body, kw_only=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    def add_to(self, builder: chats.MessageBuilder) -> None:
        """Add the message to those of a conversation. Raises InvalidRequest."""
        if self.role == "system":
            if system := join_system(self.content):
                builder.add_text("system", system)
        elif isinstance(self.content, str):
            builder.add_text(self.role, self.content)
        else:
            for block in self.content:
                block.add_to(builder, self.role)


class AnthropicTool(msgspec.Struct, Body, kw_only=True):
    """A tool of the client. `cache_control` is ignored."""

    type: Literal["custom"] | None = "custom"
    name: bodies.FunctionName
    description: str | None = None
    input_schema: dict[str, Any]

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.input_schema)


class ToolChoiceBody(msgspec.Struct, Body, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: bodies.FunctionName | None = None
    disable_parallel_tool_use: bool = False

    def __post_init__(self) -> None:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is required with type tool, and with no other")


class ThinkingBody(msgspec.Struct, Body, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: bodies.ReasoningBudget = None


class JsonFormat(msgspec.Struct, Body, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, Body, kw_only=True):
    effort: bodies.Effort = None
    format: JsonFormat | None = None


class CountBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`: the fields that make the prompt."""

    form = "output_config.format"

    model: ModelName = None
    messages: Annotated[list[AnthropicMessage], bodies.CONVERSATION]
    system: Blocks | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.8
    chat_template_kwargs: bodies.TemplateOptions = None

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        return bodies.take_tools(super().prepare(value), "custom", default="custom")

    def __post_init__(self) -> None:
        self._choice.check([tool.name for tool in self.tools])

    @property
    def _choice(self) -> chats.ToolChoice:
        if (wanted := self.tool_choice) is None:
            return chats.ToolChoice()
        if wanted.type == "tool":
            return chats.ToolChoice.only(wanted.name or "")
        return chats.ToolChoice.of(wanted.type, parallel=not wanted.disable_parallel_tool_use)

    def form_schema(self) -> dict[str, Any] | None:
        wanted = (self.output_config and self.output_config.format) or self.output_format
        return None if wanted is None else wanted.schema

    def conversation(self, *, sees: bool = False) -> chats.Conversation:
        """The conversation in the terms of `cllm.chat`. Raises InvalidRequest."""
        builder = chats.MessageBuilder("messages", combine=True, sees=sees)
        builder.add_all([AnthropicMessage(role="system", content=self.system or ""), *self.messages])
        thinking = self.thinking or ThinkingBody(type="adaptive")
        config = self.output_config or OutputConfig()
        options: dict[str, Any] = {} if config.effort is None else {"reasoning_effort": config.effort}
        if self.thinking is not None:
            options["enable_thinking"] = thinking.type != "disabled"
        return chats.Conversation(
            messages=builder.build(),
            pictures=builder.pictures,
            options={**options, **(self.chat_template_kwargs or {})},
            think=thinking.type != "disabled",
            reasoning_budget=thinking.budget_tokens,
            **self._choice.apply([tool.tool() for tool in self.tools]),
        )


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: TokenLimit | None
    stop_sequences: Annotated[tuple[StopText, ...], Meta(max_length=MAX_STOPS)] = ()
    metadata: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_limit("max_tokens")


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


EXAMPLE_EVENTS = encode_events(
    make_event("message_start", message=make_example(MessageResponse)),
    make_event("content_block_delta", index=0, delta=ContentDelta("text_delta", text="AI")),
    make_event("message_delta", delta=MessageEnding("end_turn"), usage=MessageUsage(4, 3)),
    make_event("message_stop"),
)
_DELTAS = {  # type and field
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.TOOL_CALL: ("input_json_delta", "partial_json"),
}


class MessageRenderer(BlockRenderer):
    """Renders one message, whole or as events."""

    beat = encode_events(make_event("ping"))

    def __init__(self, reply: ReplyBuilder, message_id: str, model: str, prompt_tokens: int) -> None:
        super().__init__(reply)
        self._id = message_id
        self._model = model
        self._prompt_tokens = prompt_tokens

    def start(self) -> list[StreamEvent]:
        return [make_event("message_start", message=self.body()), make_event("ping")]

    def render(self, changes: Sequence[BlockEvent], output: RequestOutput) -> list[StreamEvent]:
        rendered: list[StreamEvent] = [event for change in changes for event in _render(change)]
        if output.error is not None:
            rendered.append(make_event("error", error=anthropic.make_error(output.error.error())["error"]))
        elif output.finish_reason is not None:
            ending = MessageEnding(self._stop_reason, self._reply.stop)
            rendered.append(make_event("message_delta", delta=ending, usage=self._usage()))
            rendered.append(make_event("message_stop"))
        return rendered

    def body(self) -> MessageResponse:
        return MessageResponse(
            id=self._id,
            model=self._model,
            content=[_make_content(block) for block in self._reply.blocks],
            stop_reason=self._stop_reason,
            stop_sequence=self._reply.stop,
            usage=self._usage(),
        )

    @property
    def _stop_reason(self) -> str | None:
        if (reason := self._reply.finish_reason) is None:
            return None
        if reason is not FinishReason.STOP:
            return "max_tokens"
        if self._reply.stop is not None:
            return "stop_sequence"
        return "tool_use" if self._reply.tool_calls else "end_turn"

    def _usage(self) -> MessageUsage:
        if (usage := self._reply.usage) is None:
            return MessageUsage(self._prompt_tokens, 0)
        cached = usage.cached_tokens
        return MessageUsage(self._prompt_tokens - cached, usage.completion_tokens, cached)


def _make_content(block: Block) -> Content:
    match block.kind:
        case BlockKind.REASONING:
            return ThinkingContent(block.text, _sign(block.text))
        case BlockKind.TEXT:
            return TextContent(block.text)
        case BlockKind.TOOL_CALL:
            arguments = parse_object(block.text) or {}  # none, where the length limit cut them
            return ToolUseContent(f"toolu_{block.id}", block.name, arguments)


def _sign(reasoning: str) -> str:
    """A digest of reasoning; "" of none. Clients take a block without a signature for one that is cut."""
    return base64.b64encode(hashlib.sha256(reasoning.encode()).digest()).decode() if reasoning else ""


def _render(change: BlockEvent) -> Iterator[StreamEvent]:
    block = change.block
    if isinstance(change, BlockStart):
        empty = _make_content(Block(block.index, block.kind, block.id, block.name))
        yield make_event("content_block_start", index=block.index, content_block=empty)
    elif isinstance(change, BlockDelta):
        kind, field = _DELTAS[block.kind]
        delta = ContentDelta(kind, **{field: change.text})
        yield make_event("content_block_delta", index=block.index, delta=delta)
    else:
        if block.kind is BlockKind.REASONING:
            signature = ContentDelta("signature_delta", signature=_sign(block.text))
            yield make_event("content_block_delta", index=block.index, delta=signature)
        yield make_event("content_block_stop", index=block.index)


@anthropic.post(ROUTE, MessageResponse, events=EXAMPLE_EVENTS, computes="chat")
async def messages(body: MessagesBody, http: HttpRequest) -> Any:
    """Answer a conversation, possibly with tool calls."""
    engine = await use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    request_id = f"msg_{uuid.uuid4().hex}"
    request = make_request(engine, http, body, request_id, body.max_tokens, body.stop_sequences)
    conversation = await run_in_turn(http, body.conversation, sees=engine.sees)
    session = await open_chat(engine, conversation, request)
    name = body.model or loaded(engine)[0].name
    renderer = MessageRenderer(session.replies[0], request.id, name, session.prompt_tokens)
    return await renderer.respond(http, session, stream=body.stream)


@anthropic.post(f"{ROUTE}/count_tokens")
async def count(body: CountBody, http: HttpRequest) -> TokenCount:
    """Count the tokens of a conversation, as the chat template renders it."""
    engine = await use_engine(http, body.model)
    conversation = await run_in_turn(http, body.conversation, sees=engine.sees)
    return TokenCount(await count_tokens(engine, conversation, body.constraint()))
