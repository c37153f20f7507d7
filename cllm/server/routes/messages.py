"""Anthropic's routes: /v1/messages, /v1/messages/count_tokens."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Iterator, Sequence

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.chat.reply import Block, BlockDelta, BlockEvent, BlockKind, BlockStart
from cllm.chat.session import count_tokens, open_chat
from cllm.server.blocks import BlockRenderer, StreamEvent, encode_events
from cllm.server.errors import failure_body
from cllm.server.protocol import messages as api
from cllm.server.protocol.base import LargeJsonRoute, StructResponse, documented
from cllm.server.submit import check_constraint, make_request, model_name, use_engine
from cllm.text.folding import parse_object
from cllm.text.output_parser import OutputEvent
from cllm.types import FinishReason, RequestOutput

ROUTE = "/v1/messages"
router = APIRouter(tags=["Anthropic"], route_class=LargeJsonRoute)
EXAMPLE_EVENTS = encode_events(
    [
        api.MessageEvent("message_start", message=api.EXAMPLE),
        api.MessageEvent("content_block_delta", index=0, delta=api.ContentDelta("text_delta", text="AI")),
        api.MessageEvent("message_delta", delta=api.MessageEnding("end_turn"), usage=api.MessageUsage(4, 3)),
        api.MessageEvent("message_stop"),
    ]
)
_DELTAS = {  # type and field
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.TOOL_CALL: ("input_json_delta", "partial_json"),
}


class MessageRenderer(BlockRenderer):
    """Renders one message, whole or as events."""

    beat = encode_events([api.MessageEvent("ping")])

    def __init__(self, message_id: str, model: str, prompt_tokens: int) -> None:
        super().__init__()
        self._id = message_id
        self._model = model
        self._prompt_tokens = prompt_tokens

    def start(self) -> list[StreamEvent]:
        return [api.MessageEvent("message_start", message=self.body()), api.MessageEvent("ping")]

    def add(self, events: Sequence[OutputEvent], output: RequestOutput) -> list[StreamEvent]:
        rendered = [sent for event in self._reply.add(events, output) for sent in _render(event)]
        if output.error is not None:
            rendered.append(api.MessageEvent("error", error=failure_body(ROUTE, output.error)["error"]))
        elif output.finish_reason is not None:
            ending = api.MessageEnding(self._stop_reason, self._reply.stop)
            rendered.append(api.MessageEvent("message_delta", delta=ending, usage=self._usage()))
            rendered.append(api.MessageEvent("message_stop"))
        return [*rendered]

    def body(self) -> api.MessageResponse:
        return api.MessageResponse(
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

    def _usage(self) -> api.MessageUsage:
        usage = self._reply.usage
        if usage is None:
            return api.MessageUsage(self._prompt_tokens, 0)
        cached = usage.cached_tokens
        return api.MessageUsage(self._prompt_tokens - cached, usage.completion_tokens, cached)


def _make_content(block: Block) -> api.Content:
    match block.kind:
        case BlockKind.REASONING:
            return api.ThinkingContent(block.text, _sign(block.text))
        case BlockKind.TEXT:
            return api.TextContent(block.text)
        case BlockKind.TOOL_CALL:
            arguments = parse_object(block.text) or {}  # none, where the length limit cut them
            return api.ToolUseContent(f"toolu_{block.id}", block.name, arguments)


def _sign(reasoning: str) -> str:
    """A digest of reasoning; "" of none. Clients take a block without a signature for one that is cut."""
    return base64.b64encode(hashlib.sha256(reasoning.encode()).digest()).decode() if reasoning else ""


def _render(event: BlockEvent) -> Iterator[api.MessageEvent]:
    block = event.block
    if isinstance(event, BlockStart):
        empty = _make_content(Block(block.index, block.kind, block.id, block.name))
        yield api.MessageEvent("content_block_start", index=block.index, content_block=empty)
    elif isinstance(event, BlockDelta):
        kind, field = _DELTAS[block.kind]
        yield _make_delta(block, api.ContentDelta(kind, **{field: event.text}))
    else:
        if block.kind is BlockKind.REASONING:
            yield _make_delta(block, api.ContentDelta("signature_delta", signature=_sign(block.text)))
        yield api.MessageEvent("content_block_stop", index=block.index)


def _make_delta(block: Block, delta: api.ContentDelta) -> api.MessageEvent:
    return api.MessageEvent("content_block_delta", index=block.index, delta=delta)


@router.post(ROUTE, **documented(api.EXAMPLE, events=[EXAMPLE_EVENTS], computes=True))
async def messages(body: api.MessagesBody, http: HttpRequest) -> Response:
    """Answer a conversation, possibly with tool calls."""
    engine = await use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    request = await make_request(
        engine,
        http,
        body,
        request_id=f"msg_{uuid.uuid4().hex}",
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
    )
    session = await open_chat(engine, body.conversation(), request)
    renderer = MessageRenderer(request.id, model_name(engine, body.model), session.prompt_tokens)
    return await renderer.respond(http, session, stream=body.stream)


@router.post(f"{ROUTE}/count_tokens", **documented(api.TokenCount(14)))
async def count(body: api.CountBody, http: HttpRequest) -> Response:
    """Count the tokens of a conversation, as the chat template renders it."""
    engine = await use_engine(http, body.model)
    if (constraint := body.constraint()) is not None:
        await check_constraint(engine, constraint, body.form_field)
    tokens = await count_tokens(engine, body.conversation(), constrained=constraint is not None)
    return StructResponse(api.TokenCount(tokens))
