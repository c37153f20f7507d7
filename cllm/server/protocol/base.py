"""What all routes share: strict request bodies, typed responses, and how a route is documented."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, get_args

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.responses import Response

from cllm.errors import InvalidRequest
from cllm.types import SEED_SPACE, ConstraintKind, ConstraintSpec, SamplingParams

MAX_DEPTH = 64
MAX_BIASES = 1024

JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain"
_encoder = msgspec.json.Encoder()


class StructResponse(Response):
    """A struct (or a list of structs) as a JSON response."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        return _encoder.encode(content)


def documented(
    response: Any,
    *,
    example: str | None = None,
    events: Sequence[bytes] = (),
    computes: bool = False,
    errors: Mapping[int, tuple[str, str, str]] | None = None,
) -> dict[str, Any]:
    """Keyword arguments for a route's decorator: what the OpenAPI page says of its responses.

    `response` is a struct with an `EXAMPLE` (an instance of itself), a list of such structs, `str` for plain
    text (give its `example`), or None where the route only streams. `events` are encoded events of an example
    stream. `computes`: the request goes through the queue. `errors` are responses that other routes do not
    have: status → code, message, when it happens.
    """
    content: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    if response is str:
        content[PLAIN] = {"schema": {"type": "string"}, "example": example}
    elif response is not None:
        (schema,), schemas = msgspec.json.schema_components(
            (response,), ref_template="#/components/schemas/{name}"
        )
        items = get_args(response)
        shown = [items[0].EXAMPLE] if items else response.EXAMPLE
        content[JSON] = {"schema": schema, "example": msgspec.to_builtins(shown)}
    if events:
        content[EVENTS] = {"schema": {"type": "string"}, "example": b"".join(events).decode()}
    extra = {
        "x-content": content,
        "x-schemas": schemas,
        "x-computes": computes,
        "x-errors": {str(status): told for status, told in (errors or {}).items()},
    }
    return {"response_model": None, "openapi_extra": extra}


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode: it holds a lone surrogate") from None
    return value


def _source(value: str) -> str:
    if "\0" in value:
        raise ValueError("may not hold NUL")
    return _text(value)


Text = Annotated[str, AfterValidator(_text)]
SourceText = Annotated[str, AfterValidator(_source)]
StopText = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_source)]


def _object(value: dict[str, Any]) -> dict[str, Any]:
    _text(json.dumps(value, ensure_ascii=False))
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_object)]
"""Anything, as long as it can be written as text."""


TokenId = Annotated[int, Field(ge=0)]
# The first wrong one ends it: a million of them would be a million errors, seconds and gigabytes.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} entries, over the limit of {MAX_BIASES}")
    return value


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


class Body(BaseModel):
    """Strict: `true` is no integer, "1" is no number, NaN and infinity are nothing."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _shallow(cls, value: Any) -> Any:
        level, depth = [value], 0
        while level := [item for outer in level for item in _inside(outer) if isinstance(item, dict | list)]:
            depth += 1
            if depth >= MAX_DEPTH:
                raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
        return value


class SchedulingBody(Body):
    """When a request is computed, shared by every route that generates."""

    timeout: float | None = Field(
        None,
        gt=0,
        le=86400,
        description="Seconds from acceptance to the last token, at most the server's own limit; then 504",
        examples=[30],
    )
    priority: int = Field(0, ge=-100, le=100, description="Higher goes first; who waits long goes too")
    cache_prompt: bool = Field(
        True, description="May reuse, and leave behind, computed beginnings of prompts"
    )
    speculate: bool = Field(True, description="May guess tokens ahead; the text is the same either way")


class SamplingBody(SchedulingBody):
    """The sampling fields, shared by every route that generates. Defaults: see `SamplingParams`."""

    temperature: float = Field(0.8, ge=0, le=10, description="0 is greedy")
    top_k: int = Field(40, ge=-1, le=2**31 - 1, description="Keep the k likeliest; 0 or -1: off")
    top_p: float = Field(0.95, ge=0, le=1, description="Keep the likeliest up to this mass; 1: off")
    min_p: float = Field(0.05, ge=0, le=1, description="Drop what is less likely than this × the likeliest")
    typical_p: float = Field(1.0, gt=0, le=1, description="Locally typical sampling; 1: off")
    top_n_sigma: float = Field(-1.0, ge=-1, le=100, description="Keep logits within n sigma of the best")
    repetition_penalty: float = Field(1.0, gt=0, le=10, description="Above 1 discourages repeats; 1: off")
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="Taken off a token's logit for each time it occurred; 0: off"
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="Taken off the logit of every token that occurred; 0: off"
    )
    penalty_last_n: int = Field(64, ge=-1, le=2**31 - 1, description="Tokens penalties look back; -1: all")
    dry_multiplier: float = Field(0.0, ge=0, le=100, description="DRY repetition penalty; 0: off")
    dry_base: float = Field(1.75, ge=1, le=100, description="DRY: grows the penalty by this with each token")
    dry_allowed_length: int = Field(
        2, ge=0, le=2**31 - 1, description="DRY: repeats up to this many tokens cost nothing"
    )
    dry_penalty_last_n: int = Field(
        -1, ge=-1, le=2**31 - 1, description="DRY: how many tokens it looks back on; -1: all, 0: none"
    )
    dry_sequence_breakers: list[Annotated[StopText, Field(max_length=16)]] = Field(
        default=["\n", ":", '"', "*"], max_length=8, description="DRY: texts that no repeat reaches across"
    )
    xtc_probability: float = Field(0.0, ge=0, le=1, description="Exclude top choices sampling; 0: off")
    xtc_threshold: float = Field(
        0.1, ge=0, le=1, description="XTC: of the tokens above this, all but the least likely are excluded"
    )
    mirostat: int = Field(0, ge=0, le=2, description="0: off, 1 or 2: that version")
    mirostat_tau: float = Field(5.0, ge=0, le=100, description="Mirostat: the surprise it aims at")
    mirostat_eta: float = Field(0.1, ge=0, le=1, description="Mirostat: how fast it corrects itself")
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few)] = Field(
        default={},
        max_length=MAX_BIASES,
        description="Token id (as text) → added to its logit",
        examples=[{"42": -100}],
    )
    seed: int | None = Field(
        None, ge=-1, le=2**63 - 1, description="Same seed, same text; none or -1: random", examples=[7]
    )
    ignore_eos: bool = Field(False, description="Go on to max_tokens: never choose an end token")

    def sampling(self, vocabulary_size: int) -> SamplingParams:
        """The engine's own parameters; raises InvalidRequest for token ids outside the vocabulary."""
        drawn = self.seed is None or self.seed == -1
        values: dict[str, Any] = {
            name: getattr(self, name)
            for name in SamplingParams.__struct_fields__
            if name not in ("seed", "logit_bias", "dry_sequence_breakers", "top_k")
        }
        return SamplingParams(
            **values,
            top_k=max(0, self.top_k),
            dry_sequence_breakers=tuple(self.dry_sequence_breakers),
            logit_bias=tuple((_token(key, vocabulary_size), bias) for key, bias in self.logit_bias.items()),
            seed=secrets.randbelow(SEED_SPACE) if drawn else (self.seed or 0) % SEED_SPACE,
        )


def _token(key: str, vocabulary_size: int) -> int:
    if not key.isascii() or not key.isdigit() or int(key) >= vocabulary_size:
        message = f"logit_bias: {key[:20]!r} is not a token id (0 to {vocabulary_size - 1})"
        raise InvalidRequest(message, field="logit_bias")
    return int(key)


class ConstrainedBody(SamplingBody):
    """Fields that say what an answer must look like; at most one of them, and of the API's own.

    `form` is what the API calls its own: a field, or a part of one.
    """

    form: ClassVar[str] = ""

    grammar: SourceText | None = Field(
        None,
        min_length=1,
        description="GBNF or Lark grammar of the answer",
        examples=['root ::= "yes" | "no"'],
    )
    regex: SourceText | None = Field(
        None,
        min_length=1,
        description="Regular expression the whole answer matches",
        examples=["[0-9]{4}-[0-9]{2}"],
    )
    choice: list[StopText] | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="The answer is one of these",
        examples=[["red", "blue"]],
    )
    json_schema: dict[str, Any] | None = Field(
        None,
        description="JSON schema of the answer",
        examples=[{"type": "array", "items": {"type": "integer"}}],
    )

    def form_schema(self) -> dict[str, Any] | None:
        """The schema that the API's own field asks for."""
        return None

    def constraint(self) -> ConstraintSpec | None:
        """The one that is given; raises InvalidRequest when there are several."""
        given = (
            (ConstraintKind.GRAMMAR, self.grammar),
            (ConstraintKind.REGEX, self.regex),
            (ConstraintKind.CHOICE, _json(self.choice)),
            (ConstraintKind.JSON_SCHEMA, _json(self.json_schema)),
            (ConstraintKind.JSON_SCHEMA, _json(self.form_schema())),
        )
        specs = [ConstraintSpec(kind, source) for kind, source in given if source is not None]
        if len(specs) > 1:
            own = f", {self.form}" if self.form else ""
            message = f"give only one of grammar, regex, choice, json_schema{own}"
            raise InvalidRequest(message, self.form_field)
        return specs[0] if specs else None

    @property
    def form_field(self) -> str:
        """The field that a schema came in, or would."""
        given = self.json_schema is not None or not self.form
        return "json_schema" if given else self.form.partition(".")[0]


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


class NullableBody(Body):
    """Nulls at the top are dropped before anything is checked, but for those that mean something."""

    meant_nulls: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None or key in cls.meant_nulls}


UNSUPPORTED_MEDIA = "this model accepts text only"


def kinds(*known: str, default: str | None = None, why: Mapping[str, str] | None = None) -> BeforeValidator:
    """Before a union told apart by `type`: one that is not `known` is refused by name.

    Where none is given it is the `default`. `why` gives reasons for types that others serve; the reason of
    `""` stands for all that are not listed.
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
            raise ValueError(f"'type' is missing in it; it may be {', '.join(known)}")
        reason = reasons.get(str(kind), reasons.get("", f"it may be {', '.join(known)}"))
        raise ValueError(f"type {str(kind)[:64]!r} is not served: {reason}")

    return BeforeValidator(check)


ToolDescription = Annotated[
    Text | None,
    Field(
        max_length=1 << 14,
        description="What it does and when, for the model",
        examples=["The weather in a city, now"],
    ),
]
