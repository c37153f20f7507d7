"""From a checked body to the engine: its request, and several of one call together or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import msgspec
from starlette.requests import HTTPConnection

from cllm.errors import CllmError, EngineNotReady, InvalidRequest, ModelNotFound
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.middleware import scheduling_of
from cllm.server.protocol.base import SEED_SPACE, ConstrainedBody, SamplingBody
from cllm.types import FIELDS, ConstraintKind, ConstraintSpec, Limits, ModelInfo, Request, SamplingParams
from cllm.workers.tokenizer import CheckConstraint, TokenizerAnswer, TokenizerTask, TokenizeText, Tokens


def request_of(
    engine: EngineClient,
    http: HTTPConnection,
    body: SamplingBody,
    *,
    request_id: str,
    max_tokens: int | None,
    prompt: tuple[int, ...] = (),
    stop: tuple[str, ...] = (),
    logprobs: int = 0,
    constraint: ConstraintSpec | None = None,
) -> Request:
    """A body as the engine's own request; `max_tokens` None: as many as fit. Raises InvalidRequest."""
    info, limits = loaded(engine)
    most = limits.request_tokens
    return Request(
        id=request_id,
        prompt=prompt,
        max_tokens=min(max_tokens or most, most),
        sampling=sampling_of(body, info.vocabulary_size),
        stop=stop,
        logprobs=logprobs,
        constraint=constraint,
        **scheduling_of(http, body),
    )


def choices_of(request: Request, count: int) -> list[Request]:
    """The same request `count` times. Each draws differently, and the same call again draws the same."""
    replace = msgspec.structs.replace
    return [
        replace(
            request,
            id=f"{request.id}-{index}",
            sampling=replace(request.sampling, seed=(request.sampling.seed + index) % SEED_SPACE),
        )
        for index in range(count)
    ]


def submit_all(engine: EngineClient, requests: Iterable[Request]) -> list[AsyncOutputStream]:
    """Their streams; a refusal takes back those before it."""
    streams: list[AsyncOutputStream] = []
    try:
        for request in requests:
            streams.append(engine.submit(request, AsyncOutputStream))
    except CllmError:
        for stream in streams:
            engine.cancel(stream.request_id)
        raise
    return streams


GRAMMAR_LIMIT_S = 5.0  # the first one also builds the compiler
TEXT_LIMIT_S = 30.0  # tokenising 8 MiB takes a few seconds; what takes longer hangs


def loaded(engine: EngineClient) -> tuple[ModelInfo, Limits]:
    """What is known once the model is loaded; raises EngineNotReady before."""
    if engine.info is None or engine.limits is None:
        raise EngineNotReady("the model is still loading")
    return engine.info, engine.limits


def check_model(name: str | None) -> None:
    """Any plain name is served by the one loaded model; a path is not a name."""
    if name is not None and (".." in name or name.startswith(("/", "~")) or "\\" in name):
        raise ModelNotFound("there is no such model; GET /v1/models lists what is served")


def model_name(engine: EngineClient, asked: str | None) -> str:
    """What an answer calls the model: as it was asked for, or its own name."""
    return asked or loaded(engine)[0].name


def checked_tokens(engine: EngineClient, tokens: Sequence[int], field: str) -> tuple[int, ...]:
    """Token ids a client sent; raises InvalidRequest for one outside the vocabulary."""
    size = loaded(engine)[0].vocabulary_size
    if (largest := max(tokens, default=0)) >= size:
        raise InvalidRequest(f"{field}: {largest} is no token id (0 to {size - 1})", field=field)
    return tuple(tokens)


async def run_tokenizer(
    engine: EngineClient, task: TokenizerTask, limit_s: float = TEXT_LIMIT_S
) -> TokenizerAnswer:
    """Do a text task; one that hangs is given up, and its process with it."""
    future = engine.text.submit(task)
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        engine.text.abort(future)
        raise InvalidRequest(f"the text could not be processed within {limit_s:.0f} s; shorten it") from None
    except CllmError as error:
        engine.metrics.refused.labels(error.code).inc()
        raise


async def constraint_of(engine: EngineClient, body: ConstrainedBody) -> ConstraintSpec | None:
    """What the answer must look like, known to compile. Raises InvalidRequest."""
    try:
        spec = body.constraint()
    except ValueError as error:
        raise InvalidRequest(str(error), body.form_field) from None
    if spec is None:
        return None
    try:
        await run_tokenizer(engine, CheckConstraint(spec), GRAMMAR_LIMIT_S)
    except InvalidRequest as error:
        if spec.kind is not ConstraintKind.JSON_SCHEMA:
            raise
        # Every API has its own name for where a schema stands.
        field, told = body.form_field, error.message.removeprefix(f"{FIELDS[spec.kind]}: ")
        raise InvalidRequest(f"{field}: {told}", field) from None
    return spec


def sampling_of(body: SamplingBody, vocabulary_size: int) -> SamplingParams:
    """The sampling parameters. Raises InvalidRequest."""
    try:
        return body.sampling(vocabulary_size)
    except ValueError as error:
        raise InvalidRequest(str(error), field="logit_bias") from None


async def to_tokens(engine: EngineClient, task: TokenizerTask) -> tuple[int, ...]:
    """The tokens of a text or a conversation."""
    answer = await run_tokenizer(engine, task)
    assert isinstance(answer, Tokens)
    return answer.tokens


async def prompt_tokens(engine: EngineClient, text: str) -> tuple[int, ...]:
    """The tokens of a prompt; one that cannot fit raises ContextLengthExceeded, a full queue QueueFull."""
    engine.check_room()
    return await to_tokens(engine, TokenizeText(text, loaded(engine)[1].request_tokens))
