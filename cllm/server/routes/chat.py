"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.chat.reply import ChatReply, ReplyBuilder
from cllm.chat.session import ChatSession, open_chat
from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.errors import failure_body
from cllm.server.protocol import chat as api
from cllm.server.protocol.base import LargeJsonRoute, StructResponse, documented
from cllm.server.protocol.completions import make_usage
from cllm.server.sse import DONE, GONE, EventStream, collect, encode
from cllm.server.submit import check_model, get_registry, make_request, model_name
from cllm.text.output_parser import ContentText, OutputEvent, ReasoningText, ToolCallArguments, ToolCallStart
from cllm.types import FinishReason, RequestOutput, TokenLogprob
from cllm.workers.messages import TokenizeText, Tokens

ROUTE = "/v1/chat/completions"
router = APIRouter(tags=["OpenAI"], route_class=LargeJsonRoute)
EXAMPLE_EVENTS = (*map(encode, api.EXAMPLE_CHUNKS), DONE)
_json = msgspec.json.Encoder()
_CONTENT = b',"delta":{"content":'
_CLOSING = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class ChatRenderer:
    """Renders one call, whole or as chunks. `top` is None where no log-probabilities are wanted."""

    def __init__(
        self,
        head: dict[str, Any],
        top: int | None,
        *,
        include_usage: bool = False,
        older_form: bool = False,
    ) -> None:
        self._head = head
        self._top = top
        self._include_usage = include_usage
        self._older_form = older_form  # calls are functions
        # All chunks start alike: that part is encoded once.
        self._prefix = b"data: " + _json.encode(api.ChatCompletionChunk(**head))[:-2]
        self._opening = self._prefix + b'{"index":'

    def whole(self, replies: Sequence[ChatReply], prompt_tokens: int) -> api.ChatCompletion:
        """The response to a call that does not stream."""
        choices = [
            api.ChatChoice(
                index,
                api.ReplyMessage.from_reply(reply, older_form=self._older_form),
                self._logprobs(reply.logprobs),
                self._finish_reason(reply.finish_reason, called=bool(reply.tool_calls)),
            )
            for index, reply in enumerate(replies)
        ]
        usage = make_usage((reply.usage for reply in replies), prompt_tokens)
        return api.ChatCompletion(**self._head, choices=choices, usage=usage)

    async def chunks(self, session: ChatSession[AsyncOutputStream]) -> AsyncIterator[bytes]:
        """Chunks as they arrive, the usage if it was asked for, `[DONE]`; or an error, and the end."""
        n = len(session.streams)
        for index in range(n):
            yield self._encode(api.ChunkChoice(index, api.ChunkDelta(role="assistant", content="")))
        called = [False] * n
        usages = []
        async for index, events, output in session.events():
            if output.error is not None:
                yield encode(failure_body(ROUTE, output.error))
                return
            if output.finish_reason is None and not output.logprobs and len(events) == 1:
                event = events[0]
                if type(event) is ContentText:  # nearly all of them: put together as bytes
                    yield b"%b%d%b%b%b" % (self._opening, index, _CONTENT, _json.encode(event.text), _CLOSING)
                    continue
            called[index] = called[index] or any(isinstance(event, ToolCallStart) for event in events)
            if chunks := self._encode_step(index, events, output, called=called[index]):
                yield chunks
            if output.finish_reason is not None:
                usages.append(output.usage)
        if self._include_usage:
            usage = make_usage(usages, session.prompt_tokens)
            yield encode(api.ChatCompletionChunk(**self._head, usage=usage))
        yield DONE

    def _encode_step(
        self, index: int, events: Sequence[OutputEvent], output: RequestOutput, *, called: bool
    ) -> bytes:
        """The chunks of a step. Its log-probabilities go with the last one that has content."""
        make_delta = _make_older_delta if self._older_form else _make_delta
        choices = [api.ChunkChoice(index, make_delta(event)) for event in events]
        last_content = max(0, len(choices) - 1)
        if output.finish_reason is not None or (output.logprobs and not choices):
            choices.append(api.ChunkChoice(index, api.ChunkDelta()))
        if output.logprobs:
            choices[last_content].logprobs = self._logprobs(output.logprobs)
        if output.finish_reason is not None:
            choices[-1].finish_reason = self._finish_reason(output.finish_reason, called=called)
        return b"".join(map(self._encode, choices))

    def _finish_reason(self, reason: FinishReason, *, called: bool) -> str:
        return api.get_finish_reason(reason, called=called, older_form=self._older_form)

    def _encode(self, choice: api.ChunkChoice) -> bytes:
        return self._prefix + _json.encode(choice) + b"]}\n\n"

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> api.ChatLogprobs | None:
        return None if self._top is None else api.ChatLogprobs(api.make_logprobs(entries, self._top))


def _make_delta(event: OutputEvent) -> api.ChunkDelta:
    match event:
        case ContentText(text):
            return api.ChunkDelta(content=text)
        case ReasoningText(text):
            return api.ChunkDelta(reasoning_content=text)
        case ToolCallStart(index, name):
            call_id, function = f"call_{secrets.token_hex(12)}", api.CalledFunctionResult("", name)
            return api.ChunkDelta(tool_calls=[api.ToolCallResult(function, call_id, "function", index)])
        case ToolCallArguments(index, text):
            return api.ChunkDelta(
                tool_calls=[api.ToolCallResult(api.CalledFunctionResult(text), index=index)]
            )


def _make_older_delta(event: OutputEvent) -> api.ChunkDelta:
    """The delta where tools are functions: there is one call, without an id."""
    match event:
        case ToolCallStart(_, name):
            return api.ChunkDelta(function_call=api.CalledFunctionResult("", name))
        case ToolCallArguments(_, text):
            return api.ChunkDelta(function_call=api.CalledFunctionResult(text))
        case _:
            return _make_delta(event)


@router.post(ROUTE, **documented(api.EXAMPLE, events=EXAMPLE_EVENTS, computes=True))
async def chat(body: api.ChatBody, http: HttpRequest) -> Response:
    """Answer a conversation, possibly with tool calls."""
    engine = get_registry(http).current
    check_model(body.model)
    request = await make_request(
        engine,
        http,
        body,
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        max_tokens=body.max_tokens,
        stop=body.stops,
        logprobs=max(1, body.top) if body.top is not None else 0,
    )
    if body.predicted_text:
        task = TokenizeText(body.predicted_text, add_special=False)
        predicted = (await run_tokenizer(engine, task, Tokens)).tokens
        limit = loaded(engine)[1].request_tokens
        request = msgspec.structs.replace(request, prediction=predicted[:limit])
    session = await open_chat(engine, body.conversation(), request, body.n)
    head = {"id": request.id, "created": int(time.time()), "model": model_name(engine, body.model)}
    renderer = ChatRenderer(head, body.top, include_usage=body.include_usage, older_form=body.older_form)
    if body.stream:
        return EventStream(engine, session.streams, renderer.chunks(session))
    outputs = await collect(engine, session.streams, http)
    if outputs is None:
        return Response(status_code=GONE)
    replies = [ReplyBuilder(session.parse(choice)).reply() for choice in outputs]
    return StructResponse(renderer.whole(replies, session.prompt_tokens))
