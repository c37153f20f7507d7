"""Anthropic's routes: /v1/messages, /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.chat.conversation import count_tokens, open_chat
from cllm.frontend.engine_registry import EngineRegistry
from cllm.server.protocol.messages import CountBody, MessageAnswer, MessagesBody
from cllm.server.submit import check_constraint, check_model, make_request, model_name


def routes(registry: EngineRegistry) -> APIRouter:
    """The router. Each handler asks the registry once for the engine that serves its request."""
    router = APIRouter(tags=["Anthropic"])

    @router.post("/v1/messages", response_model=None)
    async def messages(body: MessagesBody, http: HttpRequest) -> Response | dict[str, Any]:
        """Answer a conversation; with tools, maybe by calling them."""
        engine = registry.current
        check_model(body.model)
        request = await make_request(
            engine,
            http,
            body,
            request_id=f"msg_{uuid.uuid4().hex}",
            max_tokens=body.max_tokens,
            stop=tuple(body.stop_sequences or ()),
        )
        job = await open_chat(engine, body.conversation(), request)
        answer = MessageAnswer(request.id, model_name(engine, body.model), job.prompt_tokens)
        return await answer.to(http, job, stream=body.stream)

    @router.post("/v1/messages/count_tokens")
    async def count(body: CountBody) -> dict[str, int]:
        """How many tokens a conversation has, as the model's template writes it."""
        engine = registry.current
        check_model(body.model)
        constrained = await check_constraint(engine, body) is not None
        return {"input_tokens": await count_tokens(engine, body.conversation(), constrained=constrained)}

    return router
