"""Several requests of one call go in together, or none does."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cllm.engine.engine import Engine
from cllm.engine.stream import AsyncStream
from cllm.errors import CllmError
from cllm.server.schema import SEED_SPACE
from cllm.types import Request


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
