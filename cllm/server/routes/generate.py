"""cllm's own routes: /generate, /generate_stream, /encode, /decode, /model/info."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.errors import failure_event
from cllm.server.protocol import generate as api
from cllm.server.protocol.base import LargeJsonRoute, StructResponse, documented
from cllm.server.sse import COMMENT, GONE, EventStream, collect, encode
from cllm.server.submit import check_tokens, make_request, use_engine
from cllm.types import FinishReason, Request, Usage
from cllm.workers.messages import Detokenize, Text, TokenizeText, Tokens

_EVENTS = (
    encode(api.GenerateEvent(id="8f0c", token=" there")),
    encode(
        api.GenerateEndEvent(
            id="8f0c",
            generated_tokens=3,
            finish_reason=FinishReason.LENGTH,
            usage=Usage(prompt_tokens=4, completion_tokens=3),
        )
    ),
)
router = APIRouter(tags=["cLLM"], route_class=LargeJsonRoute)


async def events(stream: AsyncOutputStream) -> AsyncIterator[bytes]:
    """`/generate_stream`'s events: one a token, then the summary or the error."""
    yield COMMENT  # there is no event before the first token
    async for output in stream:
        if output.text:
            yield encode(api.GenerateEvent(id=output.request_id, token=output.text))
        if output.error is not None:
            yield encode(failure_event(output.error, output.request_id))
        elif output.finish_reason is not None:
            assert output.usage is not None
            end = api.GenerateEndEvent(
                id=output.request_id,
                generated_tokens=output.usage.completion_tokens,
                finish_reason=output.finish_reason,
                usage=output.usage,
            )
            yield encode(end)


async def _make_request(engine: EngineClient, body: api.GenerateBody, http: HttpRequest) -> Request:
    engine.check_capacity()
    task = TokenizeText(body.prompt, loaded(engine)[1].request_tokens)
    return await make_request(
        engine,
        http,
        body,
        request_id=uuid.uuid4().hex,
        prompt=(await run_tokenizer(engine, task, Tokens)).tokens,
        max_tokens=body.max_tokens,
        stop=body.stops,
    )


@router.post("/generate", **documented(api.GENERATE_EXAMPLE, events=_EVENTS, computes=True))
async def generate(body: api.GenerateBody, http: HttpRequest) -> Response:
    """Complete a prompt; with `stream: true`, the events of `/generate_stream`."""
    if body.stream:
        return await generate_stream(body, http)
    engine = await use_engine(http, body.model, timeout_s=body.timeout)
    started = time.perf_counter()
    request = await _make_request(engine, body, http)
    stream = engine.submit(request, AsyncOutputStream)
    collected = await collect(engine, [stream], http)
    if collected is None:
        return Response(status_code=GONE)
    outputs, seconds = collected[0], time.perf_counter() - started
    last = outputs[-1]
    assert last.usage is not None and last.finish_reason is not None
    generated = last.usage.completion_tokens
    data = api.Generated(
        id=request.id,
        text="".join(output.text for output in outputs),
        response_time=round(seconds, 6),
        tokens_per_second=round(generated / seconds, 3) if seconds > 0 else 0.0,
        generated_tokens=generated,
        max_tokens=request.max_tokens,
        finish_reason=last.finish_reason,
        usage=last.usage,
    )
    return StructResponse(api.GenerateResponse(data=data))


@router.post("/generate_stream", **documented(None, events=_EVENTS, computes=True))
async def generate_stream(body: api.GenerateBody, http: HttpRequest) -> Response:
    """Complete a prompt as server-sent events."""
    engine = await use_engine(http, body.model, stream=True, timeout_s=body.timeout)
    stream = engine.submit(await _make_request(engine, body, http), AsyncOutputStream)
    return EventStream(engine, [stream], events(stream))


@router.post("/encode", **documented(api.EncodeResponse((6403, 1980, 253, 655), 4)))
async def encode_text(body: api.EncodeBody, http: HttpRequest) -> Response:
    """Convert text to token ids."""
    engine = await use_engine(http, body.model)
    tokens = (await run_tokenizer(engine, TokenizeText(body.text), Tokens)).tokens
    return StructResponse(api.EncodeResponse(tokens, len(tokens)))


@router.post("/decode", **documented(api.DecodeResponse("Once upon")))
async def decode_tokens(body: api.DecodeBody, http: HttpRequest) -> Response:
    """Convert token ids to text."""
    engine = await use_engine(http, body.model)
    task = Detokenize(check_tokens(engine, body.tokens, "tokens"))
    return StructResponse(api.DecodeResponse((await run_tokenizer(engine, task, Text)).text))


@router.get("/model/info", **documented(api.MODEL_EXAMPLE))
async def model_info(http: HttpRequest) -> Response:
    """Describe the model that is served, and its limits."""
    info, limits = loaded(await use_engine(http))
    return StructResponse(api.ModelInfoResponse(**msgspec.structs.asdict(info), limits=limits))
