"""Fields of every route that generates: scheduling, sampling, structured output."""

from __future__ import annotations

import json
import secrets
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from cllm.adapters import AdapterScale
from cllm.errors import InvalidRequest
from cllm.limits import MAX_BIASES, MAX_OPTIONS, MAX_RECONNECT_S
from cllm.server.body import Body, SourceText, StopText, Timeout, TokenId
from cllm.types import MAX_INT32, SEED_SPACE, ConstraintKind, ConstraintSpec, SamplingParams

MAX_PRIORITY = 100
BATCH_PRIORITY = -MAX_PRIORITY - 1  # of a batch's lines: below that of any client
INT64: dict[str, Any] = {"ge": -(2**63), "le": 2**63 - 1}

Grammar = Annotated[str, Meta(min_length=1, pattern="^[^\0]*$")]
Choices = Annotated[tuple[StopText, ...], Meta(min_length=1, max_length=MAX_OPTIONS)]
SamplerName = Annotated[str, Meta(max_length=64)]
EMPTY_IS_NONE = ("grammar", "guided_grammar", "stop")  # fields that clients send without a value
RepeatNames = ("repetition_penalty", "repeat_penalty")


_FORMS = (  # name of the field, by vLLM's older name, kind
    ("grammar", "guided_grammar", ConstraintKind.GRAMMAR),
    ("regex", "guided_regex", ConstraintKind.REGEX),
    ("choice", "guided_choice", ConstraintKind.CHOICE),
    ("json_schema", "guided_json", ConstraintKind.JSON_SCHEMA),
)


class StructuredOutputs(msgspec.Struct, Body, kw_only=True):
    """Structured output in vLLM's words."""

    json_schema: dict[str, Any] | SourceText | None = msgspec.field(default=None, name="json")
    json_object: bool = False
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None


class AdapterScaleBody(msgspec.Struct, Body, kw_only=True):
    """A LoRA adapter by its id, as llama-server has it."""

    id: Annotated[int, Meta(ge=0, le=MAX_INT32)]
    scale: AdapterScale = 0.0


AdapterScales = Annotated[tuple[AdapterScaleBody, ...], Meta(max_length=64)]


class AdapterScalesBody(msgspec.Struct, Body, kw_only=True):
    """`POST /lora-adapters`: a list."""

    scales: AdapterScales

    @classmethod
    def parse(cls, value: Any) -> AdapterScalesBody:
        if not isinstance(value, list):
            raise InvalidRequest('the body must be a list of adapters: [{"id": 0, "scale": 1.0}]')
        return super().parse({"scales": value})


class GenerationBody(SamplingParams, Body, frozen=True, kw_only=True):
    """The fields of `SamplingParams`, those that differ over HTTP, and others that all such routes take.

    Structured output is at most one of its fields, or the API's own field named by `form`.
    """

    form: ClassVar[str] = ""

    stream: bool = False
    timeout: Timeout = None
    priority: Annotated[int, Meta(**INT64)] = 0
    reconnect_s: Annotated[float, Meta(ge=0, le=MAX_RECONNECT_S)] | None = None
    cache_prompt: bool = True
    speculate: bool = True
    lora: AdapterScales | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 40
    dry_sequence_breakers: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=16, pattern="^[^\0]*$")], ...], Meta(max_length=8)
    ] = ("\n", ":", '"', "*")
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] = {}  # type: ignore[assignment]
    seed: Annotated[int, Meta(**INT64)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_BIASES)] = ()
    samplers: SamplerName | Annotated[tuple[SamplerName, ...], Meta(max_length=64)] | None = None
    grammar: Grammar | None = None
    regex: Grammar | None = None
    choice: Choices | None = None
    json_schema: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | SourceText | None = None
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        value = {name: given for name, given in value.items() if given != "" or name not in EMPTY_IS_NONE}
        if isinstance(stops := value.get("stop"), list):
            value["stop"] = [stop for stop in stops if stop != ""]
        if (given := value.get("logit_bias")) is not None:
            value["logit_bias"] = _read_biases(given)
        return value

    def set_limit(self, field: str) -> None:
        """Read a `TokenLimit` of at least 1: None for -1. Raises ValueError."""
        value = getattr(self, field)
        if value is not None and value < 1 and value != -1:
            raise ValueError(f"{field}: must be at least 1, or -1 for as many as fit")
        if value == -1:
            force_setattr(self, field, None)

    @property
    def biases(self) -> dict[str, float]:
        """The biases of texts. Only llama-server's routes take texts; elsewhere a text is no token id."""
        return {}

    def sampling(self, vocabulary_size: int) -> SamplingParams:
        """The engine's parameters; raises InvalidRequest for token ids outside the vocabulary."""
        tokens, texts = [], self.biases if self.logit_bias else {}
        for key, bias in self.logit_bias.items():
            text = key.removeprefix("\0")
            if text in texts and not is_token_id(key):
                continue
            if not is_token_id(text) or int(text) >= vocabulary_size:
                message = f"logit_bias: {text[:20]!r} is not a token id (0 to {vocabulary_size - 1})"
                raise InvalidRequest(message, field="logit_bias")
            tokens.append((int(text), bias))
        drawn = self.seed in (None, -1, SEED_SPACE)
        fields = {name: getattr(self, name) for name in SamplingParams.__struct_fields__}
        fields["top_k"] = max(0, self.top_k)
        fields["logit_bias"] = tuple(tokens)
        fields["seed"] = secrets.randbelow(SEED_SPACE) if drawn else (self.seed or 0) % SEED_SPACE
        if self.samplers is not None:
            given = {name.replace("-", "_") for name in self.samplers}  # a text gives letters
            for letter, names, switch in _SAMPLERS:
                fields |= {} if given & {letter, *names} else switch
        return SamplingParams(**fields)

    def form_schema(self) -> dict[str, Any] | None:
        """The schema that the API's own field asks for."""
        return None

    def constraint(self) -> ConstraintSpec | None:
        """The constraint on the answer; raises InvalidRequest when there are several."""
        nested = self.structured_outputs or StructuredOutputs()
        schema = ConstraintKind.JSON_SCHEMA
        given: list[tuple[str, ConstraintKind, Any]] = []
        for name, guided, kind in _FORMS:
            given += [(field, kind, getattr(self, field)) for field in (name, guided)]
            given.append(("structured_outputs", kind, getattr(nested, name)))
        if nested.json_object:
            given.append(("structured_outputs", schema, {"type": "object"}))
        given.append((self.form.partition(".")[0], schema, self.form_schema()))
        given = [each for each in given if each[2] is not None]
        if not given:
            return None
        if len(given) > 1:
            fields = " and ".join(dict.fromkeys(field for field, *_ in given))
            raise InvalidRequest(f"{fields}: give only one, they all say what the answer is", given[-1][0])
        field, kind, value = given[0]
        return ConstraintSpec(kind, value if isinstance(value, str) else json.dumps(value), origin=field)


def is_token_id(key: str) -> bool:
    """Test whether a key of `logit_bias` is a token id."""
    return key.isascii() and key.isdigit()


def _read_biases(value: Any) -> Any:
    """Biases by token, also from pairs; false is the lowest one. Raises ValueError."""
    if isinstance(value, dict | list) and len(value) > MAX_BIASES:
        raise ValueError(f"logit_bias: has {len(value)} entries, over the limit of {MAX_BIASES}")
    if isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        # A text of digits is a token id in an object, but a text in a pair.
        value = {f"\0{token}" if isinstance(token, str) else str(token): bias for token, bias in value}
    if isinstance(value, dict):
        return {token: -100 if bias is False else bias for token, bias in value.items()}
    return value


@cache
def get_sampling_bounds() -> dict[str, tuple[float, float]]:
    """The least and the largest value of each sampling parameter that has both."""
    bounds = {}
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items():
        meta: Meta = getattr(hint, "__metadata__", (Meta(),))[0]
        least = meta.ge if meta.gt is None else meta.gt + 1e-6
        if least is not None and meta.le is not None:
            bounds[name] = (float(least), float(meta.le))
    return bounds


_FILE = Path(__file__).with_name("samplers.toml").read_text(encoding="utf-8")
_SAMPLERS = tuple((each["letter"], each["names"], each["off"]) for each in tomllib.loads(_FILE)["samplers"])
SAMPLER_NAMES = tuple(names[0] for _, names, _ in _SAMPLERS)
