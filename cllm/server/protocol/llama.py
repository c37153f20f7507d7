"""Requests of llama-server's own routes, under its names."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

import msgspec
from cllm.server.protocol.base import Body, ModelName, SourceText, Text, TokenId, TokenIds
from cllm.server.protocol.chat import ConversationBody
from cllm.server.protocol.completions import MAX_CHOICES, MAX_PROMPTS
from cllm.server.protocol.sampling import ConstrainedBody, get_sampling_bounds, sampling_field
from pydantic import AliasChoices, ConfigDict, Field, model_validator

from cllm.chat.conversation import Conversation
from cllm.text.prompt import Gap, Snippet

MAX_PROBS = 20


Stop = Annotated[SourceText, Field(max_length=256)]


class PromptObject(Body):
    """A prompt in an object, as it comes beside images; without them it is its text."""

    prompt_string: Text = Field(description="The text", examples=["1+1="])


Pieces = Annotated[list[Text | TokenId], Field(fail_fast=True, min_length=1)]
Prompt = Text | Annotated[TokenIds, Field(min_length=1)] | Pieces | PromptObject
Prompts = Annotated[
    Prompt | Annotated[list[Prompt], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)],
    Field(union_mode="left_to_right"),
]


def split_prompts(given: Any) -> list[list[str | int]]:
    """Prompts as texts and token ids, one list each: a list with a number in it is one prompt."""
    if isinstance(given, list) and not any(isinstance(part, int) for part in given):
        return [pieces for part in given for pieces in split_prompts(part)]
    if isinstance(given, list):
        return [given]
    return [[given.prompt_string if isinstance(given, PromptObject) else given]]


class LlamaSamplingBody(ConstrainedBody):
    """Numbers out of bounds are the nearest within, as llama-server takes them."""

    bias_by_text: ClassVar[bool] = True

    @model_validator(mode="before")
    @classmethod
    def _clamp(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        value = dict(value)
        for name, (low, high) in get_sampling_bounds().items():
            for spelling in (name, name.replace("repetition_penalty", "repeat_penalty")):
                number = value.get(spelling)
                if type(number) is int or (type(number) is float and math.isfinite(number)):
                    value[spelling] = min(max(number, low), high)
        if value.get("grammar") and value.get("json_schema") is not None:
            del value["json_schema"]
        elif value.get("grammar") == "":
            del value["grammar"]
        return value


class LlamaCompletionBody(LlamaSamplingBody):
    """`POST /completion`. -1 tokens is no limit, and the prompt may contain control tokens."""

    model: ModelName = None
    prompt: Prompts = Field(
        description="Text (control tokens in it are parsed), token ids, both mixed, or a list of prompts",
        examples=["1+1=", [12, " and ", 34]],
    )
    n_predict: int = Field(
        -1,
        ge=-1,
        validation_alias=AliasChoices("n_predict", "max_completion_tokens", "max_tokens"),
        description="Maximum number of tokens to generate (also `max_tokens`); -1: as many as fit, 0: none",
    )
    n_cmpl: int = Field(
        1,
        ge=1,
        le=MAX_CHOICES,
        validation_alias=AliasChoices("n_cmpl", "n"),
        description="Answers to each prompt",
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] = Field(
        default=[],
        description="Texts that end the answer and are not part of it; an empty one is none",
        examples=[["\n\n"]],
    )
    stream: bool = Field(False, description="Send server-sent events")
    n_probs: int = Field(
        0,
        ge=0,
        le=MAX_PROBS,
        validation_alias=AliasChoices("n_probs", "logprobs"),
        description="Log-probabilities of this many most likely tokens; 0: none",
    )
    post_sampling_probs: bool = Field(
        False, description="Give probabilities after top_k, top_p, min_p and temperature, not before"
    )
    return_tokens: bool = Field(False, description="Give the ids of the generated tokens")
    return_progress: bool = Field(False, description="Send events while the prompt is computed")
    timings_per_token: bool = Field(False, description="Give timings in every event")
    response_fields: list[Annotated[str, Field(max_length=256)]] = Field(
        default=[],
        max_length=64,
        description="Give only these fields; `a/b` is the field b of a",
        examples=[["content", "generation_settings/n_predict"]],
    )
    n_indent: int = Field(0, ge=0, description="Stop at a line that is indented by less than this")
    t_max_predict_ms: int = Field(
        0, ge=-1, description="Stop at the next line break once generation has taken so long; 0: never"
    )
    repetition_penalty: float = sampling_field(
        "repetition_penalty", validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    penalty_last_n: int = sampling_field(
        "penalty_last_n", validation_alias=AliasChoices("repeat_last_n", "penalty_last_n")
    )

    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "1+1=", "n_predict": 8}})

    @model_validator(mode="after")
    def _check_count(self) -> LlamaCompletionBody:
        listed = self.prompt if isinstance(self.prompt, list) else []
        several = not any(isinstance(part, int) for part in listed)
        if several and (count := len(listed) * self.n_cmpl) > MAX_PROMPTS:
            raise ValueError(f"prompt: prompts times n_cmpl is {count}, over the limit of {MAX_PROMPTS}")
        return self

    @property
    def prompts(self) -> list[list[str | int]]:
        return split_prompts(self.prompt)

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop
        return tuple(filter(None, given))


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

    model: ModelName = None
    content: Text | Annotated[list[Text | TokenId], Field(fail_fast=True)] = Field(
        "", description="Text to tokenise, or texts and token ids mixed", examples=["1+1="]
    )
    add_special: bool = Field(False, description="Add the model's own start tokens")
    parse_special: bool = Field(True, description="Parse control tokens in the text")
    with_pieces: bool = Field(False, description="Give the text of each token, too")

    model_config = ConfigDict(json_schema_extra={"example": {"content": "1+1="}})


class LlamaDetokenizeBody(Body):
    """`POST /detokenize`."""

    model: ModelName = None
    tokens: TokenIds = Field(default=[], description="Token ids", examples=[[33, 27, 33, 45]])

    model_config = ConfigDict(json_schema_extra={"example": {"tokens": [33, 27, 33, 45]}})


class ApplyTemplateBody(ConversationBody):
    """`POST /apply-template`."""

    add_generation_prompt: bool = Field(True, description="End where the answer begins")

    def conversation(self) -> Conversation:
        found = super().conversation()
        options = {**found.options, "add_generation_prompt": self.add_generation_prompt}
        return msgspec.structs.replace(found, options=options)


class SlotBody(Body):
    """`POST /slots/{id}`."""

    model: ModelName = None
    filename: Text = Field("", description="Name to save it under; `erase` needs none", examples=["slot.bin"])
