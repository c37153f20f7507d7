"""Requests and responses of cllm's own routes (/generate, /encode, /decode), and what describes the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from pydantic import ConfigDict, Field

from cllm.models.files import parse_file_type
from cllm.server.protocol.base import Body, ModelName, StopText, Text, TokenIds, TokenLimit
from cllm.server.protocol.sampling import ConstrainedBody
from cllm.types import EmbedLimits, FinishReason, Limits, ModelInfo, Pooling, Usage

# In the chat templates of models that reason.
REASONING_MARKERS = ("<think>", "[THINK]", "<|channel|>", "reasoning_content", "enable_thinking")


class GenerateBody(ConstrainedBody):
    """`POST /generate` and `/generate_stream`."""

    model: ModelName = None
    prompt: Text = Field(
        min_length=1, description="Raw text; no chat template is applied", examples=["Once upon a time"]
    )
    max_tokens: TokenLimit | None = Field(
        256, description="Maximum number of tokens to generate; clamped to what fits; -1: as many as fit"
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

    model: ModelName = None
    text: Text = Field(
        description="Text to tokenise; control tokens in it are plain text",
        examples=["Once upon a time"],
    )

    model_config = ConfigDict(json_schema_extra={"example": {"text": "Once upon a time"}})


class DecodeBody(Body):
    """`POST /decode`."""

    model: ModelName = None
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


class ModelMeta(msgspec.Struct, frozen=True):
    """What llama-server says of a model."""

    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int
    ftype: str


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model. `capabilities`: completion, chat, tools, reasoning, embeddings, rerank."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cllm"
    root: str
    max_model_len: int
    context_length: int
    capabilities: list[str]
    loaded: bool = True
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    meta: ModelMeta


LISTED_MODEL = Model(
    id="SmolLM2-135M-Instruct",
    created=1767225600,
    root="SmolLM2-135M-Instruct",
    max_model_len=4096,
    context_length=4096,
    capabilities=["completion", "chat", "tools", "embeddings"],
    meta=ModelMeta(49152, 4096, 8192, 576, 134515584, 96862464, "Q4_1"),
)


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    parent_model: str = ""
    format: str = "gguf"
    family: str
    families: tuple[str, ...]
    parameter_size: str = ""
    quantization_level: str


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The same model as llama-server lists it for Ollama's clients."""

    name: str
    model: str
    modified_at: str = ""
    size: str = ""
    digest: str = ""
    type: str = "model"
    description: str = ""
    tags: tuple[str, ...] = ("",)
    capabilities: tuple[str, ...] = ("completion",)
    parameters: str = ""
    details: ModelDetails


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]
    models: list[ModelEntry] = []


def make_entry(info: ModelInfo) -> ModelEntry:
    details = ModelDetails(
        family=info.architecture,
        families=(info.architecture,),
        quantization_level=parse_file_type(info.description).quant,
    )
    return ModelEntry(name=info.name, model=info.name, details=details)


def make_model(
    info: ModelInfo,
    limits: Limits | None,
    created: int,
    name: str = "",
    *,
    aliases: tuple[str, ...] = (),
    loaded: bool = True,
) -> Model:
    """A model that is served, under the `name` it was asked for by. Without limits it was never loaded."""
    context = info.context_train
    if limits is not None:
        context = limits.request_tokens if info.generates else limits.embed.tokens
    return Model(
        id=name or info.name,
        created=created,
        root=info.name,
        max_model_len=context,
        context_length=context,
        capabilities=list(_list_capabilities(info)),
        loaded=loaded,
        aliases=(info.name, *aliases),
        meta=ModelMeta(
            info.vocabulary_size,
            context,
            info.context_train,
            info.embedding_length,
            info.parameters,
            info.size_bytes,
            parse_file_type(info.description).name,
        ),
    )


def _list_capabilities(info: ModelInfo) -> Iterator[str]:
    template = info.template_for(tools=True)
    if info.generates:
        yield "completion"
        if template is not None:
            yield from ("chat", "tools")
            if any(marker in template for marker in REASONING_MARKERS):
                yield "reasoning"
    yield "rerank" if info.pooling is Pooling.RANK else "embeddings"
