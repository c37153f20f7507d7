"""Embeddings, rankings and scores: /v1/embeddings, /v1/rerank, /v1/score, and llama-server's /embedding."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.errors import ContextLengthExceeded, InvalidRequest
from cllm.frontend.async_calls import loaded, run_tokenizer
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.protocol import embeddings as api
from cllm.server.protocol.base import LargeJsonRoute, StructResponse, documented
from cllm.server.sse import GONE, collect
from cllm.server.submit import model_name, tokenize_pieces, use_engine
from cllm.text.embeddings import RAW, to_vector
from cllm.types import Pooling, Request
from cllm.workers.messages import TokenizePairs, TokenizeTexts, TokenLists

ENTRIES_AT_A_TIME = 64
Inputs = tuple[tuple[int, ...], ...]
_VECTOR = [0.118, -0.042, 0.307]
_USAGE = api.EmbeddingUsage(8, 8)
_EMBEDDINGS = api.EmbeddingList(
    model="SmolLM2-135M-Instruct", data=[api.Embedding(index=0, embedding=_VECTOR)], usage=_USAGE
)
_SCORED = api.ScoreResponse(
    id="score-8f0c2d7e",
    created=1767225600,
    model="bge-reranker-v2-m3",
    data=[api.Score(index=0, score=5.27)],
    usage=_USAGE,
)
_RANKED = api.RerankResponse(model="bge-reranker-v2-m3", results=[api.Ranked(0, 5.27)], usage=_USAGE)
router = APIRouter(tags=["embeddings"], route_class=LargeJsonRoute)


async def encode_entries(entries: Iterable[Any]) -> list[Any]:
    """Entries as JSON. A call may hold a million numbers: the event loop gets a turn every few entries."""
    encoded: list[Any] = []
    for entry in entries:
        encoded.append(msgspec.Raw(msgspec.json.encode(entry)))
        if len(encoded) % ENTRIES_AT_A_TIME == 0:
            await asyncio.sleep(0)
    return encoded


async def tokenize_inputs(engine: EngineClient, value: api.Input, field: str) -> Inputs:
    """The tokens of each input; raises ContextLengthExceeded for one that is too long."""
    inputs = api.split_inputs(value)
    limit = loaded(engine)[1].embed.tokens
    texts = tuple(pieces[0] for pieces in inputs if len(pieces) == 1 and isinstance(pieces[0], str))
    lists: Inputs = ()
    if texts:
        lists = (await run_tokenizer(engine, TokenizeTexts(texts, limit, field), TokenLists)).lists
    if len(texts) == len(inputs):
        return lists
    whole, found = iter(lists), []
    for index, pieces in enumerate(inputs):
        if len(pieces) == 1 and isinstance(pieces[0], str):
            found.append(next(whole))
            continue
        tokens = await tokenize_pieces(engine, pieces, field)
        if limit and len(tokens) > limit:
            raise ContextLengthExceeded.of_input(index, len(tokens), limit, field)
        found.append(tokens)
    return tuple(found)


async def embed(
    engine: EngineClient, inputs: Inputs, http: HttpRequest
) -> tuple[Sequence[bytes], api.EmbeddingUsage] | None:
    """The embeddings of inputs in their order, or None if the client disconnected."""
    tenant = http.scope["state"]["tenant"].name
    request = Request(id=uuid.uuid4().hex, prompt=(), max_tokens=0, embed=inputs, tenant=tenant)
    collected = await collect(engine, [engine.submit(request, AsyncOutputStream)], http)
    if collected is None:
        return None
    last = collected[0][-1]
    assert last.usage is not None and len(last.embeddings) == len(inputs)
    return last.embeddings, api.EmbeddingUsage(last.usage.prompt_tokens, last.usage.prompt_tokens)


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
) -> tuple[list[float], api.EmbeddingUsage] | None:
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
    inputs: Inputs = ()
    for index, query in enumerate(queries):
        texts = (documents[index],) if several else tuple(documents)
        try:
            task = TokenizePairs(query, texts, limits.embed.tokens)
            inputs += (await run_tokenizer(engine, task, TokenLists)).lists
        except ContextLengthExceeded as error:
            old, new = ("documents 0", f"{field} {index}") if several else ("documents", field)
            raise ContextLengthExceeded(0, 0, message=error.message.replace(old, new), field=field) from None
    found = await embed(engine, inputs, http)
    if found is None:
        return None
    return [float(to_vector(data, norm=RAW)[0]) for data in found[0]], found[1]


@router.post("/v1/embeddings", **documented(_EMBEDDINGS, computes=True))
async def embeddings(body: api.EmbeddingsBody, http: HttpRequest) -> Response:
    """Turn texts into embeddings of length 1."""
    engine = await use_engine(http, body.model)
    length = embedding_length(engine)
    if loaded(engine)[0].pooling is Pooling.NONE:
        raise InvalidRequest(
            "this server pools nothing (--pooling none): use /embedding, a vector a token", "model"
        )
    if body.dimensions is not None and body.dimensions > length:
        raise InvalidRequest(
            f"dimensions is {body.dimensions}, but this model's embeddings have {length}",
            field="dimensions",
        )
    found = await embed(engine, await tokenize_inputs(engine, body.input, "input"), http)
    if found is None:
        return Response(status_code=GONE)
    arrays = (to_vector(data, body.dimensions) for data in found[0])
    as_text = body.encoding_format == "base64"
    entries = await encode_entries(
        api.Embedding(
            index=index,
            embedding=base64.b64encode(array.tobytes()).decode() if as_text else array.tolist(),
        )
        for index, array in enumerate(arrays)
    )
    model = model_name(engine, body.model)
    return StructResponse(api.EmbeddingList(model=model, usage=found[1], data=entries))


@router.post("/embedding", **documented([api.LlamaEmbedding(0, [_VECTOR])], computes=True))
@router.post("/embeddings", response_model=None, include_in_schema=False)
async def llama_embedding(body: api.LlamaEmbeddingBody, http: HttpRequest) -> Response:
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
    entries = (api.LlamaEmbedding(index, array.tolist()) for index, array in enumerate(arrays))
    return StructResponse(await encode_entries(entries))


@router.post("/v1/rerank", **documented(_RANKED, computes=True))
@router.post("/v1/reranking", response_model=None, include_in_schema=False)
@router.post("/rerank", response_model=None, include_in_schema=False)
@router.post("/reranking", response_model=None, include_in_schema=False)
async def rerank(body: api.RerankBody, http: HttpRequest) -> Response:
    """Order documents by how well they answer a query; needs a reranker."""
    engine = await use_engine(http, body.model)
    texts = body.plain_texts
    found = await score_pairs(engine, [body.query], texts, "documents", http)
    if found is None:
        return Response(status_code=GONE)
    scores, usage = found
    best = sorted(range(len(scores)), key=lambda index: scores[index], reverse=True)[: body.top_n]
    if body.listed:
        shown = [texts[index] if body.return_text else msgspec.UNSET for index in best]
        return StructResponse(
            [api.RankedInList(index, scores[index], text) for index, text in zip(best, shown, strict=True)]
        )
    results = [
        api.Ranked(
            index,
            scores[index],
            api.RankedText(texts[index]) if body.return_documents else msgspec.UNSET,
        )
        for index in best
    ]
    model = model_name(engine, body.model)
    return StructResponse(api.RerankResponse(model=model, results=results, usage=usage))


@router.post("/v1/score", **documented(_SCORED, computes=True))
@router.post("/score", response_model=None, include_in_schema=False)
async def score(body: api.ScoreBody, http: HttpRequest) -> Response:
    """Score pairs of texts, one with one, one with many, or each with its own; needs a reranker."""
    engine = await use_engine(http, body.model)
    found = await score_pairs(engine, body.queries, body.documents, "text_2", http)
    if found is None:
        return Response(status_code=GONE)
    response = api.ScoreResponse(
        id=f"score-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model_name(engine, body.model),
        data=[api.Score(index=index, score=score) for index, score in enumerate(found[0])],
        usage=found[1],
    )
    return StructResponse(response)
