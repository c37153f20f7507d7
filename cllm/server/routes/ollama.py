"""Ollama's routes, for clients that speak no other API."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.chat.reply import Block, BlockDelta, BlockEnd, BlockEvent, BlockKind, ParsedOutput, ReplyBuilder
from cllm.chat.session import open_chat
from cllm.errors import EngineNotReady, InvalidRequest
from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.errors import failure_body
from cllm.server.middleware import check_operator
from cllm.server.protocol import ollama as api
from cllm.server.protocol import ollama_responses as answers
from cllm.server.protocol.base import NDJSON, LargeJsonRoute, StructResponse, documented, get_timings
from cllm.server.protocol.chat import make_logprobs
from cllm.server.routes.embeddings import embed, embedding_length, encode_entries
from cllm.server.sse import GONE, EventStream, collect
from cllm.server.submit import find_model, get_registry, make_request, use_engine
from cllm.text.embeddings import RAW, to_vector
from cllm.text.output_parser import ContentText
from cllm.text.prompt import Gap
from cllm.types import Pooling, Request, RequestOutput, TokenLogprob, Usage
from cllm.workers.messages import (
    TokenizeInfill,
    TokenizerTask,
    TokenizeText,
    TokenizeTexts,
    TokenLists,
    Tokens,
)

MIN_TTL_S = 0.5  # after the answer to a request whose model is not to stay
router = APIRouter(tags=["Ollama"], route_class=LargeJsonRoute)
_encoder = msgspec.json.Encoder()


def encode_line(value: Any) -> bytes:
    """One line of a stream."""
    return _encoder.encode(value) + b"\n"


class LineStream(EventStream):
    """A stream of lines, which has no comments: its beat is a piece without text."""

    media_type = NDJSON


class AnswerRenderer:
    """Renders one answer, whole or as lines."""

    path = ""

    def __init__(self, body: api.AnswerBody, began: float) -> None:
        self._name, self._top, self._began = body.model, body.top, began

    def make(
        self, text: str = "", thinking: str = "", calls: Sequence[Block] = (), **more: Any
    ) -> answers.AnswerPart:
        raise NotImplementedError

    @property
    def _head(self) -> dict[str, Any]:
        return {"model": self._name, "created_at": answers.format_time()}

    @property
    def beat(self) -> bytes:
        return encode_line(self.make())

    async def lines(
        self, steps: AsyncIterator[ParsedOutput], stream: AsyncOutputStream, prompt_tokens: int
    ) -> AsyncIterator[bytes]:
        """Pieces as they come, then what it took; or an error, and the end. A tool call comes whole."""
        reply = ReplyBuilder()
        async for events, output in steps:
            if output.error is not None:
                yield encode_line(failure_body(self.path, output.error))
                return
            parts = [part for change in reply.add(events, output) if (part := self._render(change))]
            if output.finish_reason is not None:
                parts.append(self.make(**self._end(reply, stream, prompt_tokens)))
            if parts:
                yield b"".join(map(encode_line, parts))

    def whole(
        self, steps: Iterable[ParsedOutput], stream: AsyncOutputStream, prompt_tokens: int
    ) -> answers.AnswerPart:
        reply = ReplyBuilder(steps)
        return self.make(
            reply.join(BlockKind.TEXT),
            reply.join(BlockKind.REASONING),
            reply.tool_calls,
            logprobs=self._logprobs(reply.logprobs),
            **self._end(reply, stream, prompt_tokens),
        )

    def _render(self, change: BlockEvent) -> answers.AnswerPart | None:
        kind = change.block.kind
        if kind is BlockKind.TOOL_CALL:
            return self.make(calls=[change.block]) if isinstance(change, BlockEnd) else None
        if not isinstance(change, BlockDelta) or not change.text:
            return None
        if kind is BlockKind.REASONING:
            return self.make(thinking=change.text)
        return self.make(change.text, logprobs=self._logprobs(change.logprobs))

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Any:
        return UNSET if self._top is None else make_logprobs(entries, self._top)

    def _end(self, reply: ReplyBuilder, stream: AsyncOutputStream, prompt_tokens: int) -> dict[str, Any]:
        """Why it ended, and what it took: nanoseconds. The first token comes with the prompt."""
        usage = reply.usage or Usage(prompt_tokens=prompt_tokens, completion_tokens=0)
        timings = get_timings(stream, prompt_tokens, usage)
        ended = stream.ended or time.perf_counter()
        return {
            "done": True,
            "done_reason": reply.finish_reason.value if reply.finish_reason else "stop",
            "total_duration": int(1e9 * (ended - self._began)),
            "load_duration": max(0, int(1e9 * (stream.started - self._began))),
            "prompt_eval_count": prompt_tokens,
            "prompt_eval_duration": int(1e6 * timings.prompt_ms),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(1e6 * timings.predicted_ms),
        }


class ChatRenderer(AnswerRenderer):
    path = "/api/chat"

    def make(
        self, text: str = "", thinking: str = "", calls: Sequence[Block] = (), **more: Any
    ) -> answers.AnswerPart:
        made = [answers.OllamaCallResult.from_call(call.as_tool_call()) for call in calls]
        message = answers.AnswerMessage(content=text, thinking=thinking or UNSET, tool_calls=made or UNSET)
        return answers.ChatAnswer(**self._head, message=message, **more)


class GenerateRenderer(AnswerRenderer):
    path = "/api/generate"

    def make(
        self, text: str = "", thinking: str = "", calls: Sequence[Block] = (), **more: Any
    ) -> answers.AnswerPart:
        return answers.GenerateAnswer(**self._head, response=text, thinking=thinking or UNSET, **more)


def keep_alive(http: HttpRequest, name: str, seconds: float | None) -> None:
    """Have a model unloaded after so long without a request; None: as it is configured.

    Only operators may say so. A model that is kept stays.
    """
    model = find_model(http, name)
    if model.can_load and not model.config.keep and http.scope["state"]["tenant"].admin:
        never_or_soon = 0.0 if seconds is not None and seconds < 0 else max(seconds or 0.0, MIN_TTL_S)
        model.ttl_s = model.config.ttl if seconds is None else never_or_soon


async def use_model(http: HttpRequest, body: api.AnswerBody) -> EngineClient:
    """The engine of a body's model, which is loaded if need be. Raises what `use_engine` does."""
    keep_alive(http, body.model, body.keep_alive)
    return await use_engine(http, body.model, timeout_s=body.options.timeout)


async def _only_load(http: HttpRequest, body: api.AnswerBody, renderer: AnswerRenderer) -> Response:
    """A body without a question loads the model, or unloads it where it stays for 0 seconds."""
    unloads = body.keep_alive == 0
    if unloads:
        check_operator(http.scope, "keep_alive: unloading a model")
        await get_registry(http).unload(find_model(http, body.model))
    else:
        await use_model(http, body)
    return StructResponse(renderer.make(done=True, done_reason="unload" if unloads else "load"))


async def _make_request(
    engine: EngineClient, http: HttpRequest, body: api.AnswerBody, **more: Any
) -> Request:
    return await make_request(
        engine,
        http,
        body.options,
        request_id=f"ollama-{uuid.uuid4().hex}",
        max_tokens=body.options.max_tokens,
        stop=body.options.stops,
        logprobs=max(1, body.top) if body.top is not None else 0,
        **more,
    )


async def _answer_chat(
    engine: EngineClient,
    http: HttpRequest,
    body: api.OllamaChatBody | api.OllamaGenerateBody,
    renderer: AnswerRenderer,
) -> Response:
    """The answer to a conversation."""
    session = await open_chat(engine, body.conversation(), await _make_request(engine, http, body))
    stream, count = session.streams[0], session.prompt_tokens

    async def steps() -> AsyncIterator[ParsedOutput]:
        async for _, events, output in session.events():
            yield events, output

    if body.stream:
        return LineStream(engine, session.streams, renderer.lines(steps(), stream, count), renderer.beat)
    outputs = await collect(engine, session.streams, http)
    if outputs is None:
        return Response(status_code=GONE)
    return StructResponse(renderer.whole(session.parse(outputs[0]), stream, count))


async def _answer_text(
    engine: EngineClient, http: HttpRequest, body: api.OllamaGenerateBody, renderer: AnswerRenderer
) -> Response:
    """The answer to a raw prompt, or to the gap before a suffix."""
    engine.check_capacity()
    limit = loaded(engine)[1].request_tokens
    task: TokenizerTask = TokenizeText(body.prompt, limit)
    if body.suffix:
        task = TokenizeInfill(Gap(prefix=body.prompt, suffix=body.suffix), limit)
    prompt = (await run_tokenizer(engine, task, Tokens)).tokens
    stream = engine.submit(await _make_request(engine, http, body, prompt=prompt), AsyncOutputStream)

    async def steps() -> AsyncIterator[ParsedOutput]:
        async for output in stream:
            yield _as_step(output)

    if body.stream:
        return LineStream(engine, [stream], renderer.lines(steps(), stream, len(prompt)), renderer.beat)
    outputs = await collect(engine, [stream], http)
    if outputs is None:
        return Response(status_code=GONE)
    return StructResponse(renderer.whole(map(_as_step, outputs[0]), stream, len(prompt)))


def _as_step(output: RequestOutput) -> ParsedOutput:
    return [ContentText(output.text)] if output.text else [], output


@router.get("/api/version", **documented(answers.VersionResponse(answers.VERSION)))
async def version() -> Response:
    """The version of Ollama whose routes these are."""
    return StructResponse(answers.VersionResponse(answers.VERSION))


@router.get("/api/tags", **documented(answers.ModelsAnswer([answers.LISTED_EXAMPLE])))
async def tags(http: HttpRequest) -> Response:
    """List the models."""
    served = get_registry(http).served
    listed = [answers.make_listed(model.info, model.created) for model in served if model.info is not None]
    return StructResponse(answers.ModelsAnswer(listed))


@router.get("/api/ps", **documented(answers.RunningAnswer([answers.RUNNING_EXAMPLE])))
async def ps(http: HttpRequest) -> Response:
    """List the models that are loaded."""
    running = [
        answers.make_running(model.info, model.created, model.describe(default=False))
        for model in get_registry(http).served
        if model.loaded and model.info is not None
    ]
    return StructResponse(answers.RunningAnswer(running))


@router.post("/api/show", **documented(answers.SHOW_EXAMPLE))
async def show(body: api.ShowBody, http: HttpRequest) -> Response:
    """Describe a model."""
    model = find_model(http, body.model)
    if model.info is None:
        raise EngineNotReady("the model is still loading")
    return StructResponse(answers.make_shown(model.info, model.limits, model.created))


@router.post(
    "/api/chat", **documented(answers.CHAT_EXAMPLE, lines=map(encode_line, answers.CHAT_LINES), computes=True)
)
async def chat(body: api.OllamaChatBody, http: HttpRequest) -> Response:
    """Answer a conversation; unless `stream` is false, as lines of JSON."""
    renderer = ChatRenderer(body, time.perf_counter())
    if not body.messages:
        return await _only_load(http, body, renderer)
    engine = await use_model(http, body)
    return await _answer_chat(engine, http, body, renderer)


@router.post(
    "/api/generate",
    **documented(answers.GENERATE_EXAMPLE, lines=map(encode_line, answers.GENERATE_LINES), computes=True),
)
async def generate(body: api.OllamaGenerateBody, http: HttpRequest) -> Response:
    """Answer a prompt; unless `stream` is false, as lines of JSON."""
    renderer = GenerateRenderer(body, time.perf_counter())
    body.check()
    if not body.prompt and not body.suffix:
        return await _only_load(http, body, renderer)
    engine = await use_model(http, body)
    if body.raw or body.suffix:
        return await _answer_text(engine, http, body, renderer)
    return await _answer_chat(engine, http, body, renderer)


async def _embed(
    engine: EngineClient, texts: Sequence[str], field: str, http: HttpRequest, *, truncate: bool
) -> tuple[Sequence[bytes], int] | None:
    """The embeddings of texts, and how many tokens these have; None if the client disconnected."""
    info, limits = loaded(engine)
    embedding_length(engine)  # no reranker
    if info.pooling is Pooling.NONE:
        raise InvalidRequest("this server pools nothing (--pooling none): use /embedding", "model")
    limit = limits.embed.tokens
    task = TokenizeTexts(tuple(texts), 0 if truncate else limit, field)
    lists = (await run_tokenizer(engine, task, TokenLists)).lists
    if truncate and limit:  # the last token may be a closing one, which the model was trained to see
        lists = tuple(each if len(each) <= limit else (*each[: limit - 1], each[-1]) for each in lists)
    found = await embed(engine, lists, http)
    return None if found is None else (found[0], found[1].prompt_tokens)


@router.post(
    "/api/embed",
    **documented(
        answers.EmbedAnswer(
            model=api.MODEL,
            embeddings=[[0.118, -0.042, 0.307]],
            total_duration=14_000_000,
            prompt_eval_count=5,
        ),
        computes=True,
    ),
)
async def embed_texts(body: api.OllamaEmbedBody, http: HttpRequest) -> Response:
    """Turn texts into embeddings of length 1."""
    began = time.perf_counter()
    keep_alive(http, body.model, body.keep_alive)
    engine = await use_engine(http, body.model)
    length = embedding_length(engine)
    if body.dimensions is not None and body.dimensions > length:
        message = f"dimensions is {body.dimensions}, but this model's embeddings have {length}"
        raise InvalidRequest(message, "dimensions")
    vectors: Sequence[Any] = []
    count = 0
    if texts := body.texts:
        found = await _embed(engine, texts, "input", http, truncate=body.truncate)
        if found is None:
            return Response(status_code=GONE)
        vectors = await encode_entries(to_vector(data, body.dimensions).tolist() for data in found[0])
        count = found[1]
    duration = int(1e9 * (time.perf_counter() - began))
    answer = answers.EmbedAnswer(
        model=body.model, embeddings=vectors, total_duration=duration, prompt_eval_count=count
    )
    return StructResponse(answer)


@router.post("/api/embeddings", **documented(answers.OldEmbedAnswer([0.118, -0.042, 0.307]), computes=True))
async def embed_text(body: api.OllamaEmbeddingsBody, http: HttpRequest) -> Response:
    """Turn a text into an embedding, which is not scaled."""
    keep_alive(http, body.model, body.keep_alive)
    engine = await use_engine(http, body.model)
    if not body.prompt:
        return StructResponse(answers.OldEmbedAnswer([]))
    found = await _embed(engine, [body.prompt], "prompt", http, truncate=True)
    if found is None:
        return Response(status_code=GONE)
    return StructResponse(answers.OldEmbedAnswer(to_vector(found[0][0], norm=RAW).tolist()))
