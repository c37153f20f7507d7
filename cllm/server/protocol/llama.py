"""Requests and responses of llama-server's own routes, under its names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from pydantic import AliasChoices, ConfigDict, Field

from cllm.server.protocol.base import Body, ConstrainedBody, StopText, Text, TokenIds, sampling_field
from cllm.server.protocol.completions import decode_piece
from cllm.text.prompt import Gap, Snippet
from cllm.types import TokenLogprob


class LlamaCompletionBody(ConstrainedBody):
    """`POST /completion`. -1 tokens is no limit, and the prompt may contain control tokens."""

    prompt: Text | Annotated[TokenIds, Field(min_length=1)] = Field(
        description="Text (control tokens in it are parsed), or token ids", examples=["1+1="]
    )
    n_predict: int = Field(
        -1,
        ge=-1,
        validation_alias=AliasChoices("n_predict", "max_tokens"),
        description="Maximum number of tokens to generate (also `max_tokens`); -1: as many as fit",
    )
    stop: list[StopText] = Field(
        default=[],
        max_length=16,
        description="Texts that end the answer and are not part of it",
        examples=[["\n\n"]],
    )
    stream: bool = Field(False, description="Send server-sent events")
    n_probs: int = Field(
        0, ge=0, le=20, description="Log-probabilities of this many most likely tokens; 0: none"
    )
    repetition_penalty: float = sampling_field(
        "repetition_penalty", validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    penalty_last_n: int = sampling_field(
        "penalty_last_n", validation_alias=AliasChoices("repeat_last_n", "penalty_last_n")
    )

    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "1+1=", "n_predict": 8}})


class SnippetBody(Body):
    """A snippet of another file of the project."""

    text: Text = Field(description="The text of the snippet", examples=["def add(a, b): ..."])
    filename: Text = Field("tmp", max_length=4096, description="The file it comes from", examples=["util.py"])


class InfillBody(LlamaCompletionBody):
    """`POST /infill`: the fields of `/completion`, and the text around the gap."""

    input_prefix: Text = Field(
        description="The text before the gap; if it is too long, its end is kept", examples=["def add("]
    )
    input_suffix: Text = Field(
        description="The text after the gap; if it is too long, its start is kept",
        examples=["):\n    return a + b\n"],
    )
    input_extra: list[SnippetBody] = Field(
        default=[],
        max_length=1024,
        description="Snippets of other files, as context",
        examples=[[{"filename": "util.py", "text": "def add(a, b): ..."}]],
    )
    prompt: Text = Field(
        "", description="The start of the text in the gap; control tokens in it are parsed", examples=["a, "]
    )

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "input_prefix": "def add(a, b):\n    return ",
                "input_suffix": "\n\nprint(add(1, 2))\n",
                "n_predict": 16,
            }
        }
    )

    def gap(self) -> Gap:
        snippets = tuple(Snippet(extra.text, extra.filename) for extra in self.input_extra)
        return Gap(prefix=self.input_prefix, suffix=self.input_suffix, prompt=self.prompt, snippets=snippets)


class LlamaTokenizeBody(Body):
    """`POST /tokenize`."""

    content: Text = Field(description="Text to tokenise", examples=["1+1="])
    add_special: bool = Field(False, description="Add the model's own start tokens")
    parse_special: bool = Field(True, description="Parse control tokens in the text")

    model_config = ConfigDict(json_schema_extra={"example": {"content": "1+1="}})


class LlamaLogprob(msgspec.Struct, frozen=True):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class LlamaTokenLogprobs(LlamaLogprob, frozen=True):
    """The log-probability of a token, and of the likeliest ones in its place."""

    top_logprobs: list[LlamaLogprob]


class LlamaTimings(msgspec.Struct, frozen=True):
    """The times of a request, in milliseconds."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    cached_from: str = ""  # the tier of the KV cache: device, ram or disk


class LlamaEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer, as a stream sends it."""

    content: str
    tokens: tuple[int, ...]
    stop: bool = False
    completion_probabilities: list[LlamaTokenLogprobs] | msgspec.UnsetType = msgspec.UNSET


class LlamaCompletion(LlamaEvent, frozen=True, kw_only=True):
    """The response of `/completion` and `/infill`, and the last event of their streams."""

    stop: bool = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool = False
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    timings: LlamaTimings


COMPLETION_EXAMPLE = LlamaCompletion(
    content="2\n\n",
    tokens=(34, 198, 198),
    model="SmolLM2-135M-Instruct",
    tokens_predicted=3,
    tokens_evaluated=4,
    tokens_cached=0,
    stop_type="limit",
    stopping_word="",
    timings=LlamaTimings(0, 4, 21.5, 3, 18.2, 164.8),
)


class LlamaTokens(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]


class LlamaContent(msgspec.Struct, frozen=True):
    content: str


class LlamaPrompt(msgspec.Struct, frozen=True):
    prompt: str


class LlamaSettings(msgspec.Struct, frozen=True):
    n_ctx: int


class LlamaProps(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/props`."""

    default_generation_settings: LlamaSettings
    total_slots: int
    model_alias: str
    chat_template: str
    chat_template_tool_use: str | msgspec.UnsetType = msgspec.UNSET
    build_info: str


PROPS_EXAMPLE = LlamaProps(
    default_generation_settings=LlamaSettings(4096),
    total_slots=8,
    model_alias="SmolLM2-135M-Instruct",
    chat_template="{% for message in messages %}…{% endfor %}",
    build_info="cllm 0.1.0",
)


class LlamaSlot(msgspec.Struct, frozen=True):
    id: int
    n_ctx: int
    is_processing: bool


def make_probabilities(entries: Iterable[TokenLogprob]) -> list[LlamaTokenLogprobs]:
    """Log-probabilities in llama-server's shape."""
    return [
        LlamaTokenLogprobs(
            entry.token,
            decode_piece(entry.pieces[0]),
            list(entry.pieces[0]),
            entry.logprob,
            [
                LlamaLogprob(token, decode_piece(piece), list(piece), logprob)
                for (token, logprob), piece in zip(entry.top, entry.pieces[1:], strict=True)
            ],
        )
        for entry in entries
    ]
