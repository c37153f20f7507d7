"""For operators: is it alive, does it admit, what does it do."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

import msgspec
from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field
from starlette.responses import Response

from cllm.errors import EngineNotReady
from cllm.frontend.engine_client import Health
from cllm.frontend.engine_registry import EngineRegistry
from cllm.server.protocol.base import Body, StructResponse, Text, documented
from cllm.server.submit import loaded
from cllm.workers.messages import StateFileDone

INSPECT_LIMIT_S = 10.0


class StateFileAnswer(msgspec.Struct, frozen=True):
    """What was written to a state file, or read from one."""

    EXAMPLE: ClassVar[StateFileAnswer]

    entries: int
    tokens: int
    bytes: int
    skipped: int


StateFileAnswer.EXAMPLE = StateFileAnswer(entries=12, tokens=9216, bytes=212860928, skipped=0)


class ReloadAnswer(msgspec.Struct, frozen=True):
    """The model that serves now."""

    EXAMPLE: ClassVar[ReloadAnswer]

    model: str
    description: str
    sequences: int
    request_tokens: int


ReloadAnswer.EXAMPLE = ReloadAnswer("SmolLM2-360M-Instruct", "llama 360M Q8_0", 8, 4096)


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


_NOT_WRITTEN = (
    "storage_failed",
    "the state file could not be written: No space left on device",
    "The disk is full, or fails: the old file stays",
)
_NOT_READ = (
    "storage_failed",
    "the state file could not be read: Input/output error",
    "The disk fails: nothing has changed",
)
_NO_FILE = ("not_found", "there is no state file of this name", "No such file")


def cache_routes(registry: EngineRegistry) -> APIRouter:
    """The router of state files. A large file takes its time: streams go on meanwhile."""
    router = APIRouter(tags=["operation"], prefix="/admin/prefixes")

    def answer(done: StateFileDone) -> Response:
        return StructResponse(StateFileAnswer(done.entries, done.tokens, done.size, done.skipped))

    @router.post("/save", **documented(StateFileAnswer, errors={507: _NOT_WRITTEN}))
    async def save(body: StateFileBody) -> Response:
        """Write the computed prefixes in RAM to a file."""
        return answer(await asyncio.wrap_future(registry.current.save_prefixes(body.name)))

    @router.post("/restore", **documented(StateFileAnswer, errors={404: _NO_FILE, 507: _NOT_READ}))
    async def restore(body: StateFileBody) -> Response:
        """Put the computed prefixes of a file back into RAM, as far as there is room."""
        return answer(await asyncio.wrap_future(registry.current.restore_prefixes(body.name)))

    return router


class ReloadBody(Body):
    """`POST /admin/reload`."""

    model: Text = Field(
        default="",
        max_length=1024,
        description="GGUF file in --model-dir; empty: the file that is served, read again",
        examples=["SmolLM2-360M-Instruct-Q8_0.gguf"],
    )

    model_config = ConfigDict(json_schema_extra={"example": {"model": "SmolLM2-360M-Instruct-Q8_0.gguf"}})


_NOT_RELOADED = (
    "reload_failed",
    "another model is being loaded already; try again when it serves",
    "The model could not be changed: the one that serves goes on",
)


def reload_routes(registry: EngineRegistry) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.post("/admin/reload", **documented(ReloadAnswer, errors={409: _NOT_RELOADED}))
    async def reload(body: ReloadBody) -> Response:
        """Load a model beside the one that serves, then change over; running streams end on the old one."""
        info, limits = loaded(await registry.reload(body.model))
        answer = ReloadAnswer(info.name, info.description, limits.sequences, limits.request_tokens)
        return StructResponse(answer)

    return router
