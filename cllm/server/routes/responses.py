"""OpenAI's /v1/responses, without its memory: every request carries its whole conversation."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.chat.conversation import count_tokens, open_chat
from cllm.errors import NotFound
from cllm.frontend.engine_registry import EngineRegistry
from cllm.server.protocol.responses import ResponsesBody
from cllm.server.protocol.responses_output import ResponseAnswer, echo
from cllm.server.submit import check_constraint, check_model, make_request, model_name


def routes(registry: EngineRegistry) -> APIRouter:
    """The router. Each handler asks the registry once for the engine that serves its request."""
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesBody, http: HttpRequest) -> Response | dict[str, Any]:
        """Answer an input; with tools, maybe by calling them. Nothing is stored."""
        engine = registry.current
        check_model(body.model)
        request = await make_request(
            engine,
            http,
            body,
            request_id=f"resp_{uuid.uuid4().hex}",
            max_tokens=body.max_output_tokens,
            stop=body.stops,
            logprobs=max(1, body.top) if body.top is not None else 0,
        )
        job = await open_chat(engine, body.to_conversation(), request)
        answer = ResponseAnswer(request.id, echo(body, model_name(engine, body.model)), body.top)
        return await answer.to(http, job, stream=body.stream)

    @router.post("/v1/responses/input_tokens", response_model=None)
    async def input_tokens(body: ResponsesBody) -> dict[str, Any]:
        """How many tokens the input has, as the model's template writes it."""
        engine = registry.current
        check_model(body.model)
        constrained = await check_constraint(engine, body) is not None
        count = await count_tokens(engine, body.to_conversation(), constrained=constrained)
        return {"object": "response.input_tokens", "input_tokens": count}

    @router.get("/v1/responses/{response_id:path}", include_in_schema=False)
    @router.delete("/v1/responses/{response_id:path}", include_in_schema=False)
    @router.post("/v1/responses/{response_id:path}", include_in_schema=False)
    async def stored(response_id: str) -> None:
        """Retrieve, delete, cancel, list input items: of nothing."""
        raise NotFound("there is no such response: this server is stateless, nothing is stored")

    return router
