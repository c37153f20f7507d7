"""From a checked body to the engine: its request, and several of one call together or not at all."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from starlette.requests import HTTPConnection

from cllm.engine.engine import Engine
from cllm.engine.stream import AsyncStream
from cllm.errors import CllmError
from cllm.server.auth import scheduling_of
from cllm.server.schema import SEED_SPACE, SamplingBody
from cllm.server.text import loaded, sampling_of
from cllm.types import ConstraintSpec, Request


def request_of(
    engine: Engine,
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
    facts, limits = loaded(engine)
    most = limits.request_tokens
    return Request(
        id=request_id,
        prompt=prompt,
        max_tokens=min(max_tokens or most, most),
        sampling=sampling_of(body, facts.vocabulary_size),
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


def submit_all(engine: Engine, requests: Iterable[Request]) -> list[AsyncStream]:
    """Their streams; a refusal takes back those before it."""
    streams: list[AsyncStream] = []
    try:
        for request in requests:
            streams.append(engine.submit(request, AsyncStream))
    except CllmError:
        for stream in streams:
            engine.cancel(stream.request_id)
        raise
    return streams
