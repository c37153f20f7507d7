"""Requests and responses of `/v1/embeddings`, `/v1/rerank`, `/v1/score` and llama-server's `/embedding`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import (
    AfterValidator,
    AliasChoices,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from cllm.server.protocol.base import Body, ModelName, Text, TokenId, TokenIds
from cllm.server.protocol.completions import ModelBody

MAX_INPUTS = 2048

InputText = Annotated[Text, Field(min_length=1)]
InputTexts = Annotated[list[InputText], Field(min_length=1, max_length=MAX_INPUTS)]
InputTokens = Annotated[TokenIds, Field(min_length=1)]
InputTokenLists = Annotated[list[InputTokens], Field(min_length=1, max_length=MAX_INPUTS)]


class InputPart(Body):
    """A part of an input."""

    type: Literal["text"] = Field("text", description="Always `text`: the model accepts text only")
    text: Text = Field(description="The text of this part", examples=["The cat sat."])


class InputObject(Body):
    """An input in an object, as llama-server takes it."""

    content: InputText | list[InputPart] | None = Field(
        None, description="Text, or parts of text", examples=["The cat sat."]
    )
    prompt_string: InputText | None = Field(None, description="Text", examples=["The cat sat."])

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or self.prompt_string or ""


def _has_tokens(value: list[str | int]) -> list[str | int]:
    if not any(isinstance(part, int) for part in value):
        raise ValueError(f"at most {MAX_INPUTS} inputs; a mixed one has token ids")
    return value


MixedInput = Annotated[
    list[InputText | TokenId], Field(fail_fast=True, min_length=1), AfterValidator(_has_tokens)
]
InputObjects = Annotated[
    list[InputText | InputTokens | MixedInput | InputObject], Field(min_length=1, max_length=MAX_INPUTS)
]
Input = InputText | InputTokens | InputTexts | InputTokenLists | MixedInput | InputObjects | InputObject


def split_inputs(value: Input) -> list[list[str | int]]:
    """Each input as texts and token ids: a list with a number in it is one input."""
    if isinstance(value, list) and not any(isinstance(part, int) for part in value):
        return [pieces for part in value for pieces in split_inputs(part)]  # type: ignore[arg-type]
    if isinstance(value, list):
        return [value]  # type: ignore[list-item]
    return [[value.text if isinstance(value, InputObject) else value]]


class EmbeddingsBody(ModelBody):
    """`POST /v1/embeddings`."""

    input: Input = Field(
        description=f"A text, texts, token ids, or lists of token ids; at most {MAX_INPUTS} inputs",
        examples=["The cat sat.", ["The cat sat.", "A feline rested."]],
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="`float`: numbers; `base64`: little-endian 32-bit floats"
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Keep only the first dimensions of an embedding, scaled to length 1 again",
        examples=[64],
    )

    model_config = ConfigDict(
        json_schema_extra={"example": {"input": ["The cat sat.", "A feline rested."], "dimensions": 64}}
    )


class LlamaEmbeddingBody(Body):
    """`POST /embedding`, as llama-server has it."""

    model: ModelName = None
    content: Input = Field(
        validation_alias=AliasChoices("content", "input"),
        description=f"A text, texts, token ids, or lists of token ids; at most {MAX_INPUTS} inputs",
        examples=["The cat sat.", ["The cat sat.", "A feline rested."]],
    )
    embd_normalize: int = Field(
        2,
        ge=-1,
        le=64,
        description="Norm: -1 none, 0 largest element is 32760, 1 taxicab, 2 Euclidean, above p-norm",
    )

    model_config = ConfigDict(json_schema_extra={"example": {"content": "The cat sat."}})


class DocumentBody(Body):
    text: InputText = Field(description="The text to rank", examples=["It is a bear."])


class RerankBody(ModelBody):
    """`POST /v1/rerank`."""

    query: InputText = Field(
        description="The query that documents are ranked for", examples=["What is a panda?"]
    )
    documents: list[InputText | DocumentBody] = Field(
        validation_alias=AliasChoices("documents", "texts"),
        min_length=1,
        max_length=MAX_INPUTS,
        description=f'Texts, or objects with a "text"; at most {MAX_INPUTS}',
        examples=[["It is a bear.", {"text": "hi"}]],
    )
    top_n: int | None = Field(
        None, ge=1, description="Return only the best documents; none: all", examples=[1]
    )
    return_documents: bool = Field(False, description="Return each document beside its score")
    return_text: bool = Field(False, description="The same for `texts`")
    _listed: bool = PrivateAttr(False)  # the shapes of text-embeddings-inference: `texts` in, a bare list out

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"query": "What is a panda?", "documents": ["It is a bear.", "hi"], "top_n": 1}
        }
    )

    @model_validator(mode="wrap")
    @classmethod
    def _see_texts(cls, value: Any, handler: ModelWrapValidatorHandler[RerankBody]) -> RerankBody:
        body = handler(value)
        body._listed = isinstance(value, dict) and "texts" in value
        return body

    @property
    def listed(self) -> bool:
        return self._listed

    @property
    def plain_texts(self) -> tuple[str, ...]:
        return tuple(one if isinstance(one, str) else one.text for one in self.documents)


class ScoreBody(ModelBody):
    """`POST /v1/score`."""

    text_1: InputText | InputTexts = Field(
        description="One text, or as many as `text_2` has", examples=["What is a panda?"]
    )
    text_2: InputText | InputTexts = Field(
        description=f"The texts to score against `text_1`; at most {MAX_INPUTS}",
        examples=[["It is a bear.", "hi"]],
    )

    model_config = ConfigDict(
        json_schema_extra={"example": {"text_1": "What is a panda?", "text_2": ["It is a bear.", "hi"]}}
    )

    @model_validator(mode="after")
    def _pairs(self) -> ScoreBody:
        queries, documents = self.queries, self.documents
        if len(queries) not in (1, len(documents)):
            raise ValueError(
                f"text_1: it has {len(queries)} texts and text_2 has {len(documents)}; give one, or as many"
            )
        return self

    @property
    def queries(self) -> tuple[str, ...]:
        return (self.text_1,) if isinstance(self.text_1, str) else tuple(self.text_1)

    @property
    def documents(self) -> tuple[str, ...]:
        return (self.text_2,) if isinstance(self.text_2, str) else tuple(self.text_2)


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding of one input: numbers, or base64 of them."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/v1/embeddings`."""

    object: Literal["list"] = "list"
    model: str
    usage: EmbeddingUsage
    data: list[Embedding]


class LlamaEmbedding(msgspec.Struct, frozen=True):
    """The embedding of one input in llama-server's shape."""

    index: int
    embedding: list[list[float]]


class RankedText(msgspec.Struct, frozen=True):
    text: str


class Ranked(msgspec.Struct, frozen=True):
    """The score of one document, and the document itself where it was asked for."""

    index: int
    relevance_score: float
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class RankedInList(msgspec.Struct, frozen=True):
    """The same in the shape of text-embeddings-inference."""

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The documents of `/v1/rerank`, best first."""

    object: Literal["list"] = "list"
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


class Score(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of `/v1/score`, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
