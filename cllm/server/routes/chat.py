"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.chat.conversation import open_chat
from cllm.frontend.engine_registry import EngineRegistry
from cllm.server.protocol.base import StructResponse
from cllm.server.protocol.chat import ChatAnswer, ChatBody
from cllm.server.sse import GONE, EventStream
from cllm.server.submit import check_model, make_request, model_name


def routes(registry: EngineRegistry) -> APIRouter:
    """The router. Each handler asks the registry once for the engine that serves its request."""
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, http: HttpRequest) -> Response:
        """Answer a conversation; with tools, maybe by calling them."""
        engine = registry.current
        check_model(body.model)
        top = (body.top_logprobs or 0) if body.logprobs else None
        request = await make_request(
            engine,
            http,
            body,
            request_id=f"chatcmpl-{uuid.uuid4().hex}",
            max_tokens=body.max_tokens,
            stop=body.stops,
            logprobs=max(1, top) if top is not None else 0,
        )
        job = await open_chat(engine, body.conversation(), request, body.n)
        head = {"id": request.id, "created": int(time.time()), "model": model_name(engine, body.model)}
        answer = ChatAnswer(head, top, include_usage=body.include_usage)
        if body.stream:
            return EventStream(engine, job.streams, answer.chunks(job))
        replies = await job.replies(http)
        if replies is None:
            return Response(status_code=GONE)
        return StructResponse(answer.whole(replies, job.prompt_tokens))

    return router
