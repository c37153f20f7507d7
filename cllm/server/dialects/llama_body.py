"""Requests and responses of llama-server's own routes, under its names."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from cllm.chat.conversation import Conversation, Pictures
from cllm.errors import InvalidRequest
from cllm.limits import MAX_CHOICES, MAX_PROMPTS
from cllm.server.body import Body, ModelName, TokenId
from cllm.server.dialects.openai.bodies import NO_MEDIA, ChatBody, Stops
from cllm.server.dialects.openai.completions import decode_piece
from cllm.server.examples import make_example
from cllm.server.generation import SAMPLER_NAMES, GenerationBody, get_sampling_bounds, is_token_id
from cllm.server.timings import PromptProgress, Timings
from cllm.text.prompt import Gap, Snippet
from cllm.types import SEED_SPACE, Request, SamplingParams, TokenLogprob

MAX_PROBS = 20
MEDIA_MARKER = "<__media__>"
_TABLES = tomllib.loads(Path(__file__).with_name("llama_server.toml").read_text(encoding="utf-8"))


class PromptObject(msgspec.Struct, Body, kw_only=True):
    """A prompt in an object, as it comes beside pictures; without them it is its text."""

    prompt_string: str
    multimodal_data: list[Any] | None = None

    def take_pictures(self, pictures: Pictures) -> None:
        """Move the pictures to those of the request, and write their markers. Raises InvalidRequest."""
        texts, data = self.prompt_string.split(MEDIA_MARKER), self.multimodal_data or []
        if data and len(texts) != len(data) + 1:
            count = f"{len(texts) - 1} times {MEDIA_MARKER} for {len(data)} pictures"
            raise InvalidRequest(f"prompt: it has {count}; write one for each", "prompt")
        if data:
            markers = [pictures.add("multimodal_data", each, "prompt") for each in data]
            self.prompt_string = "".join(map("".join, zip(texts, [*markers, ""], strict=True)))

    @property
    def text(self) -> str:
        return self.prompt_string


Pieces = Annotated[list[str | TokenId], Meta(min_length=1)]
Prompts = str | PromptObject | Annotated[list[str | TokenId | PromptObject | Pieces], Meta(min_length=1)]


def has_tokens(value: Any) -> bool:
    """Test whether a list has token ids, which makes it one input."""
    return isinstance(value, list) and any(isinstance(part, int) for part in value)


def split_inputs(value: Any) -> list[list[str | int]]:
    """Each prompt or input as texts and token ids: a list with a number in it is one input."""
    if has_tokens(value):
        return [value]
    if isinstance(value, list):
        return [pieces for part in value for pieces in split_inputs(part)]
    return [[value if isinstance(value, str) else value.text]]


class LlamaCompletionBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /completion`. -1 tokens is no limit, and the prompt may contain control tokens.

    Numbers out of bounds are the nearest within, as llama-server takes them.
    """

    ALIASES = {
        "n_predict": ("n_predict", "max_completion_tokens", "max_tokens"),
        "n_cmpl": ("n_cmpl", "n"),
        "n_probs": ("n_probs", "logprobs"),
        "repetition_penalty": ("repeat_penalty", "repetition_penalty"),
        "penalty_last_n": ("repeat_last_n", "penalty_last_n"),
    }

    model: ModelName = None
    prompt: Prompts
    n_predict: Annotated[int, Meta(ge=-1)] = -1
    n_cmpl: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    stop: Stops | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_PROBS)] = 0
    post_sampling_probs: bool = False
    return_tokens: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    response_fields: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=64)] = ()
    n_indent: Annotated[int, Meta(ge=0)] = 0
    t_max_predict_ms: Annotated[int, Meta(ge=-1)] = 0

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        value = dict(super().prepare(value))
        for name, (low, high) in get_sampling_bounds().items():
            for spelling in (name, name.replace("repetition_penalty", "repeat_penalty")):
                number = value.get(spelling)
                if type(number) is int or (type(number) is float and math.isfinite(number)):
                    value[spelling] = min(max(number, low), high)
        if value.get("grammar") and value.get("json_schema") is not None:
            del value["json_schema"]
        return value

    def __post_init__(self) -> None:
        if (count := len(self.prompts) * self.n_cmpl) > MAX_PROMPTS:
            raise ValueError(f"prompt: prompts times n_cmpl is {count}, over the limit of {MAX_PROMPTS}")
        if any(not isinstance(piece, str | int) for pieces in self.prompts for piece in pieces):
            raise ValueError("prompt: a list with a token id in it is one prompt of texts and token ids")

    @property
    def prompts(self) -> list[list[str | int]]:
        return split_inputs(self.prompt)

    def take_pictures(self, *, sees: bool) -> Pictures:
        """The pictures of all prompts, which have markers in their places then. Raises InvalidRequest."""
        pictures = Pictures()
        for each in self.prompt if isinstance(self.prompt, list) else [self.prompt]:
            if isinstance(each, PromptObject):
                if each.multimodal_data and not sees:
                    raise InvalidRequest(f"prompt: {NO_MEDIA}", "prompt")
                each.take_pictures(pictures)
        return pictures

    @property
    def biases(self) -> dict[str, float]:
        return {key.removeprefix("\0"): bias for key, bias in self.logit_bias.items() if not is_token_id(key)}


class SnippetBody(msgspec.Struct, Body, kw_only=True):
    """A snippet of another file of the project."""

    text: str
    filename: Annotated[str, Meta(max_length=4096)] = "tmp"


class InfillBody(LlamaCompletionBody, frozen=True, kw_only=True):
    """`POST /infill`: the fields of `/completion`, and the text around the gap."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[tuple[SnippetBody, ...], Meta(max_length=1024)] = ()
    prompt: str = ""

    def gap(self, max_tokens: int) -> Gap:
        """The gap, in a text that is cut to `max_tokens`."""
        snippets = tuple(Snippet(extra.text, extra.filename) for extra in self.input_extra)
        around = {"prefix": self.input_prefix, "suffix": self.input_suffix, "prompt": self.prompt}
        return Gap(**around, snippets=snippets, cut_to=max_tokens)


class LlamaTokenizeBody(msgspec.Struct, Body, kw_only=True):
    """`POST /tokenize`."""

    ALIASES = {"content": ("content", "prompt"), "add_special": ("add_special", "add_special_tokens")}

    model: ModelName = None
    content: str | list[str | TokenId] = ""
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class LlamaDetokenizeBody(msgspec.Struct, Body, kw_only=True):
    """`POST /detokenize`."""

    model: ModelName = None
    tokens: tuple[TokenId, ...] = ()


class ApplyTemplateBody(ChatBody, frozen=True, kw_only=True):
    """`POST /apply-template`."""

    add_generation_prompt: bool = True

    def conversation(self, *, sees: bool = False) -> Conversation:
        found = super().conversation(sees=sees)
        options = {**found.options, "add_generation_prompt": self.add_generation_prompt}
        return msgspec.structs.replace(found, options=options)


class SlotBody(msgspec.Struct, Body, kw_only=True):
    """`POST /slots/{id}`."""

    OPTIONAL = True

    model: ModelName = None
    filename: str = ""


# Responses ---------------------------------------------------------------------------------------------


class LlamaLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token, and how likely it was: before sampling as `logprob`, after it as `prob`."""

    id: int
    token: str
    bytes: list[int]
    logprob: float | UnsetType = UNSET
    prob: float | UnsetType = UNSET


class LlamaTokenLogprobs(LlamaLogprob, frozen=True, kw_only=True):
    """The same, and the likeliest tokens in its place."""

    top_logprobs: list[LlamaLogprob] | UnsetType = UNSET
    top_probs: list[LlamaLogprob] | UnsetType = UNSET


class LlamaEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer, as a stream sends it."""

    index: int = 0
    content: str = ""
    tokens: tuple[int, ...] = ()
    stop: bool = False
    id_slot: int = -1  # any: cllm chooses it by what it holds
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    completion_probabilities: list[LlamaTokenLogprobs] | UnsetType = UNSET


class LlamaCompletion(LlamaEvent, frozen=True, kw_only=True):
    """The response of `/completion` and `/infill`, and the last event of their streams."""

    stop: bool = True
    model: str
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    cached_from: str  # the tier of the KV cache: device, ram or disk


def make_settings(request: Request, *, brief: bool = False) -> dict[str, Any]:
    """The settings of a request under llama-server's names. A `brief` answer leaves texts out."""
    sampling = request.sampling
    names = {"penalty_last_n": "repeat_last_n", "repetition_penalty": "repeat_penalty"}
    own = {names.get(name, name): value for name, value in msgspec.structs.asdict(sampling).items()}
    adaptive = {name: own.pop(name) for name in ("adaptive_target", "adaptive_decay")}
    settings = {**own, **_TABLES["settings"], **adaptive}
    settings |= {
        "seed": SEED_SPACE if sampling.seed is None else sampling.seed,
        "logit_bias": [{"bias": bias, "token": token} for token, bias in sampling.logit_bias],
        "stop": request.stop,
        "max_tokens": request.max_tokens,
        "n_predict": request.max_tokens,
        "n_probs": request.logprobs,
        "grammar": request.constraint.source if request.constraint else "",
        "samplers": [name for name in SAMPLER_NAMES if name != "adaptive_p" or sampling.adaptive_target >= 0],
        "speculative.types": "none" if not request.speculate else "ngram",
    }
    texts = ("stop", "grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens", "logit_bias")
    for name in (*texts, "dry_sequence_breakers") if brief else ():
        del settings[name]
    return settings


def select_fields(response: Any, paths: Iterable[str]) -> dict[str, Any]:
    """Only these fields of a response; `a/b` is the field b of a. What is not there is left out."""
    found: dict[str, Any] = {}
    whole = msgspec.to_builtins(response)
    for path in paths:
        value = whole
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            found[path] = value
    return found


_SETTINGS = make_settings(Request(id="", max_tokens=3))
COMPLETION_EXAMPLE = msgspec.structs.replace(make_example(LlamaCompletion), generation_settings=_SETTINGS)


class LlamaPiece(msgspec.Struct, frozen=True):
    id: int
    piece: str | list[int]  # bytes where it is no text by itself


def make_piece(token: int, piece: bytes) -> LlamaPiece:
    try:
        return LlamaPiece(token, piece.decode())
    except UnicodeDecodeError:
        return LlamaPiece(token, list(piece))


class LlamaAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter of `/lora-adapters`. `scale` is that of requests that name none."""

    id: int
    path: str  # the name of its file
    scale: float
    name: str = ""  # requests for MODEL:NAME use it
    task_name: str = ""
    prompt_prefix: str = ""


class LlamaTokens(msgspec.Struct, frozen=True):
    tokens: Sequence[int | LlamaPiece]


class LlamaContent(msgspec.Struct, frozen=True):
    content: str


class LlamaPrompt(msgspec.Struct, frozen=True):
    prompt: str


class InputTokens(msgspec.Struct, frozen=True):
    """The length of a prompt."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class LlamaSettings(msgspec.Struct, frozen=True):
    params: dict[str, Any]
    n_ctx: int


class Modalities(msgspec.Struct, frozen=True):
    vision: bool = False
    video: bool = False
    audio: bool = False


class InterToken(msgspec.Struct, frozen=True):
    """Inter-token latency beside prefill: what is kept, and what it may be where that costs throughput."""

    target_ms: int
    max_ms: int


class LlamaProps(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/props`."""

    default_generation_settings: LlamaSettings
    total_slots: int
    model_alias: str
    model_ftype: str
    model_path: str  # the file's name: its folder is the operator's business
    modalities: Modalities = Modalities()
    endpoint_slots: bool = True
    endpoint_props: bool = False
    endpoint_metrics: bool = True
    chat_template: str
    chat_template_tool_use: str | UnsetType = UNSET
    chat_template_caps: dict[str, bool]
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool = False
    inter_token: InterToken
    media_marker: str = ""
    ui: bool = False
    ui_settings: dict[str, Any] = {}
    cors_proxy_enabled: bool = False


def make_caps(template: str) -> dict[str, bool]:
    """Capabilities of a chat template, by the variables that it uses. cllm itself adds the others."""
    found = {f"supports_{name}": text in template for name, text in _TABLES["capabilities"].items()}
    return {**found, "supports_system_role": True, "supports_string_content": True}


def make_params(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a request that gives none."""
    body = LlamaCompletionBody.parse({"prompt": "", **defaults})
    sampling = msgspec.structs.replace(body.sampling(1 << 31), seed=None)
    settings = make_settings(Request(id="", max_tokens=0, sampling=sampling), brief=True)
    seed = SEED_SPACE if body.seed is None or body.seed < 0 else body.seed
    return {**settings, "seed": seed, "n_predict": body.n_predict, "max_tokens": body.n_predict}


PROPS_EXAMPLE = msgspec.structs.replace(
    make_example(LlamaProps),
    default_generation_settings=LlamaSettings(make_params({}), 4096),
    chat_template_caps=make_caps("tools"),
)


class NextToken(msgspec.Struct, frozen=True):
    has_next_token: bool
    has_new_line: bool
    n_remain: int
    n_decoded: int


class LlamaSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A slot; the rest is there while it computes. Never a text."""

    id: int
    n_ctx: int
    speculative: bool = True
    is_processing: bool = False
    id_task: int | UnsetType = UNSET
    n_prompt_tokens: int | UnsetType = UNSET
    params: dict[str, Any] | UnsetType = UNSET
    next_token: list[NextToken] | UnsetType = UNSET


def make_probabilities(
    entries: Iterable[TokenLogprob], sampling: SamplingParams | None = None, top: int = MAX_PROBS
) -> list[LlamaTokenLogprobs]:
    """Probabilities in llama-server's shape; with `sampling`, those after it."""
    found = []
    name = "logprob" if sampling is None else "prob"
    for entry in entries:
        values, own = [logprob for _, logprob in entry.top], entry.logprob
        if sampling is not None:
            values = _sample(values, sampling)
            own = dict(zip(dict(entry.top), values, strict=False)).get(entry.token, 0.0)
        shown = zip(map(_token, dict(entry.top), entry.pieces[1:]), values[:top], strict=False)
        likely = [LlamaLogprob(**token | {name: value}) for token, value in shown]
        token = _token(entry.token, entry.pieces[0]) | {name: own, f"top_{name}s": likely}
        found.append(LlamaTokenLogprobs(**token))
    return found


def _token(token: int, piece: bytes) -> dict[str, Any]:
    return {"id": token, "token": decode_piece(piece), "bytes": list(piece)}


def _sample(logprobs: Sequence[float], sampling: SamplingParams) -> list[float]:
    """The probabilities of the candidates that top_k, top_p, min_p and temperature leave."""
    if sampling.temperature <= 0:
        return [1.0]
    chances = [math.exp(logprob) for logprob in logprobs[: sampling.top_k or None]]
    total, kept, seen = sum(chances), 0, 0.0
    for chance in chances:
        if kept and (seen >= sampling.top_p * total or chance < sampling.min_p * chances[0]):
            break
        kept, seen = kept + 1, seen + chance
    weights = [math.exp(logprob / sampling.temperature) for logprob in logprobs[:kept]]
    return [weight / sum(weights) for weight in weights]
