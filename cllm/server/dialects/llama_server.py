"""llama-server's dialect, so that scripts written for it run unchanged."""

from __future__ import annotations

import asyncio
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest

from cllm import __version__
from cllm.chat.session import ChatSession, count_tokens, encode_pictures
from cllm.errors import CllmError, ContextLengthExceeded, EngineNotReady, InvalidRequest, NotSupported
from cllm.frontend.async_calls import loaded, merged, run_tokenizer, submit_all
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.limits import MAX_PIECES, MAX_TOKENIZED
from cllm.messages import Pieces, RenderChat, SlotAction, SpellTokens, Text
from cllm.models.files import parse_file_type
from cllm.names import is_name
from cllm.server import submit
from cllm.server.body import run_in_turn
from cllm.server.dialect import COMMENT, TEXT, Dialect, encode, get_status
from cllm.server.dialects import llama_body as shapes
from cllm.server.dialects.llama_body import LlamaCompletionBody
from cllm.server.dialects.openai import openai
from cllm.server.dialects.openai.bodies import ChatBody
from cllm.server.dialects.openai.models import models
from cllm.server.dialects.operation import health, inspect
from cllm.server.generation import AdapterScalesBody
from cllm.server.middleware import check_operator
from cllm.server.sse import EventStream, collect, render
from cllm.server.timings import PromptProgress, get_timings
from cllm.text.prompt import Gap, RawText
from cllm.types import FinishReason, Health, Request, RequestOutput

PROBED = 64  # candidates that probabilities after sampling are made of
PROGRESS_S = 0.25  # between two looks at a prompt that is computed
_replace = msgspec.structs.replace


class LlamaServerDialect(Dialect):
    """For scripts written for llama-server."""

    name = "llama-server"
    about = "llama.cpp's own server: scripts written for it run unchanged."
    prefix = "/slots/"
    types = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        501: "not_supported_error",
        503: "unavailable_error",
    }

    def make_error(self, error: CllmError) -> Any:
        status = get_status(error)
        shown = {"code": status, "message": error.message, "type": self.get_type(status)}
        if isinstance(error, ContextLengthExceeded):
            shown["type"] = "exceed_context_size_error"
            shown |= {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.limit}
        return {"error": shown}


llama_server = LlamaServerDialect()


class LineLimits:
    """Ends an answer at a line that is indented by too little, or at the first line break after a time."""

    def __init__(self, n_indent: int, seconds: float, end: Callable[[], Any]) -> None:
        self._n_indent = n_indent
        self._seconds = seconds
        self._end = end
        self._line: str | None = None  # the current line so far, after the first line break
        self.over = False

    def cut(self, text: str, elapsed_s: float) -> str:
        """Cut off the part of the text that does not belong to the answer."""
        if self.over:
            return ""
        kept = self._by_indent(text) if self._n_indent else text
        late = self._seconds > 0 and elapsed_s > self._seconds and "\n" in kept
        if late or kept is not text:
            self.over = True
            self._end()
        return kept

    def _by_indent(self, text: str) -> str:
        first, *lines = text.split("\n")
        if (begun := self._line) is not None:
            first = begun + first
        position = -len(begun or "")
        for index, line in enumerate((first, *lines)):
            indent = len(line) - len(line.lstrip(" \t"))
            complete = index < len(lines)
            if (index or begun is not None) and indent < self._n_indent and (line[indent:] or complete):
                return text[: max(0, position + indent)]
            position += len(line) + 1
        self._line = lines[-1] if lines else None if begun is None else first
        return text


class LimitedStream(AsyncOutputStream):
    """A stream that may have limits by line."""

    limits: LineLimits | None = None

    def push(self, output: RequestOutput) -> None:
        if self.limits is not None and output.error is None:
            now = time.perf_counter()
            output = _replace(output, text=self.limits.cut(output.text, now - (self.first_token or now)))
            if self.limits.over and output.finish_reason is not None:
                output = _replace(output, finish_reason=FinishReason.LENGTH, stop=None)
        super().push(output)


def make_completion(
    request: Request,
    stream: AsyncOutputStream,
    outputs: Sequence[RequestOutput],
    *,
    model: str,
    prompt: str,
    context: int,
) -> shapes.LlamaCompletion:
    """A finished answer, with everything that llama-server says of one."""
    last, text = outputs[-1], "".join(output.text for output in outputs)
    assert last.usage is not None
    usage, limited = last.usage, last.finish_reason is FinishReason.LENGTH
    return shapes.LlamaCompletion(
        content=text,
        tokens=tuple(token for output in outputs for token in output.tokens),
        model=model,
        tokens_predicted=usage.completion_tokens,
        tokens_evaluated=usage.prompt_tokens,
        tokens_cached=usage.cells or usage.prompt_tokens,
        cached_from=usage.cached_from,
        generation_settings=shapes.make_settings(request),
        prompt=prompt,
        has_new_line="\n" in text,
        truncated=limited and usage.prompt_tokens + usage.completion_tokens >= context,
        stop_type="limit" if limited else "word" if last.stop else "eos",
        stopping_word=last.stop or "",
        timings=get_timings(stream, usage.prompt_tokens, usage),
    )


async def make_verbose(
    session: ChatSession, request: Request, outputs: Sequence[RequestOutput]
) -> dict[str, Any]:
    """`__verbose` of a chat: its first choice as `/completion` would answer."""
    prompt = (await run_tokenizer(session.engine, RenderChat(session.chat), Text)).text
    info, limits = loaded(session.engine)
    stream, context = session.streams[0], limits.request_tokens
    answer = make_completion(request, stream, outputs, model=info.name, prompt=prompt, context=context)
    found: dict[str, Any] = msgspec.to_builtins(_replace(answer, tokens=()))
    return found


class Completions(NamedTuple):
    """One call: its body, the request all prompts share, and the prompts as tokens and as text."""

    body: LlamaCompletionBody
    request: Request
    model: str
    context: int
    prompts: Sequence[tuple[tuple[int, ...], str]]

    def prompt(self, index: int) -> tuple[tuple[int, ...], str]:
        return self.prompts[index // self.body.n_cmpl]

    def probabilities(self, outputs: Sequence[RequestOutput]) -> Any:
        """The probabilities of these outputs' tokens, where they were asked for."""
        if not self.body.n_probs:
            return UNSET
        entries = [entry for output in outputs for entry in output.logprobs]
        sampling = self.request.sampling if self.body.post_sampling_probs else None
        return shapes.make_probabilities(entries, sampling, self.body.n_probs)

    def whole(self, index: int, stream: LimitedStream, outputs: Sequence[RequestOutput]) -> Any:
        """A finished answer, or (without outputs before the last) the last event of a stream."""
        body, prompt = self.body, self.prompt(index)[1]
        answer = make_completion(
            self.request, stream, outputs, model=self.model, prompt=prompt, context=self.context
        )
        limit = {"n_predict": body.n_predict, "max_tokens": body.n_predict, "stream": body.stream}
        answer = _replace(
            answer,
            index=index,
            content="" if body.stream else answer.content,
            tokens=answer.tokens if body.return_tokens and not body.stream else (),
            completion_probabilities=UNSET if body.stream else self.probabilities(outputs),
            generation_settings={**answer.generation_settings, **limit},
        )
        return shapes.select_fields(answer, body.response_fields) if body.response_fields else answer

    async def events(self, streams: Sequence[LimitedStream]) -> AsyncIterator[bytes]:
        """The events of a stream: pieces, then the last of each answer; or an error, and the end."""
        yield COMMENT  # there is no event before the first token
        generated = [0] * len(streams)
        lines = [False] * len(streams)
        async for index, output in merged(streams):
            if output.error is not None:
                yield llama_server.frame_error(output.error.error())
                return
            lines[index] = lines[index] or "\n" in output.text
            for piece in self._split(output):
                generated[index] += len(piece.tokens)
                yield encode(self._event(index, streams[index], generated[index], piece))
            if output.finish_reason is not None:
                last = _replace(output, text="\n" if lines[index] else "", tokens=())
                yield encode(self.whole(index, streams[index], [last]))

    def _event(
        self, index: int, stream: LimitedStream, generated: int, output: RequestOutput
    ) -> shapes.LlamaEvent:
        count = len(self.prompt(index)[0])
        return shapes.LlamaEvent(
            index=index,
            content=output.text,
            tokens=output.tokens,
            tokens_predicted=generated,
            tokens_evaluated=count,
            timings=get_timings(stream, count) if self.body.timings_per_token else UNSET,
            completion_probabilities=self.probabilities([output]) if output.logprobs else UNSET,
        )

    def _split(self, output: RequestOutput) -> Iterator[RequestOutput]:
        """An output as one of each token where probabilities are asked for; nothing of an empty one."""
        if not self.body.n_probs or len(output.tokens) < 2:
            if output.tokens or output.text:
                yield output
            return
        text = output.text
        for index, (token, entry) in enumerate(zip(output.tokens, output.logprobs, strict=True), 1):
            piece = entry.pieces[0].decode("utf-8", "ignore")
            own = text if index == len(output.tokens) else piece if text.startswith(piece) else ""
            text = text[len(own) :]
            yield _replace(output, text=own, tokens=(token,), logprobs=(entry,))


async def add_progress(
    engine: EngineClient,
    stream: AsyncOutputStream,
    total: int,
    events: AsyncIterator[bytes],
    begins: int,
    make: Callable[..., Any],
) -> AsyncIterator[bytes]:
    """The events of an answer; after those that it begins with, `make` events of the prompt's progress.

    The prompt of the `stream` has `total` tokens.
    """
    for _ in range(begins):
        yield await anext(events)
    first = asyncio.ensure_future(anext(events))
    try:
        while not first.done():
            await asyncio.wait((first,), timeout=PROGRESS_S)
            processed = total
            if not first.done():
                leases = (await asyncio.wrap_future(engine.inspect())).leases
                processed = sum(each.position for each in leases if each.request_id == stream.request_id)
            elapsed_ms = 1000 * (time.perf_counter() - stream.started)
            yield encode(make(prompt_progress=PromptProgress(total, 0, min(total, processed), elapsed_ms)))
    except BaseException:
        first.cancel()
        raise
    yield await first
    async for event in events:
        yield event


async def spell(engine: EngineClient, tokens: tuple[int, ...]) -> str:
    """Tokens as text, control tokens too."""
    found = await run_tokenizer(engine, SpellTokens(tokens), Pieces)
    return b"".join(found.pieces).decode("utf-8", "replace")


async def complete(
    engine: EngineClient,
    body: LlamaCompletionBody,
    http: HttpRequest,
    inputs: Sequence[RawText | Gap],
    texts: Sequence[str | None],
    media: dict[str, bytes] | None = None,
) -> Any:
    """Submit the prompts, and answer whole or with a stream. Several answers come as a list.

    `texts` are the prompts as the answers show them; None: as their tokens are spelled.
    """
    probed = PROBED if body.post_sampling_probs else body.n_probs
    limit, logprobs = None if body.n_predict < 0 else body.n_predict, probed if body.n_probs else None
    request = submit.make_request(engine, http, body, uuid.uuid4().hex, limit, body.stop, logprobs=logprobs)
    request = _replace(request, media=media or {})
    request, prompts = await submit.prepare(engine, request, inputs, body.biases)
    shown = [
        (prompt.items, await spell(engine, prompt.items) if text is None else text)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    info, limits = loaded(engine)
    call = Completions(body, request, info.name, limits.request_tokens, shown)
    streams = submit_all(engine, request, prompts, body.n_cmpl, LimitedStream)
    if body.n_indent or body.t_max_predict_ms > 0:
        loop = asyncio.get_running_loop()
        for stream in streams:
            end = partial(loop.call_soon, engine.cancel, stream.request_id)
            stream.limits = LineLimits(body.n_indent, body.t_max_predict_ms / 1000, end)
    if body.stream:
        events = call.events(streams)
        if body.return_progress:
            total = len(prompts[0])
            make = partial(shapes.LlamaEvent, tokens_evaluated=total)
            events = add_progress(engine, streams[0], total, events, 1, make)
        return EventStream(engine, streams, events)
    collected = await collect(engine, streams, http)

    def make_whole() -> list[Any]:
        pairs = zip(streams, collected, strict=True)
        return [call.whole(index, stream, outputs) for index, (stream, outputs) in enumerate(pairs)]

    found = await render(collected, make_whole)
    return found[0] if len(found) == 1 else found


# Routes ------------------------------------------------------------------------------------------------

_EVENTS = encode(shapes.LlamaEvent(content="2", tokens=(34,))) + encode(shapes.COMPLETION_EXAMPLE)


@llama_server.post("/completion", shapes.COMPLETION_EXAMPLE, events=_EVENTS, computes=TEXT, several=True)
@llama_server.post("/completions", shown=False, computes=TEXT)
async def completion(body: shapes.LlamaCompletionBody, http: HttpRequest) -> Any:
    """Complete prompts."""
    engine = await submit.use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    inputs: list[RawText] = []
    texts: list[str | None] = []
    tenant = http.scope["state"]["tenant"].name
    media, rows = await encode_pictures(engine, body.take_pictures(sees=engine.sees), tenant)
    for pieces in body.prompts:
        submit.check_tokens(engine, [piece for piece in pieces if isinstance(piece, int)], "prompt")
        own = {marker: each for marker, each in media.items() if marker in str(pieces[0])}
        inputs.append(RawText(tuple(pieces), parse_special=True, media=own))
        texts.append(pieces[0] if len(pieces) == 1 and isinstance(pieces[0], str) else None)
    return await complete(engine, body, http, inputs, texts, rows)


@llama_server.post("/infill", shapes.COMPLETION_EXAMPLE, events=_EVENTS, computes=TEXT, several=True)
async def infill(body: shapes.InfillBody, http: HttpRequest) -> Any:
    """Fill the gap in a text; needs a model with fill-in-the-middle tokens."""
    engine = await submit.use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    limit = loaded(engine)[1].request_tokens
    # The text is cut at its far ends so that the answer fits.
    reserved = min(body.n_predict, limit // 2) if body.n_predict > 0 else limit // 4
    return await complete(engine, body, http, [body.gap(limit - reserved)], [body.input_prefix + body.prompt])


@llama_server.post("/tokenize", shapes.LlamaTokens((33, 27, 33, 45)))
async def tokenize(body: shapes.LlamaTokenizeBody, http: HttpRequest) -> shapes.LlamaTokens:
    """Convert text to token ids."""
    engine = await submit.use_engine(http, body.model)
    pieces = [body.content] if isinstance(body.content, str) else body.content
    submit.check_tokens(engine, [piece for piece in pieces if isinstance(piece, int)], "content")
    special = {"add_special": body.add_special, "parse_special": body.parse_special}
    limit = MAX_PIECES if body.with_pieces else MAX_TOKENIZED
    tokens = await submit.tokenize(engine, pieces, "content", limit, **special)
    if not body.with_pieces:
        return shapes.LlamaTokens(tokens)
    texts = (await run_tokenizer(engine, SpellTokens(tokens), Pieces)).pieces
    return shapes.LlamaTokens(await asyncio.to_thread(lambda: [*map(shapes.make_piece, tokens, texts)]))


@llama_server.get("/tokenizer_info", {"bos_token": None, "eos_token": "</s>", "chat_template": None})
async def tokenizer_info(http: HttpRequest) -> dict[str, str | None]:
    """Name the start and end tokens and the chat template, as vLLM does: lm-eval asks for them."""
    info, _ = loaded(await submit.use_engine(http, None))
    named = {"bos_token": info.begin_text, "eos_token": info.end_text, "chat_template": info.chat_template}
    return {name: text or None for name, text in named.items()}


@llama_server.post("/detokenize", shapes.LlamaContent("1+1="))
async def detokenize(body: shapes.LlamaDetokenizeBody, http: HttpRequest) -> shapes.LlamaContent:
    """Convert token ids to text."""
    engine = await submit.use_engine(http, body.model)
    return shapes.LlamaContent(await spell(engine, submit.check_tokens(engine, body.tokens, "tokens")))


@llama_server.post("/apply-template", shapes.LlamaPrompt("<|im_start|>user\nWhat is AI?<|im_end|>\n"))
async def apply_template(body: shapes.ApplyTemplateBody, http: HttpRequest) -> shapes.LlamaPrompt:
    """Render a conversation with the model's chat template."""
    engine = await submit.use_engine(http, body.model)
    conversation = await run_in_turn(http, body.conversation, sees=engine.sees)
    task = RenderChat(conversation.for_template())
    return shapes.LlamaPrompt((await run_tokenizer(engine, task, Text)).text)


@llama_server.post("/chat/completions/input_tokens", shapes.InputTokens(12))
@openai.post("/v1/chat/completions/input_tokens", shown=False)
async def count_chat(body: ChatBody, http: HttpRequest) -> shapes.InputTokens:
    """Count the prompt tokens of a conversation."""
    engine = await submit.use_engine(http, body.model)
    conversation = await run_in_turn(http, body.conversation, sees=engine.sees)
    return shapes.InputTokens(await count_tokens(engine, conversation))


@llama_server.get("/props", shapes.PROPS_EXAMPLE)
async def props(http: HttpRequest) -> shapes.LlamaProps:
    """Describe the model and the defaults."""
    model = submit.find_model(http)
    if model.engine is None:
        raise EngineNotReady(f"{model.name} is not loaded yet")
    info, limits = loaded(model.engine)
    routes = http.app.state.open_routes
    params = shapes.make_params(http.app.state.defaults)
    return shapes.LlamaProps(
        default_generation_settings=shapes.LlamaSettings(params, limits.request_tokens),
        total_slots=limits.sequences,
        model_alias=info.name,
        model_ftype=parse_file_type(info.description).name,
        model_path=info.file,
        modalities=shapes.Modalities(vision=info.sees, audio=info.hears),
        media_marker=shapes.MEDIA_MARKER if info.sees or info.hears else "",
        endpoint_slots="-/slots" not in routes,
        endpoint_props="/props" in routes,
        chat_template=info.chat_template or "",
        chat_template_tool_use=info.tool_template or UNSET,
        chat_template_caps=shapes.make_caps(info.chat_template or ""),
        bos_token=info.begin_text,
        eos_token=info.end_text,
        build_info=f"cllm {__version__}",
        is_sleeping=model.health is Health.SLEEPING,
        inter_token=shapes.InterToken(limits.target_itl_ms, limits.max_itl_ms),
    )


@llama_server.post("/props", shown=False)
async def change_props(http: HttpRequest) -> dict[str, bool]:
    """Change nothing, as llama-server does; for clients that try."""
    if "/props" not in http.app.state.open_routes:
        raise NotSupported("properties cannot be changed: start the server with --props")
    return {"success": True}


@llama_server.get("/lora-adapters", [shapes.LlamaAdapter(0, "sql-lora-f16.gguf", 1.0)])
async def lora_adapters(http: HttpRequest) -> list[shapes.LlamaAdapter]:
    """List the LoRA adapters by id, with their scales for requests that name none."""
    if (engine := submit.find_model(http).engine) is None:
        return []
    scales = engine.adapters.scales
    return [
        shapes.LlamaAdapter(number, Path(each.file).name, scales.get(each.name, 0.0), each.name)
        for number, each in enumerate(engine.adapters.loaded)
    ]


@llama_server.post("/lora-adapters", shown=False)
async def scale_adapters(body: AdapterScalesBody, http: HttpRequest) -> dict[str, bool]:
    """Set the scales of LoRA adapters for requests that name none; those left out are off."""
    check_operator(http.scope, "changing the adapters of all requests")
    adapters = (await submit.use_engine(http)).adapters
    adapters.scales = adapters.choose_by_id({each.id: each.scale for each in body.scales})
    return {"success": True}


@llama_server.get("/slots", [shapes.LlamaSlot(id=0, n_ctx=4096, is_processing=True)])
async def slots(http: HttpRequest) -> list[shapes.LlamaSlot]:
    """List the slots, and what each computes."""
    if "-/slots" in http.app.state.open_routes:
        raise NotSupported("slots are not shown: start the server without --no-slots")
    engine = await submit.use_engine(http)
    limits = loaded(engine)[1]
    snapshot = await inspect(engine)
    leases = {lease.seq_id: lease.request_id for lease in snapshot.leases}
    if http.query_params.get("fail_on_no_slot") and len(leases) >= limits.sequences:
        raise EngineNotReady("no slot is free")
    running = {state.request.id: state for state in submit.get_registry(http).requests}
    shown = []
    for number in range(limits.sequences):
        slot = shapes.LlamaSlot(id=number, n_ctx=limits.request_tokens, is_processing=number in leases)
        if (state := running.get(leases.get(number, ""))) is not None:
            left = state.request.max_tokens - state.generated
            slot = msgspec.structs.replace(
                slot,
                id_task=zlib.crc32(state.request.id.encode()),
                n_prompt_tokens=state.request.input_tokens,
                params=shapes.make_settings(state.request, brief=True),
                next_token=[shapes.NextToken(left > 0, False, left, state.generated)],
            )
        shown.append(slot)
    return shown


@llama_server.post("/slots/{id_slot}", shown=False)
async def use_slot(id_slot: str, body: shapes.SlotBody, http: HttpRequest) -> dict[str, Any]:
    """Save the cached prefix of a slot to disk under a name, restore it to RAM, or forget it."""
    if (action := http.query_params.get("action")) not in get_args(SlotAction):
        raise InvalidRequest("action: it must be save, restore or erase", "action")
    engine = await submit.use_engine(http, body.model)
    slot = int(id_slot) if id_slot.isascii() and id_slot.isdigit() else -1
    if not 0 <= slot < loaded(engine)[1].sequences:
        raise InvalidRequest("id_slot: there is no such slot", "id_slot")
    if action != "erase" and not is_name(body.filename):
        raise InvalidRequest("filename: up to 64 letters, digits, '.', '-' and '_', not a path", "filename")
    started = time.perf_counter()
    done = await asyncio.wrap_future(engine.use_slot(cast(SlotAction, action), slot, body.filename))
    if action == "erase":
        return {"id_slot": slot, "n_erased": done.tokens}
    count, size = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    timings = {f"{action}_ms": 1000 * (time.perf_counter() - started)}
    answer = {"id_slot": slot, "filename": body.filename, count: done.tokens, size: done.size}
    return {**answer, "timings": timings}


# Routes of others, without their /v1; those of chats and of the Responses API are beside their own.
llama_server.get("/models", shown=False)(models)
openai.get("/v1/health", shown=False)(health)
