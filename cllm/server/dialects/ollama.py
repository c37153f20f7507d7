"""Ollama's routes, for clients that speak no other API."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from cllm.chat.reply import Block, BlockDelta, BlockEnd, BlockEvent, BlockKind, ReplyBuilder
from cllm.chat.session import open_chat
from cllm.errors import CllmError, ConfigError, EngineNotReady, InvalidRequest, ModelNotFound, SetupError
from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.messages import TokenizeTexts, TokenLists
from cllm.models.files import HubReference, parse_hub
from cllm.server.body import run_in_turn
from cllm.server.dialect import NDJSON, TEXT, Dialect, encode_line
from cllm.server.dialects import ollama_body as shapes
from cllm.server.dialects.openai.chat import make_logprobs
from cllm.server.dialects.openai.embeddings import RAW, check_embeds, embed, encode_entries, to_vector
from cllm.server.examples import read_examples
from cllm.server.middleware import check_operator
from cllm.server.sse import EventStream, collect, render
from cllm.server.submit import find_model, get_registry, make_request, prepare, use_engine
from cllm.server.timings import get_timings
from cllm.types import TokenLogprob, Usage

POLL_S = 0.5  # between two lines about a pull
MIN_TTL_S = 0.5  # after the answer to a request whose model is not to stay


class OllamaDialect(Dialect):
    """For Ollama's clients: errors in its shape, and streams of lines of JSON."""

    name = "Ollama"
    about = "For Ollama's clients that speak no other API; names may end in `:latest`."
    prefix = "/api/"

    def make_error(self, error: CllmError) -> Any:
        return {"error": error.message}

    def frame_error(self, error: CllmError) -> bytes:
        return encode_line(self.make_error(error))


ollama = OllamaDialect()


class OllamaRenderer:
    """Renders one answer, whole or as lines."""

    def __init__(self, body: shapes.OllamaAnswerBody) -> None:
        self._name, self._top, self._began = body.model, body.top, time.perf_counter()
        self._chat = isinstance(body, shapes.OllamaChatBody)

    def make(
        self, text: str = "", thinking: str = "", calls: Sequence[Block] = (), **more: Any
    ) -> shapes.AnswerPart:
        """Make an answer, or a piece of one, in the shape of the body's route."""
        more |= {"model": self._name, "created_at": shapes.format_time()}
        if not self._chat:
            return shapes.GenerateAnswer(response=text, thinking=thinking or UNSET, **more)
        made = [shapes.make_call(call.as_tool_call()) for call in calls]
        message = shapes.AnswerMessage(content=text, thinking=thinking or UNSET, tool_calls=made or UNSET)
        return shapes.ChatAnswer(message=message, **more)

    async def lines(
        self, reply: ReplyBuilder, stream: AsyncOutputStream, prompt_tokens: int
    ) -> AsyncIterator[bytes]:
        """Pieces as they come, then what it took; or an error, and the end. A tool call comes whole."""
        async for output in stream:
            if output.error is not None:
                yield ollama.frame_error(output.error.error())
                return
            parts = [part for change in reply.add(output) if (part := self._render(change))]
            if output.finish_reason is not None:
                parts.append(self.make(**self._end(reply, stream, prompt_tokens)))
            if parts:
                yield b"".join(map(encode_line, parts))

    def whole(self, reply: ReplyBuilder, stream: AsyncOutputStream, prompt_tokens: int) -> shapes.AnswerPart:
        return self.make(
            reply.join(BlockKind.TEXT),
            reply.join(BlockKind.REASONING),
            reply.tool_calls,
            logprobs=self._logprobs(reply.logprobs),
            **self._end(reply, stream, prompt_tokens),
        )

    def _render(self, change: BlockEvent) -> shapes.AnswerPart | None:
        if (kind := change.block.kind) is BlockKind.TOOL_CALL:
            return self.make(calls=[change.block]) if isinstance(change, BlockEnd) else None
        if not isinstance(change, BlockDelta) or not change.text:
            return None
        if kind is BlockKind.REASONING:
            return self.make(thinking=change.text)
        return self.make(change.text, logprobs=self._logprobs(change.logprobs))

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Any:
        return UNSET if self._top is None else make_logprobs(entries, self._top)

    def _end(self, reply: ReplyBuilder, stream: AsyncOutputStream, prompt_tokens: int) -> dict[str, Any]:
        """The reason of the end, counts, and times in nanoseconds. The first token comes with the prompt."""
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


def keep_alive(http: HttpRequest, name: str, seconds: float | None) -> None:
    """Have a model unloaded after `seconds` without a request. None restores the configured time.

    Only operators may change it. A model that is kept stays.
    """
    model = find_model(http, name)
    if model.can_load and not model.config.keep and http.scope["state"]["tenant"].admin:
        never_or_soon = 0.0 if seconds is not None and seconds < 0 else max(seconds or 0.0, MIN_TTL_S)
        model.ttl_s = model.config.ttl if seconds is None else never_or_soon


async def _answer(
    http: HttpRequest, body: shapes.OllamaAnswerBody, *, asked: bool
) -> shapes.AnswerPart | Response:
    """The answer to a conversation or a raw prompt. A body that has neither only loads the model.

    It unloads it where it stays for 0 seconds.
    """
    renderer = OllamaRenderer(body)
    if not asked and body.keep_alive == 0:
        check_operator(http.scope, "keep_alive: unloading a model")
        await get_registry(http).unload(find_model(http, body.model))
        return renderer.make(done=True, done_reason="unload")
    keep_alive(http, body.model, body.keep_alive)
    engine = await use_engine(http, body.model, timeout_s=body.options.timeout)
    if not asked:
        return renderer.make(done=True, done_reason="load")
    stream, reply, count = await _submit(engine, http, body)
    if body.stream:
        # Lines have no comments: the beat is a piece without text.
        lines, beat = renderer.lines(reply, stream, count), encode_line(renderer.make())
        return EventStream(engine, [stream], lines, beat, NDJSON)
    outputs = await collect(engine, [stream], http)

    def make() -> Any:
        for output in outputs[0]:
            reply.add(output)
        return renderer.whole(reply, stream, count)

    return await render(outputs, make)


async def _submit(
    engine: EngineClient, http: HttpRequest, body: shapes.OllamaAnswerBody
) -> tuple[AsyncOutputStream, ReplyBuilder, int]:
    """The stream of the answer, the reply that is built from it, and the length of the prompt."""
    options, request_id = body.options, f"ollama-{uuid.uuid4().hex}"
    request = make_request(
        engine, http, options, request_id, options.max_tokens, options.stop, logprobs=body.top
    )
    if (raw := body.raw_prompt) is None:
        conversation = await run_in_turn(http, body.conversation, sees=engine.sees)
        session = await open_chat(engine, conversation, request)
        return session.streams[0], session.replies[0], session.prompt_tokens
    request, (prompt,) = await prepare(engine, request, [raw])
    stream = engine.submit(msgspec.structs.replace(request, prompt=prompt), AsyncOutputStream)
    return stream, ReplyBuilder(), len(prompt)


@ollama.get("/api/version", shapes.VersionResponse(shapes.VERSION))
async def version() -> shapes.VersionResponse:
    """The version of Ollama whose routes these are."""
    return shapes.VersionResponse(shapes.VERSION)


@ollama.get("/api/tags")
async def tags(http: HttpRequest) -> shapes.ModelsAnswer:
    """List the models."""
    entries = [
        shapes.make_entry(model.info, model.created, name)
        for model in get_registry(http).served
        if model.info is not None
        for name in ("", *(f"{model.info.name}:{adapter}" for adapter in model.adapters))
    ]
    return shapes.ModelsAnswer([shapes.ListedModel(**each) for each in entries])


@ollama.get("/api/ps")
async def ps(http: HttpRequest) -> shapes.RunningAnswer:
    """List the models that are loaded."""
    running = [
        shapes.make_running(model.info, model.created, model.describe(default=False))
        for model in get_registry(http).served
        if model.loaded and model.info is not None
    ]
    return shapes.RunningAnswer(running)


@ollama.post("/api/show", shapes.SHOW_EXAMPLE)
async def show(body: shapes.ShowBody, http: HttpRequest) -> shapes.ShowAnswer:
    """Describe a model."""
    model = find_model(http, body.model)
    if model.info is None:
        raise EngineNotReady("the model is still loading")
    return shapes.make_shown(model.info, model.limits, model.created)


@ollama.post("/api/chat", shapes.CHAT_EXAMPLE, lines=shapes.CHAT_LINES, computes="chat")
async def chat(body: shapes.OllamaChatBody, http: HttpRequest) -> shapes.AnswerPart | Response:
    """Answer a conversation; unless `stream` is false, as lines of JSON."""
    return await _answer(http, body, asked=bool(body.messages))


@ollama.post("/api/generate", shapes.GENERATE_EXAMPLE, lines=shapes.GENERATE_LINES, computes=TEXT)
async def generate(body: shapes.OllamaGenerateBody, http: HttpRequest) -> shapes.AnswerPart | Response:
    """Answer a prompt; unless `stream` is false, as lines of JSON."""
    return await _answer(http, body, asked=bool(body.prompt or body.suffix))


async def _embed(
    engine: EngineClient, texts: Sequence[str], field: str, http: HttpRequest, *, truncate: bool
) -> tuple[Sequence[bytes], int]:
    """The embeddings of texts, and how many tokens these have."""
    check_embeds(engine)
    limit = loaded(engine)[1].embed.tokens
    task = TokenizeTexts(tuple(texts), 0 if truncate else limit, field)
    lists = (await run_tokenizer(engine, task, TokenLists)).lists
    if truncate and limit:  # the last token may be a closing one, which the model was trained to see
        lists = tuple(each if len(each) <= limit else (*each[: limit - 1], each[-1]) for each in lists)
    found = await embed(engine, lists, http)
    return found[0], found[1].prompt_tokens


@ollama.post("/api/embed", computes="embeddings")
async def embed_texts(body: shapes.OllamaEmbedBody, http: HttpRequest) -> shapes.EmbedAnswer:
    """Turn texts into embeddings of length 1."""
    began = time.perf_counter()
    keep_alive(http, body.model, body.keep_alive)
    engine = await use_engine(http, body.model, timeout_s=body.options.timeout)
    check_embeds(engine, body.dimensions, pooled=False)
    vectors: Sequence[Any] = []
    count = 0
    if texts := body.texts:
        found = await _embed(engine, texts, "input", http, truncate=body.truncate)
        vectors = await encode_entries(to_vector(data, body.dimensions).tolist() for data in found[0])
        count = found[1]
    duration = int(1e9 * (time.perf_counter() - began))
    return shapes.EmbedAnswer(
        model=body.model, embeddings=vectors, total_duration=duration, prompt_eval_count=count
    )


@ollama.post("/api/embeddings", computes="embeddings")
async def embed_text(body: shapes.OllamaEmbeddingsBody, http: HttpRequest) -> shapes.OldEmbedAnswer:
    """Turn a text into an embedding, which is not scaled."""
    keep_alive(http, body.model, body.keep_alive)
    engine = await use_engine(http, body.model, timeout_s=body.options.timeout)
    if not body.prompt:
        return shapes.OldEmbedAnswer([])
    found = await _embed(engine, [body.prompt], "prompt", http, truncate=True)
    return shapes.OldEmbedAnswer(to_vector(found[0][0], norm=RAW).tolist())


# The models of this machine, for operators ------------------------------------------------------------


class ProgressLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of `/api/pull`; the last one says `success`."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0


_PULLED = read_examples(ProgressLine)


@ollama.post("/api/pull", _PULLED[-1], lines=b"".join(map(encode_line, _PULLED)))
async def pull(body: shapes.PullBody) -> ProgressLine | Response:
    """Get a model from Hugging Face or ModelScope; continues where it was interrupted."""
    text = shapes.strip_tag(body.model)
    reference = _parse(text)
    if body.stream:
        return StreamingResponse(_lines(text, reference), media_type=NDJSON)
    try:
        async for _ in _pull(text, reference):
            pass
    except SetupError as error:
        raise InvalidRequest(error.message, "model") from None
    return ProgressLine("success")


def _parse(text: str) -> HubReference:
    """A reference to a hub. Raises InvalidRequest for any other name, and for any other address."""
    with suppress(ConfigError):
        if (found := parse_hub(text)) is not None and not found.endpoint:
            return found
    raise InvalidRequest(
        "model: give a model of a hub as hf.co/USER/REPO:QUANT or ms:USER/REPO:QUANT; names of Ollama's own "
        "library lead nowhere here",
        "model",
    )


async def _lines(text: str, reference: HubReference) -> AsyncIterator[bytes]:
    try:
        async for line in _pull(text, reference):
            yield encode_line(line)
    except CllmError as error:
        yield ollama.frame_error(error)


async def _pull(text: str, reference: HubReference) -> AsyncIterator[ProgressLine]:
    """The progress of a pull, which runs in a process of its own and ends with its reader."""
    yield ProgressLine("pulling manifest")
    look = await asyncio.to_thread(_make_look, reference)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cllm", "pull", "--", text),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    ending = asyncio.ensure_future(child.communicate())
    try:
        while not (await asyncio.wait((ending,), timeout=POLL_S))[0]:
            yield await asyncio.to_thread(look)
        said = (await ending)[1].decode(errors="replace").strip()
        if child.returncode:
            raise SetupError(said.rpartition("\n")[2].removeprefix("cllm: ") or "the pull was ended")
    finally:
        if child.returncode is None:
            child.terminate()
        ending.cancel()
    yield ProgressLine("success")


def _make_look(reference: HubReference) -> Callable[[], ProgressLine]:
    """Find the file to be pulled; return what tells the part of it that is here."""
    from cllm.models.hub import make_hub
    from cllm.models.pull import Pull, PullOptions, find_model

    with make_hub(reference) as hub:
        model = find_model(hub, reference)
        pull = Pull(hub, reference, model, PullOptions())
    total, digest = model.chosen.size, f"sha256:{model.files[0].etag}"
    return lambda: ProgressLine("pulling", digest, total, max(0, total - pull.missing_bytes()))


@ollama.post("/api/copy")
async def copy(body: shapes.CopyBody, http: HttpRequest) -> Response:
    """Give a served model one more name, until the server ends; the answer is empty."""
    get_registry(http).add_alias(body.source, shapes.strip_tag(body.destination))
    return Response()


@ollama.delete("/api/delete", ProgressLine("success"))
async def delete(body: shapes.DeleteBody) -> ProgressLine:
    """Remove a model from this machine; one that is loaded is refused."""
    try:
        await asyncio.to_thread(_delete, shapes.strip_tag(body.model))
    except (SetupError, OSError) as error:
        raise InvalidRequest(str(error), "model") from None
    return ProgressLine("success")


def _delete(name: str) -> None:
    from cllm.models.store import find_stored, find_users, plan_removal, remove, scan

    if (reference := parse_hub(name)) is not None:
        model = find_stored(reference)
    else:
        wanted = name.lower()
        names = ((each, (each.name, each.stem, each.path.name)) for each in scan())
        model = next((each for each, known in names if wanted in map(str.lower, known)), None)
    if model is None:
        raise ModelNotFound(f"there is no model {name!r} on this machine")
    removal = plan_removal(model)
    if users := find_users(removal.paths):
        raise InvalidRequest(f"{model.name} is used by process {next(iter(users))}: unload it first", "model")
    remove(model, removal)
