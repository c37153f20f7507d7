"""For operators: another model, without dropping a stream."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import ConfigDict, Field

from cllm.server.schema import Body, Text
from cllm.server.switch import EngineSwitch
from cllm.server.text import loaded


class ReloadBody(Body):
    """`POST /admin/reload`."""

    model: Text = Field(
        default="",
        max_length=1024,
        description="GGUF file in --model-dir; empty: the file that is served, read again",
        examples=["SmolLM2-360M-Instruct-Q8_0.gguf"],
    )

    model_config = ConfigDict(json_schema_extra={"example": {"model": "SmolLM2-360M-Instruct-Q8_0.gguf"}})


def routes(switch: EngineSwitch) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.post("/admin/reload")
    async def reload(body: ReloadBody) -> dict[str, Any]:
        """Load a model beside the one that serves, then change over; running streams end on the old one."""
        facts, limits = loaded(await switch.reload(body.model))
        return {
            "model": facts.name,
            "description": facts.description,
            "sequences": limits.sequences,
            "request_tokens": limits.request_tokens,
        }

    return router
