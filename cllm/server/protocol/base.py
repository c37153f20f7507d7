"""What all routes share: strict request bodies, typed responses, and how a route is documented."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import msgspec
from fastapi.routing import APIRoute
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)
from starlette.requests import Request
from starlette.responses import Response

from cllm.errors import InvalidRequest
from cllm.types import SEED_SPACE, ConstraintKind, ConstraintSpec, SamplingParams

log = logging.getLogger(__name__)
MAX_DEPTH = 64
LARGE_BODY = 1 << 18  # bytes; decoded in about a millisecond
MAX_BIASES = 1024
MAX_PRIORITY = 100
MIN_TIMEOUT_S = 0.001

JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain"
DOCUMENTED = "x-documented"  # what `documented` says, on its way to the OpenAPI page
_encoder = msgspec.json.Encoder()


class StructResponse(Response):
    """A struct (or a list of structs) as a JSON response."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        return _encoder.encode(content)


class LargeJsonRoute(APIRoute):
    """A route whose large bodies are decoded one at a time, with a turn for other requests in between."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def decode_first(request: Request) -> Response:
            if int(request.headers.get("content-length", LARGE_BODY)) < LARGE_BODY:
                return await handle(request)
            return await handle(_LargeJsonRequest(request.scope, request.receive))

        return decode_first


class _LargeJsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        async with self.app.state.large_bodies:
            await asyncio.sleep(0)
            try:
                return msgspec.json.decode(body)
            except (msgspec.DecodeError, RecursionError):
                return await super().json()  # takes more than JSON (NaN), and says what is wrong


def documented(
    response: Any,
    *,
    events: Sequence[bytes] = (),
    computes: bool = False,
    errors: Mapping[int, tuple[str, str, str]] | None = None,
) -> dict[str, Any]:
    """Keyword arguments for a route's decorator: what the OpenAPI page says of its responses.

    `response` is an example: a struct, a list of structs, or plain text; None where the route only streams.
    A struct's class stands for its `EXAMPLE`. `events` are encoded events of an example stream. `computes`:
    the request goes through the queue. `errors` are responses that other routes do not have: status → code,
    message, when it happens.
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
        content[JSON] = {"schema": schema, "example": msgspec.to_builtins(example)}
    if events:
        content[EVENTS] = {"schema": {"type": "string"}, "example": b"".join(events).decode()}
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


def _object(value: dict[str, Any]) -> dict[str, Any]:
    _text(json.dumps(value, ensure_ascii=False))
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_object)]
"""Any JSON object that can be written as text."""


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


def _clamp_priority(value: int) -> int:
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, value))


class SchedulingBody(Body):
    """How a request is scheduled, shared by every route that generates."""

    timeout: float | None = Field(
        None,
        ge=MIN_TIMEOUT_S,
        le=86400,
        description="Seconds from acceptance to the last token, then 504; the server's own limit applies too",
        examples=[30],
    )
    priority: Annotated[int, AfterValidator(_clamp_priority)] = Field(
        0,
        ge=-(2**63),
        le=2**63 - 1,
        description=f"Higher goes first, from -{MAX_PRIORITY} to {MAX_PRIORITY} (the nearest counts); "
        "waiting raises it by one a second",
    )
    cache_prompt: bool = Field(True, description="Use the prefix cache: match from it and store to it")
    speculate: bool = Field(True, description="Allow speculative decoding; the text is the same either way")


_SAMPLING = get_type_hints(SamplingParams, include_extras=True)


def sampling_field(name: str, **options: Any) -> Any:
    """The body's field of a sampling parameter, with the default, bounds and description it has there."""
    parameter = next(field for field in msgspec.structs.fields(SamplingParams) if field.name == name)
    (meta,) = _SAMPLING[name].__metadata__
    bounds = {key: getattr(meta, key) for key in ("gt", "ge", "lt", "le", "max_length", "description")}
    return Field(**{"default": parameter.default, **bounds, **options})


def _count_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} entries, over the limit of {MAX_BIASES}")
    return value


if TYPE_CHECKING:
    _SamplingFields = SchedulingBody
else:
    _SamplingFields = create_model(
        "_SamplingFields",
        __base__=SchedulingBody,
        **{name: (_SAMPLING[name].__origin__, sampling_field(name)) for name in _SAMPLING},
    )


class SamplingBody(_SamplingFields):
    """The fields of `SamplingParams`, shared by every route that generates; those that differ over HTTP."""

    top_k: int = sampling_field("top_k", ge=-1, description="Keep the k most likely tokens; 0 or -1: off")
    dry_sequence_breakers: list[Annotated[StopText, Field(max_length=16)]] = sampling_field(
        "dry_sequence_breakers", default=["\n", ":", '"', "*"]
    )
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_count_biases)
    ] = sampling_field("logit_bias", default={}, examples=[{"42": -100}])
    seed: int | None = sampling_field(
        "seed",
        default=None,
        ge=-(2**63),
        le=2**63 - 1,
        description="The same seed gives the same text; none or -1: random",
        examples=[7],
    )

    def sampling(self, vocabulary_size: int) -> SamplingParams:
        """The engine's parameters; raises InvalidRequest for token ids outside the vocabulary."""
        biases = []
        for key, bias in self.logit_bias.items():
            if not key.isascii() or not key.isdigit() or int(key) >= vocabulary_size:
                message = f"logit_bias: {key[:20]!r} is not a token id (0 to {vocabulary_size - 1})"
                raise InvalidRequest(message, field="logit_bias")
            biases.append((int(key), bias))
        drawn = self.seed is None or self.seed == -1
        differing = {
            "top_k": max(0, self.top_k),
            "dry_sequence_breakers": tuple(self.dry_sequence_breakers),
            "logit_bias": tuple(biases),
            "seed": secrets.randbelow(SEED_SPACE) if drawn else (self.seed or 0) % SEED_SPACE,
        }
        return SamplingParams(**{name: getattr(self, name) for name in _SAMPLING} | differing)


Grammar = Annotated[SourceText, Field(min_length=1)]
Choices = Annotated[list[StopText], Field(min_length=1, max_length=256)]


class StructuredOutputs(Body):
    """Structured output in vLLM's words."""

    json_schema: JsonObject | SourceText | None = Field(
        None, alias="json", description="A JSON schema, also as text", examples=[{"type": "object"}]
    )
    json_object: bool = Field(False, description="Any JSON object")
    regex: Grammar | None = Field(None, description="A regular expression", examples=["[0-9]+"])
    choice: Choices | None = Field(None, description="Texts to choose from", examples=[["red", "blue"]])
    grammar: Grammar | None = Field(None, description="A grammar", examples=['root ::= "yes" | "no"'])


class ConstrainedBody(SamplingBody):
    """Structured output: at most one of these fields, or of the API's own field named by `form`."""

    form: ClassVar[str] = ""

    grammar: Grammar | None = Field(
        None, description="The answer follows this GBNF or Lark grammar", examples=['root ::= "yes" | "no"']
    )
    regex: Grammar | None = Field(
        None,
        description="The whole answer matches this regular expression",
        examples=["[0-9]{4}-[0-9]{2}"],
    )
    choice: Choices | None = Field(
        None, description="The answer is one of these texts", examples=[["red", "blue"]]
    )
    json_schema: dict[str, Any] | None = Field(
        None,
        description="The answer is JSON that validates against this schema",
        examples=[{"type": "array", "items": {"type": "integer"}}],
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="The same as vLLM has it", examples=[{"choice": ["red", "blue"]}]
    )
    guided_json: JsonObject | SourceText | None = Field(
        None, description="`json_schema` by vLLM's older name, also as text", examples=[{"type": "object"}]
    )
    guided_regex: Grammar | None = Field(None, description="`regex` by that name", examples=["[0-9]+"])
    guided_choice: Choices | None = Field(
        None, description="`choice` by that name", examples=[["red", "blue"]]
    )
    guided_grammar: Grammar | None = Field(
        None, description="`grammar` by that name", examples=['root ::= "yes" | "no"']
    )

    def form_schema(self) -> dict[str, Any] | None:
        """The schema that the API's own field asks for."""
        return None

    def _constraints(self) -> list[tuple[str, ConstraintKind, Any]]:
        """What the answer must look like: field, kind and value of each that was given."""
        more = self.structured_outputs or StructuredOutputs.model_validate({})
        nested = "structured_outputs"
        given = (
            ("grammar", ConstraintKind.GRAMMAR, self.grammar),
            ("guided_grammar", ConstraintKind.GRAMMAR, self.guided_grammar),
            (nested, ConstraintKind.GRAMMAR, more.grammar),
            ("regex", ConstraintKind.REGEX, self.regex),
            ("guided_regex", ConstraintKind.REGEX, self.guided_regex),
            (nested, ConstraintKind.REGEX, more.regex),
            ("choice", ConstraintKind.CHOICE, self.choice),
            ("guided_choice", ConstraintKind.CHOICE, self.guided_choice),
            (nested, ConstraintKind.CHOICE, more.choice),
            ("json_schema", ConstraintKind.JSON_SCHEMA, self.json_schema),
            ("guided_json", ConstraintKind.JSON_SCHEMA, self.guided_json),
            (nested, ConstraintKind.JSON_SCHEMA, more.json_schema),
            (nested, ConstraintKind.JSON_SCHEMA, {"type": "object"} if more.json_object else None),
            (self.form.partition(".")[0], ConstraintKind.JSON_SCHEMA, self.form_schema()),
        )
        return [each for each in given if each[2] is not None]

    def constraint(self) -> ConstraintSpec | None:
        """The constraint on the answer; raises InvalidRequest when there are several."""
        given = self._constraints()
        if not given:
            return None
        if len(given) > 1:
            fields = " and ".join(dict.fromkeys(field for field, *_ in given))
            raise InvalidRequest(f"{fields}: give only one, they all say what the answer is", given[-1][0])
        _, kind, value = given[0]
        return ConstraintSpec(kind, value if isinstance(value, str) else json.dumps(value))

    @property
    def form_field(self) -> str:
        """The field that holds the schema, for errors."""
        return next((field for field, *_ in self._constraints()), "json_schema")


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
