"""OpenAI's Responses API: its answers, its routes, and stored responses to continue."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.chat.reply import Block, BlockDelta, BlockEvent, BlockKind, BlockStart, ReplyBuilder
from cllm.chat.session import count_tokens, open_chat
from cllm.errors import CllmError, NotFound
from cllm.frontend.async_calls import loaded
from cllm.server.blocks import BlockRenderer, StreamEvent, encode_events
from cllm.server.dialect import JSON, encode_named
from cllm.server.dialects.llama_body import InputTokens
from cllm.server.dialects.llama_server import LlamaServerDialect
from cllm.server.dialects.openai import OpenAIDialect
from cllm.server.dialects.openai.bodies import drop_nulls
from cllm.server.dialects.openai.chat import ChatTokenLogprob, make_logprobs
from cllm.server.dialects.responses_body import ResponseItem, ResponsesBody
from cllm.server.job_store import NOT_STORED, JobDatabase, JobStore, StoredObject
from cllm.server.submit import make_request, use_engine
from cllm.server.turns import run_in_turn
from cllm.text.call_parser import parse_object
from cllm.types import Failure, FinishReason, RequestOutput, TokenLogprob

ROUTE = "/v1/responses"
_NAMES = {  # prefix of the item's id, type of the events with its text
    BlockKind.REASONING: ("rs", "response.reasoning_text"),
    BlockKind.TEXT: ("msg", "response.output_text"),
    BlockKind.TOOL_CALL: ("fc", "response.function_call_arguments"),
}
_STATUSES = {None: "in_progress", FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete"}
_NOT_FOUND = {404: ("not_found", NOT_STORED, "No such response")}
_encode = msgspec.json.Encoder().encode
decode_items = msgspec.json.Decoder(list[ResponseItem]).decode


class ResponsesDialect(OpenAIDialect):
    """The Responses API: an error in a stream is an event with a name."""

    prefix = "/v1/responses/"

    def frame_error(self, error: CllmError) -> bytes:
        shown = {"code": error.code, "message": error.message, "param": getattr(error, "field", None)}
        return encode_named("error", {"type": "error", "sequence_number": 0, **shown})


class LlamaResponsesDialect(LlamaServerDialect):
    """The same at llama-server's paths, with the shape of its errors."""

    prefix = "/responses/"

    def frame_error(self, error: CllmError) -> bytes:
        return responses.frame_error(error)


responses = ResponsesDialect()
llama_responses = LlamaResponsesDialect()


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of an output message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of a reasoning item."""

    text: str = ""


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """An output item: text."""

    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class OutputReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """An output item: reasoning."""

    id: str
    status: str
    content: list[OutputReasoning]
    summary: list[Any] = []


class OutputFunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """An output item: a tool call; `arguments` is JSON text."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class OutputCustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    """An output item: a call of a custom tool, with its one text."""

    id: str
    status: str
    call_id: str
    name: str
    input: str


OutputItem = OutputMessage | OutputReasoningItem | OutputFunctionCall | OutputCustomCall


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0
    cached_from: str = ""  # the tier of the KV cache: device, ram or disk


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of a call."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    message: str
    code: str = "server_error"


class IncompleteDetails(msgspec.Struct):
    reason: str = "max_output_tokens"


class ResponseObject(msgspec.Struct, kw_only=True):
    """The response: the output, and the parameters of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | list[dict[str, Any]] | None = None
    max_output_tokens: int | None = None
    temperature: float
    top_p: float
    user: str | None = None
    model: str
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, str]
    top_logprobs: int
    truncation: str = "disabled"
    store: bool = False
    background: bool = False
    previous_response_id: str | None = None
    service_tier: str = "default"
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None


def echo(body: ResponsesBody, model: str) -> dict[str, Any]:
    """The fields of the response that repeat the request."""
    same = ("max_output_tokens", "parallel_tool_calls", "previous_response_id", "store", "temperature")
    return {
        **{name: getattr(body, name) for name in (*same, "top_p", "user")},
        "instructions": drop_nulls(msgspec.to_builtins(body.instructions)),
        "tool_choice": drop_nulls(msgspec.to_builtins(body.tool_choice)),
        "tools": [tool.echo() for tool in body.tools],
        "model": model,
        "text": {"format": msgspec.to_builtins(body.text_format)},
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "metadata": body.metadata,
        "top_logprobs": body.top_logprobs or 0,
    }


EXAMPLE = ResponseObject(
    id="resp_8f0c2d7e",
    created_at=1767225600,
    completed_at=1767225601,
    status="completed",
    **echo(
        ResponsesBody.parse({"input": "?", "instructions": "Be brief.", "max_output_tokens": 64}),
        "SmolLM2-135M-Instruct",
    ),
    output=[OutputMessage("msg_2b7e", "completed", [OutputText("AI is …")])],
    usage=ResponseUsage(4, InputTokensDetails(0), 3, OutputTokensDetails(0), 7),
)


class ResponseEvent(StreamEvent):
    """One event of a stream."""

    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | OutputReasoning | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


class DeletedResponse(msgspec.Struct):
    """The response of `DELETE /v1/responses/{response_id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


EXAMPLE_EVENTS = encode_events(
    [
        ResponseEvent("response.created", 0, response=EXAMPLE),
        ResponseEvent("response.output_text.delta", 4, output_index=0, item_id="msg_1", delta="AI"),
        ResponseEvent("response.completed", 9, response=EXAMPLE),
    ]
)


def _get_store(http: HttpRequest) -> tuple[JobStore, str]:
    """The store of the app, and the tenant that asks."""
    return http.app.state.jobs, http.scope["state"]["tenant"].name


async def load_history(body: ResponsesBody, http: HttpRequest) -> list[ResponseItem]:
    """The items before a request's own; raises NotFound."""
    if body.previous_response_id is None:
        return []
    store, tenant = _get_store(http)
    chain = await store.run(JobDatabase.get_chain, tenant, body.previous_response_id)
    return [item for stored in chain for item in decode_items(stored.more)]


def make_stored(body: ResponsesBody, response: ResponseObject, tenant: str, ttl: float) -> StoredObject:
    return StoredObject(
        id=response.id,
        tenant=tenant,
        created=response.created_at,
        expires=time.time() + ttl,
        record=_encode(response),
        more=_encode([*body.items, *response.output]),
        previous=body.previous_response_id,
    )


class ResponseRenderer(BlockRenderer):
    """Renders one response; its events are numbered.

    `top` None renders no log-probabilities. `keep` is called with a response that has ended well.
    """

    def __init__(
        self,
        reply: ReplyBuilder,
        response_id: str,
        echoed: dict[str, Any],
        top: int | None = None,
        keep: Callable[[ResponseObject], None] = lambda _: None,
    ) -> None:
        super().__init__(reply)
        self._keep = keep
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

    def render(self, changes: Sequence[BlockEvent], output: RequestOutput) -> list[StreamEvent]:
        rendered: list[StreamEvent] = [event for change in changes for event in self._render(change)]
        if (failure := output.error) is not None:
            self._failure = failure
            fields = {"code": failure.code, "message": failure.message, "param": None}
            rendered.append(self._event("error", **fields))
        if output.finish_reason is not None:
            body = self.body()
            rendered.append(self._event(f"response.{self._status}", response=body))
            if output.error is None:
                self._keep(body)
        return rendered

    def whole(self) -> ResponseObject:
        body = self.body()
        self._keep(body)
        return body

    @property
    def _status(self) -> str:
        return _STATUSES.get(self._reply.finish_reason, "failed")

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
            InputTokensDetails(usage.cached_tokens, cached_from=usage.cached_from),
            usage.completion_tokens,
            OutputTokensDetails(self._reply.reasoning_tokens),
            usage.prompt_tokens + usage.completion_tokens,
        )

    def _make_item(self, block: Block, *, started: bool = False) -> OutputItem:
        """The output item of a block that has ended, or has just `started`."""
        status = "in_progress" if started else "incomplete" if block.cut else "completed"
        item_id = f"{_NAMES[block.kind][0]}_{block.id}"
        if block.kind is BlockKind.TOOL_CALL:
            call = OutputCustomCall if block.name in self._custom else OutputFunctionCall
            given = _get_input(block) if call is OutputCustomCall else block.text
            return call(item_id, status, f"call_{block.id}", block.name, "" if started else given)
        content: list[Any] = [] if started else [self._make_part(block)]
        kind = OutputMessage if block.kind is BlockKind.TEXT else OutputReasoningItem
        return kind(item_id, status, content)

    def _make_part(self, block: Block, *, started: bool = False) -> OutputText | OutputReasoning:
        """The one part of an item that holds text."""
        text = "" if started else block.text
        if block.kind is BlockKind.REASONING:
            return OutputReasoning(text)
        return OutputText(text, logprobs=[] if started else self._logprobs(block.logprobs))

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[ChatTokenLogprob]:
        return [] if self._top is None else make_logprobs(entries, self._top)

    def _event(self, kind: str, /, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(kind, self._sent, **fields)
        self._sent += 1
        return event

    def _render(self, change: BlockEvent) -> list[ResponseEvent]:
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
            more = {"logprobs": part.logprobs} if isinstance(part, OutputText) else {}
            done = [
                self._event(f"{kind}.done", **within, text=part.text, **more),
                self._event("response.content_part.done", **within, part=part),
            ]
        return [*done, self._event("response.output_item.done", **item)]


def _get_input(block: Block) -> str:
    """The text that a custom tool is called with."""
    text = (parse_object(block.text) or {}).get("input")
    return text if isinstance(text, str) else block.text


@llama_responses.post("/responses", shown=False)
@responses.post(ROUTE, EXAMPLE, events=EXAMPLE_EVENTS, computes=True)
async def create_response(body: ResponsesBody, http: HttpRequest) -> Any:
    """Answer an input, possibly with tool calls; `previous_response_id` continues a stored response."""
    engine = await use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    history = await load_history(body, http)
    request = make_request(
        engine,
        http,
        body,
        request_id=f"resp_{uuid.uuid4().hex}",
        max_tokens=body.max_output_tokens,
        stop=body.stop,
        logprobs=body.top,
    )
    conversation = await run_in_turn(http, partial(body.to_conversation, history, sees=engine.sees))
    session = await open_chat(engine, conversation, request)
    store, tenant = _get_store(http)

    def keep(response: ResponseObject) -> None:
        if body.store and store.enabled:
            new = make_stored(body, response, tenant, http.app.state.response_ttl)
            store.submit(JobDatabase.put_response, new)

    echoed = echo(body, body.model or loaded(engine)[0].name)
    renderer = ResponseRenderer(session.replies[0], request.id, echoed, body.top, keep)
    return await renderer.respond(http, session, stream=body.stream)


@llama_responses.post("/responses/input_tokens", shown=False)
@responses.post(f"{ROUTE}/input_tokens", InputTokens(14))
async def input_tokens(body: ResponsesBody, http: HttpRequest) -> InputTokens:
    """Count the tokens of an input, as the chat template renders it."""
    engine = await use_engine(http, body.model)
    history = await load_history(body, http)
    conversation = await run_in_turn(http, partial(body.to_conversation, history, sees=engine.sees))
    return InputTokens(await count_tokens(engine, conversation, body.constraint()))


@responses.get(f"{ROUTE}/{{response_id}}", EXAMPLE, errors=_NOT_FOUND)
async def retrieve(response_id: str, http: HttpRequest) -> Response:
    """Return a stored response."""
    store, tenant = _get_store(http)
    stored = await store.run(JobDatabase.get, "response", tenant, response_id)
    return Response(stored.record, media_type=JSON)


@responses.delete(f"{ROUTE}/{{response_id}}", DeletedResponse("resp_1"), errors=_NOT_FOUND)
async def delete(response_id: str, http: HttpRequest) -> DeletedResponse:
    """Forget a stored response; those that continue it cannot be continued any more."""
    store, tenant = _get_store(http)
    await store.run(JobDatabase.delete, "response", tenant, response_id)
    return DeletedResponse(response_id)


@responses.get(f"{ROUTE}/{{response_id:path}}", shown=False)
@responses.delete(f"{ROUTE}/{{response_id:path}}", shown=False)
@responses.post(f"{ROUTE}/{{response_id:path}}", shown=False)
async def unsupported(response_id: str) -> Response:
    """Cancel, compact, list input items."""
    raise NotFound("this route does not exist: a stored response can be retrieved and deleted")
