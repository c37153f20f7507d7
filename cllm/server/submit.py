"""From the checked body of an HTTP request to the engine's own `Request`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from starlette.requests import Request as HttpRequest

from cllm.errors import CllmError, ContextLengthExceeded, InvalidRequest
from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import EngineRegistry
from cllm.frontend.served_model import ServedModel
from cllm.limits import MAX_BIASED_TOKENS, MAX_TOKENIZED, check
from cllm.messages import Prepare, Prepared
from cllm.server.generation import MAX_PRIORITY, GenerationBody
from cllm.server.middleware import LEASES
from cllm.server.sse import wait_for_load
from cllm.text.prompt import Gap, RawText
from cllm.types import Prompt, Request, SamplingParams

_replace = msgspec.structs.replace


def get_registry(http: HttpRequest) -> EngineRegistry:
    """The models of the app."""
    registry: EngineRegistry = http.app.state.registry
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
    registry = get_registry(http)
    model, http.scope["state"]["adapter"] = registry.find_adapter(name or http.query_params.get("model"))
    http.scope["state"] |= {"model": name or model.name, "timeout_s": timeout_s}
    if model.open:
        lease = await registry.use(model)
    else:
        try:
            tenant = http.scope["state"]["tenant"].name
            lease = await wait_for_load(http, registry.use(model, timeout_s, tenant), stream=stream)
        except CllmError as error:
            model.metrics.refused.labels(error.code).inc()
            raise
    http.scope[LEASES].append(lease)
    return lease.engine


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
    engine.check_capacity(request.tenant)
    limit = loaded(engine)[1].request_tokens
    plain = [
        Prompt(tuple(piece for piece in each.pieces if isinstance(piece, int)))
        for each in inputs
        if isinstance(each, RawText) and not any(isinstance(piece, str) for piece in each.pieces)
    ]
    if len(plain) == len(inputs) and not biases and request.constraint is None:  # nothing to be tokenised
        if (longest := max(map(len, plain), default=0)) > limit:
            raise ContextLengthExceeded(longest, limit)
        return request, plain
    if biases:
        _check_biased(engine.tokenizer.bound.min_tokens(*biases))
    task = Prepare(tuple(inputs), limit, request.constraint, tuple(biases))
    prepared = await run_tokenizer(engine, task, Prepared)
    if biases:
        pairs = zip(prepared.texts, biases.values(), strict=True)
        more = tuple((token, bias) for tokens, bias in pairs for token in tokens)
        _check_biased(len(more))
        sampling = _replace(request.sampling, logit_bias=request.sampling.logit_bias + more)
        request = _replace(request, sampling=sampling)
    return request, [prompt.prompt for prompt in prepared.prompts]


def _check_biased(count: int) -> None:
    check(count, MAX_BIASED_TOKENS, "biased tokens", "logit_bias", "use fewer or shorter texts")


async def tokenize(
    engine: EngineClient,
    pieces: Sequence[str | int],
    field: str,
    limit: int = MAX_TOKENIZED,
    *,
    add_special: bool,
    parse_special: bool,
) -> tuple[int, ...]:
    """The tokens of texts and token ids, one after the other. Raises InvalidRequest for too many bytes."""
    size = sum(len(piece.encode("utf-8", "replace")) for piece in pieces if isinstance(piece, str))
    check(size, limit, "bytes to tokenise", field, "send it in parts")
    task = Prepare((RawText(tuple(pieces), add_special, parse_special),))
    return (await run_tokenizer(engine, task, Prepared)).prompts[0].prompt.items


def make_request(
    engine: EngineClient,
    http: HttpRequest | None,
    body: GenerationBody,
    request_id: str,
    max_tokens: int | None,
    stop: str | tuple[str, ...] | None = None,
    *,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    sampling: SamplingParams | None = None,
    adapter: str = "",
) -> Request:
    """A body as the engine's request, without a prompt, for the tenant of `http`. Raises InvalidRequest.

    `max_tokens` None sets no limit but the context's; `logprobs` None scores no token. `adapter` is a name
    where there is no `http`, whose model may have one. Raises ModelNotFound for one that is not loaded.
    """
    info, limits = loaded(engine)
    state = {} if http is None else http.scope["state"]
    state["reconnect_s"] = body.reconnect_s
    adapter = adapter or state.get("adapter", "")
    scales = {adapter: engine.adapters.get(adapter).scale} if adapter else None
    if body.lora is not None:
        scales = engine.adapters.choose_by_id({each.id: each.scale for each in body.lora})
    return Request(
        id=request_id,
        max_tokens=limits.request_tokens if max_tokens is None else min(max_tokens, limits.request_tokens),
        sampling=body.sampling(info.vocabulary_size) if sampling is None else sampling,
        constraint=body.constraint(),
        stop=(stop,) if isinstance(stop, str) else stop or (),
        min_tokens=body.min_tokens,
        stop_token_ids=body.stop_token_ids and check_tokens(engine, body.stop_token_ids, "stop_token_ids"),
        logprobs=0 if logprobs is None else max(1, logprobs),
        prompt_logprobs=0 if prompt_logprobs is None else max(1, prompt_logprobs),
        timeout_s=body.timeout,
        priority=state.get("priority", max(-MAX_PRIORITY, min(MAX_PRIORITY, body.priority))),
        tenant="" if http is None else state["tenant"].name,
        adapter=engine.adapters.choose(scales),
        reuse=body.cache_prompt,
        streamed=body.stream,
        speculate=body.speculate,
    )
