"""Embeddings, rankings and scores: /v1/embeddings, /v1/rerank, /v1/score, and llama-server's /embedding."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request as HttpRequest

from cllm.errors import ContextLengthExceeded, InvalidRequest
from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.limits import MAX_INPUTS
from cllm.messages import TokenizePairs, TokenizeTexts, TokenLists
from cllm.server.body import Body, ModelName, Name, Timeout, TokenId
from cllm.server.dialects.cllm import cllm
from cllm.server.dialects.llama_body import has_tokens, split_inputs
from cllm.server.dialects.llama_server import llama_server
from cllm.server.dialects.openai import OpenAIDialect
from cllm.server.dialects.openai.bodies import NO_MEDIA, JsonValue, TextPart
from cllm.server.examples import VECTOR
from cllm.server.sse import collect
from cllm.server.submit import check_tokens, tokenize, use_engine
from cllm.types import Pooling, Request

BYTES_AT_A_TIME = 1 << 18
RAW = -1  # as `norm` of `to_vector`
TokenizedInputs = tuple[tuple[int, ...], ...]


class EmbeddingsDialect(OpenAIDialect):
    """OpenAI's dialect, with what vLLM and Jina add to it."""

    name = "embeddings"
    about = "Embeddings of texts, and rankings and scores by a reranker."
    prefix = "/v1/embeddings/"


embeddings = EmbeddingsDialect()
User = Name | None
InputText = Annotated[str, Meta(min_length=1)]
InputTexts = Annotated[tuple[InputText, ...], Meta(min_length=1, max_length=MAX_INPUTS)]


class InputObject(msgspec.Struct, Body, kw_only=True):
    """An input in an object, as llama-server takes it."""

    content: InputText | list[TextPart] | None = None
    prompt_string: InputText | None = None
    multimodal_data: list[Any] | None = None

    def __post_init__(self) -> None:
        if self.multimodal_data:
            raise ValueError(NO_MEDIA)

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or self.prompt_string or ""


MixedInput = Annotated[list[InputText | TokenId], Meta(min_length=1)]
InputList = Annotated[list[InputText | TokenId | MixedInput | InputObject], Meta(min_length=1)]
Input = InputText | InputObject | InputList


def check_inputs(field: str, value: Any) -> None:
    """Check inputs beyond their type. Raises ValueError."""
    if not isinstance(value, list):
        return
    if has_tokens(value):
        if not all(isinstance(part, str | int) for part in value):
            raise ValueError(f"{field}: an input with token ids has texts beside them, no lists or objects")
    elif len(value) > MAX_INPUTS or not all(has_tokens(part) for part in value if isinstance(part, list)):
        raise ValueError(f"{field}: at most {MAX_INPUTS} inputs; a list in it has token ids")


class InputsBody(msgspec.Struct, Body, kw_only=True):
    """What all of these routes take."""

    model: ModelName = None
    timeout: Timeout = None


class EmbeddingsBody(InputsBody, kw_only=True):
    """`POST /v1/embeddings`."""

    user: User = None
    input: Input
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        check_inputs("input", self.input)


class LlamaEmbeddingBody(InputsBody, kw_only=True):
    """`POST /embedding`, as llama-server has it."""

    ALIASES = {"content": ("content", "input")}

    content: Input
    embd_normalize: Annotated[int, Meta(ge=-1, le=64)] = 2

    def __post_init__(self) -> None:
        check_inputs("content", self.content)


class DocumentBody(msgspec.Struct, Body, kw_only=True):
    text: InputText


Documents = Annotated[tuple[InputText | DocumentBody, ...], Meta(min_length=1, max_length=MAX_INPUTS)]


class RerankBody(InputsBody, kw_only=True):
    """`POST /v1/rerank`."""

    ALIASES = {"documents": ("documents", "texts")}

    user: User = None
    query: InputText
    documents: Documents
    texts: JsonValue = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False
    return_text: bool = False


class ScoreBody(InputsBody, kw_only=True):
    """`POST /v1/score`."""

    user: User = None
    text_1: InputText | InputTexts
    text_2: InputText | InputTexts

    def __post_init__(self) -> None:
        queries, documents = len(self.queries), len(self.documents)
        if queries not in (1, documents):
            raise ValueError(f"text_1: {queries} texts, but {documents} in text_2; give one, or as many")

    @property
    def queries(self) -> tuple[str, ...]:
        return (self.text_1,) if isinstance(self.text_1, str) else self.text_1

    @property
    def documents(self) -> tuple[str, ...]:
        return (self.text_2,) if isinstance(self.text_2, str) else self.text_2


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


class Ranked(msgspec.Struct):
    """The score of one document, and the document itself where it was asked for."""

    index: int
    relevance_score: float
    document: DocumentBody | UnsetType = UNSET


class RankedInList(msgspec.Struct):
    """The same in the shape of text-embeddings-inference."""

    index: int
    score: float
    text: str | UnsetType = UNSET


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


def to_vector(data: bytes, dimensions: int | None = None, norm: int = 2) -> npt.NDArray[np.float32]:
    """The first `dimensions` elements of an embedding in `RequestOutput.embeddings`, scaled to norm 1.

    `norm` is that of llama-server: RAW scales nothing, 0 makes the largest element 32760, 1 and above are the
    p-norms. A vector of zeros is not scaled.
    """
    vector = np.frombuffer(data, "<f4")[:dimensions].astype(np.float64)
    if norm == RAW:
        length = 1.0
    elif norm == 0:
        length = float(np.abs(vector).max()) / 32760.0
    else:
        length = float((np.abs(vector) ** norm).sum() ** (1.0 / norm))
    return (vector / length if length > 0 else vector).astype("<f4")


async def encode_entries(entries: Iterable[Any]) -> list[Any]:
    """Entries as JSON. A call may hold a million numbers: the event loop gets a turn every few thousand."""
    encoded: list[Any] = []
    size = 0
    for entry in entries:
        encoded.append(msgspec.Raw(data := msgspec.json.encode(entry)))
        if (size := size + len(data)) >= BYTES_AT_A_TIME:
            size = 0
            await asyncio.sleep(0)
    return encoded


async def tokenize_inputs(engine: EngineClient, value: Input, field: str) -> TokenizedInputs:
    """The tokens of each input; raises ContextLengthExceeded for one that is too long."""
    inputs = split_inputs(value)
    limit = loaded(engine)[1].embed.tokens
    texts = tuple(pieces[0] for pieces in inputs if len(pieces) == 1 and isinstance(pieces[0], str))
    lists: TokenizedInputs = ()
    if texts:
        lists = (await run_tokenizer(engine, TokenizeTexts(texts, limit, field), TokenLists)).lists
    if len(texts) == len(inputs):
        return lists
    whole, found = iter(lists), []
    for index, pieces in enumerate(inputs):
        tokens = check_tokens(engine, [piece for piece in pieces if isinstance(piece, int)], field)
        if not tokens:
            tokens = next(whole)
        elif len(tokens) < len(pieces):
            tokens = await tokenize(engine, pieces, field, add_special=True, parse_special=False)
        if limit and len(tokens) > limit:
            raise ContextLengthExceeded.of_input(index, len(tokens), limit, field)
        found.append(tokens)
    return tuple(found)


async def embed(
    engine: EngineClient, inputs: TokenizedInputs, http: HttpRequest
) -> tuple[Sequence[bytes], EmbeddingUsage]:
    """The embeddings of inputs in their order."""
    state = http.scope["state"]
    if name := state.get("adapter"):
        raise InvalidRequest(f"model: embeddings are computed without adapters: leave out ':{name}'", "model")
    request = Request(
        id=uuid.uuid4().hex,
        max_tokens=0,
        embed=inputs,
        timeout_s=state["timeout_s"],
        tenant=state["tenant"].name,
        priority=state.get("priority", 0),
    )
    ((*_, last),) = await collect(engine, [engine.submit(request, AsyncOutputStream)], http)
    assert last.usage is not None and len(last.embeddings) == len(inputs)
    return last.embeddings, EmbeddingUsage(last.usage.prompt_tokens, last.usage.prompt_tokens)


def check_embeds(engine: EngineClient, dimensions: int | None = None, *, pooled: bool = True) -> int:
    """Length of this model's embeddings. Raises InvalidRequest where it makes none, or none like these."""
    info, _ = loaded(engine)
    if info.pooling is Pooling.RANK:
        raise InvalidRequest(
            f"{info.name} is a reranker and makes no embeddings: use /v1/rerank, or start the server with "
            "--pooling mean, cls or last",
            field="model",
        )
    if pooled and info.pooling is Pooling.NONE:
        message = "this server pools nothing (--pooling none): use /embedding, a vector a token"
        raise InvalidRequest(message, "model")
    if dimensions is not None and dimensions > info.vector_length:
        message = f"dimensions is {dimensions}, but this model's embeddings have {info.vector_length}"
        raise InvalidRequest(message, "dimensions")
    return info.vector_length


async def score_pairs(
    engine: EngineClient, queries: Sequence[str], documents: Sequence[str], field: str, http: HttpRequest
) -> tuple[list[float], EmbeddingUsage]:
    """The score of each document for the one query, or for its own. `field` names the documents in errors.

    Raises InvalidRequest where the model is no reranker: no other model was trained to give a score.
    """
    info, limits = loaded(engine)
    if info.pooling is not Pooling.RANK:
        raise InvalidRequest(
            f"{info.name} is not a reranker: it has no ranking head (its pooling is {info.pooling.value}); "
            "serve a reranker, or rank by the similarity of /v1/embeddings",
            field="model",
        )
    several = len(queries) > 1
    inputs: TokenizedInputs = ()
    for index, query in enumerate(queries):
        texts = (documents[index],) if several else tuple(documents)
        try:
            task = TokenizePairs(query, texts, limits.embed.tokens)
            inputs += (await run_tokenizer(engine, task, TokenLists)).lists
        except ContextLengthExceeded as error:
            old, new = ("documents 0", f"{field} {index}") if several else ("documents", field)
            raise ContextLengthExceeded(
                error.prompt_tokens, error.limit, message=error.message.replace(old, new), field=field
            ) from None
    vectors, usage = await embed(engine, inputs, http)
    return [float(to_vector(data, norm=RAW)[0]) for data in vectors], usage


@embeddings.post("/v1/embeddings", computes="embeddings")
async def embed_texts(body: EmbeddingsBody, http: HttpRequest) -> EmbeddingList:
    """Turn texts into embeddings of length 1."""
    engine = await use_engine(http, body.model, timeout_s=body.timeout)
    check_embeds(engine, body.dimensions)
    vectors, usage = await embed(engine, await tokenize_inputs(engine, body.input, "input"), http)
    arrays = (to_vector(data, body.dimensions) for data in vectors)
    as_text = body.encoding_format == "base64"
    shown = (base64.b64encode(array.tobytes()).decode() if as_text else array.tolist() for array in arrays)
    entries = await encode_entries(Embedding(index=index, embedding=one) for index, one in enumerate(shown))
    return EmbeddingList(model=body.model or loaded(engine)[0].name, usage=usage, data=entries)


@llama_server.post("/embedding", [LlamaEmbedding(0, [VECTOR])], computes="embeddings")
@llama_server.post("/embeddings", shown=False, computes="embeddings")
async def llama_embedding(body: LlamaEmbeddingBody, http: HttpRequest) -> list[Any]:
    """Turn texts into embeddings, in llama-server's shape."""
    engine = await use_engine(http, body.model, timeout_s=body.timeout)
    length = check_embeds(engine, pooled=False)
    vectors, _ = await embed(engine, await tokenize_inputs(engine, body.content, "content"), http)
    norm = RAW if loaded(engine)[0].pooling is Pooling.NONE else body.embd_normalize
    arrays = (to_vector(data, norm=norm).reshape(-1, length) for data in vectors)
    rows = iter(await encode_entries(row.tolist() for array in arrays for row in array))
    counts = (len(data) // (4 * length) for data in vectors)  # without pooling a row for each token
    return [LlamaEmbedding(index, [*islice(rows, count)]) for index, count in enumerate(counts)]


@embeddings.post("/v1/rerank", computes="rerank")
@embeddings.post("/v1/reranking", shown=False, computes="rerank")
@llama_server.post("/rerank", shown=False, computes="rerank")
@llama_server.post("/reranking", shown=False, computes="rerank")
async def rerank(body: RerankBody, http: HttpRequest) -> RerankResponse | list[RankedInList]:
    """Order documents by how well they answer a query; needs a reranker."""
    engine = await use_engine(http, body.model, timeout_s=body.timeout)
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    scores, usage = await score_pairs(engine, [body.query], texts, "documents", http)
    best = sorted(range(len(scores)), key=lambda index: scores[index], reverse=True)[: body.top_n]
    if body.texts is not None:
        shown = texts if body.return_text else [UNSET] * len(texts)
        return [RankedInList(index, scores[index], shown[index]) for index in best]
    found = [DocumentBody(text=text) if body.return_documents else UNSET for text in texts]
    results = [Ranked(index, scores[index], found[index]) for index in best]
    return RerankResponse(model=body.model or loaded(engine)[0].name, results=results, usage=usage)


@embeddings.post("/v1/score", computes="score")
@cllm.post("/score", shown=False, computes="score")
async def score(body: ScoreBody, http: HttpRequest) -> ScoreResponse:
    """Score pairs of texts, one with one, one with many, or each with its own; needs a reranker."""
    engine = await use_engine(http, body.model, timeout_s=body.timeout)
    scores, usage = await score_pairs(engine, body.queries, body.documents, "text_2", http)
    return ScoreResponse(
        id=f"score-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=body.model or loaded(engine)[0].name,
        data=[Score(index=index, score=score) for index, score in enumerate(scores)],
        usage=usage,
    )
