"""Requests of llama-server's own routes, under its names."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cllm.chat.conversation import Conversation
from cllm.server.body import NO_NUL, Body, ModelName, TokenId, about
from cllm.server.dialects.openai.bodies import MAX_CHOICES, MAX_PROMPTS, ChatBody
from cllm.server.generation import GenerationBody, get_sampling_bounds, is_token_id
from cllm.text.prompt import Gap, Snippet

MAX_PROBS = 20
Stop = Annotated[str, Meta(max_length=256, pattern=NO_NUL)]


class PromptObject(msgspec.Struct, Body, kw_only=True):
    """A prompt in an object, as it comes beside images; without them it is its text."""

    prompt_string: Annotated[str, about("The text", "1+1=")]


Pieces = Annotated[list[str | TokenId], Meta(min_length=1)]
Prompts = str | PromptObject | Annotated[list[str | TokenId | PromptObject | Pieces], Meta(min_length=1)]


def split_prompts(given: Any) -> list[list[str | int]]:
    """Prompts as texts and token ids, one list each: a list with a number in it is one prompt."""
    if isinstance(given, list) and not any(isinstance(part, int) for part in given):
        return [pieces for part in given for pieces in split_prompts(part)]
    if isinstance(given, list):
        return [given]
    return [[given.prompt_string if isinstance(given, PromptObject) else given]]


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
    EXAMPLE = {"prompt": "1+1=", "n_predict": 8}

    model: ModelName = None
    prompt: Annotated[
        Prompts,
        about(
            "Text (control tokens in it are parsed), token ids, both mixed, or a list of prompts",
            "1+1=",
            [12, " and ", 34],
        ),
    ]
    n_predict: Annotated[
        int,
        about("Maximum number of tokens to generate (also `max_tokens`); -1: as many as fit, 0: none", ge=-1),
    ] = -1
    n_cmpl: Annotated[int, about("Answers to each prompt", ge=1, le=MAX_CHOICES)] = 1
    stop: Annotated[
        Stop | Annotated[tuple[Stop, ...], Meta(max_length=16)],
        about("Texts that end the answer and are not part of it; an empty one is none", ["\n\n"]),
    ] = ()
    stream: Annotated[bool, about("Send server-sent events")] = False
    n_probs: Annotated[
        int, about("Log-probabilities of this many most likely tokens; 0: none", ge=0, le=MAX_PROBS)
    ] = 0
    post_sampling_probs: Annotated[
        bool, about("Give probabilities after top_k, top_p, min_p and temperature, not before")
    ] = False
    return_tokens: Annotated[bool, about("Give the ids of the generated tokens")] = False
    return_progress: Annotated[bool, about("Send events while the prompt is computed")] = False
    timings_per_token: Annotated[bool, about("Give timings in every event")] = False
    response_fields: Annotated[
        tuple[Annotated[str, Meta(max_length=256)], ...],
        about(
            "Give only these fields; `a/b` is the field b of a",
            ["content", "generation_settings/n_predict"],
            max_length=64,
        ),
    ] = ()
    n_indent: Annotated[int, about("Stop at a line that is indented by less than this", ge=0)] = 0
    t_max_predict_ms: Annotated[
        int, about("Stop at the first line break after this time of generation; 0: never", ge=-1)
    ] = 0

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
        elif value.get("grammar") == "":
            del value["grammar"]
        return value

    def check(self) -> None:
        super().check()
        if (count := len(self.prompts) * self.n_cmpl) > MAX_PROMPTS:
            raise ValueError(f"prompt: prompts times n_cmpl is {count}, over the limit of {MAX_PROMPTS}")
        if any(not isinstance(piece, str | int) for pieces in self.prompts for piece in pieces):
            raise ValueError("prompt: a list with a token id in it is one prompt of texts and token ids")

    @property
    def prompts(self) -> list[list[str | int]]:
        return split_prompts(self.prompt)

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop))

    @property
    def biases(self) -> dict[str, float]:
        return {key.removeprefix("\0"): bias for key, bias in self.logit_bias.items() if not is_token_id(key)}


class SnippetBody(msgspec.Struct, Body, kw_only=True):
    """A snippet of another file of the project."""

    text: Annotated[str, about("The text of the snippet", "def add(a, b): ...")]
    filename: Annotated[str, about("The file it comes from", "util.py", max_length=4096)] = "tmp"


class InfillBody(LlamaCompletionBody, frozen=True, kw_only=True):
    """`POST /infill`: the fields of `/completion`, and the text around the gap."""

    EXAMPLE = {
        "input_prefix": "def add(a, b):\n    return ",
        "input_suffix": "\n\nprint(add(1, 2))\n",
        "n_predict": 16,
    }

    input_prefix: Annotated[
        str, about("The text before the gap; if it is too long, its end is kept", "def add(")
    ]
    input_suffix: Annotated[
        str, about("The text after the gap; if too long, its start is kept", "):\n    return a + b\n")
    ]
    input_extra: Annotated[
        tuple[SnippetBody, ...],
        about(
            "Snippets of other files, as context",
            [{"filename": "util.py", "text": "def add(a, b): ..."}],
            max_length=1024,
        ),
    ] = ()
    prompt: Annotated[
        str, about("The start of the text in the gap; control tokens in it are parsed", "a, ")
    ] = ""

    def gap(self, max_tokens: int) -> Gap:
        """The gap, in a text that is cut to `max_tokens`."""
        snippets = tuple(Snippet(extra.text, extra.filename) for extra in self.input_extra)
        around = {"prefix": self.input_prefix, "suffix": self.input_suffix, "prompt": self.prompt}
        return Gap(**around, snippets=snippets, cut_to=max_tokens)


class LlamaTokenizeBody(msgspec.Struct, Body, kw_only=True):
    """`POST /tokenize`."""

    EXAMPLE = {"content": "1+1="}

    model: ModelName = None
    content: Annotated[
        str | list[str | TokenId], about("Text to tokenise, or texts and token ids mixed", "1+1=")
    ] = ""
    add_special: Annotated[bool, about("Add the model's own start tokens")] = False
    parse_special: Annotated[bool, about("Parse control tokens in the text")] = True
    with_pieces: Annotated[bool, about("Give the text of each token, too")] = False


class LlamaDetokenizeBody(msgspec.Struct, Body, kw_only=True):
    """`POST /detokenize`."""

    EXAMPLE = {"tokens": [33, 27, 33, 45]}

    model: ModelName = None
    tokens: Annotated[tuple[TokenId, ...], about("Token ids", [33, 27, 33, 45])] = ()


class ApplyTemplateBody(ChatBody, frozen=True, kw_only=True):
    """`POST /apply-template`."""

    add_generation_prompt: Annotated[bool, about("End where the answer begins")] = True

    def conversation(self) -> Conversation:
        found = super().conversation()
        options = {**found.options, "add_generation_prompt": self.add_generation_prompt}
        return msgspec.structs.replace(found, options=options)


class SlotBody(msgspec.Struct, Body, kw_only=True):
    """`POST /slots/{id}`."""

    model: ModelName = None
    filename: Annotated[str, about("Name of the saved slot; `erase` needs none", "slot.bin")] = ""
