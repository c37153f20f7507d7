"""Embeddings, rankings and scores: /v1/embeddings, /v1/rerank, /v1/score, and llama-server's /embedding."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.errors import ContextLengthExceeded, InvalidRequest
from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.messages import TokenizePairs, TokenizeTexts, TokenLists
from cllm.server.body import Body, ModelName, Name, TokenId, about
from cllm.server.dialect import StructResponse
from cllm.server.dialects.cllm import cllm
from cllm.server.dialects.llama_server import llama_server
from cllm.server.dialects.openai import OpenAIDialect
from cllm.server.sse import GONE, collect
from cllm.server.submit import check_tokens, model_name, tokenize, use_engine
from cllm.types import RAW, Pooling, Request, to_vector

MAX_INPUTS = 2048
ENTRIES_AT_A_TIME = 64
TokenizedInputs = tuple[tuple[int, ...], ...]


class EmbeddingsDialect(OpenAIDialect):
    """OpenAI's dialect, with what vLLM and Jina add to it."""

    name = "embeddings"
    about = "Embeddings of texts, and rankings and scores by a reranker."
    prefix = "/v1/embeddings/"


embeddings = EmbeddingsDialect()
User = Annotated[Name | None, about("Ignored", "ann")]
InputText = Annotated[str, Meta(min_length=1)]
InputTexts = Annotated[tuple[InputText, ...], Meta(min_length=1, max_length=MAX_INPUTS)]


class InputPart(msgspec.Struct, Body, kw_only=True):
    """A part of an input."""

    type: Annotated[Literal["text"], about("Always `text`: the model accepts text only")] = "text"
    text: Annotated[str, about("The text of this part", "The cat sat.")]


class InputObject(msgspec.Struct, Body, kw_only=True):
    """An input in an object, as llama-server takes it."""

    content: Annotated[
        InputText | list[InputPart] | None, about("Text, or parts of text", "The cat sat.")
    ] = None
    prompt_string: Annotated[InputText | None, about("Text", "The cat sat.")] = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or self.prompt_string or ""


MixedInput = Annotated[list[InputText | TokenId], Meta(min_length=1)]
Input = Annotated[
    InputText
    | InputObject
    | Annotated[list[InputText | TokenId | MixedInput | InputObject], Meta(min_length=1)],
    about(
        f"A text, texts, token ids, or lists of token ids; at most {MAX_INPUTS} inputs",
        "The cat sat.",
        ["The cat sat.", "A feline rested."],
    ),
]


def has_tokens(value: Any) -> bool:
    """Whether an input has token ids: then a list of it is one input."""
    return isinstance(value, list) and any(isinstance(part, int) for part in value)


def split_inputs(value: Any) -> list[list[str | int]]:
    """Each input as texts and token ids: a list with a number in it is one input."""
    if has_tokens(value):
        return [value]
    if isinstance(value, list):
        return [pieces for part in value for pieces in split_inputs(part)]
    return [[value.text if isinstance(value, InputObject) else value]]


def check_inputs(field: str, value: Any) -> None:
    """Check what the type of inputs cannot say. Raises ValueError."""
    if not isinstance(value, list):
        return
    if has_tokens(value):
        if not all(isinstance(part, str | int) for part in value):
            raise ValueError(f"{field}: an input with token ids has texts beside them, no lists or objects")
    elif len(value) > MAX_INPUTS or not all(has_tokens(part) for part in value if isinstance(part, list)):
        raise ValueError(f"{field}: at most {MAX_INPUTS} inputs; a list in it has token ids")


class EmbeddingsBody(msgspec.Struct, Body, kw_only=True):
    """`POST /v1/embeddings`."""

    EXAMPLE = {"input": ["The cat sat.", "A feline rested."], "dimensions": 64}

    model: ModelName = None
    user: User = None
    input: Input
    encoding_format: Annotated[
        Literal["float", "base64"], about("`float`: numbers; `base64`: little-endian 32-bit floats")
    ] = "float"
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        about("Keep only the first dimensions of an embedding, scaled to length 1 again", 64),
    ] = None

    def check(self) -> None:
        check_inputs("input", self.input)


class LlamaEmbeddingBody(msgspec.Struct, Body, kw_only=True):
    """`POST /embedding`, as llama-server has it."""

    ALIASES = {"content": ("content", "input")}
    EXAMPLE = {"content": "The cat sat."}

    model: ModelName = None
    content: Input
    embd_normalize: Annotated[
        int,
        about(
            "Norm: -1 none, 0 largest element is 32760, 1 taxicab, 2 Euclidean, above p-norm", ge=-1, le=64
        ),
    ] = 2

    def check(self) -> None:
        check_inputs("content", self.content)


class DocumentBody(msgspec.Struct, Body, kw_only=True):
    text: Annotated[InputText, about("The text to rank", "It is a bear.")]


Documents = Annotated[tuple[InputText | DocumentBody, ...], Meta(min_length=1, max_length=MAX_INPUTS)]


class RerankBody(msgspec.Struct, Body, kw_only=True):
    """`POST /v1/rerank`."""

    ALIASES = {"documents": ("documents", "texts")}
    EXAMPLE = {"query": "What is a panda?", "documents": ["It is a bear.", "hi"], "top_n": 1}

    model: ModelName = None
    user: User = None
    query: Annotated[InputText, about("The query that documents are ranked for", "What is a panda?")]
    documents: Annotated[
        Documents,
        about(f'Texts, or objects with a "text"; at most {MAX_INPUTS}', ["It is a bear.", {"text": "hi"}]),
    ]
    texts: Annotated[
        Documents | None,
        about(
            "`documents` as text-embeddings-inference names them; the answer is then its list",
            ["It is a bear.", "hi"],
        ),
    ] = None
    top_n: Annotated[
        Annotated[int, Meta(ge=1)] | None, about("Return only the best documents; none: all", 1)
    ] = None
    return_documents: Annotated[bool, about("Return each document beside its score")] = False
    return_text: Annotated[bool, about("The same for `texts`")] = False

    @property
    def plain_texts(self) -> tuple[str, ...]:
        return tuple(one if isinstance(one, str) else one.text for one in self.documents)


class ScoreBody(msgspec.Struct, Body, kw_only=True):
    """`POST /v1/score`."""

    EXAMPLE = {"text_1": "What is a panda?", "text_2": ["It is a bear.", "hi"]}

    model: ModelName = None
    user: User = None
    text_1: Annotated[
        InputText | InputTexts, about("One text, or as many as `text_2` has", "What is a panda?")
    ]
    text_2: Annotated[
        InputText | InputTexts,
        about(f"The texts to score against `text_1`; at most {MAX_INPUTS}", ["It is a bear.", "hi"]),
    ]

    def check(self) -> None:
        queries, documents = len(self.queries), len(self.documents)
        if queries not in (1, documents):
            raise ValueError(
                f"text_1: it has {queries} texts and text_2 has {documents}; give one, or as many"
            )

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


_VECTOR = [0.118, -0.042, 0.307]
_USAGE = EmbeddingUsage(8, 8)
_EMBEDDINGS = EmbeddingList(
    model="SmolLM2-135M-Instruct", data=[Embedding(index=0, embedding=_VECTOR)], usage=_USAGE
)
_SCORED = ScoreResponse(
    id="score-8f0c2d7e",
    created=1767225600,
    model="bge-reranker-v2-m3",
    data=[Score(index=0, score=5.27)],
    usage=_USAGE,
)
_RANKED = RerankResponse(model="bge-reranker-v2-m3", results=[Ranked(0, 5.27)], usage=_USAGE)


async def encode_entries(entries: Iterable[Any]) -> list[Any]:
    """Entries as JSON. A call may hold a million numbers: the event loop gets a turn every few entries."""
    encoded: list[Any] = []
    for entry in entries:
        encoded.append(msgspec.Raw(msgspec.json.encode(entry)))
        if len(encoded) % ENTRIES_AT_A_TIME == 0:
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
            tokens = await tokenize(engine, pieces, add_special=True, parse_special=False)
        if limit and len(tokens) > limit:
            raise ContextLengthExceeded.of_input(index, len(tokens), limit, field)
        found.append(tokens)
    return tuple(found)


async def embed(
    engine: EngineClient, inputs: TokenizedInputs, http: HttpRequest
) -> tuple[Sequence[bytes], EmbeddingUsage] | None:
    """The embeddings of inputs in their order, or None if the client disconnected."""
    tenant = http.scope["state"]["tenant"].name
    request = Request(id=uuid.uuid4().hex, prompt=(), max_tokens=0, embed=inputs, tenant=tenant)
    collected = await collect(engine, [engine.submit(request, AsyncOutputStream)], http)
    if collected is None:
        return None
    last = collected[0][-1]
    assert last.usage is not None and len(last.embeddings) == len(inputs)
    return last.embeddings, EmbeddingUsage(last.usage.prompt_tokens, last.usage.prompt_tokens)


def embedding_length(engine: EngineClient) -> int:
    """How many numbers an embedding of this model has; raises InvalidRequest for a reranker."""
    info, _ = loaded(engine)
    if info.pooling is Pooling.RANK:
        raise InvalidRequest(
            f"{info.name} is a reranker and makes no embeddings: use /v1/rerank, or start the server with "
            "--pooling mean, cls or last",
            field="model",
        )
    return info.vector_length


async def score_pairs(
    engine: EngineClient, queries: Sequence[str], documents: Sequence[str], field: str, http: HttpRequest
) -> tuple[list[float], EmbeddingUsage] | None:
    """The score of each document for the one query, or for its own; None if the client disconnected.

    `field` is the one that holds the documents, for errors.

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
    found = await embed(engine, inputs, http)
    if found is None:
        return None
    return [float(to_vector(data, norm=RAW)[0]) for data in found[0]], found[1]


@embeddings.post("/v1/embeddings", _EMBEDDINGS, computes=True)
async def embed_texts(body: EmbeddingsBody, http: HttpRequest) -> Response:
    """Turn texts into embeddings of length 1."""
    engine = await use_engine(http, body.model)
    length = embedding_length(engine)
    if loaded(engine)[0].pooling is Pooling.NONE:
        raise InvalidRequest(
            "this server pools nothing (--pooling none): use /embedding, a vector a token", "model"
        )
    if body.dimensions is not None and body.dimensions > length:
        raise InvalidRequest(
            f"dimensions is {body.dimensions}, but this model's embeddings have {length}", field="dimensions"
        )
    found = await embed(engine, await tokenize_inputs(engine, body.input, "input"), http)
    if found is None:
        return Response(status_code=GONE)
    arrays = (to_vector(data, body.dimensions) for data in found[0])
    as_text = body.encoding_format == "base64"
    entries = await encode_entries(
        Embedding(
            index=index, embedding=base64.b64encode(array.tobytes()).decode() if as_text else array.tolist()
        )
        for index, array in enumerate(arrays)
    )
    model = model_name(engine, body.model)
    return StructResponse(EmbeddingList(model=model, usage=found[1], data=entries))


@llama_server.post("/embedding", [LlamaEmbedding(0, [_VECTOR])], computes=True)
@llama_server.post("/embeddings", shown=False)
async def llama_embedding(body: LlamaEmbeddingBody, http: HttpRequest) -> Response:
    """Turn texts into embeddings, in llama-server's shape."""
    engine = await use_engine(http, body.model)
    length = embedding_length(engine)
    found = await embed(engine, await tokenize_inputs(engine, body.content, "content"), http)
    if found is None:
        return Response(status_code=GONE)
    if loaded(engine)[0].pooling is Pooling.NONE:
        arrays = (to_vector(data, norm=RAW).reshape(-1, length) for data in found[0])
    else:
        arrays = (to_vector(data, norm=body.embd_normalize).reshape(1, -1) for data in found[0])
    entries = (LlamaEmbedding(index, array.tolist()) for index, array in enumerate(arrays))
    return StructResponse(await encode_entries(entries))


@embeddings.post("/v1/rerank", _RANKED, computes=True)
@embeddings.post("/v1/reranking", shown=False)
@llama_server.post("/rerank", shown=False)
@llama_server.post("/reranking", shown=False)
async def rerank(body: RerankBody, http: HttpRequest) -> Response:
    """Order documents by how well they answer a query; needs a reranker."""
    engine = await use_engine(http, body.model)
    texts = body.plain_texts
    found = await score_pairs(engine, [body.query], texts, "documents", http)
    if found is None:
        return Response(status_code=GONE)
    scores, usage = found
    best = sorted(range(len(scores)), key=lambda index: scores[index], reverse=True)[: body.top_n]
    if body.texts is not None:
        shown = [texts[index] if body.return_text else msgspec.UNSET for index in best]
        return StructResponse(
            [RankedInList(index, scores[index], text) for index, text in zip(best, shown, strict=True)]
        )
    results = [
        Ranked(index, scores[index], RankedText(texts[index]) if body.return_documents else msgspec.UNSET)
        for index in best
    ]
    model = model_name(engine, body.model)
    return StructResponse(RerankResponse(model=model, results=results, usage=usage))


@embeddings.post("/v1/score", _SCORED, computes=True)
@cllm.post("/score", shown=False)
async def score(body: ScoreBody, http: HttpRequest) -> Response:
    """Score pairs of texts, one with one, one with many, or each with its own; needs a reranker."""
    engine = await use_engine(http, body.model)
    found = await score_pairs(engine, body.queries, body.documents, "text_2", http)
    if found is None:
        return Response(status_code=GONE)
    response = ScoreResponse(
        id=f"score-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model_name(engine, body.model),
        data=[Score(index=index, score=score) for index, score in enumerate(found[0])],
        usage=found[1],
    )
    return StructResponse(response)
