"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.chat.reply import ChatReply, ReplyBuilder
from cllm.chat.session import ChatSession, open_chat
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.errors import failure_body
from cllm.server.protocol import chat as api
from cllm.server.protocol.base import LargeJsonRoute, StructResponse, Timings, documented, get_timings
from cllm.server.protocol.completions import make_prompt_logprobs, make_usage
from cllm.server.routes.llama_completion import make_verbose, watch_prompt
from cllm.server.sse import DONE, GONE, EventStream, collect, encode
from cllm.server.submit import make_request, model_name, use_engine
from cllm.text.output_parser import ContentText, OutputEvent, ReasoningText, ToolCallArguments, ToolCallStart
from cllm.types import FinishReason, RequestOutput, TokenLogprob

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
        timed: bool = False,
        scored: int | None = None,
    ) -> None:
        self._head = head
        self._top = top
        self._include_usage = include_usage
        self._timed = timed  # every chunk has timings, not the last one alone
        self._scored = scored  # alternatives of each token of the prompt; None: it is not scored
        self._older_form = older_form  # calls are functions
        # All chunks start alike: that part is encoded once.
        self._prefix = b"data: " + _json.encode(api.ChatCompletionChunk(**head))[:-2]
        self._opening = self._prefix + b'{"index":'

    def whole(
        self, replies: Sequence[ChatReply], session: ChatSession[AsyncOutputStream], **more: Any
    ) -> api.ChatCompletion:
        """The response to a call that does not stream. Its times are those of the first choice."""
        choices = [
            api.ChatChoice(
                index,
                api.ReplyMessage.from_reply(reply, older_form=self._older_form),
                self._logprobs(reply.logprobs),
                self._finish_reason(reply.finish_reason, called=bool(reply.tool_calls)),
            )
            for index, reply in enumerate(replies)
        ]
        usage = make_usage((reply.usage for reply in replies), session.prompt_tokens)
        timings = get_timings(session.streams[0], session.prompt_tokens, replies[0].usage)
        if self._scored is not None:
            entries = replies[0].prompt_logprobs
            more["prompt_logprobs"] = [make_prompt_logprobs(entry, self._scored) for entry in entries]
        return api.ChatCompletion(**self._head, choices=choices, usage=usage, timings=timings, **more)

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
            plain = output.finish_reason is None and not output.logprobs and not self._timed
            if plain and len(events) == 1:
                event = events[0]
                if type(event) is ContentText:  # nearly all of them: put together as bytes
                    yield b"%b%d%b%b%b" % (self._opening, index, _CONTENT, _json.encode(event.text), _CLOSING)
                    continue
            called[index] = called[index] or any(isinstance(event, ToolCallStart) for event in events)
            if output.finish_reason is not None:
                usages.append(output.usage)
            timings: Timings | UnsetType = UNSET
            if self._timed or (len(usages) == n and not self._include_usage):
                timings = get_timings(session.streams[index], session.prompt_tokens, output.usage)
            if chunks := self._encode_step(index, events, output, timings, called=called[index]):
                yield chunks
        if self._include_usage:
            timings = get_timings(session.streams[0], session.prompt_tokens, usages[0])
            usage = make_usage(usages, session.prompt_tokens)
            yield encode(api.ChatCompletionChunk(**self._head, usage=usage, timings=timings))
        yield DONE

    async def with_progress(
        self, session: ChatSession[AsyncOutputStream], chunks: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """The chunks, and before the first that has an output: how much of the prompt is computed."""
        for _ in session.streams:
            yield await anext(chunks)
        first = asyncio.ensure_future(anext(chunks))
        total = session.prompt_tokens
        async for progress in watch_prompt(session.engine, session.streams[0], total, first):
            choices = [api.ChunkChoice(0, api.ChunkDelta())]
            yield encode(api.ChatCompletionChunk(**self._head, choices=choices, prompt_progress=progress))
        yield await first
        async for chunk in chunks:
            yield chunk

    def _encode_step(
        self,
        index: int,
        events: Sequence[OutputEvent],
        output: RequestOutput,
        timings: Timings | UnsetType,
        *,
        called: bool,
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
        if not choices:
            return b""
        *before, last = choices
        return b"".join((*map(self._encode, before), self._encode(last, timings)))

    def _finish_reason(self, reason: FinishReason, *, called: bool) -> str:
        return api.get_finish_reason(reason, called=called, older_form=self._older_form)

    def _encode(self, choice: api.ChunkChoice, timings: Timings | UnsetType = UNSET) -> bytes:
        more = b"" if timings is UNSET else b',"timings":' + _json.encode(timings)
        return self._prefix + _json.encode(choice) + b"]" + more + b"}\n\n"

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
    engine = await use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    request = await make_request(
        engine,
        http,
        body,
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        max_tokens=body.max_tokens,
        stop=body.stops,
        logprobs=max(1, body.top) if body.top is not None else 0,
    )
    request = msgspec.structs.replace(request, prompt_logprobs=body.scored)
    conversation = msgspec.structs.replace(body.conversation(), prediction=body.predicted_text)
    session = await open_chat(engine, conversation, request, body.n)
    head = {"id": request.id, "created": int(time.time()), "model": model_name(engine, body.model)}
    renderer = ChatRenderer(
        head,
        body.top,
        include_usage=body.include_usage,
        older_form=body.older_form,
        timed=body.timings_per_token,
        scored=body.prompt_logprobs,
    )
    if body.stream:
        chunks = renderer.chunks(session)
        if body.return_progress:
            chunks = renderer.with_progress(session, chunks)
        return EventStream(engine, session.streams, chunks)
    outputs = await collect(engine, session.streams, http)
    if outputs is None:
        return Response(status_code=GONE)
    replies = [ReplyBuilder(session.parse(choice)).reply() for choice in outputs]
    more = {"verbose": await make_verbose(session, request, outputs[0])} if body.verbose else {}
    return StructResponse(renderer.whole(replies, session, **more))
