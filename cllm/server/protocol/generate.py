"""Requests and responses of cllm's own routes: /generate, /encode, /decode, /model/info."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import ConfigDict, Field

from cllm.server.protocol.base import Body, ConstrainedBody, StopText, Text, TokenIds
from cllm.types import EmbedLimits, FinishReason, Limits, ModelInfo, Usage


class GenerateBody(ConstrainedBody):
    """`POST /generate` and `/generate_stream`."""

    prompt: Text = Field(
        min_length=1, description="Raw text; no chat template is applied", examples=["Once upon a time"]
    )
    max_tokens: int = Field(
        256, ge=1, description="Maximum number of tokens to generate; clamped to what fits"
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] = Field(
        default=[], description="Texts that end the answer and are not part of it", examples=[["\n\n"]]
    )
    stream: bool = Field(False, description="Send server-sent events")

    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}}
    )

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class EncodeBody(Body):
    """`POST /encode`."""

    text: Text = Field(
        description="Text to tokenise; control tokens in it are plain text",
        examples=["Once upon a time"],
    )

    model_config = ConfigDict(json_schema_extra={"example": {"text": "Once upon a time"}})


class DecodeBody(Body):
    """`POST /decode`."""

    tokens: TokenIds = Field(
        max_length=1_000_000, description="Token ids of this model", examples=[[1, 2, 3]]
    )

    model_config = ConfigDict(json_schema_extra={"example": {"tokens": [403, 253]}})


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """A finished answer of `/generate`, and what it took."""

    id: str
    text: str
    response_time: float
    tokens_per_second: float
    generated_tokens: int
    max_tokens: int
    finish_reason: FinishReason
    usage: Usage


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/generate`."""

    success: Literal[True] = True
    data: Generated


GENERATE_EXAMPLE = GenerateResponse(
    data=Generated(
        id="8f0c2d7e4b6a4f5e9c1d2a3b4c5d6e7f",
        text=" there was a",
        response_time=0.051,
        tokens_per_second=58.8,
        generated_tokens=3,
        max_tokens=32,
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=4, completion_tokens=3, decoded_tokens=6, steps=3, ubatches=3, cells=6),
    )
)


class GenerateEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A token of a stream."""

    id: str
    token: str
    done: bool = False


class GenerateEndEvent(GenerateEvent, frozen=True, kw_only=True):
    """The last event of a stream."""

    token: str = ""
    done: bool = True
    generated_tokens: int
    finish_reason: FinishReason
    usage: Usage


class EncodeResponse(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]
    length: int


class DecodeResponse(msgspec.Struct, frozen=True):
    text: str


class ModelInfoResponse(ModelInfo, frozen=True, kw_only=True):
    """The model that is served, and its limits."""

    limits: Limits


MODEL_EXAMPLE = ModelInfoResponse(
    name="SmolLM2-135M-Instruct",
    architecture="llama",
    description="llama 135M Q4_1",
    parameters=134515584,
    size_bytes=96862464,
    vocabulary_size=49152,
    context_train=8192,
    embedding_length=576,
    layers=30,
    chat_template="{% for message in messages %}…{% endfor %}",
    vector_length=576,
    limits=Limits(
        sequences=8,
        cells=32768,
        sequence_cells=4096,
        request_tokens=4096,
        batch_tokens=512,
        embed=EmbedLimits(tokens=4096, batch_tokens=512, rows=32, chunked=True),
    ),
)
