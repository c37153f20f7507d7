"""For operators: is it alive, does it admit, what does it do."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field
from starlette.responses import Response

from cllm.errors import EngineNotReady
from cllm.frontend.engine_client import Health
from cllm.frontend.engine_registry import EngineRegistry
from cllm.server.protocol.base import Body, Text
from cllm.server.submit import loaded
from cllm.workers.messages import StateFileDone

INSPECT_LIMIT_S = 10.0


def routes(registry: EngineRegistry) -> APIRouter:
    """The router. Each handler asks the registry once for the engine that serves its request."""
    router = APIRouter(tags=["operation"])

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Alive: 200 as long as this process answers."""
        return {"status": "ok", "engine": registry.current.health.value}

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """Admitting: 200 when a request sent now would be computed."""
        health = registry.current.health
        return JSONResponse({"status": health.value}, 200 if health is Health.READY else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus."""
        metrics = registry.current.metrics
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/debug/kv")
    async def debug_kv() -> dict[str, Any]:
        """The pool and every lease, taken between two steps."""
        try:
            async with asyncio.timeout(INSPECT_LIMIT_S):
                snapshot = await asyncio.wrap_future(registry.current.inspect())
        except TimeoutError:
            raise EngineNotReady(f"the engine did not answer within {INSPECT_LIMIT_S:.0f} s") from None
        leased = len(snapshot.leases)
        return {
            "sequences": {
                "total": snapshot.sequences_total,
                "leased": leased,
                "free": snapshot.sequences_total - leased,
            },
            "cells": {"total": snapshot.cells_total, "used": snapshot.cells_used},
            "leases": msgspec.to_builtins(snapshot.leases),
            "counters": {
                "leased_total": snapshot.leased_total,
                "released_total": snapshot.released_total,
                "cleared_cells_total": snapshot.cleared_cells_total,
                "integrity_failures": snapshot.integrity_failures,
            },
        }

    @router.get("/debug/requests")
    async def debug_requests() -> dict[str, Any]:
        """Every accepted request: its stage, its age, its progress. Never its text."""
        now = time.monotonic()
        return {
            "requests": [
                {
                    "id": state.request.id,
                    "place": state.stage.value,
                    "age_s": round(now - state.arrived, 3),
                    "prompt_tokens": state.request.input_tokens,
                    "generated_tokens": state.generated,
                    "max_tokens": state.request.max_tokens,
                }
                for state in registry.requests
            ]
        }

    return router


class StateFileBody(Body):
    """`POST /admin/prefixes/save` and `/admin/prefixes/restore`."""

    name: Text = Field(
        min_length=1,
        max_length=64,
        pattern="^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Name of the file in --state-dir: letters, digits, '-' and '_'",
        examples=["warm"],
    )

    model_config = ConfigDict(json_schema_extra={"example": {"name": "warm"}})


def cache_routes(registry: EngineRegistry) -> APIRouter:
    """The router of state files. A large file takes its time: streams go on meanwhile."""
    router = APIRouter(tags=["operation"], prefix="/admin/prefixes")

    @router.post("/save")
    async def save(body: StateFileBody) -> dict[str, int]:
        """Write the computed prefixes in RAM to a file."""
        return _told(await asyncio.wrap_future(registry.current.save_prefixes(body.name)))

    @router.post("/restore")
    async def restore(body: StateFileBody) -> dict[str, int]:
        """Put the computed prefixes of a file back into RAM, as far as there is room."""
        return _told(await asyncio.wrap_future(registry.current.restore_prefixes(body.name)))

    return router


def _told(done: StateFileDone) -> dict[str, int]:
    return {"entries": done.entries, "tokens": done.tokens, "bytes": done.size, "skipped": done.skipped}


class ReloadBody(Body):
    """`POST /admin/reload`."""

    model: Text = Field(
        default="",
        max_length=1024,
        description="GGUF file in --model-dir; empty: the file that is served, read again",
        examples=["SmolLM2-360M-Instruct-Q8_0.gguf"],
    )

    model_config = ConfigDict(json_schema_extra={"example": {"model": "SmolLM2-360M-Instruct-Q8_0.gguf"}})


def reload_routes(registry: EngineRegistry) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.post("/admin/reload")
    async def reload(body: ReloadBody) -> dict[str, Any]:
        """Load a model beside the one that serves, then change over; running streams end on the old one."""
        info, limits = loaded(await registry.reload(body.model))
        return {
            "model": info.name,
            "description": info.description,
            "sequences": limits.sequences,
            "request_tokens": limits.request_tokens,
        }

    return router
