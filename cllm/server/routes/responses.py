"""OpenAI's /v1/responses, stateless: each request carries its whole conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.chat.reply import Block, BlockDelta, BlockEvent, BlockKind, BlockStart
from cllm.chat.session import count_tokens, open_chat
from cllm.errors import NotFound
from cllm.server.blocks import BlockRenderer, StreamEvent, encode_events
from cllm.server.protocol.base import StructResponse, documented
from cllm.server.protocol.chat import ChatTokenLogprob, make_logprobs
from cllm.server.protocol.responses import ResponsesBody
from cllm.server.protocol.responses_output import (
    IncompleteDetails,
    InputTokens,
    InputTokensDetails,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputReasoningItem,
    OutputText,
    OutputTokensDetails,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
    echo,
)
from cllm.server.submit import check_constraint, check_model, get_registry, make_request, model_name
from cllm.text.output_parser import OutputEvent
from cllm.types import Failure, FinishReason, RequestOutput, TokenLogprob

ROUTE = "/v1/responses"
router = APIRouter(tags=["OpenAI"])
EXAMPLE_EVENTS = encode_events(
    [
        ResponseEvent("response.created", 0, response=ResponseObject.EXAMPLE),
        ResponseEvent("response.output_text.delta", 4, output_index=0, item_id="msg_1", delta="AI"),
        ResponseEvent("response.completed", 9, response=ResponseObject.EXAMPLE),
    ]
)
_ID_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.TOOL_CALL: "fc"}
_DELTA_TYPES = {
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.TOOL_CALL: "response.function_call_arguments",
}


class ResponseRenderer(BlockRenderer):
    """Renders one response; its events are numbered. `top` None: without log-probabilities."""

    def __init__(self, response_id: str, echoed: dict[str, Any], top: int | None = None) -> None:
        super().__init__()
        self._id = response_id
        self._echoed = echoed
        self._top = top
        self._created = int(time.time())
        self._failure: Failure | None = None
        self._sent = 0

    def start(self) -> list[StreamEvent]:
        return [
            self._event("response.created", response=self.body()),
            self._event("response.in_progress", response=self.body()),
        ]

    def add(self, events: Sequence[OutputEvent], output: RequestOutput) -> list[StreamEvent]:
        rendered: list[StreamEvent] = []
        for event in self._reply.add(events, output):
            rendered += self._render(event)
        if (failure := output.error) is not None:
            self._failure = failure
            fields = {"code": failure.code, "message": failure.message, "param": None}
            rendered.append(self._event("error", **fields))
        if output.finish_reason is not None:
            rendered.append(self._event(f"response.{self._status}", response=self.body()))
        return rendered

    @property
    def _status(self) -> str:
        match self._reply.finish_reason:
            case None:
                return "in_progress"
            case FinishReason.STOP:
                return "completed"
            case FinishReason.LENGTH:
                return "incomplete"
            case _:
                return "failed"

    def body(self) -> ResponseObject:
        status, failure = self._status, self._failure
        return ResponseObject(
            id=self._id,
            created_at=self._created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=None if failure is None else ResponseFailure(failure.message),
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            **self._echoed,
            output=[self._make_item(block) for block in self._reply.blocks],
            usage=self._usage(),
        )

    def _usage(self) -> ResponseUsage | None:
        if (usage := self._reply.usage) is None:
            return None
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(self._reply.reasoning_tokens),
            usage.prompt_tokens + usage.completion_tokens,
        )

    def _make_item(self, block: Block, *, started: bool = False) -> OutputItem:
        """The output item of a block that has ended, or has just `started`."""
        status = "in_progress" if started else "incomplete" if block.cut else "completed"
        item_id = _item_id(block)
        match block.kind:
            case BlockKind.REASONING:
                return OutputReasoningItem(item_id, status, [] if started else [OutputReasoning(block.text)])
            case BlockKind.TEXT:
                return OutputMessage(item_id, status, [] if started else [self._make_text(block)])
            case BlockKind.TOOL_CALL:
                arguments = "" if started else block.text
                return OutputFunctionCall(item_id, status, f"call_{block.id}", block.name, arguments)

    def _make_text(self, block: Block) -> OutputText:
        return OutputText(block.text, logprobs=self._logprobs(block.logprobs))

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[ChatTokenLogprob]:
        return [] if self._top is None else make_logprobs(entries, self._top)

    def _event(self, kind: str, /, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(kind, self._sent, **fields)
        self._sent += 1
        return event

    def _render(self, change: BlockEvent) -> list[ResponseEvent]:
        """The events of a block's change: items hold parts, parts hold text."""
        block = change.block
        kind = _DELTA_TYPES[block.kind]
        text = block.kind is BlockKind.TEXT
        within: dict[str, Any] = {"output_index": block.index, "item_id": _item_id(block)}
        if block.kind is not BlockKind.TOOL_CALL:
            within["content_index"] = 0
        if isinstance(change, BlockDelta):
            more = {"logprobs": self._logprobs(change.logprobs)} if text else {}
            return [self._event(f"{kind}.delta", **within, delta=change.text, **more)]
        started = isinstance(change, BlockStart)
        item = {"output_index": block.index, "item": self._make_item(block, started=started)}
        if started:
            added = [self._event("response.output_item.added", **item)]
            if block.kind is not BlockKind.TOOL_CALL:
                part = OutputText() if text else OutputReasoning()
                added.append(self._event("response.content_part.added", **within, part=part))
            return added
        if block.kind is BlockKind.TOOL_CALL:
            done = [self._event(f"{kind}.done", **within, name=block.name, arguments=block.text)]
        else:
            done = self._end_part(block, within)
        return [*done, self._event("response.output_item.done", **item)]

    def _end_part(self, block: Block, within: dict[str, Any]) -> list[ResponseEvent]:
        part: OutputText | OutputReasoning = OutputReasoning(block.text)
        more: dict[str, Any] = {}
        if block.kind is BlockKind.TEXT:
            part = self._make_text(block)
            more["logprobs"] = part.logprobs
        return [
            self._event(f"{_DELTA_TYPES[block.kind]}.done", **within, text=part.text, **more),
            self._event("response.content_part.done", **within, part=part),
        ]


def _item_id(block: Block) -> str:
    return f"{_ID_PREFIXES[block.kind]}_{block.id}"


@router.post(ROUTE, **documented(ResponseObject, events=[EXAMPLE_EVENTS], computes=True))
async def responses(body: ResponsesBody, http: HttpRequest) -> Response:
    """Answer an input, possibly with tool calls. Nothing is stored."""
    engine = get_registry(http).current
    check_model(body.model)
    request = await make_request(
        engine,
        http,
        body,
        request_id=f"resp_{uuid.uuid4().hex}",
        max_tokens=body.max_output_tokens,
        stop=body.stops,
        logprobs=max(1, body.top) if body.top is not None else 0,
    )
    session = await open_chat(engine, body.to_conversation(), request)
    renderer = ResponseRenderer(request.id, echo(body, model_name(engine, body.model)), body.top)
    return await renderer.respond(http, session, stream=body.stream)


@router.post(f"{ROUTE}/input_tokens", **documented(InputTokens(14)))
async def input_tokens(body: ResponsesBody, http: HttpRequest) -> Response:
    """Count the tokens of an input, as the chat template renders it."""
    engine = get_registry(http).current
    check_model(body.model)
    if (constraint := body.constraint()) is not None:
        await check_constraint(engine, constraint, body.form_field)
    count = await count_tokens(engine, body.to_conversation(), constrained=constraint is not None)
    return StructResponse(InputTokens(count))


@router.get(f"{ROUTE}/{{response_id:path}}", include_in_schema=False)
@router.delete(f"{ROUTE}/{{response_id:path}}", include_in_schema=False)
@router.post(f"{ROUTE}/{{response_id:path}}", include_in_schema=False)
async def stored(response_id: str) -> None:
    """Retrieve, delete, cancel, list input items: no response is ever stored."""
    raise NotFound("this response does not exist: the server is stateless and stores nothing")
