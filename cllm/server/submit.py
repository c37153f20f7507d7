"""From the checked body of an HTTP request to the engine's own `Request`."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import HTTPConnection

from cllm.errors import InvalidRequest, ModelNotFound
from cllm.frontend.async_calls import GRAMMAR_LIMIT_S, loaded, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.server.protocol.base import ConstrainedBody
from cllm.types import ConstraintKind, ConstraintSpec, Request
from cllm.workers.messages import CheckConstraint, Text


def check_model(name: str | None) -> None:
    """Any plain name is served by the one loaded model; raises ModelNotFound for a path."""
    if name is not None and (".." in name or name.startswith(("/", "~")) or "\\" in name):
        raise ModelNotFound("this model does not exist: GET /v1/models lists the models served")


def model_name(engine: EngineClient, asked: str | None) -> str:
    """The model's name in a response: as the client wrote it, or the model's own."""
    return asked or loaded(engine)[0].name


def check_tokens(engine: EngineClient, tokens: Sequence[int], field: str) -> tuple[int, ...]:
    """The token ids of a client; raises InvalidRequest for one outside the vocabulary."""
    size = loaded(engine)[0].vocabulary_size
    if (largest := max(tokens, default=0)) >= size:
        raise InvalidRequest(f"{field}: {largest} is not a token id (0 to {size - 1})", field=field)
    return tuple(tokens)


async def check_constraint(engine: EngineClient, body: ConstrainedBody) -> ConstraintSpec | None:
    """The constraint that a body sets on the answer, known to compile. Raises InvalidRequest."""
    if (spec := body.constraint()) is None:
        return None
    try:
        await run_tokenizer(engine, CheckConstraint(spec), Text, GRAMMAR_LIMIT_S)
    except InvalidRequest as error:
        if spec.kind is not ConstraintKind.JSON_SCHEMA:
            raise
        # Each API has its own name for the field that holds the schema.
        field, reason = body.form_field, error.message.removeprefix(f"{error.field}: ")
        raise InvalidRequest(f"{field}: {reason}", field) from None
    return spec


async def make_request(
    engine: EngineClient,
    http: HTTPConnection,
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
    return Request(
        id=request_id,
        prompt=prompt,
        max_tokens=min(max_tokens or limits.request_tokens, limits.request_tokens),
        sampling=body.sampling(info.vocabulary_size),
        stop=stop,
        logprobs=logprobs,
        constraint=await check_constraint(engine, body),
        timeout_s=body.timeout,
        priority=body.priority,
        reuse=body.cache_prompt,
        speculate=body.speculate,
        tenant=http.scope["state"]["tenant"].name,
    )
