"""Responses of llama-server's own routes, under its names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cllm.server.dialects.llama_server.bodies import MAX_PROBS, LlamaCompletionBody
from cllm.server.dialects.openai.completions import decode_piece
from cllm.server.generation import SAMPLER_NAMES
from cllm.server.timings import EXAMPLE_TIMINGS, PromptProgress, Timings
from cllm.types import SEED_SPACE, Request, SamplingParams, TokenLogprob


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


def make_settings(request: Request, *, stream: bool = False, brief: bool = False) -> dict[str, Any]:
    """The settings of a request under llama-server's names; `brief`: without texts."""
    sampling = request.sampling
    own = msgspec.structs.asdict(sampling)
    names = {"penalty_last_n": "repeat_last_n", "repetition_penalty": "repeat_penalty"}
    settings = {names.get(name, name): value for name, value in own.items()}
    settings |= {
        "seed": SEED_SPACE if sampling.seed is None else sampling.seed,
        "logit_bias": [{"bias": bias, "token": token} for token, bias in sampling.logit_bias],
        "stop": request.stop,
        "max_tokens": request.max_tokens,
        "n_predict": request.max_tokens,
        "n_keep": 0,
        "n_discard": 0,
        "stream": stream,
        "n_probs": request.logprobs,
        "min_keep": 0,
        "grammar": request.constraint.source if request.constraint else "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "generation_prompt": "",
        "samplers": SAMPLER_NAMES,
        "speculative.types": "none" if not request.speculate else "ngram",
        "timings_per_token": False,
        "post_sampling_probs": False,
        "backend_sampling": False,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "lora": [],
    }
    texts = ("stop", "grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens", "logit_bias")
    for name in (*texts, "dry_sequence_breakers") if brief else ():
        del settings[name]
    return settings


def select_fields(response: Any, paths: Iterable[str]) -> dict[str, Any]:
    """Only these fields of a response; `a/b` is the field b of a. What is not there is left out."""
    found: dict[str, Any] = {}
    for path in paths:
        value = msgspec.to_builtins(response)
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            found[path] = value
    return found


COMPLETION_EXAMPLE = LlamaCompletion(
    content="2\n\n",
    model="SmolLM2-135M-Instruct",
    tokens_predicted=3,
    tokens_evaluated=4,
    tokens_cached=6,
    generation_settings=make_settings(Request(id="", max_tokens=3)),
    prompt="1+1=",
    has_new_line=True,
    truncated=False,
    stop_type="limit",
    stopping_word="",
    timings=EXAMPLE_TIMINGS,
)


class LlamaPiece(msgspec.Struct, frozen=True):
    id: int
    piece: str | list[int]  # bytes where it is no text by itself


def make_piece(token: int, piece: bytes) -> LlamaPiece:
    try:
        return LlamaPiece(token, piece.decode())
    except UnicodeDecodeError:
        return LlamaPiece(token, list(piece))


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
    media_marker: str = ""
    ui: bool = False
    ui_settings: dict[str, Any] = {}
    cors_proxy_enabled: bool = False


def make_caps(template: str) -> dict[str, bool]:
    """What a chat template can do, by the variables that it uses. What it cannot, cllm does around it."""
    used = {
        "tools": "tools",
        "tool_calls": "tool_calls",
        "parallel_tool_calls": "tool_calls",
        "object_arguments": "arguments | tojson",
        "typed_content": "content[0]",
        "preserve_reasoning": "preserve_reasoning",
        "reasoning_effort": "reasoning_effort",
    }
    found = {f"supports_{name}": text in template for name, text in used.items()}
    return {**found, "supports_system_role": True, "supports_string_content": True}


def make_params(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a request that gives none."""
    body = LlamaCompletionBody.parse({"prompt": "", **defaults})
    sampling = msgspec.structs.replace(body.sampling(1 << 31), seed=None)
    settings = make_settings(Request(id="", max_tokens=0, sampling=sampling), brief=True)
    seed = SEED_SPACE if body.seed is None or body.seed < 0 else body.seed
    return {**settings, "seed": seed, "n_predict": body.n_predict, "max_tokens": body.n_predict}


PROPS_EXAMPLE = LlamaProps(
    default_generation_settings=LlamaSettings(make_params({}), 4096),
    total_slots=8,
    model_alias="SmolLM2-135M-Instruct",
    model_ftype="Q4_1",
    model_path="SmolLM2-135M-Instruct.Q4_1.gguf",
    chat_template="{% for message in messages %}…{% endfor %}",
    chat_template_caps=make_caps("tools"),
    bos_token="<s>",
    eos_token="</s>",
    build_info="cllm 0.1.0",
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
    return [
        _make_logprobs(entry, top) if sampling is None else _make_probs(entry, sampling, top)
        for entry in entries
    ]


def _token(token: int, piece: bytes) -> dict[str, Any]:
    return {"id": token, "token": decode_piece(piece), "bytes": list(piece)}


def _make_logprobs(entry: TokenLogprob, top: int) -> LlamaTokenLogprobs:
    candidates = zip(entry.top[:top], entry.pieces[1:], strict=False)
    return LlamaTokenLogprobs(
        **_token(entry.token, entry.pieces[0]),
        logprob=entry.logprob,
        top_logprobs=[
            LlamaLogprob(**_token(token, piece), logprob=logprob) for (token, logprob), piece in candidates
        ],
    )


def _make_probs(entry: TokenLogprob, sampling: SamplingParams, top: int) -> LlamaTokenLogprobs:
    """After top_k, top_p, min_p and temperature, by the candidates that are known."""
    candidates = list(zip(entry.top, entry.pieces[1:], strict=True))
    if sampling.temperature <= 0:
        left = candidates[:1]
        weights = [1.0]
    else:
        limit = sampling.top_k or len(candidates)
        chances = [math.exp(logprob) for (_, logprob), _ in candidates[:limit]]
        total, kept, seen = sum(chances), 0, 0.0
        for chance in chances:
            if kept and (seen >= sampling.top_p * total or chance < sampling.min_p * chances[0]):
                break
            kept, seen = kept + 1, seen + chance
        left = candidates[:kept]
        weights = [math.exp(logprob / sampling.temperature) for (_, logprob), _ in left]
    scale = sum(weights)
    probs = [weight / scale for weight in weights]
    by_token = {token: prob for ((token, _), _), prob in zip(left, probs, strict=True)}
    return LlamaTokenLogprobs(
        **_token(entry.token, entry.pieces[0]),
        prob=by_token.get(entry.token, 0.0),
        top_probs=[
            LlamaLogprob(**_token(token, piece), prob=prob)
            for ((token, _), piece), prob in zip(left[:top], probs, strict=False)
        ],
    )
