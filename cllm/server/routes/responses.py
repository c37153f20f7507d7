"""OpenAI's /v1/responses, and the store of responses that a later request may continue."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from pydantic import TypeAdapter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.chat.reply import Block, BlockDelta, BlockEvent, BlockKind, BlockStart, ParsedOutput
from cllm.chat.session import count_tokens, open_chat
from cllm.errors import NotFound
from cllm.server.blocks import BlockRenderer, StreamEvent, encode_events
from cllm.server.protocol import responses as api
from cllm.server.protocol.base import JSON, LargeJsonRoute, StructResponse, documented
from cllm.server.protocol.chat import ChatTokenLogprob, make_logprobs
from cllm.server.protocol.items import Item
from cllm.server.submit import check_constraint, make_request, model_name, use_engine
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


_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
MAX_STORED = 1024  # responses of one tenant
_NOT_STORED = (
    "this response is not stored here: it was made with store false, or deleted, or dropped to make room "
    "(--response-store-mb); send the whole conversation as input items"
)
_NOT_FOUND = {404: ("not_found", _NOT_STORED, "No such response")}


class DeletedResponse(msgspec.Struct):
    """The response of `DELETE /v1/responses/{response_id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class StoredResponse(msgspec.Struct, frozen=True):
    """A response as JSON, and what a conversation that continues it needs."""

    id: str
    previous: str | None
    body: bytes
    input: bytes  # its items, a JSON list
    output: bytes

    @property
    def size(self) -> int:
        return len(self.body) + len(self.input) + len(self.output)


class ResponseStore:
    """Stored responses in memory, those of each tenant apart, and as many bytes of each. 0 bytes: none.

    Those not used for longest are dropped first. A response refers to the one it continues, so using it
    counts for all before it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tenants: dict[str, OrderedDict[str, StoredResponse]] = {}

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Keep a response, unless it is larger than the whole store."""
        if stored.size > self._max_bytes:
            return
        kept = self._tenants.setdefault(tenant, OrderedDict())
        kept[stored.id] = stored
        size = sum(each.size for each in kept.values())
        while size > self._max_bytes or len(kept) > MAX_STORED:
            size -= kept.popitem(last=False)[1].size

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """A response; raises NotFound."""
        kept = self._tenants.get(tenant)
        if kept is None or response_id not in kept:
            raise NotFound(_NOT_STORED)
        return kept[response_id]

    def get_chain(self, tenant: str, response_id: str) -> list[StoredResponse]:
        """A response and all it continues, the oldest first; raises NotFound where one of them is gone."""
        chain: list[StoredResponse] = []
        following: str | None = response_id
        while following is not None:
            chain.append(self.get(tenant, following))
            following = chain[-1].previous
        chain.reverse()
        for stored in chain:
            self._tenants[tenant].move_to_end(stored.id)
        return chain

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response; raises NotFound."""
        self.get(tenant, response_id)
        del self._tenants[tenant][response_id]

    def clear(self) -> int:
        """Forget the responses of all tenants; returns how many there were."""
        count = sum(map(len, self._tenants.values()))
        self._tenants.clear()
        return count


def _get_store(http: HttpRequest) -> tuple[ResponseStore, str]:
    """The store of the app, and the tenant that asks."""
    store = http.app.state.responses
    assert isinstance(store, ResponseStore)
    return store, http.scope["state"]["tenant"].name


def _load_history(body: api.ResponsesBody, http: HttpRequest) -> list[Item]:
    """The items before a request's own; raises NotFound."""
    if body.previous_response_id is None:
        return []
    store, tenant = _get_store(http)
    return [
        item
        for stored in store.get_chain(tenant, body.previous_response_id)
        for part in (stored.input, stored.output)
        for item in _ITEMS.validate_json(part)
    ]


def _make_keeper(body: api.ResponsesBody, http: HttpRequest) -> Callable[[api.ResponseObject], None]:
    """Called with the finished response: stores it where that is wanted."""
    store, tenant = _get_store(http)

    def keep(response: api.ResponseObject) -> None:
        if body.store:
            items = _ITEMS.dump_json(body.items, by_alias=True, exclude_none=True)
            encode = msgspec.json.encode
            previous = body.previous_response_id
            store.put(
                tenant,
                StoredResponse(response.id, previous, encode(response), items, encode(response.output)),
            )

    return keep


class ResponseRenderer(BlockRenderer):
    """Renders one response; its events are numbered. `top` None: without log-probabilities.

    `keep` is called with a response that has ended well.
    """

    def __init__(
        self,
        response_id: str,
        echoed: dict[str, Any],
        top: int | None = None,
        keep: Callable[[api.ResponseObject], None] = lambda _: None,
    ) -> None:
        super().__init__()
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

    def add(self, events: Sequence[OutputEvent], output: RequestOutput) -> list[StreamEvent]:
        rendered: list[StreamEvent] = []
        for event in self._reply.add(events, output):
            rendered += self._render(event)
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

    def whole(self, steps: Sequence[ParsedOutput]) -> api.ResponseObject:
        body: api.ResponseObject = super().whole(steps)
        self._keep(body)
        return body

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
    """Answer an input, possibly with tool calls; `previous_response_id` continues a stored response."""
    engine = await use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    history = _load_history(body, http)
    request = await make_request(
        engine,
        http,
        body,
        request_id=f"resp_{uuid.uuid4().hex}",
        max_tokens=body.max_output_tokens,
        stop=body.stops,
        logprobs=max(1, body.top) if body.top is not None else 0,
    )
    session = await open_chat(engine, body.to_conversation(history), request)
    echoed = api.echo(body, model_name(engine, body.model))
    renderer = ResponseRenderer(request.id, echoed, body.top, _make_keeper(body, http))
    return await renderer.respond(http, session, stream=body.stream)


@router.post(f"{ROUTE}/input_tokens", **documented(api.InputTokens(14)))
async def input_tokens(body: api.ResponsesBody, http: HttpRequest) -> Response:
    """Count the tokens of an input, as the chat template renders it."""
    engine = await use_engine(http, body.model)
    if (constraint := body.constraint()) is not None:
        await check_constraint(engine, constraint, body.form_field)
    conversation = body.to_conversation(_load_history(body, http))
    count = await count_tokens(engine, conversation, constrained=constraint is not None)
    return StructResponse(api.InputTokens(count))


@router.get(f"{ROUTE}/{{response_id}}", **documented(api.EXAMPLE, errors=_NOT_FOUND))
async def retrieve(response_id: str, http: HttpRequest) -> Response:
    """Return a stored response."""
    store, tenant = _get_store(http)
    return Response(store.get(tenant, response_id).body, media_type=JSON)


@router.delete(f"{ROUTE}/{{response_id}}", **documented(DeletedResponse("resp_1"), errors=_NOT_FOUND))
async def delete(response_id: str, http: HttpRequest) -> Response:
    """Forget a stored response; those that continue it cannot be continued any more."""
    store, tenant = _get_store(http)
    store.delete(tenant, response_id)
    return StructResponse(DeletedResponse(response_id))


@router.get(f"{ROUTE}/{{response_id:path}}", include_in_schema=False)
@router.delete(f"{ROUTE}/{{response_id:path}}", include_in_schema=False)
@router.post(f"{ROUTE}/{{response_id:path}}", include_in_schema=False)
async def unsupported(response_id: str) -> None:
    """Cancel, compact, list input items."""
    raise NotFound("this route does not exist: a stored response can be retrieved and deleted")
