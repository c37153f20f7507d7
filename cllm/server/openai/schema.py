"""The body of `/v1/completions`, and what it shares with that of `/v1/chat/completions`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Field, model_validator

from cllm.server.schema import Body, ConstrainedBody, StopText, Text
from cllm.types import ConstraintKind, ConstraintSpec

MOST_CHOICES = 64
MOST_PROMPTS = 256

TokenId = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(max_length=256)]


class StreamOptions(Body):
    include_usage: bool = Field(False, description="A last chunk with the usage")


class SchemaFormat(Body):
    name: Name = "answer"
    schema_: dict[str, Any] = Field(alias="schema", description="What the answer validates against")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, and is needed there")
        return self


class OpenAIBody(ConstrainedBody):
    """What both routes share."""

    model: Name | None = Field(None, description="Any plain name is served by the loaded model")
    n: int = Field(1, ge=1, le=MOST_CHOICES, description="How many answers; the prompt is computed once")
    response_format: ResponseFormat | None = Field(None, description="Text, any JSON object, or a schema")
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Name | None = Field(None, description="Ignored")
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        le=10,
        validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"),
        description="Above 1 discourages repeats; 1: off",
    )

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def constraint(self) -> ConstraintSpec | None:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return super().constraint()
        if super().constraint() is not None:
            raise ValueError("give only one of grammar, regex, choice, json_schema and response_format")
        schema = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema_
        return ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(schema))

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(OpenAIBody):
    """`POST /v1/completions`."""

    prompt: (
        Text
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[list[TokenId]], Field(min_length=1, max_length=MOST_PROMPTS)]
    ) = Field(description="Text, texts, tokens, or lists of tokens")
    max_tokens: int | None = Field(16, ge=1, description="Most tokens to generate; null: as many as fit")
    best_of: int | None = Field(
        None, ge=1, le=MOST_CHOICES, description="Generate this many, answer the best n"
    )
    logprobs: int | None = Field(None, ge=0, le=20, description="Log-probabilities of the likeliest")
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
        if self.n * len(self.prompts) > MOST_PROMPTS:
            raise ValueError(f"n times prompts must be at most {MOST_PROMPTS}")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Always several: texts, or lists of tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
