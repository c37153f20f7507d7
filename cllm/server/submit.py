"""From the checked body of an HTTP request to the engine's own `Request`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from starlette.requests import Request as HttpRequest

from cllm.errors import CllmError, ContextLengthExceeded, InvalidRequest
from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import EngineRegistry
from cllm.frontend.served_model import ServedModel
from cllm.server.hold import get_hold
from cllm.server.protocol.sampling import ConstrainedBody
from cllm.types import ConstraintKind, ConstraintSpec, Request
from cllm.workers.messages import CheckConstraint, Text, TokenizeText, Tokens


def get_registry(http: HttpRequest) -> EngineRegistry:
    """The models of the app."""
    registry = http.app.state.registry
    assert isinstance(registry, EngineRegistry)
    return registry


def find_model(http: HttpRequest, name: str | None = None) -> ServedModel:
    """The model of a name, else of `?model=`, else the default one. Raises ModelNotFound."""
    return get_registry(http).find(name or http.query_params.get("model"))


async def use_engine(
    http: HttpRequest, name: str | None = None, *, stream: bool = False, timeout_s: float | None = None
) -> EngineClient:
    """The engine for an HTTP request, which stays loaded until its response has ended. A handler asks once.

    The model is that of `find_model`; it is loaded if need be, within `timeout_s`. The head of a `stream` of
    events is sent meanwhile, and comments. Raises ModelNotFound, ModelDoesNotFit, EngineNotReady, QueueFull,
    DeadlineExceeded, and ClientGone where the client leaves meanwhile.
    """
    registry, hold = get_registry(http), get_hold(http.scope)
    model = find_model(http, name)
    if model.open:
        return hold.add(await registry.use(model)).engine
    try:
        return (await hold.wait(registry.use(model, timeout_s), stream=stream)).engine
    except CllmError as error:
        model.metrics.refused.labels(error.code).inc()
        raise


def model_name(engine: EngineClient, asked: str | None) -> str:
    """The model's name in a response: as the client wrote it, or the model's own."""
    return asked or loaded(engine)[0].name


def check_tokens(engine: EngineClient, tokens: Sequence[int], field: str) -> tuple[int, ...]:
    """The token ids of a client; raises InvalidRequest for one outside the vocabulary."""
    size = loaded(engine)[0].vocabulary_size
    if (largest := max(tokens, default=0)) >= size:
        raise InvalidRequest(f"{field}: {largest} is not a token id (0 to {size - 1})", field=field)
    return tuple(tokens)


async def tokenize_pieces(
    engine: EngineClient,
    pieces: Sequence[str | int],
    field: str,
    limit: int = 0,
    *,
    add_special: bool = True,
    parse_special: bool = False,
) -> tuple[int, ...]:
    """The tokens of texts and token ids, one after the other. Raises InvalidRequest, ContextLengthExceeded.

    `limit` is that of a prompt; special tokens are added to a text at its beginning only.
    """
    tokens: list[int] = []
    for texts, run in groupby(enumerate(pieces), lambda each: isinstance(each[1], str)):
        if not texts:
            tokens += check_tokens(engine, [int(token) for _, token in run], field)
            continue
        for index, text in run:
            first = add_special and not index
            task = TokenizeText(str(text), limit, add_special=first, parse_special=parse_special)
            tokens += (await run_tokenizer(engine, task, Tokens)).tokens
    if limit and len(tokens) > limit:
        raise ContextLengthExceeded(len(tokens), limit)
    return tuple(tokens)


async def check_constraint(engine: EngineClient, spec: ConstraintSpec, form_field: str) -> None:
    """Compile the constraint of a body. Raises InvalidRequest, which names a schema's field `form_field`."""
    try:
        await run_tokenizer(engine, CheckConstraint(spec), Text)
    except InvalidRequest as error:
        if spec.kind is not ConstraintKind.JSON_SCHEMA:
            raise
        reason = error.message.removeprefix(f"{error.field}: ")
        raise InvalidRequest(f"{form_field}: {reason}", form_field) from None


async def make_request(
    engine: EngineClient,
    http: HttpRequest,
    body: ConstrainedBody,
    *,
    request_id: str,
    max_tokens: int | None,
    prompt: tuple[int, ...] = (),
    stop: tuple[str, ...] = (),
    logprobs: int = 0,
) -> Request:
    """A body as the engine's request; `max_tokens` None: as many as fit. Raises InvalidRequest."""
    info, limits = loaded(engine)
    constraint = body.constraint()
    if constraint is not None:
        await check_constraint(engine, constraint, body.form_field)
    tokens = {
        key: (
            await run_tokenizer(engine, TokenizeText(body.bias_text(key), add_special=False), Tokens)
        ).tokens
        for key in body.bias_texts
    }
    return Request(
        id=request_id,
        prompt=prompt,
        max_tokens=limits.request_tokens if max_tokens is None else min(max_tokens, limits.request_tokens),
        sampling=body.sampling(info.vocabulary_size, tokens),
        stop=stop,
        logprobs=logprobs,
        constraint=constraint,
        min_tokens=body.min_tokens,
        stop_token_ids=check_tokens(engine, body.stop_token_ids, "stop_token_ids"),
        timeout_s=body.timeout,
        priority=body.priority,
        reuse=body.cache_prompt,
        speculate=body.speculate,
        tenant=http.scope["state"]["tenant"].name,
    )
