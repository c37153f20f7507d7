"""OpenAI's `/v1/chat/completions` and `/v1/audio/transcriptions`: their answers and routes."""

from __future__ import annotations

import base64
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.datastructures import UploadFile
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from cllm.chat.reply import BlockDelta, BlockEnd, BlockEvent, BlockKind, ChatReply
from cllm.chat.session import ChatSession, ChatStep, open_chat
from cllm.errors import InvalidRequest
from cllm.frontend.async_calls import loaded
from cllm.server.body import run_in_turn
from cllm.server.dialect import DONE, Dialect, encode
from cllm.server.dialects.llama_server import add_progress, llama_server, make_verbose
from cllm.server.dialects.openai import completions, openai
from cllm.server.dialects.openai.bodies import ChatBody
from cllm.server.examples import read_examples
from cllm.server.middleware import SOUNDS
from cllm.server.sse import EventStream, collect, render
from cllm.server.submit import make_request, use_engine
from cllm.server.timings import TimedResponse, Timings, get_timings
from cllm.types import FinishReason, TokenLogprob

_json = msgspec.json.Encoder()
_CONTENT = b',"delta":{"content":'
_CLOSING = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class CandidateLogprob(msgspec.Struct):
    """A token that could have been sampled."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(CandidateLogprob):
    """The sampled token, and the most likely ones in its place."""

    top_logprobs: list[CandidateLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatTokenLogprob]


def make_logprobs(entries: Sequence[TokenLogprob], top: int) -> list[ChatTokenLogprob]:
    """One entry a token, each with the `top` most likely ones."""

    def fields(piece: bytes, logprob: float) -> tuple[str, float, list[int]]:
        return piece.decode(errors="replace"), logprob, list(piece)

    made = []
    for entry in entries:
        likely = zip(entry.pieces[1 : 1 + top], entry.top[:top], strict=True)
        candidates = [CandidateLogprob(*fields(piece, logprob)) for piece, (_, logprob) in likely]
        made.append(ChatTokenLogprob(*fields(entry.pieces[0], entry.logprob), candidates))
    return made


class CalledFunctionResult(msgspec.Struct):
    """The function of a call; `arguments` is JSON text. A later chunk has only more of the arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallResult(msgspec.Struct):
    """A tool call of an answer. Chunks have an `index`; only the first of a call has `id` and `type`."""

    function: CalledFunctionResult
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class ReplyMessage(msgspec.Struct):
    """The answer."""

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallResult] | UnsetType = UNSET
    function_call: CalledFunctionResult | UnsetType = UNSET

    @classmethod
    def from_reply(cls, reply: ChatReply, *, older_form: bool = False) -> ReplyMessage:
        calls = [
            ToolCallResult(CalledFunctionResult(call.arguments, call.name), call.id, "function")
            for call in reply.tool_calls
        ]
        return cls(
            reply.text if reply.text or not calls else None,
            reasoning_content=reply.reasoning or UNSET,
            tool_calls=calls if calls and not older_form else UNSET,
            function_call=calls[0].function if calls and older_form else UNSET,
        )


class ChatChoice(msgspec.Struct):
    """One of the `n` answers."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(TimedResponse, frozen=True, kw_only=True):
    """The response."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: completions.CompletionUsage
    prompt_logprobs: completions.PromptLogprobs | UnsetType = UNSET


class ChunkDelta(msgspec.Struct, omit_defaults=True):
    """More of one choice."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallResult] | UnsetType = UNSET
    function_call: CalledFunctionResult | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """More of one choice, or its end."""

    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(TimedResponse, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    usage: completions.CompletionUsage | UnsetType = UNSET
    choices: Sequence[ChunkChoice] = ()  # last: a stream encodes what precedes it once


EXAMPLE_EVENTS = b"".join(map(encode, read_examples(ChatCompletionChunk))) + DONE


class ChatCompletionRenderer:
    """Renders one call, whole or as chunks."""

    def __init__(self, body: ChatBody, head: dict[str, Any]) -> None:
        self._body = body
        self._head = head
        # All chunks start alike: that part is encoded once.
        self._prefix = b"data: " + _json.encode(ChatCompletionChunk(**head))[:-2]
        self._opening = self._prefix + b'{"index":'

    def whole(self, replies: Sequence[ChatReply], session: ChatSession, **more: Any) -> ChatCompletion:
        """The response to a call that does not stream. Its times are those of the first choice."""
        choices = [
            ChatChoice(
                index,
                ReplyMessage.from_reply(reply, older_form=self._body.older_form),
                self._logprobs(reply.logprobs),
                self._finish_reason(reply.finish_reason, called=bool(reply.tool_calls)),
            )
            for index, reply in enumerate(replies)
        ]
        usage = completions.make_usage((reply.usage for reply in replies), session.prompt_tokens)
        timings = get_timings(session.streams[0], session.prompt_tokens, replies[0].usage)
        if (count := self._body.prompt_logprobs) is not None:
            entries = replies[0].prompt_logprobs
            more["prompt_logprobs"] = [completions.make_prompt_logprobs(entry, count) for entry in entries]
        return ChatCompletion(**self._head, choices=choices, usage=usage, timings=timings, **more)

    async def chunks(self, session: ChatSession, dialect: Dialect) -> AsyncIterator[bytes]:
        """Chunks as they arrive, the usage if it was asked for, `[DONE]`; or an error, and the end."""
        n, timed, include_usage = len(session.streams), self._body.timings_per_token, self._body.include_usage
        no_content = None if dialect is llama_server else ""
        for index in range(n):
            yield self._encode(ChunkChoice(index, ChunkDelta(role="assistant", content=no_content)))
        usages = []
        async for step in session.steps():
            index, changes, output = step
            if output.error is not None:
                yield dialect.frame_error(output.error.error())
                return
            plain = output.finish_reason is None and not output.logprobs and not timed
            if plain and len(changes) == 1:
                change = changes[0]
                if type(change) is BlockDelta and change.block.kind is BlockKind.TEXT:
                    # Nearly all of them: put together as bytes.
                    text = _json.encode(change.text)
                    yield b"%b%d%b%b%b" % (self._opening, index, _CONTENT, text, _CLOSING)
                    continue
            if output.finish_reason is not None:
                usages.append(output.usage)
            timings: Timings | UnsetType = UNSET
            if timed or (len(usages) == n and not include_usage):
                timings = get_timings(session.streams[index], session.prompt_tokens, output.usage)
            if chunks := self._encode_step(step, timings, called=bool(session.replies[index].tool_calls)):
                yield chunks
        if include_usage:
            timings = get_timings(session.streams[0], session.prompt_tokens, usages[0])
            usage = completions.make_usage(usages, session.prompt_tokens)
            yield encode(ChatCompletionChunk(**self._head, usage=usage, timings=timings))
        yield DONE

    def _encode_step(self, step: ChatStep, timings: Timings | UnsetType, *, called: bool) -> bytes:
        """The chunks of a step. Its log-probabilities go with the last one that has content."""
        index, changes, output = step
        deltas = [self._make_delta(change) for change in changes]
        choices = [ChunkChoice(index, delta) for delta in deltas if delta is not None]
        last_content = max(0, len(choices) - 1)
        if output.finish_reason is not None or (output.logprobs and not choices):
            choices.append(ChunkChoice(index, ChunkDelta()))
        if output.logprobs:
            choices[last_content].logprobs = self._logprobs(output.logprobs)
        if output.finish_reason is not None:
            choices[-1].finish_reason = self._finish_reason(output.finish_reason, called=called)
        if not choices:
            return b""
        *before, last = choices
        return b"".join((*map(self._encode, before), self._encode(last, timings)))

    def _finish_reason(self, reason: FinishReason, *, called: bool) -> str:
        """`tool_calls` (in the older form `function_call`) where the answer stopped after a call."""
        if called and reason is FinishReason.STOP:
            return "function_call" if self._body.older_form else "tool_calls"
        return reason.value

    def _encode(self, choice: ChunkChoice, timings: Timings | UnsetType = UNSET) -> bytes:
        more = b"" if timings is UNSET else b',"timings":' + _json.encode(timings)
        return self._prefix + _json.encode(choice) + b"]" + more + b"}\n\n"

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        top = self._body.top
        return None if top is None else ChatLogprobs(make_logprobs(entries, top))

    def _make_delta(self, change: BlockEvent) -> ChunkDelta | None:
        """The delta of a change; None where a block of text starts, or any block ends."""
        block, text = change.block, change.text if isinstance(change, BlockDelta) else None
        if isinstance(change, BlockEnd) or (text is None and block.kind is not BlockKind.TOOL_CALL):
            return None
        if block.kind is BlockKind.TEXT:
            return ChunkDelta(content=text or "")
        if block.kind is BlockKind.REASONING:
            return ChunkDelta(reasoning_content=text or "")
        function = CalledFunctionResult(text or "", block.name if text is None else UNSET)
        if self._body.older_form:  # there is one call, without an id
            return ChunkDelta(function_call=function)
        call = ToolCallResult(function, index=block.call)
        if text is None:
            call.id, call.type = f"call_{block.id}", "function"
        return ChunkDelta(tool_calls=[call])


@openai.post("/v1/chat/completions", events=EXAMPLE_EVENTS, computes="chat")
@llama_server.post("/chat/completions", shown=False, computes="chat")
async def chat(body: ChatBody, http: HttpRequest) -> ChatCompletion | Response:
    """Answer a conversation, possibly with tool calls."""
    engine = await use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    request_id, scored = f"chatcmpl-{uuid.uuid4().hex}", body.prompt_logprobs
    request = make_request(
        engine, http, body, request_id, body.max_tokens, body.stop, logprobs=body.top, prompt_logprobs=scored
    )
    conversation = await run_in_turn(http, body.conversation, sees=engine.sees)
    session = await open_chat(engine, conversation, request, body.n)
    name = body.model or loaded(engine)[0].name
    head: dict[str, Any] = {"id": request.id, "created": int(time.time()), "model": name}
    renderer = ChatCompletionRenderer(body, head)
    if body.stream:
        chunks = renderer.chunks(session, http.scope["state"]["dialect"])
        if body.return_progress:
            make = partial(ChatCompletionChunk, **head, choices=[ChunkChoice(0, ChunkDelta())])
            stream, total = session.streams[0], session.prompt_tokens
            chunks = add_progress(engine, stream, total, chunks, body.n, make)
        return EventStream(engine, session.streams, chunks)
    outputs = await collect(engine, session.streams, http)
    more = {"verbose": await make_verbose(session, request, outputs[0])} if body.verbose else {}

    def make_whole() -> Any:
        return renderer.whole([reply.reply() for reply in session.finish(outputs)], session, **more)

    return await render(outputs, make_whole)


class Transcription(msgspec.Struct):
    """What is said in a sound."""

    text: str


@openai.post(SOUNDS, Transcription("Hello!"), computes="generate_content")
async def transcribe(http: HttpRequest) -> Transcription | Response:
    """Transcribe a sound: multipart, with the fields `file` and `model`."""
    await http.body()  # it is read again
    async with http.form(max_files=1, max_fields=8) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise InvalidRequest("file: this field is required, as a part of multipart/form-data", "file")
        data = base64.b64encode(await file.read()).decode()
        given = {name: value for name, value in form.items() if isinstance(value, str)}
    if (shape := given.get("response_format", "json")) not in ("json", "text"):
        raise InvalidRequest(
            f"response_format: {shape[:32]!r} is not supported: ask for json or text", "response_format"
        )
    if not re.fullmatch(r"\d{1,3}(\.\d{1,9})?", heat := given.get("temperature") or "0"):
        raise InvalidRequest(f"temperature: {heat[:32]!r} is no number", "temperature")
    question = given.get("prompt") or "Transcribe the audio to text" + (
        f"; it is in {given['language'][:32]}." if given.get("language") else "."
    )
    parts = [{"type": "input_audio", "input_audio": {"data": data}}, {"type": "text", "text": question}]
    asked = {"model": given.get("model"), "messages": [{"role": "user", "content": parts}]}
    answer = await chat(ChatBody.parse({**asked, "temperature": float(heat)}), http)
    assert isinstance(answer, ChatCompletion), "it is not streamed"
    text = answer.choices[0].message.content or ""
    return Transcription(text) if shape == "json" else PlainTextResponse(text)
