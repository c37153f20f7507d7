"""cllm's own dialect, a prompt in and text out: /generate, /encode, /decode, /model/info."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.errors import CllmError
from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.limits import MAX_VALUES
from cllm.messages import Detokenize, Text
from cllm.server.body import Body, ModelName, TokenId, TokenLimit
from cllm.server.dialect import COMMENT, TEXT, Dialect, encode
from cllm.server.dialects.openai.bodies import Stops
from cllm.server.examples import read_examples
from cllm.server.generation import GenerationBody
from cllm.server.sse import EventStream, collect
from cllm.server.submit import check_tokens, make_request, prepare, tokenize, use_engine
from cllm.text.prompt import RawText
from cllm.types import FinishReason, Limits, ModelInfo, Request, Usage


class CllmDialect(Dialect):
    """cllm's own routes."""

    name = "cLLM"
    about = "cllm's own: a prompt in, text out. No chat template is applied."
    prefix = ""

    def make_error(self, error: CllmError) -> Any:
        return {"success": False, "error": error.code, "message": error.message}

    def frame_error(self, error: CllmError, request_id: str = "") -> bytes:
        return encode({"id": request_id, "error": error.code, "message": error.message, "done": True})


cllm = CllmDialect()


class GenerateBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /generate` and `/generate_stream`."""

    model: ModelName = None
    prompt: Annotated[str, Meta(min_length=1)]
    max_tokens: TokenLimit | None = 256
    stop: Stops = ()

    def __post_init__(self) -> None:
        self.set_limit("max_tokens")


class EncodeBody(msgspec.Struct, Body, kw_only=True):
    """`POST /encode`."""

    model: ModelName = None
    text: str


class DecodeBody(msgspec.Struct, Body, kw_only=True):
    """`POST /decode`."""

    model: ModelName = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_VALUES)]


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """A finished answer of `/generate`, and what it took."""

    id: str
    text: str
    response_time: float
    tokens_per_second: float
    generated_tokens: int
    max_tokens: int
    finish_reason: FinishReason
    usage: Usage


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/generate`."""

    success: Literal[True] = True
    data: Generated


class GenerateEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A token of a stream."""

    id: str
    token: str
    done: bool = False


class GenerateEndEvent(GenerateEvent, frozen=True, kw_only=True):
    """The last event of a stream."""

    token: str = ""
    done: bool = True
    generated_tokens: int
    finish_reason: FinishReason
    usage: Usage


class EncodeResponse(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]
    length: int


class DecodeResponse(msgspec.Struct, frozen=True):
    text: str


class ModelInfoResponse(ModelInfo, frozen=True, kw_only=True):
    """The model that is served, and its limits."""

    limits: Limits


_EVENTS = b"".join(map(encode, read_examples(GenerateEvent, GenerateEndEvent)))


async def events(stream: AsyncOutputStream) -> AsyncIterator[bytes]:
    """`/generate_stream`'s events: one a token, then the summary or the error."""
    yield COMMENT  # there is no event before the first token
    async for output in stream:
        if output.text:
            yield encode(GenerateEvent(id=output.request_id, token=output.text))
        if output.error is not None:
            yield cllm.frame_error(output.error.error(), output.request_id)
        elif output.finish_reason is not None:
            assert output.usage is not None
            end = GenerateEndEvent(
                id=output.request_id,
                generated_tokens=output.usage.completion_tokens,
                finish_reason=output.finish_reason,
                usage=output.usage,
            )
            yield encode(end)


async def _make_request(engine: EngineClient, body: GenerateBody, http: HttpRequest) -> Request:
    request = make_request(engine, http, body, uuid.uuid4().hex, body.max_tokens, body.stop)
    request, (prompt,) = await prepare(engine, request, [RawText((body.prompt,))])
    return msgspec.structs.replace(request, prompt=prompt)


@cllm.post("/generate", events=_EVENTS, computes=TEXT)
async def generate(body: GenerateBody, http: HttpRequest) -> GenerateResponse | Response:
    """Complete a prompt; with `stream: true`, the events of `/generate_stream`."""
    if body.stream:
        return await generate_stream(body, http)
    engine = await use_engine(http, body.model, timeout_s=body.timeout)
    started = time.perf_counter()
    request = await _make_request(engine, body, http)
    collected = await collect(engine, [engine.submit(request, AsyncOutputStream)], http)
    outputs, seconds = collected[0], time.perf_counter() - started
    last = outputs[-1]
    assert last.usage is not None and last.finish_reason is not None
    generated = last.usage.completion_tokens
    data = Generated(
        id=request.id,
        text="".join(output.text for output in outputs),
        response_time=round(seconds, 6),
        tokens_per_second=round(generated / seconds, 3) if seconds > 0 else 0.0,
        generated_tokens=generated,
        max_tokens=request.max_tokens,
        finish_reason=last.finish_reason,
        usage=last.usage,
    )
    return GenerateResponse(data=data)


@cllm.post("/generate_stream", events=_EVENTS, computes=TEXT)
async def generate_stream(body: GenerateBody, http: HttpRequest) -> Response:
    """Complete a prompt as server-sent events."""
    engine = await use_engine(http, body.model, stream=True, timeout_s=body.timeout)
    request = await _make_request(engine, msgspec.structs.replace(body, stream=True), http)
    stream = engine.submit(request, AsyncOutputStream)
    return EventStream(engine, [stream], events(stream))


@cllm.post("/encode", EncodeResponse((6403, 1980, 253, 655), 4))
async def encode_text(body: EncodeBody, http: HttpRequest) -> EncodeResponse:
    """Convert text to token ids."""
    engine = await use_engine(http, body.model)
    tokens = await tokenize(engine, (body.text,), "text", add_special=True, parse_special=False)
    return EncodeResponse(tokens, len(tokens))


@cllm.post("/decode", DecodeResponse("Once upon"))
async def decode_tokens(body: DecodeBody, http: HttpRequest) -> DecodeResponse:
    """Convert token ids to text."""
    engine = await use_engine(http, body.model)
    task = Detokenize(check_tokens(engine, body.tokens, "tokens"))
    return DecodeResponse((await run_tokenizer(engine, task, Text)).text)


@cllm.get("/model/info")
async def model_info(http: HttpRequest) -> ModelInfoResponse:
    """Describe the model that is served, and its limits."""
    info, limits = loaded(await use_engine(http))
    return ModelInfoResponse(**msgspec.structs.asdict(info), limits=limits)
