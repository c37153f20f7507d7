"""What all routes share: strict request bodies, typed responses, and how a route is documented."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, get_args, get_origin

import msgspec
from fastapi.routing import APIRoute
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from starlette.requests import Request
from starlette.responses import Response

from cllm import __version__
from cllm.frontend.output_stream import OutputStream
from cllm.types import Usage

log = logging.getLogger(__name__)
MAX_DEPTH = 64
LARGE_BODY = 1 << 18  # bytes; decoded in about a millisecond

JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain"
NDJSON = "application/x-ndjson"
DOCUMENTED = "x-documented"  # what `documented` says, on its way to the OpenAPI page
_encoder = msgspec.json.Encoder()


class StructResponse(Response):
    """A struct (or a list of structs) as a JSON response."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        return _encoder.encode(content)


class LargeJsonRoute(APIRoute):
    """A route whose large bodies are decoded one at a time, with a turn for other requests in between.

    Fields that a body lacks are those of the app's `defaults`.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def decode_first(request: Request) -> Response:
            if int(request.headers.get("content-length", LARGE_BODY)) >= LARGE_BODY:
                request = _LargeJsonRequest(request.scope, request.receive)
            elif request.app.state.add_defaults:
                request = _JsonRequest(request.scope, request.receive)
            return await handle(request)

        return decode_first


class _JsonRequest(Request):
    async def json(self) -> Any:
        return self.app.state.add_defaults(await super().json())


class _LargeJsonRequest(_JsonRequest):
    async def json(self) -> Any:
        body = await self.body()
        async with self.app.state.large_bodies:
            await asyncio.sleep(0)
            try:
                return self.app.state.add_defaults(msgspec.json.decode(body))
            except (msgspec.DecodeError, RecursionError):
                return await super().json()  # takes more than JSON (NaN), and says what is wrong


def documented(
    response: Any,
    *,
    events: Sequence[bytes] = (),
    lines: Iterable[bytes] = (),
    computes: bool = False,
    errors: Mapping[int, tuple[str, str, str]] | None = None,
    several: bool = False,
) -> dict[str, Any]:
    """Keyword arguments for a route's decorator: what the OpenAPI page says of its responses.

    `response` is an example: a struct, a list of structs, or plain text; None where the route only streams.
    A struct's class stands for its `EXAMPLE`. `events` are encoded events of an example stream, `lines` those
    of one that is lines of JSON. `computes`:
    the request goes through the queue. `errors` are responses that other routes do not have: status → code,
    message, when it happens. `several`: as llama-server's, it answers
    several prompts or choices with a list, and with the fields alone that `response_fields` names.
    """
    content: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    example = getattr(response, "EXAMPLE", response)
    if isinstance(example, str):
        content[PLAIN] = {"schema": {"type": "string"}, "example": example}
    elif example is not None:
        kind: Any = list[type(example[0])] if isinstance(example, list) else type(example)  # type: ignore[misc]
        (schema,), schemas = msgspec.json.schema_components(
            (kind,), ref_template="#/components/schemas/{name}"
        )
        if several:
            one = {"anyOf": [schema, {"type": "object", "description": "What `response_fields` names"}]}
            schema = {"anyOf": [*one["anyOf"], {"type": "array", "items": one}]}
        content[JSON] = {"schema": schema, "example": msgspec.to_builtins(example)}
    if events:
        content[EVENTS] = {"example": b"".join(events).decode()}
    if example_lines := b"".join(lines):
        content[NDJSON] = {"example": example_lines.decode()}
    # As text: FastAPI drops every null on the way, in examples too.
    about = {"content": content, "schemas": schemas, "computes": computes, "errors": errors or {}}
    return {"response_model": None, "openapi_extra": {DOCUMENTED: _encoder.encode(about).decode()}}


def _text(value: str) -> str:
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode: it contains a lone surrogate") from None
    return value


def _source(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain NUL")
    return _text(value)


Text = Annotated[str, AfterValidator(_text)]
SourceText = Annotated[str, AfterValidator(_source)]
StopText = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_source)]


def _writable(value: Any) -> Any:
    _text(json.dumps(value, ensure_ascii=False))
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_writable)]
"""Any JSON object that can be written as text."""
JsonValue = Annotated[
    Any,
    AfterValidator(_writable),
    WithJsonSchema({"type": ["object", "array", "string", "number", "boolean", "null"]}),
]
"""Any JSON value that can be written as text."""


ModelName = Annotated[
    Annotated[str, Field(max_length=256)] | None,
    Field(
        description="Name or alias of a served model; of a server with one model: any plain name",
        examples=["SmolLM2-135M-Instruct"],
    ),
]
TokenId = Annotated[int, Field(ge=0)]
# Checking stops at the first wrong id: a million errors would cost seconds and gigabytes.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


@cache
def _integer_keys(body: type[BaseModel]) -> frozenset[str]:
    """The keys of a body whose values are integers."""

    def is_integer(kind: Any) -> bool:
        return kind is int or (get_origin(kind) is Annotated and get_args(kind)[0] is int)

    keys: set[str] = set()
    for name, field in body.model_fields.items():
        if any(map(is_integer, (field.annotation, *get_args(field.annotation)))):
            alias = field.validation_alias
            keys |= {name, *map(str, alias.choices)} if isinstance(alias, AliasChoices) else {name}
    return frozenset(keys)


class Body(BaseModel):
    """A strict request body: `true` is no integer, "1" is no number, NaN and infinity are nothing.

    Null stands for a field that was left out, and 64.0 for 64: some languages have no integers.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    meant_nulls: ClassVar[frozenset[str]] = frozenset()  # fields where null has a meaning

    @model_validator(mode="before")
    @classmethod
    def _check_depth(cls, value: Any) -> Any:
        level, depth = [value] if isinstance(value, dict | list) else [], 0
        while level := [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list)
        ]:
            depth += 1
            if depth >= MAX_DEPTH:
                raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if not isinstance(value, dict):
            return value
        integers = _integer_keys(cls)
        return {
            key: int(item) if type(item) is float and key in integers and item.is_integer() else item
            for key, item in value.items()
            if item is not None or key in cls.meant_nulls
        }


def _as_limit(value: int) -> int | None:
    if value < 1 and value != -1:
        raise ValueError("must be at least 1, or -1 for as many as fit")
    return None if value == -1 else value


TokenLimit = Annotated[int, Field(ge=-1), AfterValidator(_as_limit)]
"""A number of tokens to generate; -1, which becomes None: as many as fit."""


def skip_tools(*known: str, default: str) -> BeforeValidator:
    """Before a list of tools: leaves out those of a type that cannot be called here.

    A missing type is the `default`.
    """

    def skip(value: Any) -> Any:
        taken = []
        for tool in value if isinstance(value, list) else ():
            kind = (tool.get("type") if isinstance(tool, dict) else None) or default
            if kind in known:
                taken.append(tool)
            else:
                log.debug("skipped a tool of type %.64r: it cannot be called here", kind)
        return taken if isinstance(value, list) else value

    return BeforeValidator(skip)


def kinds(*known: str, default: str | None = None, why: Mapping[str, str] | None = None) -> BeforeValidator:
    """Before a union discriminated by `type`: refuses a type that is not `known`.

    A missing type is the `default`. `why` gives reasons by type; that of `""` stands for all not listed.
    """
    reasons = why or {}

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        if kind is None:
            kind = default
        if isinstance(kind, str) and kind in known:
            return {**value, "type": kind}
        if kind is None:
            raise ValueError(f"'type' is missing; it must be {', '.join(known)}")
        reason = reasons.get(str(kind), reasons.get("", f"it must be {', '.join(known)}"))
        raise ValueError(f"type {str(kind)[:64]!r} is not supported: {reason}")

    return BeforeValidator(check)


ToolDescription = Annotated[
    Text | None,
    Field(
        description="What the tool does and when to call it, for the model",
        examples=["The weather in a city, now"],
    ),
]


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """The times of a request under llama-server's names. The first token comes with the prompt."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | msgspec.UnsetType = msgspec.UNSET
    draft_n_accepted: int | msgspec.UnsetType = msgspec.UNSET
    cached_from: str = ""  # the tier of the KV cache: device, ram or disk


def make_timings(
    *,
    prompt_tokens: int,
    generated: int,
    prompt_s: float,
    generated_s: float,
    cached: int = 0,
    cached_from: str = "",
    drafted: int = 0,
    accepted: int = 0,
) -> Timings:
    computed, steps = prompt_tokens - cached, max(0, generated - 1)
    return Timings(
        cache_n=cached,
        prompt_n=computed,
        prompt_ms=1000 * prompt_s,
        prompt_per_token_ms=1000 * prompt_s / computed if computed else 0.0,
        prompt_per_second=computed / prompt_s if prompt_s > 0 else 0.0,
        predicted_n=generated,
        predicted_ms=1000 * generated_s,
        predicted_per_token_ms=1000 * generated_s / steps if steps else 0.0,
        predicted_per_second=steps / generated_s if generated_s > 0 else 0.0,
        draft_n=drafted or msgspec.UNSET,
        draft_n_accepted=accepted if drafted else msgspec.UNSET,
        cached_from=cached_from,
    )


def get_timings(stream: OutputStream, prompt_tokens: int, usage: Usage | None = None) -> Timings:
    """The times of a stream so far; of one that has ended, with its `usage`."""
    now = stream.ended or time.perf_counter()
    first = stream.first_token or now
    usage = usage or Usage(prompt_tokens=prompt_tokens, completion_tokens=stream.generated)
    return make_timings(
        prompt_tokens=prompt_tokens,
        generated=usage.completion_tokens,
        prompt_s=first - stream.started,
        generated_s=now - first,
        cached=usage.cached_tokens,
        cached_from=usage.cached_from,
        drafted=usage.drafted_tokens,
        accepted=usage.accepted_tokens,
    )


class PromptProgress(msgspec.Struct, frozen=True):
    """How much of a prompt is computed."""

    total: int
    cache: int
    processed: int
    time_ms: float


class TimedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What a response of OpenAI's routes has besides, as llama-server's has."""

    system_fingerprint: str = f"cllm-{__version__}"
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    prompt_progress: PromptProgress | msgspec.UnsetType = msgspec.UNSET
    verbose: dict[str, Any] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="__verbose")
