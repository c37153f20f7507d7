"""Request and response of `/v1/completions`, and the fields that OpenAI's routes share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import AfterValidator, AliasChoices, ConfigDict, Field, model_validator

from cllm.chat.conversation import make_template_options
from cllm.server.protocol.base import Body, ModelName, StopText, Text, TimedResponse, TokenIds, make_timings
from cllm.server.protocol.sampling import ConstrainedBody, sampling_field
from cllm.types import FinishReason, RequestOutput, TokenLogprob, Usage

MAX_CHOICES = 64
MAX_PROMPTS = 256

Name = Annotated[str, Field(max_length=256)]
PromptLimit = Annotated[int, Field(ge=-1), AfterValidator(lambda limit: None if limit < 0 else limit)]
"""As `TokenLimit`; 0: only the prompt is computed."""
ReasoningBudget = Annotated[
    Annotated[int, Field(ge=-1)] | None,
    Field(description="Tokens of reasoning; 0: none, -1: no limit", examples=[1024]),
]
Effort = Annotated[
    Annotated[str, Field(max_length=32)] | None,
    Field(description="A variable for the chat template; `none` switches reasoning off", examples=["low"]),
]


class ModelBody(Body):
    """Fields that nearly all of OpenAI's routes have."""

    model: ModelName = None
    user: Name | None = Field(None, description="Ignored", examples=["ann"])


class StreamOptions(Body):
    """What a stream sends besides the answer."""

    include_usage: bool = Field(False, description="Send a last chunk with the usage")


class SchemaFormat(Body):
    """A JSON schema with a name."""

    name: Name = Field("answer", description="Ignored")
    schema_: dict[str, Any] = Field(
        alias="schema",
        description="The JSON schema that the answer validates against",
        examples=[{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}],
    )
    strict: bool | None = Field(None, description="Ignored: the answer always validates", examples=[True])


ReasoningFormat = Annotated[
    Literal["auto", "deepseek", "deepseek-legacy", "none"],
    Field(description="`none`: reasoning stays in the text; others: it goes to `reasoning_content`"),
]


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="`text`, `json_object` (any JSON object), or `json_schema` (validates against the schema)"
    )
    json_schema: SchemaFormat | None = Field(
        None,
        description="The schema; required by the type `json_schema`",
        examples=[{"name": "answer", "schema": {"type": "object"}}],
    )
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="The schema of a `json_object`", examples=[{"type": "object"}]
    )

    @model_validator(mode="after")
    def _consistent(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is required by the type json_schema, and allowed there only")
        return self


class OpenAIFields(ModelBody, ConstrainedBody):
    """Fields that `/v1/responses` shares with `OpenAIBody`."""

    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = Field(
        None, description="Texts that end the answer and are not part of it", examples=[["\n\n"]]
    )
    repetition_penalty: float = sampling_field(
        "repetition_penalty", validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class OpenAIBody(OpenAIFields):
    """Fields that `/v1/completions` and `/v1/chat/completions` share."""

    form = "response_format"

    n: int = Field(
        1, ge=1, le=MAX_CHOICES, description="How many answers to generate; the prompt is computed once"
    )
    response_format: ResponseFormat | None = Field(
        None, description="Text, any JSON object, or a schema", examples=[{"type": "json_object"}]
    )
    stream: bool = Field(False, description="Send server-sent events, with `data: [DONE]` at the end")
    stream_options: StreamOptions | None = Field(
        None, description="What a stream sends besides the answer", examples=[{"include_usage": True}]
    )
    timings_per_token: bool = Field(False, description="Give llama-server's `timings` in every event")
    return_progress: bool = Field(False, description="Send events while the prompt is computed")
    verbose: bool = Field(False, description="Give `__verbose`, what llama-server's `/completion` would say")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="Score the prompt's tokens, and this many likely ones", examples=[1]
    )

    def form_schema(self) -> dict[str, Any] | None:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        return wanted.json_schema.schema_ if wanted.json_schema else wanted.schema_ or {"type": "object"}

    @property
    def scored(self) -> int:
        """How many alternatives are wanted for each token of the prompt; 0: they are not scored."""
        return 0 if self.prompt_logprobs is None else max(1, self.prompt_logprobs)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ThinkingMode(Body):
    """Reasoning, as the APIs of some models switch it."""

    type: Annotated[str, Field(max_length=32)] = Field(
        description="`enabled` or `disabled`; others leave it to the template", examples=["disabled"]
    )
    budget_tokens: ReasoningBudget = None


class ReasoningOptions(Body):
    """Reasoning, as OpenRouter's clients ask for it."""

    effort: Effort = None
    enabled: bool | None = Field(None, description="Reasoning, on or off", examples=[False])
    max_tokens: ReasoningBudget = None


class ThinkingBody(Body):
    """How much the model reasons, in the words of several APIs; the first that is given decides."""

    reasoning_effort: Effort = None
    enable_thinking: bool | None = Field(None, description="Reasoning, on or off", examples=[False])
    thinking: bool | ThinkingMode | None = Field(
        None, description="Reasoning, on or off", examples=[{"type": "disabled"}]
    )
    reasoning: ReasoningOptions | None = Field(
        None, description="How much to reason", examples=[{"effort": "low"}]
    )
    thinking_budget: ReasoningBudget = None
    reasoning_budget: ReasoningBudget = None

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning is not None else None)

    @property
    def budget(self) -> int | None:
        """How many tokens of reasoning there may be; None: no limit."""
        mode = self.thinking if isinstance(self.thinking, ThinkingMode) else None
        given = (
            self.thinking_budget,
            self.reasoning_budget,
            mode.budget_tokens if mode is not None else None,
            self.reasoning.max_tokens if self.reasoning is not None else None,
        )
        found = next((budget for budget in given if budget is not None), None)
        return None if found == -1 else found

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to reason; None: as its template has it."""
        mode = self.thinking.type if isinstance(self.thinking, ThinkingMode) else self.thinking
        given = (
            self.enable_thinking,
            {"enabled": True, "disabled": False}.get(mode) if isinstance(mode, str) else mode,
            self.reasoning.enabled if self.reasoning is not None else None,
            False if self.budget == 0 else None,
            None if self.effort is None else self.effort != "none",
        )
        return next((wanted for wanted in given if wanted is not None), None)

    def thinking_options(self, given: dict[str, Any] | None) -> dict[str, Any]:
        """The fields of `Conversation` that follow, with template variables that were `given`."""
        options = dict(given or {})
        if self.thinks is not None:
            options.setdefault("enable_thinking", self.thinks)
        return {
            "options": make_template_options(options, self.effort),
            "think": self.thinks is not False,
            "reasoning_budget": self.budget,
        }


class PredictedPart(Body):
    type: Literal["text"] = Field("text", description="Always `text`")
    text: Text = Field(description="The text", examples=["def add(a, b):"])


class Prediction(Body):
    """What most of the answer is expected to be: a file that is edited, say."""

    type: Literal["content"] = Field("content", description="Always `content`")
    content: Text | Annotated[list[PredictedPart], Field(max_length=MAX_PROMPTS)] = Field(
        description="Text, or parts of text", examples=["def add(a, b):"]
    )


class PredictedBody(Body):
    prediction: Prediction | None = Field(
        None,
        description="What most of the answer will repeat: then it is generated faster",
        examples=[{"type": "content", "content": "def add(a, b):"}],
    )

    @property
    def predicted_text(self) -> str:
        content = self.prediction.content if self.prediction is not None else ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class CompletionBody(OpenAIBody):
    """`POST /v1/completions`."""

    meant_nulls: ClassVar[frozenset[str]] = frozenset({"max_tokens"})

    prompt: (
        Text
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(
        description="A text, texts, token ids, or lists of token ids",
        examples=["Once upon a time", [1, 2, 3]],
    )
    suffix: Text | None = Field(
        None,
        description="The text after the answer; needs a model with fill-in-the-middle tokens",
        examples=[" The end."],
    )
    max_tokens: PromptLimit | None = Field(
        16, description="Maximum number of tokens to generate; null or -1: as many as fit; 0: none"
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="Generate this many answers and return the best n",
        examples=[4],
    )
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Log-probabilities of each token and of this many more", examples=[2]
    )
    echo: bool = Field(
        False, description="Repeat the prompt before the answer, with `logprobs` of its tokens, too"
    )

    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}}
    )

    @model_validator(mode="after")
    def _consistent(self) -> CompletionBody:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of must be at least n ({self.n})")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ValueError("best_of above n cannot be streamed: the best answers are known only at the end")
        if (self.best_of or self.n) * len(self.prompts) > MAX_PROMPTS:
            raise ValueError(f"n (or best_of) times prompts must be at most {MAX_PROMPTS}")
        return self

    @property
    def scores_echo(self) -> bool:
        """Whether the tokens of the prompt are among those with log-probabilities."""
        return self.echo and self.logprobs is not None and not self.suffix

    @property
    def scored(self) -> int:
        return max(super().scored, max(1, self.logprobs or 0) if self.scores_echo else 0)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list: of texts, or of lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int  # whose KV the prefix cache held
    cached_from: str = ""  # its tier: device, ram or disk


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    accepted_prediction_tokens: int  # draft tokens that came true
    rejected_prediction_tokens: int


class CompletionUsage(msgspec.Struct, frozen=True):
    """The tokens of a call, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET  # of a prediction


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities as parallel lists, one entry a token; the first of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token of the prompt, or one that could have stood in its place, as vLLM has it."""

    logprob: float
    rank: int | None  # 1: the most likely; null: not among those asked for
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # one entry a token, by token id


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer, or a piece of it; a finished one has a reason."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(TimedResponse, frozen=True, kw_only=True):
    """The response of `/v1/completions`, whole or one chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | msgspec.UnsetType = msgspec.UNSET


COMPLETION_EXAMPLE = Completion(
    id="cmpl-1",
    created=1767225600,
    model="SmolLM2-135M-Instruct",
    choices=[CompletionChoice(0, " there was a", finish_reason=FinishReason.STOP)],
    usage=CompletionUsage(4, 3, 7, PromptTokensDetails(0)),
    timings=make_timings(prompt_tokens=4, generated=3, prompt_s=0.0215, generated_s=0.0182),
)


def make_usage(usages: Iterable[Usage | None], prompt_tokens: int) -> CompletionUsage:
    """The usage of all choices together; a prompt counts once, however many answers it got."""
    ended = [usage for usage in usages if usage is not None]
    generated = sum(usage.completion_tokens for usage in ended)
    least = min(ended, key=lambda usage: usage.cached_tokens, default=None)
    details = PromptTokensDetails(least.cached_tokens, least.cached_from) if least else PromptTokensDetails(0)
    usage = CompletionUsage(prompt_tokens, generated, prompt_tokens + generated, details)
    if not any(usage.predicted_tokens for usage in ended):
        return usage
    accepted = sum(usage.accepted_tokens for usage in ended)
    rejected = sum(usage.drafted_tokens for usage in ended) - accepted
    predicted = CompletionTokensDetails(accepted, rejected)
    return msgspec.structs.replace(usage, completion_tokens_details=predicted)


def make_choice(
    body: CompletionBody, index: int, outputs: Sequence[RequestOutput], *, echo: str = "", offset: int = 0
) -> CompletionChoice:
    """A choice from its outputs. `offset` is where its tokens begin in the text, after what came before."""
    prompt = [entry for output in outputs for entry in output.prompt_logprobs]
    entries = [entry for output in outputs for entry in output.logprobs]
    logprobs = None
    if body.logprobs is not None:
        if prompt and body.scores_echo:
            entries, offset = prompt + entries, offset - len(echo)
        logprobs = make_logprobs(entries, offset, max(1, body.logprobs))
    choice = CompletionChoice(
        index, echo + "".join(output.text for output in outputs), logprobs, outputs[-1].finish_reason
    )
    if not prompt or body.prompt_logprobs is None:
        return choice
    scores = [make_prompt_logprobs(entry, body.prompt_logprobs) for entry in prompt]
    return msgspec.structs.replace(choice, prompt_logprobs=scores)


def decode_piece(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def make_logprobs(entries: Sequence[TokenLogprob], offset: int, count: int) -> CompletionLogprobs:
    """`count` alternatives for each token."""
    tokens = [decode_piece(entry.pieces[0]) for entry in entries]
    top = [_make_top(entry, count) if entry.top else None for entry in entries]
    values = [entry.logprob if entry.top else None for entry in entries]
    ends = accumulate(map(len, tokens), initial=offset)
    return CompletionLogprobs(tokens, values, top, list(ends)[:-1])


def _make_top(entry: TokenLogprob, count: int) -> dict[str, float]:
    """The likeliest tokens by their text; where several have the same (a part of a character), the first."""
    found: dict[str, float] = {}
    for piece, (_, logprob) in zip(entry.pieces[1 : 1 + count], entry.top[:count], strict=True):
        found.setdefault(decode_piece(piece), logprob)
    return found


def make_prompt_logprobs(entry: TokenLogprob, count: int) -> dict[str, PromptLogprob] | None:
    """The token and the `count` likeliest in its place, by token id; None for the first of a prompt."""
    if not entry.top:
        return None
    ranked = zip(entry.top, range(1, 1 + len(entry.top)), map(decode_piece, entry.pieces[1:]), strict=True)
    found = {token: PromptLogprob(value, rank, text) for (token, value), rank, text in ranked}
    own = found.get(entry.token, PromptLogprob(entry.logprob, None, decode_piece(entry.pieces[0])))
    likeliest = dict(list(found.items())[:count])
    return {str(token): each for token, each in ({entry.token: own} | likeliest).items()}
