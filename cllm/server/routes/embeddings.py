"""Vectors and rankings: /v1/embeddings, /v1/rerank, and llama-server's /embedding."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.errors import InvalidRequest
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.engine_registry import EngineRegistry
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.server.middleware import tenant_of
from cllm.server.protocol.embeddings import EmbeddingsBody, Input, LlamaEmbeddingBody, RerankBody, as_list
from cllm.server.sse import GONE, collect
from cllm.server.submit import check_model, checked_tokens, loaded, model_name, run_tokenizer
from cllm.text.embeddings import RAW, to_vector
from cllm.types import Pooling, Request, Usage
from cllm.workers.tokenizer import TokenizePairs, TokenizerTask, TokenizeTexts, TokenLists

ENTRIES_AT_A_TIME = 64
Inputs = tuple[tuple[int, ...], ...]


class Vectors(msgspec.Struct, frozen=True):
    """What a call's inputs have become, in their order."""

    vectors: Sequence[bytes]
    usage: Usage

    def told_usage(self) -> dict[str, int]:
        tokens = self.usage.prompt_tokens
        return {"prompt_tokens": tokens, "total_tokens": tokens}


async def as_json(entries: Iterable[dict[str, Any]], **head: Any) -> Response:
    """A list of entries straight to bytes, under `data` of an object where there is a head.

    A call may hold a million numbers: the event loop gets a turn every few entries.
    """
    encoder = msgspec.json.Encoder()
    data: list[msgspec.Raw] = []
    for entry in entries:
        data.append(msgspec.Raw(encoder.encode(entry)))
        if len(data) % ENTRIES_AT_A_TIME == 0:
            await asyncio.sleep(0)
    return Response(encoder.encode({**head, "data": data} if head else data), media_type="application/json")


async def token_lists(engine: EngineClient, task: TokenizerTask) -> Inputs:
    answer = await run_tokenizer(engine, task)
    assert isinstance(answer, TokenLists)
    return answer.lists


async def inputs_of(engine: EngineClient, value: Input, field: str) -> Inputs:
    """The tokens of each input; those that cannot fit raise ContextLengthExceeded."""
    _, limits = loaded(engine)
    given = as_list(value)
    texts = [one for one in given if isinstance(one, str)]
    if texts:
        return await token_lists(engine, TokenizeTexts(tuple(texts), limits.embed.tokens, field))
    return tuple(checked_tokens(engine, one, field) for one in given if not isinstance(one, str))


async def embed(engine: EngineClient, inputs: Inputs, http: HttpRequest) -> Vectors | None:
    """The vectors of inputs, or None if the client left: then nothing more is computed for it."""
    request = Request(id=uuid.uuid4().hex, prompt=(), max_tokens=0, embed=inputs, tenant=tenant_of(http).name)
    stream = engine.submit(request, AsyncOutputStream)
    answers = await collect(engine, [stream], http.receive)
    if answers is None:
        return None
    last = answers[0][-1]
    assert last.usage is not None and len(last.vectors) == len(inputs)
    return Vectors(last.vectors, last.usage)


def vector_length(engine: EngineClient) -> int:
    """How many numbers a vector of this model has; raises InvalidRequest for one that makes none."""
    info, _ = loaded(engine)
    if info.pooling is Pooling.RANK:
        raise InvalidRequest(
            f"{info.name} is a reranker: it scores pairs and makes no vectors; use /v1/rerank "
            "(or start the server with --pooling mean, cls or last)",
            field="model",
        )
    return info.vector_length


def refuse_unless_reranker(engine: EngineClient) -> None:
    """No score is made up from a model that was not trained to give one."""
    info, _ = loaded(engine)
    if info.pooling is not Pooling.RANK:
        raise InvalidRequest(
            f"{info.name} is not a reranker: it has no ranking head (its pooling is {info.pooling.value}); "
            "serve a reranker, or rank by the similarity of /v1/embeddings",
            field="model",
        )


def routes(registry: EngineRegistry) -> APIRouter:
    """The router. Each handler asks the registry once for the engine that serves its request."""
    router = APIRouter(tags=["vectors"])

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingsBody, http: HttpRequest) -> Response:
        """Turn texts into vectors of length 1."""
        engine = registry.current
        check_model(body.model)
        most = vector_length(engine)
        if body.dimensions is not None and body.dimensions > most:
            raise InvalidRequest(
                f"dimensions is {body.dimensions}, but this model's vectors have {most}", field="dimensions"
            )
        found = await embed(engine, await inputs_of(engine, body.input, "input"), http)
        if found is None:
            return Response(status_code=GONE)
        arrays = (to_vector(data, body.dimensions) for data in found.vectors)
        as_text = body.encoding_format == "base64"
        entries = (
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(array.tobytes()).decode() if as_text else array.tolist(),
            }
            for index, array in enumerate(arrays)
        )
        model = model_name(engine, body.model)
        return await as_json(entries, object="list", model=model, usage=found.told_usage())

    @router.post("/embedding", response_model=None)
    @router.post("/embeddings", response_model=None, include_in_schema=False)
    async def llama_embedding(body: LlamaEmbeddingBody, http: HttpRequest) -> Response:
        """Turn texts into vectors, in llama-server's shape."""
        engine = registry.current
        vector_length(engine)
        found = await embed(engine, await inputs_of(engine, body.content, "content"), http)
        if found is None:
            return Response(status_code=GONE)
        arrays = (to_vector(data, norm=body.embd_normalize) for data in found.vectors)
        return await as_json(
            {"index": index, "embedding": [array.tolist()]} for index, array in enumerate(arrays)
        )

    @router.post("/v1/rerank", response_model=None)
    @router.post("/v1/reranking", response_model=None, include_in_schema=False)
    @router.post("/rerank", response_model=None, include_in_schema=False)
    @router.post("/reranking", response_model=None, include_in_schema=False)
    async def rerank(body: RerankBody, http: HttpRequest) -> Response | dict[str, Any]:
        """Order documents by how well they answer a query; needs a reranker."""
        engine = registry.current
        check_model(body.model)
        refuse_unless_reranker(engine)
        task = TokenizePairs(body.query, body.texts, loaded(engine)[1].embed.tokens)
        found = await embed(engine, await token_lists(engine, task), http)
        if found is None:
            return Response(status_code=GONE)
        scores = [float(to_vector(data, norm=RAW)[0]) for data in found.vectors]
        best = sorted(range(len(scores)), key=lambda index: scores[index], reverse=True)[: body.top_n]
        results = [
            {
                "index": index,
                "relevance_score": scores[index],
                **({"document": {"text": body.texts[index]}} if body.return_documents else {}),
            }
            for index in best
        ]
        model = model_name(engine, body.model)
        return {"object": "list", "model": model, "results": results, "usage": found.told_usage()}

    return router
