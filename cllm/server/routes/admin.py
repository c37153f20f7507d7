"""For operators: is it alive, does it admit, what does it do."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.responses import Response

from cllm.engine.engine import Engine, Health
from cllm.errors import EngineNotReady

INSPECT_LIMIT_S = 10.0


def routes(engine: Engine) -> APIRouter:
    """The router over one engine."""
    router = APIRouter(tags=["operation"])

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Alive: 200 as long as this process answers."""
        return {"status": "ok", "engine": engine.health.value}

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """Admitting: 200 when a request sent now would be computed."""
        return JSONResponse({"status": engine.health.value}, 200 if engine.health is Health.READY else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus."""
        return Response(engine.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/debug/kv")
    async def debug_kv() -> dict[str, Any]:
        """The pool and every lease, taken between two steps."""
        try:
            async with asyncio.timeout(INSPECT_LIMIT_S):
                snapshot = await asyncio.wrap_future(engine.inspect())
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
        """Every request in the ledger: where it is, since when, how far. Never what it says."""
        now = time.monotonic()
        return {
            "requests": [
                {
                    "id": ticket.request.id,
                    "place": ticket.place.value,
                    "age_s": round(now - ticket.arrived, 3),
                    "prompt_tokens": ticket.request.input_tokens,
                    "generated_tokens": ticket.generated,
                    "max_tokens": ticket.request.max_tokens,
                }
                for ticket in engine.tickets
            ]
        }

    return router
