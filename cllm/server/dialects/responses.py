"""OpenAI's Responses API: its answers, its routes, and stored responses to continue."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.chat.conversation import Conversation
from cllm.chat.reply import Block, BlockDelta, BlockEvent, BlockKind, BlockStart, ReplyBuilder
from cllm.chat.session import ChatSession, count_tokens, open_chat
from cllm.errors import CllmError, InvalidRequest, ShuttingDown
from cllm.frontend.async_calls import loaded
from cllm.limits import MAX_MESSAGES, check
from cllm.server.answer_log import AnswerLog
from cllm.server.background import ATTEMPT_EVENTS, end_response
from cllm.server.body import run_sized
from cllm.server.dialect import JSON, encode_named
from cllm.server.dialects import responses_body as shapes
from cllm.server.dialects.llama_body import InputTokens
from cllm.server.dialects.llama_server import LlamaServerDialect
from cllm.server.dialects.openai import OpenAIDialect
from cllm.server.dialects.openai.batches import NUMBER, DeletedObject, get_jobs
from cllm.server.dialects.openai.bodies import drop_nulls
from cllm.server.dialects.openai.chat import ChatTokenLogprob, make_logprobs
from cllm.server.dialects.responses_body import OutputReasoning, OutputText, ResponseObject, ResponsesBody
from cllm.server.job_store import STORES_NOTHING, JobDatabase, StoredObject
from cllm.server.sse import BlockRenderer, EventStream, StreamEvent, encode_events, make_event
from cllm.server.submit import make_request, use_engine
from cllm.text.call_parser import parse_object
from cllm.text.json_shape import ShapeSum
from cllm.types import Failure, FinishReason, RequestOutput, TokenLogprob

ROUTE = "/v1/responses"
_NAMES = {  # prefix of the item's id, type of the events with its text
    BlockKind.REASONING: ("rs", "response.reasoning_text"),
    BlockKind.TEXT: ("msg", "response.output_text"),
    BlockKind.TOOL_CALL: ("fc", "response.function_call_arguments"),
}
_STATUSES = {
    None: "in_progress",
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.CANCELLED: "cancelled",
}
_EVENTS = {"cancelled": "failed"}  # the event of a status, where it has another name
LINGER_S = 600.0  # for the events of a background response that has ended
CANCEL_S = 10.0  # for a step to end
START_ANOTHER = "start another conversation"
_encode = msgspec.json.Encoder().encode
decode_items = msgspec.json.Decoder(list[shapes.ResponseItem]).decode


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


def echo(body: ResponsesBody, model: str) -> dict[str, Any]:
    """The fields of the response that repeat the request."""
    same = ("max_output_tokens", "parallel_tool_calls", "previous_response_id", "store", "temperature")
    return {
        **{name: getattr(body, name) for name in (*same, "top_p", "user", "background")},
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
    output=[shapes.OutputMessage("msg_2b7e", "completed", [OutputText("AI is …")])],
    usage=shapes.ResponseUsage(4, shapes.InputTokensDetails(0), 3, shapes.OutputTokensDetails(0), 7),
)


EXAMPLE_EVENTS = encode_events(
    make_event("response.created", sequence_number=0, response=EXAMPLE),
    make_event("response.output_text.delta", sequence_number=4, output_index=0, item_id="msg_1", delta="AI"),
    make_event("response.completed", sequence_number=9, response=EXAMPLE),
)


async def load_conversation(body: ResponsesBody, http: HttpRequest, *, sees: bool) -> Conversation:
    """The conversation with what is stored before it. Raises NotFound, InvalidRequest for too much of it."""
    store, tenant = get_jobs(http)
    field, stored = "conversation", []
    if isinstance(body.conversation, shapes.ConversationName) and body.conversation.id is not None:
        stored = [await store.run(JobDatabase.get, "conversation", tenant, body.conversation.id)]
    elif body.previous_response_id is not None:
        field = "previous_response_id"
        stored = await store.run(JobDatabase.get_chain, tenant, body.previous_response_id)

    histories = [each.more for each in stored]
    make = partial(make_conversation, body, histories, field, sees=sees)
    return await run_sized(http, len(await http.body()) + sum(map(len, histories)), make)


def make_conversation(
    body: ResponsesBody, histories: Sequence[bytes], field: str, *, sees: bool = False
) -> Conversation:
    """Decode what is stored, counted as one body is, and put it before the input. Raises InvalidRequest."""
    size, items = ShapeSum(field, START_ANOTHER), list[shapes.ResponseItem]()
    for each in histories:
        size.add(each)
        items += decode_items(each)
    check(len(items) + len(body.items), MAX_MESSAGES, "items", field, START_ANOTHER)
    return body.to_conversation(items, sees=sees)


async def find_conversation(
    body: ResponsesBody, http: HttpRequest, earlier: StoredObject | None
) -> str | None:
    """The id of the conversation that is continued: that of an earlier attempt, the named one, or a new one.

    Raises StorageFailed, NotFound where nothing is stored.
    """
    if earlier is not None:
        kept: dict[str, str] = msgspec.json.decode(earlier.record).get("conversation", {})
        return kept.get("id")
    if not isinstance(body.conversation, shapes.ConversationName):
        return None
    if body.conversation.id is not None or not body.store:
        return body.conversation.id
    return (await create_conversation(shapes.ConversationBody(), http)).id


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

    `top` None renders no log-probabilities. `keep` is called with a response that has ended. One that is
    `queued` is so until its first output. Each `attempt` at it numbers its events anew, from `first` on.
    """

    def __init__(
        self,
        reply: ReplyBuilder,
        response_id: str,
        echoed: dict[str, Any],
        top: int | None = None,
        keep: Callable[[ResponseObject, Failure | None], None] = lambda *_: None,
        *,
        queued: bool = False,
        attempt: int = 1,
    ) -> None:
        super().__init__(reply)
        self._keep = keep
        self._id = response_id
        self._echoed = echoed
        self._top = top
        self._custom = {tool["name"] for tool in echoed["tools"] if tool["type"] == "custom"}
        self._created = int(time.time())
        self._failure: Failure | None = None
        self._queued = queued
        self.attempt = attempt
        self.first = self._sent = (attempt - 1) * ATTEMPT_EVENTS

    def start(self) -> list[StreamEvent]:
        return [self._event(f"response.{kind}", response=self.body()) for kind in ("created", self._status)]

    def render(self, changes: Sequence[BlockEvent], output: RequestOutput) -> list[StreamEvent]:
        rendered: list[StreamEvent] = []
        if self._queued:
            self._queued = False
            rendered.append(self._event("response.in_progress", response=self.body()))
        rendered += [event for change in changes for event in self._render(change)]
        if (failure := output.error) is not None:
            self._failure = failure
            fields = {"code": failure.code, "message": failure.message, "param": None}
            rendered.append(self._event("error", **fields))
        if output.finish_reason is not None:
            body = self.body()
            rendered.append(self._event(f"response.{_EVENTS.get(body.status, body.status)}", response=body))
            self._keep(body, self._failure)
        return rendered

    def whole(self) -> ResponseObject:
        body = self.body()
        self._keep(body, self._failure)
        return body

    @property
    def _status(self) -> str:
        return "queued" if self._queued else _STATUSES.get(self._reply.finish_reason, "failed")

    def body(self) -> ResponseObject:
        status, failure = self._status, self._failure
        return ResponseObject(
            id=self._id,
            created_at=self._created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=None if failure is None else shapes.ResponseFailure(failure.message),
            incomplete_details=shapes.IncompleteDetails() if status == "incomplete" else None,
            **self._echoed,
            output=[self._make_item(block) for block in self._reply.blocks],
            usage=self._usage(),
        )

    def _usage(self) -> shapes.ResponseUsage | None:
        if (usage := self._reply.usage) is None:
            return None
        return shapes.ResponseUsage(
            usage.prompt_tokens,
            shapes.InputTokensDetails(usage.cached_tokens, cached_from=usage.cached_from),
            usage.completion_tokens,
            shapes.OutputTokensDetails(self._reply.reasoning_tokens),
            usage.prompt_tokens + usage.completion_tokens,
        )

    def _make_item(self, block: Block, *, started: bool = False) -> shapes.OutputItem:
        """The output item of a block that has ended, or has just `started`."""
        status = "in_progress" if started else "incomplete" if block.cut else "completed"
        item_id = f"{_NAMES[block.kind][0]}_{block.id}"
        if block.kind is BlockKind.TOOL_CALL:
            call = shapes.OutputCustomCall if block.name in self._custom else shapes.OutputFunctionCall
            given = _get_input(block) if call is shapes.OutputCustomCall else block.text
            return call(item_id, status, f"call_{block.id}", block.name, "" if started else given)
        content: list[Any] = [] if started else [self._make_part(block)]
        kind = shapes.OutputMessage if block.kind is BlockKind.TEXT else shapes.OutputReasoningItem
        return kind(item_id, status, content)

    def _make_part(self, block: Block, *, started: bool = False) -> OutputText | OutputReasoning:
        """The one part of an item that holds text."""
        text = "" if started else block.text
        if block.kind is BlockKind.REASONING:
            return OutputReasoning(text)
        return OutputText(text, logprobs=[] if started else self._logprobs(block.logprobs))

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[ChatTokenLogprob]:
        return [] if self._top is None else make_logprobs(entries, self._top)

    def _event(self, kind: str, /, **fields: Any) -> StreamEvent:
        event = make_event(kind, sequence_number=self._sent, **fields)
        self._sent += 1
        return event

    def _render(self, change: BlockEvent) -> list[StreamEvent]:
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


def make_keeper(
    body: ResponsesBody, http: HttpRequest, conversation: str | None
) -> Callable[[ResponseObject, Failure | None], None]:
    """What stores a response that has ended, and adds its items to its conversation."""
    (store, tenant), ttl = get_jobs(http), http.app.state.response_ttl

    def keep(response: ResponseObject, failure: Failure | None) -> None:
        new = make_stored(body, response, tenant, ttl)

        def extend(old: StoredObject) -> StoredObject:
            more = old.more[:-1] + (b"," if len(old.more) > 2 else b"") + new.more[1:]
            return msgspec.structs.replace(old, expires=new.expires, more=more)

        def end(old: StoredObject) -> StoredObject:
            same = {"created": old.created, "previous": old.previous}
            return msgspec.structs.replace(new, **same) if old.active else old

        well = response.status in ("completed", "incomplete")
        if conversation is not None and well and body.store:
            store.submit(JobDatabase.change, "conversation", tenant, conversation, extend)
        if not body.background:
            if body.store and store.enabled and well:
                store.submit(JobDatabase.put_response, new)
        elif failure is None or failure.code != ShuttingDown.code:  # the next server takes it up
            store.submit(JobDatabase.change, "response", tenant, response.id, end)

    return keep


@llama_responses.post("/responses", shown=False, computes="chat")
@responses.post(ROUTE, EXAMPLE, events=EXAMPLE_EVENTS, computes="chat")
async def create_response(body: ResponsesBody, http: HttpRequest) -> Any:
    """Answer an input, possibly with tool calls; `previous_response_id` continues a stored response.

    With `background`, the answer is made without a connection.
    """
    earlier: StoredObject | None = http.scope["state"].get("response")  # of a server that ended
    if body.background and not http.app.state.jobs.enabled:
        raise InvalidRequest(f"background: {STORES_NOTHING}", "background")
    stream = body.stream and earlier is None
    engine = await use_engine(http, body.model, stream=stream, timeout_s=body.timeout)
    request_id, limit = earlier.id if earlier else f"resp_{uuid.uuid4().hex}", body.max_output_tokens
    request = make_request(engine, http, body, request_id, limit, body.stop, logprobs=body.top)
    conversation_id = await find_conversation(body, http, earlier)
    conversation = await load_conversation(body, http, sees=engine.sees)
    session = await open_chat(engine, conversation, request)
    echoed = echo(body, body.model or loaded(engine)[0].name)
    echoed["store"] = body.store and http.app.state.jobs.enabled
    if conversation_id is not None:
        echoed["conversation"] = {"id": conversation_id}
    renderer = ResponseRenderer(
        session.replies[0],
        request.id,
        echoed,
        body.top,
        make_keeper(body, http, conversation_id),
        queued=body.background,
        attempt=1 if earlier is None else earlier.active + 1,
    )
    if not body.background:
        return await renderer.respond(http, session, stream=stream)
    log = await accept(http, session, renderer, body.previous_response_id)
    return EventStream.follow(log) if stream else renderer.body()


async def accept(
    http: HttpRequest, session: ChatSession, renderer: ResponseRenderer, previous: str | None
) -> AnswerLog:
    """Store the request of a background response, then let it go on without a connection. StorageFailed."""
    (store, tenant), app = get_jobs(http), http.app.state
    response, asked, expires = renderer.body(), await http.body(), time.time() + app.response_ttl
    attempt, record = renderer.attempt, _encode(response)
    new = StoredObject(response.id, tenant, response.created_at, expires, attempt, record, asked, previous)
    try:
        if attempt == 1:
            await store.run(JobDatabase.put_response, new)
        else:
            await store.run(JobDatabase.change, "response", tenant, new.id, lambda _: new)
    except BaseException:
        for each in session.streams:
            session.engine.cancel(each.request_id)
        raise
    given = (app.logs, response.id, tenant, session.engine, session.streams, LINGER_S)
    log = AnswerLog(*given, first=renderer.first, describe=renderer.body)
    log.start(renderer.chunks(session), http.scope)
    return log


@llama_responses.post("/responses/input_tokens", shown=False)
@responses.post(f"{ROUTE}/input_tokens", InputTokens(14))
async def input_tokens(body: ResponsesBody, http: HttpRequest) -> InputTokens:
    """Count the tokens of an input, as the chat template renders it."""
    engine = await use_engine(http, body.model)
    conversation = await load_conversation(body, http, sees=engine.sees)
    return InputTokens(await count_tokens(engine, conversation, body.constraint()))


@responses.get(f"{ROUTE}/{{response_id}}", EXAMPLE)
async def retrieve(response_id: str, http: HttpRequest) -> Any:
    """Return a stored response, or a background one as far as it has come.

    `?stream=true&starting_after=N` returns its events after number N, then those to come.
    """
    store, tenant = get_jobs(http)
    log: AnswerLog | None = http.app.state.logs.get(tenant, response_id)
    stream, after = (http.query_params.get(name, "") for name in ("stream", "starting_after"))
    if after and not re.fullmatch(NUMBER, after):
        raise InvalidRequest("starting_after: must be the sequence_number of an event", "starting_after")
    if stream == "true" and log is not None:
        return EventStream.follow(log, int(after or -1))
    if stream != "true" and log is not None and log.describe is not None and not log.ended.is_set():
        return log.describe()
    stored = await store.run(JobDatabase.get, "response", tenant, response_id)
    if stream == "true":
        raise InvalidRequest("stream: events of this response are not kept: retrieve it without", "stream")
    return Response(stored.record, media_type=JSON)


async def _stop(response_id: str, http: HttpRequest) -> StoredObject:
    """End a background response that runs or waits. Raises NotFound."""
    store, tenant = get_jobs(http)
    stored = await store.run(JobDatabase.get, "response", tenant, response_id)
    if stored.active:
        http.app.state.background.stop(response_id)
        if (log := http.app.state.logs.get(tenant, response_id)) is not None:
            log.cancel()
            with suppress(TimeoutError):
                await asyncio.wait_for(log.ended.wait(), CANCEL_S)
        end = partial(end_response, status="cancelled")
        stored = await store.run(JobDatabase.change, "response", tenant, response_id, end)
    return stored


@responses.post(f"{ROUTE}/{{response_id}}/cancel", EXAMPLE)
async def cancel(response_id: str, http: HttpRequest) -> Response:
    """Cancel a background response; one that has ended stays as it is."""
    stored = await _stop(response_id, http)
    if not msgspec.json.decode(stored.record)["background"]:
        raise InvalidRequest("response_id: only a response with background true can be cancelled")
    return Response(stored.record, media_type=JSON)


@responses.delete(f"{ROUTE}/{{response_id}}", DeletedObject("resp_1", "response"))
async def delete(response_id: str, http: HttpRequest) -> DeletedObject:
    """Forget a stored response; those that continue it cannot be continued any more."""
    store, tenant = get_jobs(http)
    await _stop(response_id, http)
    await store.run(JobDatabase.delete, "response", tenant, response_id)
    if (log := http.app.state.logs.get(tenant, response_id)) is not None:
        http.app.state.logs.remove(log)
    return DeletedObject(response_id, "response")


# Conversations ----------------------------------------------------------------------------------------


@responses.post("/v1/conversations")
async def create_conversation(body: shapes.ConversationBody, http: HttpRequest) -> shapes.ConversationObject:
    """Begin a conversation, which `conversation` of a response continues; it may have items already."""
    (store, tenant), created = get_jobs(http), time.time()
    new = shapes.ConversationObject(f"conv_{uuid.uuid4().hex}", int(created), body.metadata)
    expires = created + http.app.state.response_ttl
    stored = StoredObject(new.id, tenant, created, expires, record=_encode(new), more=_encode(body.items))
    await store.run(JobDatabase.add, "conversation", stored)
    return new


@responses.get("/v1/conversations/{conversation_id}")
async def retrieve_conversation(conversation_id: str, http: HttpRequest) -> shapes.ConversationObject:
    """Return what is known of a conversation."""
    store, tenant = get_jobs(http)
    found = await store.run(JobDatabase.get, "conversation", tenant, conversation_id)
    metadata = msgspec.json.decode(found.record).get("metadata", {})
    return shapes.ConversationObject(found.id, int(found.created), metadata)


@responses.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(conversation_id: str, http: HttpRequest) -> DeletedObject:
    """Forget a conversation with all its items."""
    store, tenant = get_jobs(http)
    await store.run(JobDatabase.delete, "conversation", tenant, conversation_id)
    return DeletedObject(conversation_id, "conversation.deleted")
