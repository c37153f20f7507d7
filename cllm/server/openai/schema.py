"""The body of `/v1/completions`, and what it shares with that of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, ConfigDict, Field, model_validator

from cllm.server.nullable import NullableBody
from cllm.server.schema import Body, ConstrainedBody, StopText, Text, TokenIds

MOST_CHOICES = 64
MOST_PROMPTS = 256

Name = Annotated[str, Field(max_length=256)]


class StreamOptions(Body):
    """What a stream tells besides the answer."""

    include_usage: bool = Field(False, description="A last chunk with the usage")


class SchemaFormat(Body):
    """A JSON schema with a name."""

    name: Name = Field("answer", description="Ignored: for the client's own order")
    schema_: dict[str, Any] = Field(
        alias="schema",
        description="What the answer validates against",
        examples=[{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}],
    )
    strict: bool | None = Field(None, description="Ignored: it always is", examples=[True])


class ResponseFormat(Body):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="`text`: anything; `json_object`: some JSON object; `json_schema`: what the schema says"
    )
    json_schema: SchemaFormat | None = Field(
        None,
        description="For the type `json_schema`, and needed there",
        examples=[{"name": "answer", "schema": {"type": "object"}}],
    )

    @model_validator(mode="after")
    def _consistent(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, and is needed there")
        return self


class OpenAIFields(NullableBody, ConstrainedBody):
    """What `/v1/responses` shares with them, too."""

    model: Name | None = Field(
        None, description="Any plain name is served by the loaded model", examples=["any"]
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = Field(
        None, description="Text that ends the answer; it is not part of it", examples=[["\n\n"]]
    )
    user: Name | None = Field(None, description="Ignored", examples=["somebody"])
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        le=10,
        validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"),
        description="Above 1 discourages repeats (also `repeat_penalty`); 1: off",
    )

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class OpenAIBody(OpenAIFields):
    """What both routes share."""

    form = "response_format"

    n: int = Field(1, ge=1, le=MOST_CHOICES, description="How many answers; the prompt is computed once")
    response_format: ResponseFormat | None = Field(
        None, description="Text, any JSON object, or a schema", examples=[{"type": "json_object"}]
    )
    stream: bool = Field(False, description="Answer as server-sent events, `data: [DONE]` at the end")
    stream_options: StreamOptions | None = Field(
        None, description="What a stream tells besides the answer", examples=[{"include_usage": True}]
    )

    def form_schema(self) -> dict[str, Any] | None:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        return {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema_

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(OpenAIBody):
    """`POST /v1/completions`."""

    meant_nulls: ClassVar[frozenset[str]] = frozenset({"max_tokens"})

    prompt: (
        Text
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
    ) = Field(description="Text, texts, tokens, or lists of tokens", examples=["Once upon a time", [1, 2, 3]])
    suffix: Text | None = Field(
        None,
        description="What comes after the answer; for models with fill-in-the-middle tokens",
        examples=[" The end."],
    )
    max_tokens: int | None = Field(16, ge=1, description="Most tokens to generate; null: as many as fit")
    best_of: int | None = Field(
        None, ge=1, le=MOST_CHOICES, description="Generate this many, answer the best n", examples=[4]
    )
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Log-probabilities of this many likeliest tokens", examples=[2]
    )
    echo: bool = Field(False, description="Put the prompt before the answer")

    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}}
    )

    @model_validator(mode="after")
    def _consistent(self) -> CompletionBody:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of must be at least n ({self.n})")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ValueError("best_of above n cannot be streamed: the best is known at the end")
        if (self.best_of or self.n) * len(self.prompts) > MOST_PROMPTS:
            raise ValueError(f"n (or best_of) times prompts must be at most {MOST_PROMPTS}")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Always several: texts, or lists of tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
