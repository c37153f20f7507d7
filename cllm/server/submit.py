"""From the checked body of an HTTP request to the engine's own `Request`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from cllm.errors import CllmError, ContextLengthExceeded, InvalidRequest
from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import EngineRegistry
from cllm.frontend.served_model import ServedModel
from cllm.messages import Prepare, Prepared
from cllm.server.generation import GenerationBody
from cllm.server.sse import get_leases
from cllm.text.prompt import Gap, RawText
from cllm.types import Prompt, Request, SamplingParams

_replace = msgspec.structs.replace


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
    registry, leases = get_registry(http), get_leases(http.scope)
    model = find_model(http, name)
    if model.open:
        return leases.add(await registry.use(model)).engine
    try:
        return (await leases.wait(registry.use(model, timeout_s), stream=stream)).engine
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


async def prepare(
    engine: EngineClient, request: Request, inputs: Sequence[RawText | Gap], biases: Mapping[str, float] = {}
) -> tuple[Request, list[Prompt]]:
    """The tokens of each prompt, and the request with all that its texts decide.

    Raises InvalidRequest, ContextLengthExceeded, and QueueFull before any work.
    """
    engine.check_capacity()
    plain = [_get_tokens(each) for each in inputs]
    limit = loaded(engine)[1].request_tokens
    if request.constraint is None and not biases and None not in plain:  # nothing to be tokenised
        found = [Prompt(tokens) for tokens in plain if tokens is not None]
        if (longest := max(map(len, found), default=0)) > limit:
            raise ContextLengthExceeded(longest, limit)
        return request, found
    task = Prepare(tuple(inputs), limit, request.constraint, tuple(biases))
    prepared = await run_tokenizer(engine, task, Prepared)
    if biases:
        pairs = zip(prepared.texts, biases.values(), strict=True)
        more = tuple((token, bias) for tokens, bias in pairs for token in tokens)
        sampling = _replace(request.sampling, logit_bias=request.sampling.logit_bias + more)
        request = _replace(request, sampling=sampling)
    return request, [prompt.prompt for prompt in prepared.prompts]


def _get_tokens(given: RawText | Gap) -> tuple[int, ...] | None:
    """The token ids of a prompt without a text; None of any other."""
    if isinstance(given, Gap):
        return None
    tokens = tuple(piece for piece in given.pieces if isinstance(piece, int))
    return tokens if len(tokens) == len(given.pieces) else None


async def tokenize(
    engine: EngineClient, pieces: Sequence[str | int], *, add_special: bool, parse_special: bool
) -> tuple[int, ...]:
    """The tokens of texts and token ids, one after the other, however many there are."""
    task = Prepare((RawText(tuple(pieces), add_special, parse_special),))
    return (await run_tokenizer(engine, task, Prepared)).prompts[0].prompt.items


def make_request(engine: EngineClient, http: HttpRequest, body: GenerationBody, **fields: Any) -> Request:
    """The request of a body, for the tenant that sends it; see `build_request`."""
    return build_request(engine, body, tenant=http.scope["state"]["tenant"].name, **fields)


def build_request(
    engine: EngineClient,
    body: GenerationBody,
    *,
    request_id: str,
    max_tokens: int | None,
    sampling: SamplingParams | None = None,
    **fields: Any,
) -> Request:
    """A body as the engine's request, without a prompt. `max_tokens` None sets no limit but the context's.

    `fields` are others of `Request`. Raises InvalidRequest.
    """
    info, limits = loaded(engine)
    return Request(
        id=request_id,
        max_tokens=limits.request_tokens if max_tokens is None else min(max_tokens, limits.request_tokens),
        sampling=body.sampling(info.vocabulary_size) if sampling is None else sampling,
        constraint=body.constraint(),
        min_tokens=body.min_tokens,
        stop_token_ids=check_tokens(engine, body.stop_token_ids, "stop_token_ids"),
        timeout_s=body.timeout,
        priority=body.priority,
        reuse=body.cache_prompt,
        speculate=body.speculate,
        **fields,
    )
