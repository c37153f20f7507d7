"""OpenAI's routes: /v1/models, /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.errors import EngineNotReady
from cllm.frontend.async_calls import loaded, merged, run_tokenizer, submit_all
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.frontend.served_model import ServedModel
from cllm.server.errors import failure_body
from cllm.server.protocol import completions as api
from cllm.server.protocol.base import LargeJsonRoute, StructResponse, documented, get_timings
from cllm.server.protocol.generate import LISTED_MODEL, Model, ModelList, make_entry, make_model
from cllm.server.sse import COMMENT, DONE, GONE, EventStream, collect, encode
from cllm.server.submit import check_tokens, find_model, get_registry, make_request, use_engine
from cllm.text.prompt import Gap
from cllm.types import RequestOutput, Usage
from cllm.workers.messages import Detokenize, Text, TokenizeInfill, TokenizerTask, TokenizeText, Tokens

ROUTE = "/v1/completions"
_replace = msgspec.structs.replace
_json = msgspec.json.Encoder()
_TEXT = b',"text":'
_CLOSING = b',"logprobs":null,"finish_reason":null}]}\n\n'
_CHUNK = _replace(
    api.COMPLETION_EXAMPLE,
    choices=[api.CompletionChoice(0, " there")],
    usage=msgspec.UNSET,
    timings=msgspec.UNSET,
)
router = APIRouter(tags=["OpenAI"], route_class=LargeJsonRoute)


@router.get("/v1/models", **documented(ModelList(data=[LISTED_MODEL])))
async def models(http: HttpRequest) -> Response:
    """List the models."""
    served = get_registry(http).served
    entries = [make_entry(model.info) for model in served if model.info is not None]
    return StructResponse(ModelList(data=[describe_model(model) for model in served], models=entries))


@router.get("/v1/models/{name:path}", **documented(LISTED_MODEL))
async def model(name: str, http: HttpRequest) -> Response:
    """Describe the model that serves requests for this name."""
    return StructResponse(describe_model(find_model(http, name), name))


def describe_model(model: ServedModel, name: str = "") -> Model:
    """A model, under the `name` it was asked for by. What is not known before a load is the header's."""
    if model.info is None:
        raise EngineNotReady("the model is still loading")
    aliases = model.config.aliases
    return make_model(model.info, model.limits, model.created, name, aliases=aliases, loaded=model.loaded)


@router.post(ROUTE, **documented(api.COMPLETION_EXAMPLE, events=(encode(_CHUNK), DONE), computes=True))
async def completions(body: api.CompletionBody, http: HttpRequest) -> Response:
    """Complete prompts."""
    engine = await use_engine(http, body.model, stream=body.stream, timeout_s=body.timeout)
    info, limits = loaded(engine)
    best_of = body.best_of or body.n
    logprobs = body.logprobs is not None
    request = await make_request(
        engine,
        http,
        body,
        request_id=f"cmpl-{uuid.uuid4().hex}",
        max_tokens=body.max_tokens,
        stop=body.stops,
        logprobs=body.logprobs or int(logprobs or best_of > body.n),
    )
    request = _replace(request, prompt_logprobs=body.scored)
    given = body.prompts
    prompts = await _tokenize(engine, given, body.suffix, limits.request_tokens)
    echoes = await _detokenize(engine, given) if body.echo else [""] * len(prompts)
    streams = submit_all(engine, request, prompts, best_of, AsyncOutputStream)
    model = body.model or info.name
    head = api.Completion(id=request.id, created=int(time.time()), model=model, choices=[])
    if body.stream:
        return EventStream(engine, streams, _events(body, head, prompts, echoes, streams))
    collected = await collect(engine, streams, http)
    if collected is None:
        return Response(status_code=GONE)
    usage = api.make_usage([outputs[-1].usage for outputs in collected], sum(map(len, prompts)))
    if best_of > body.n:
        collected = _best(collected, best_of, body.n)
    choices = []
    for index, outputs in enumerate(collected):
        echo = echoes[index // body.n]
        choices.append(api.make_choice(body, index, outputs, echo=echo, offset=len(echo)))
    timings = get_timings(streams[0], len(prompts[0]), collected[0][-1].usage)
    return StructResponse(_replace(head, choices=choices, usage=usage, timings=timings))


async def _events(
    body: api.CompletionBody,
    head: api.Completion,
    prompts: Sequence[tuple[int, ...]],
    echoes: Sequence[str],
    streams: Sequence[AsyncOutputStream],
) -> AsyncIterator[bytes]:
    """Chunks as the choices come, the usage if it was asked for, `[DONE]`; or an error, and the end."""
    opening = b"data: " + _json.encode(head)[:-2] + b'{"index":'
    echoes = [echo for echo in echoes for _ in range(body.n)]
    offsets = list(map(len, echoes))
    yield COMMENT  # there is no event before the first token
    if body.echo and not body.scores_echo:
        for index, echo in enumerate(echoes):
            yield encode(_replace(head, choices=[api.CompletionChoice(index, echo)]))
    usages: list[Usage | None] = []
    async for index, output in merged(streams):
        if output.error is not None:
            yield encode(failure_body(ROUTE, output.error))
            return
        scored = bool(output.prompt_logprobs)
        if output.finish_reason is None and not output.logprobs and not scored:
            if output.text:  # nearly all chunks: put together as bytes
                yield b"%b%d%b%b%b" % (opening, index, _TEXT, _json.encode(output.text), _CLOSING)
            continue
        echo = echoes[index] if scored and body.scores_echo else ""
        choice = api.make_choice(body, index, [output], echo=echo, offset=offsets[index])
        if choice.logprobs is not None:
            offsets[index] += sum(map(len, choice.logprobs.tokens)) - len(echo)
        if output.finish_reason is not None:
            usages.append(output.usage)
        chunk = _replace(head, choices=[choice])
        if len(usages) == len(streams) and not body.include_usage:
            timings = get_timings(streams[index], len(prompts[index // body.n]), output.usage)
            chunk = _replace(chunk, timings=timings)
        yield encode(chunk)
    if body.include_usage:
        timings = get_timings(streams[0], len(prompts[0]), usages[0])
        usage = api.make_usage(usages, sum(map(len, prompts)))
        yield encode(_replace(head, usage=usage, timings=timings))
    yield DONE


async def _tokenize(
    engine: EngineClient, given: Sequence[str] | Sequence[list[int]], suffix: str | None, limit: int
) -> list[tuple[int, ...]]:
    """The tokens of each prompt. Raises ContextLengthExceeded, and QueueFull before any work."""
    engine.check_capacity()
    prompts: list[tuple[int, ...]] = []
    for one in given:
        prompt = one if isinstance(one, str) else check_tokens(engine, one, "prompt")
        task: TokenizerTask
        if suffix:
            task = TokenizeInfill(Gap(prefix=prompt, suffix=suffix), limit)
        elif isinstance(prompt, str):
            task = TokenizeText(prompt, limit)
        else:
            prompts.append(prompt)
            continue
        prompts.append((await run_tokenizer(engine, task, Tokens)).tokens)
    return prompts


async def _detokenize(engine: EngineClient, given: Sequence[str] | Sequence[list[int]]) -> list[str]:
    """The text of each prompt, to be repeated."""
    echoes: list[str] = []
    for one in given:
        if isinstance(one, str):
            echoes.append(one)
        else:
            echoes.append((await run_tokenizer(engine, Detokenize(tuple(one)), Text)).text)
    return echoes


def _best(collected: Sequence[list[RequestOutput]], best_of: int, n: int) -> list[list[RequestOutput]]:
    """The n likeliest answers to each prompt, likeliest first."""

    def mean_logprob(outputs: Sequence[RequestOutput]) -> float:
        logprobs = [entry.logprob for output in outputs for entry in output.logprobs]
        return sum(logprobs) / len(logprobs) if logprobs else float("-inf")

    kept: list[list[RequestOutput]] = []
    for begin in range(0, len(collected), best_of):
        kept += sorted(collected[begin : begin + best_of], key=mean_logprob, reverse=True)[:n]
    return kept
