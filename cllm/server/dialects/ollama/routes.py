"""Ollama's routes, for clients that speak no other API."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.chat.reply import Block, BlockDelta, BlockEnd, BlockEvent, BlockKind, ReplyBuilder
from cllm.chat.session import open_chat
from cllm.errors import EngineNotReady, InvalidRequest
from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.messages import TokenizeTexts, TokenLists
from cllm.server.dialect import NDJSON, StructResponse, encode_line
from cllm.server.dialects.ollama import answers, bodies, ollama
from cllm.server.dialects.openai.chat import make_logprobs
from cllm.server.dialects.openai.embeddings import embed, embedding_length, encode_entries
from cllm.server.dialects.openai.fields import list_stops
from cllm.server.middleware import check_operator
from cllm.server.sse import GONE, EventStream, collect
from cllm.server.submit import find_model, get_registry, make_request, prepare, use_engine
from cllm.server.timings import get_timings
from cllm.types import RAW, Pooling, TokenLogprob, Usage, to_vector

MIN_TTL_S = 0.5  # after the answer to a request whose model is not to stay


class LineStream(EventStream):
    """A stream of lines, which has no comments: its beat is a piece without text."""

    media_type = NDJSON


class OllamaRenderer:
    """Renders one answer, whole or as lines."""

    def __init__(self, body: bodies.OllamaAnswerBody) -> None:
        self._name, self._top, self._began = body.model, body.top, time.perf_counter()

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
        self, reply: ReplyBuilder, stream: AsyncOutputStream, prompt_tokens: int
    ) -> AsyncIterator[bytes]:
        """Pieces as they come, then what it took; or an error, and the end. A tool call comes whole."""
        async for output in stream:
            if output.error is not None:
                yield ollama.frame_failure(output.error)
                return
            parts = [part for change in reply.add(output) if (part := self._render(change))]
            if output.finish_reason is not None:
                parts.append(self.make(**self._end(reply, stream, prompt_tokens)))
            if parts:
                yield b"".join(map(encode_line, parts))

    def whole(self, reply: ReplyBuilder, stream: AsyncOutputStream, prompt_tokens: int) -> answers.AnswerPart:
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


class OllamaChatRenderer(OllamaRenderer):
    def make(
        self, text: str = "", thinking: str = "", calls: Sequence[Block] = (), **more: Any
    ) -> answers.AnswerPart:
        made = [answers.OllamaCallResult.from_call(call.as_tool_call()) for call in calls]
        message = answers.AnswerMessage(content=text, thinking=thinking or UNSET, tool_calls=made or UNSET)
        return answers.ChatAnswer(**self._head, message=message, **more)


class OllamaGenerateRenderer(OllamaRenderer):
    def make(
        self, text: str = "", thinking: str = "", calls: Sequence[Block] = (), **more: Any
    ) -> answers.AnswerPart:
        return answers.GenerateAnswer(**self._head, response=text, thinking=thinking or UNSET, **more)


def keep_alive(http: HttpRequest, name: str, seconds: float | None) -> None:
    """Have a model unloaded after `seconds` without a request; None: as it is configured.

    Only operators may change it. A model that is kept stays.
    """
    model = find_model(http, name)
    if model.can_load and not model.config.keep and http.scope["state"]["tenant"].admin:
        never_or_soon = 0.0 if seconds is not None and seconds < 0 else max(seconds or 0.0, MIN_TTL_S)
        model.ttl_s = model.config.ttl if seconds is None else never_or_soon


async def _answer(
    http: HttpRequest, body: bodies.OllamaAnswerBody, renderer: OllamaRenderer, *, asked: bool
) -> Response:
    """The answer to a conversation or a raw prompt. A body that has neither only loads the model.

    It unloads it where it stays for 0 seconds.
    """
    if not asked and body.keep_alive == 0:
        check_operator(http.scope, "keep_alive: unloading a model")
        await get_registry(http).unload(find_model(http, body.model))
        return StructResponse(renderer.make(done=True, done_reason="unload"))
    keep_alive(http, body.model, body.keep_alive)
    engine = await use_engine(http, body.model, timeout_s=body.options.timeout)
    if not asked:
        return StructResponse(renderer.make(done=True, done_reason="load"))
    stream, reply, count = await _submit(engine, http, body)
    if body.stream:
        return LineStream(engine, [stream], renderer.lines(reply, stream, count), renderer.beat)
    outputs = await collect(engine, [stream], http)
    if outputs is None:
        return Response(status_code=GONE)
    for output in outputs[0]:
        reply.add(output)
    return StructResponse(renderer.whole(reply, stream, count))


async def _submit(
    engine: EngineClient, http: HttpRequest, body: bodies.OllamaAnswerBody
) -> tuple[AsyncOutputStream, ReplyBuilder, int]:
    """The stream of the answer, the reply that is built from it, and the length of the prompt."""
    request = make_request(
        engine,
        http,
        body.options,
        request_id=f"ollama-{uuid.uuid4().hex}",
        max_tokens=body.options.max_tokens,
        stop=list_stops(body.options.stop),
        logprobs=max(1, body.top) if body.top is not None else 0,
    )
    if (raw := body.raw_prompt) is None:
        session = await open_chat(engine, body.conversation(), request)
        return session.streams[0], session.replies[0], session.prompt_tokens
    request, (prompt,) = await prepare(engine, request, [raw])
    stream = engine.submit(msgspec.structs.replace(request, prompt=prompt), AsyncOutputStream)
    return stream, ReplyBuilder(), len(prompt)


@ollama.get("/api/version", answers.VersionResponse(answers.VERSION))
async def version() -> Response:
    """The version of Ollama whose routes these are."""
    return StructResponse(answers.VersionResponse(answers.VERSION))


@ollama.get("/api/tags", answers.ModelsAnswer([answers.LISTED_EXAMPLE]))
async def tags(http: HttpRequest) -> Response:
    """List the models."""
    served = get_registry(http).served
    listed = [answers.make_listed(model.info, model.created) for model in served if model.info is not None]
    return StructResponse(answers.ModelsAnswer(listed))


@ollama.get("/api/ps", answers.RunningAnswer([answers.RUNNING_EXAMPLE]))
async def ps(http: HttpRequest) -> Response:
    """List the models that are loaded."""
    running = [
        answers.make_running(model.info, model.created, model.describe(default=False))
        for model in get_registry(http).served
        if model.loaded and model.info is not None
    ]
    return StructResponse(answers.RunningAnswer(running))


@ollama.post("/api/show", answers.SHOW_EXAMPLE)
async def show(body: bodies.ShowBody, http: HttpRequest) -> Response:
    """Describe a model."""
    model = find_model(http, body.model)
    if model.info is None:
        raise EngineNotReady("the model is still loading")
    return StructResponse(answers.make_shown(model.info, model.limits, model.created))


@ollama.post("/api/chat", answers.CHAT_EXAMPLE, lines=map(encode_line, answers.CHAT_LINES), computes=True)
async def chat(body: bodies.OllamaChatBody, http: HttpRequest) -> Response:
    """Answer a conversation; unless `stream` is false, as lines of JSON."""
    return await _answer(http, body, OllamaChatRenderer(body), asked=bool(body.messages))


@ollama.post(
    "/api/generate", answers.GENERATE_EXAMPLE, lines=map(encode_line, answers.GENERATE_LINES), computes=True
)
async def generate(body: bodies.OllamaGenerateBody, http: HttpRequest) -> Response:
    """Answer a prompt; unless `stream` is false, as lines of JSON."""
    return await _answer(http, body, OllamaGenerateRenderer(body), asked=bool(body.prompt or body.suffix))


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


@ollama.post("/api/embed", answers.EMBED_EXAMPLE, computes=True)
async def embed_texts(body: bodies.OllamaEmbedBody, http: HttpRequest) -> Response:
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


@ollama.post("/api/embeddings", answers.OldEmbedAnswer([0.118, -0.042, 0.307]), computes=True)
async def embed_text(body: bodies.OllamaEmbeddingsBody, http: HttpRequest) -> Response:
    """Turn a text into an embedding, which is not scaled."""
    keep_alive(http, body.model, body.keep_alive)
    engine = await use_engine(http, body.model)
    if not body.prompt:
        return StructResponse(answers.OldEmbedAnswer([]))
    found = await _embed(engine, [body.prompt], "prompt", http, truncate=True)
    if found is None:
        return Response(status_code=GONE)
    return StructResponse(answers.OldEmbedAnswer(to_vector(found[0][0], norm=RAW).tolist()))
