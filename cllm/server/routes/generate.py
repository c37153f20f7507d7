"""cLLM's own routes: /generate, /generate_stream, /encode, /decode, /model/info."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import EngineRegistry
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.errors import failure_event
from cllm.server.protocol.base import DecodeBody, EncodeBody, GenerateBody
from cllm.server.sse import GONE, EventStream, collect, encode
from cllm.server.submit import (
    checked_tokens,
    constraint_of,
    loaded,
    prompt_tokens,
    request_of,
    run_tokenizer,
    to_tokens,
)
from cllm.types import Request, RequestOutput
from cllm.workers.tokenizer import Detokenize, Text, TokenizeText


async def to_request(engine: EngineClient, body: GenerateBody, http: HttpRequest) -> Request:
    """A validated body as the engine's own request."""
    return request_of(
        engine,
        http,
        body,
        request_id=uuid.uuid4().hex,
        prompt=await prompt_tokens(engine, body.prompt),
        max_tokens=body.max_tokens,
        stop=body.stops,
        constraint=await constraint_of(engine, body),
    )


def answer(deltas: list[RequestOutput], max_tokens: int, seconds: float) -> dict[str, Any]:
    """The body of a finished `/generate`."""
    last = deltas[-1]
    assert last.usage is not None and last.finish_reason is not None
    generated = last.usage.completion_tokens
    return {
        "success": True,
        "data": {
            "id": last.request_id,
            "text": "".join(delta.text for delta in deltas),
            "response_time": round(seconds, 6),
            "tokens_per_second": round(generated / seconds, 3) if seconds > 0 else 0.0,
            "generated_tokens": generated,
            "max_tokens": max_tokens,
            "finish_reason": last.finish_reason.value,
            "usage": msgspec.to_builtins(last.usage),
        },
    }


async def events(stream: AsyncOutputStream) -> AsyncIterator[bytes]:
    """`/generate_stream`'s events: a token each, then the summary or the error."""
    async for delta in stream:
        if delta.text:
            yield encode({"id": delta.request_id, "token": delta.text, "done": False})
        if delta.error is not None:
            yield encode(failure_event(delta.error, delta.request_id))
        elif delta.finish_reason is not None:
            assert delta.usage is not None
            yield encode(
                {
                    "id": delta.request_id,
                    "token": "",
                    "done": True,
                    "generated_tokens": delta.usage.completion_tokens,
                    "finish_reason": delta.finish_reason.value,
                    "usage": delta.usage,
                }
            )


def routes(registry: EngineRegistry) -> APIRouter:
    """The router. Each handler asks the registry once for the engine that serves its request."""
    router = APIRouter(tags=["cLLM"])

    async def generate_events(body: GenerateBody, http: HttpRequest) -> Response:
        engine = registry.current
        request = await to_request(engine, body, http)
        stream = engine.submit(request, AsyncOutputStream)
        return EventStream(engine, [stream], events(stream))

    @router.post("/generate", response_model=None)
    async def generate(body: GenerateBody, http: HttpRequest) -> Response | dict[str, Any]:
        """Complete a prompt; with `stream: true`, the events of `/generate_stream`."""
        if body.stream:
            return await generate_events(body, http)
        engine = registry.current
        started = time.perf_counter()
        request = await to_request(engine, body, http)
        stream = engine.submit(request, AsyncOutputStream)
        collected = await collect(engine, [stream], http.receive)
        if collected is None:
            return Response(status_code=GONE)
        return answer(collected[0], request.max_tokens, time.perf_counter() - started)

    @router.post("/generate_stream", response_model=None)
    async def generate_stream(body: GenerateBody, http: HttpRequest) -> Response:
        """Complete a prompt as server-sent events."""
        return await generate_events(body, http)

    @router.post("/encode")
    async def encode_text(body: EncodeBody) -> dict[str, Any]:
        """Text to token ids."""
        engine = registry.current
        tokens = await to_tokens(engine, TokenizeText(body.text))
        return {"tokens": list(tokens), "length": len(tokens)}

    @router.post("/decode")
    async def decode_tokens(body: DecodeBody) -> dict[str, str]:
        """Token ids to text."""
        engine = registry.current
        result = await run_tokenizer(engine, Detokenize(checked_tokens(engine, body.tokens, "tokens")))
        assert isinstance(result, Text)
        return {"text": result.text}

    @router.get("/model/info")
    async def model_info() -> dict[str, Any]:
        """What is served, and its limits."""
        info, limits = loaded(registry.current)
        return {**msgspec.to_builtins(info), "limits": msgspec.to_builtins(limits)}

    return router
