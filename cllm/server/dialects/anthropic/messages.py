"""Anthropic's `/v1/messages`: its answers and its routes."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.chat.reply import Block, BlockDelta, BlockEvent, BlockKind, BlockStart, ReplyBuilder
from cllm.chat.session import count_tokens, open_chat
from cllm.server.blocks import BlockRenderer, StreamEvent, encode_events
from cllm.server.dialect import StructResponse
from cllm.server.dialects.anthropic import anthropic
from cllm.server.dialects.anthropic.messages_body import CountBody, MessagesBody
from cllm.server.submit import make_request, model_name, use_engine
from cllm.text.argument_values import parse_object
from cllm.types import FinishReason, RequestOutput


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


ROUTE = "/v1/messages"
EXAMPLE_EVENTS = encode_events(
    [
        MessageEvent("message_start", message=EXAMPLE),
        MessageEvent("content_block_delta", index=0, delta=ContentDelta("text_delta", text="AI")),
        MessageEvent("message_delta", delta=MessageEnding("end_turn"), usage=MessageUsage(4, 3)),
        MessageEvent("message_stop"),
    ]
)
_DELTAS = {  # type and field
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.TOOL_CALL: ("input_json_delta", "partial_json"),
}


class MessageRenderer(BlockRenderer):
    """Renders one message, whole or as events."""

    beat = encode_events([MessageEvent("ping")])

    def __init__(self, reply: ReplyBuilder, message_id: str, model: str, prompt_tokens: int) -> None:
        super().__init__(reply)
        self._id = message_id
        self._model = model
        self._prompt_tokens = prompt_tokens

    def start(self) -> list[StreamEvent]:
        return [MessageEvent("message_start", message=self.body()), MessageEvent("ping")]

    def render(self, changes: Sequence[BlockEvent], output: RequestOutput) -> list[StreamEvent]:
        rendered: list[StreamEvent] = [event for change in changes for event in _render(change)]
        if output.error is not None:
            rendered.append(MessageEvent("error", error=anthropic.make_error(output.error.error())["error"]))
        elif output.finish_reason is not None:
            ending = MessageEnding(self._stop_reason, self._reply.stop)
            rendered.append(MessageEvent("message_delta", delta=ending, usage=self._usage()))
            rendered.append(MessageEvent("message_stop"))
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
        reason = self._reply.finish_reason
        if reason is None:
            return None
        if reason is not FinishReason.STOP:
            return "max_tokens"
        if self._reply.stop is not None:
            return "stop_sequence"
        return "tool_use" if self._reply.tool_calls else "end_turn"

    def _usage(self) -> MessageUsage:
        usage = self._reply.usage
        if usage is None:
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


def _render(change: BlockEvent) -> Iterator[MessageEvent]:
    block = change.block
    if isinstance(change, BlockStart):
        empty = _make_content(Block(block.index, block.kind, block.id, block.name))
        yield MessageEvent("content_block_start", index=block.index, content_block=empty)
    elif isinstance(change, BlockDelta):
        kind, field = _DELTAS[block.kind]
        yield _make_delta(block, ContentDelta(kind, **{field: change.text}))
    else:
        if block.kind is BlockKind.REASONING:
            yield _make_delta(block, ContentDelta("signature_delta", signature=_sign(block.text)))
        yield MessageEvent("content_block_stop", index=block.index)


def _make_delta(block: Block, delta: ContentDelta) -> MessageEvent:
    return MessageEvent("content_block_delta", index=block.index, delta=delta)


@anthropic.post(ROUTE, EXAMPLE, events=(EXAMPLE_EVENTS,), computes=True)
async def messages(body: MessagesBody, http: HttpRequest) -> Response:
    """Answer a conversation, possibly with tool calls."""
    engine = await use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    request = make_request(
        engine,
        http,
        body,
        request_id=f"msg_{uuid.uuid4().hex}",
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or (),
    )
    session = await open_chat(engine, body.conversation(), request)
    name = model_name(engine, body.model)
    renderer = MessageRenderer(session.replies[0], request.id, name, session.prompt_tokens)
    return await renderer.respond(http, session, stream=body.stream)


@anthropic.post(f"{ROUTE}/count_tokens", TokenCount(14))
async def count(body: CountBody, http: HttpRequest) -> Response:
    """Count the tokens of a conversation, as the chat template renders it."""
    engine = await use_engine(http, body.model)
    return StructResponse(TokenCount(await count_tokens(engine, body.conversation(), body.constraint())))
