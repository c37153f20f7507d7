"""Fields of every route that generates: scheduling, sampling, structured output."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, create_model

from cllm.errors import InvalidRequest
from cllm.server.protocol.base import Body, JsonObject, SourceText, StopText, TokenIds
from cllm.types import SEED_SPACE, ConstraintKind, ConstraintSpec, SamplingParams

MAX_BIASES = 1024
MAX_PRIORITY = 100
MIN_TIMEOUT_S = 0.001


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


def get_sampling_bounds() -> dict[str, tuple[float, float]]:
    """The least and the largest value of each sampling parameter that has both."""
    metas = {name: hint.__metadata__[0] for name, hint in _SAMPLING.items()}
    least = {name: meta.ge if meta.gt is None else meta.gt + 1e-6 for name, meta in metas.items()}
    return {name: (least[name], meta.le) for name, meta in metas.items() if meta.le is not None}


def _read_biases(value: Any) -> Any:
    """Biases by token, also from pairs; false is the lowest one."""
    if isinstance(value, dict | list) and len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} entries, over the limit of {MAX_BIASES}")
    if isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        # A text of digits is a token id in an object, but a text in a pair.
        value = {f"\0{token}" if isinstance(token, str) else str(token): bias for token, bias in value}
    if isinstance(value, dict):
        return {token: -100 if bias is False else bias for token, bias in value.items()}
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

    bias_by_text: ClassVar[bool] = False  # `logit_bias` takes texts as well as token ids

    top_k: int = sampling_field("top_k", ge=-1, description="Keep the k most likely tokens; 0 or -1: off")
    dry_sequence_breakers: list[Annotated[StopText, Field(max_length=16)]] = sampling_field(
        "dry_sequence_breakers", default=["\n", ":", '"', "*"]
    )
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_read_biases)
    ] = sampling_field("logit_bias", default={}, examples=[{"42": -100}])
    seed: int | None = sampling_field(
        "seed",
        default=None,
        ge=-(2**63),
        le=2**63 - 1,
        description="The same seed gives the same text; none, -1 or 2^32 - 1: random",
        examples=[7],
    )

    min_tokens: int = Field(0, ge=0, description="Generate at least so many before the answer may end")
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_BIASES)] = Field(
        default=[], description="Tokens that end the answer, as end tokens do", examples=[[2]]
    )
    samplers: Annotated[str, Field(max_length=64)] | list[Annotated[str, Field(max_length=64)]] | None = (
        Field(
            None,
            max_length=64,
            description="Only these samplers, by llama.cpp's names or letters, in cllm's own order",
            examples=[["top_k", "temperature"]],
        )
    )

    @property
    def bias_texts(self) -> list[str]:
        """The texts in `logit_bias`."""
        return [key for key in self.logit_bias if not key.isdigit()] if self.bias_by_text else []

    @staticmethod
    def bias_text(key: str) -> str:
        """The text of one of the `bias_texts`."""
        return key.removeprefix("\0")

    def sampling(
        self, vocabulary_size: int, tokens: Mapping[str, Sequence[int]] | None = None
    ) -> SamplingParams:
        """The engine's parameters; raises InvalidRequest for token ids outside the vocabulary.

        `tokens` are those of the `bias_texts`.
        """
        biases = []
        for key, bias in self.logit_bias.items():
            if tokens and key in tokens:
                biases += [(token, bias) for token in tokens[key]]
                continue
            key = self.bias_text(key)
            if not key.isascii() or not key.isdigit() or int(key) >= vocabulary_size:
                message = f"logit_bias: {key[:20]!r} is not a token id (0 to {vocabulary_size - 1})"
                raise InvalidRequest(message, field="logit_bias")
            biases.append((int(key), bias))
        drawn = self.seed in (None, -1, SEED_SPACE)
        differing = {
            "top_k": max(0, self.top_k),
            "dry_sequence_breakers": tuple(self.dry_sequence_breakers),
            "logit_bias": tuple(biases),
            "seed": secrets.randbelow(SEED_SPACE) if drawn else (self.seed or 0) % SEED_SPACE,
        }
        off = {} if self.samplers is None else get_disabled(self.samplers)
        return SamplingParams(**{name: getattr(self, name) for name in _SAMPLING} | differing | off)


# llama.cpp's samplers in the order in which they are always applied: letter, names, what switches it off.
_SAMPLERS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("e", ("penalties",), {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}),
    ("d", ("dry",), {"dry_multiplier": 0.0}),
    ("s", ("top_n_sigma",), {"top_n_sigma": -1.0}),
    ("k", ("top_k",), {"top_k": 0}),
    ("y", ("typ_p", "typical_p", "typical", "typ"), {"typical_p": 1.0}),
    ("p", ("top_p", "nucleus"), {"top_p": 1.0}),
    ("m", ("min_p",), {"min_p": 0.0}),
    ("x", ("xtc",), {"xtc_probability": 0.0}),
    ("t", ("temperature", "temp"), {"temperature": 1.0, "dynatemp_range": 0.0}),
)
SAMPLER_NAMES = tuple(names[0] for _, names, _ in _SAMPLERS)


def get_disabled(samplers: str | Sequence[str]) -> dict[str, Any]:
    """The parameters that switch off every sampler but these."""
    given = {name.replace("-", "_") for name in samplers}  # a text gives letters
    off = (switch for letter, names, switch in _SAMPLERS if not given & {letter, *names})
    return {name: value for switch in off for name, value in switch.items()}


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
