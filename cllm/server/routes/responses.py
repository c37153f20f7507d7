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
from cllm.server.protocol import responses as api
from cllm.server.protocol.base import LargeJsonRoute, StructResponse, documented
from cllm.server.protocol.chat import ChatTokenLogprob, make_logprobs
from cllm.server.submit import check_constraint, check_model, get_registry, make_request, model_name
from cllm.text.folding import parse_object
from cllm.text.output_parser import OutputEvent
from cllm.types import Failure, FinishReason, RequestOutput, TokenLogprob

ROUTE = "/v1/responses"
router = APIRouter(tags=["OpenAI"], route_class=LargeJsonRoute)
EXAMPLE_EVENTS = encode_events(
    [
        api.ResponseEvent("response.created", 0, response=api.EXAMPLE),
        api.ResponseEvent("response.output_text.delta", 4, output_index=0, item_id="msg_1", delta="AI"),
        api.ResponseEvent("response.completed", 9, response=api.EXAMPLE),
    ]
)
_NAMES = {  # prefix of the item's id, type of the events with its text
    BlockKind.REASONING: ("rs", "response.reasoning_text"),
    BlockKind.TEXT: ("msg", "response.output_text"),
    BlockKind.TOOL_CALL: ("fc", "response.function_call_arguments"),
}
_STATUSES = {None: "in_progress", FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete"}


class ResponseRenderer(BlockRenderer):
    """Renders one response; its events are numbered. `top` None: without log-probabilities."""

    def __init__(self, response_id: str, echoed: dict[str, Any], top: int | None = None) -> None:
        super().__init__()
        self._id = response_id
        self._echoed = echoed
        self._top = top
        self._custom = {tool["name"] for tool in echoed["tools"] if tool["type"] == "custom"}
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
        return _STATUSES.get(self._reply.finish_reason, "failed")

    def body(self) -> api.ResponseObject:
        status, failure = self._status, self._failure
        return api.ResponseObject(
            id=self._id,
            created_at=self._created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=None if failure is None else api.ResponseFailure(failure.message),
            incomplete_details=api.IncompleteDetails() if status == "incomplete" else None,
            **self._echoed,
            output=[self._make_item(block) for block in self._reply.blocks],
            usage=self._usage(),
        )

    def _usage(self) -> api.ResponseUsage | None:
        if (usage := self._reply.usage) is None:
            return None
        return api.ResponseUsage(
            usage.prompt_tokens,
            api.InputTokensDetails(usage.cached_tokens, cached_from=usage.cached_from),
            usage.completion_tokens,
            api.OutputTokensDetails(self._reply.reasoning_tokens),
            usage.prompt_tokens + usage.completion_tokens,
        )

    def _make_item(self, block: Block, *, started: bool = False) -> api.OutputItem:
        """The output item of a block that has ended, or has just `started`."""
        status = "in_progress" if started else "incomplete" if block.cut else "completed"
        item_id = f"{_NAMES[block.kind][0]}_{block.id}"
        if block.kind is BlockKind.TOOL_CALL:
            if block.name in self._custom:
                text = "" if started else _get_input(block)
                return api.OutputCustomCall(item_id, status, f"call_{block.id}", block.name, text)
            arguments = "" if started else block.text
            return api.OutputFunctionCall(item_id, status, f"call_{block.id}", block.name, arguments)
        content: list[Any] = [] if started else [self._make_part(block)]
        kind = api.OutputMessage if block.kind is BlockKind.TEXT else api.OutputReasoningItem
        return kind(item_id, status, content)

    def _make_part(self, block: Block, *, started: bool = False) -> api.OutputText | api.OutputReasoning:
        """The one part of an item that holds text."""
        text = "" if started else block.text
        if block.kind is BlockKind.REASONING:
            return api.OutputReasoning(text)
        return api.OutputText(text, logprobs=[] if started else self._logprobs(block.logprobs))

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[ChatTokenLogprob]:
        return [] if self._top is None else make_logprobs(entries, self._top)

    def _event(self, kind: str, /, **fields: Any) -> api.ResponseEvent:
        event = api.ResponseEvent(kind, self._sent, **fields)
        self._sent += 1
        return event

    def _render(self, change: BlockEvent) -> list[api.ResponseEvent]:
        """The events of a block's change: items hold parts, parts hold text."""
        block = change.block
        prefix, kind = _NAMES[block.kind]
        called = block.kind is BlockKind.TOOL_CALL
        custom = called and block.name in self._custom
        within: dict[str, Any] = {"output_index": block.index, "item_id": f"{prefix}_{block.id}"}
        if not called:
            within["content_index"] = 0
        if isinstance(change, BlockDelta):
            if custom:
                return []  # the input is known when its JSON is complete
            text = block.kind is BlockKind.TEXT
            more: dict[str, Any] = {"logprobs": self._logprobs(change.logprobs)} if text else {}
            return [self._event(f"{kind}.delta", **within, delta=change.text, **more)]
        started = isinstance(change, BlockStart)
        item = {"output_index": block.index, "item": self._make_item(block, started=started)}
        part = None if called else self._make_part(block, started=started)
        if started:
            added = [self._event("response.output_item.added", **item)]
            if part is not None:
                added.append(self._event("response.content_part.added", **within, part=part))
            return added
        if custom:
            kind, given = "response.custom_tool_call_input", _get_input(block)
            done = [
                self._event(f"{kind}.delta", **within, delta=given),
                self._event(f"{kind}.done", **within, input=given),
            ]
        elif part is None:
            done = [self._event(f"{kind}.done", **within, name=block.name, arguments=block.text)]
        else:
            more = {"logprobs": part.logprobs} if isinstance(part, api.OutputText) else {}
            done = [
                self._event(f"{kind}.done", **within, text=part.text, **more),
                self._event("response.content_part.done", **within, part=part),
            ]
        return [*done, self._event("response.output_item.done", **item)]


def _get_input(block: Block) -> str:
    """The text that a custom tool is called with."""
    text = (parse_object(block.text) or {}).get("input")
    return text if isinstance(text, str) else block.text


@router.post(ROUTE, **documented(api.EXAMPLE, events=[EXAMPLE_EVENTS], computes=True))
async def responses(body: api.ResponsesBody, http: HttpRequest) -> Response:
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
    renderer = ResponseRenderer(request.id, api.echo(body, model_name(engine, body.model)), body.top)
    return await renderer.respond(http, session, stream=body.stream)


@router.post(f"{ROUTE}/input_tokens", **documented(api.InputTokens(14)))
async def input_tokens(body: api.ResponsesBody, http: HttpRequest) -> Response:
    """Count the tokens of an input, as the chat template renders it."""
    engine = get_registry(http).current
    check_model(body.model)
    if (constraint := body.constraint()) is not None:
        await check_constraint(engine, constraint, body.form_field)
    count = await count_tokens(engine, body.to_conversation(), constrained=constraint is not None)
    return StructResponse(api.InputTokens(count))


@router.get(f"{ROUTE}/{{response_id:path}}", include_in_schema=False)
@router.delete(f"{ROUTE}/{{response_id:path}}", include_in_schema=False)
@router.post(f"{ROUTE}/{{response_id:path}}", include_in_schema=False)
async def stored(response_id: str) -> None:
    """Retrieve, delete, cancel, list input items: no response is ever stored."""
    raise NotFound("this response does not exist: the server is stateless and stores nothing")
