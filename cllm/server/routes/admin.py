"""Routes for operators: health, readiness, metrics, KV and request tables, reload."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cllm.errors import EngineNotReady, NotFound
from cllm.frontend.async_calls import loaded
from cllm.frontend.engine_client import EngineClient
from cllm.server.protocol import admin as api
from cllm.server.protocol.base import StructResponse, documented
from cllm.server.submit import find_model, get_registry, use_engine
from cllm.types import Health, Snapshot

INSPECT_LIMIT_S = 10.0
_METRICS = (
    "# HELP cllm_requests_running Requests being computed\n"
    "# TYPE cllm_requests_running gauge\n"
    "cllm_requests_running 3.0\n"
)
_REQUEST = api.RequestInfo(
    id="8f0c2d7e", place="running", age_s=0.31, prompt_tokens=42, generated_tokens=16, max_tokens=256
)
_RELOADED = api.ReloadResponse("SmolLM2-360M-Instruct", "llama 360M Q8_0", 8, 4096)
_CLEARED = api.CacheClearedResponse(3, 4711, 2)
_NOT_CLEARED = (
    "storage_failed",
    "files of the disk cache could not be removed: Permission denied",
    "What is on disk may come back at the next start; slots and RAM are clear",
)
_NOT_RELOADED = (
    "reload_failed",
    "another model is being loaded already; try again when it serves",
    "The model could not be changed; the old one serves on",
)
_BUSY = (
    "model_busy",
    "SmolLM2-135M-Instruct has 3 requests; try again when they have ended",
    "Requests need the model",
)
_DOES_NOT_FIT = (
    "model_does_not_fit",
    "Qwen3-30B-A3B does not fit (host: needs 33012 MiB, limit 15360 MiB); give it less context, or raise "
    "--models-memory-mb",
    "The model needs more than the limit leaves beside those that are kept",
)
router = APIRouter(tags=["operation"])


def get_health(http: HttpRequest) -> Health:
    """Of the server; with `?model=`, of that model."""
    return find_model(http).health if "model" in http.query_params else get_registry(http).health


@router.get("/health", **documented(api.HealthResponse("ok", "ready")))
async def health(http: HttpRequest) -> Response:
    """Alive: 200, also while the engine restarts; 503 once it has crashed too often in a row."""
    health = get_health(http)
    status, code = ("failed", 503) if health is Health.FAILED else ("ok", 200)
    return StructResponse(api.HealthResponse(status, health.value), code)


@router.get("/ready", **documented(api.HealthResponse("ready")))
async def ready(http: HttpRequest) -> Response:
    """Ready: 200 when a request sent now would be computed."""
    health = get_health(http)
    if health in (Health.READY, Health.SLEEPING):
        return StructResponse(api.HealthResponse(health.value))
    engine = find_model(http).engine
    error = engine.error if engine is not None else None
    return StructResponse(api.HealthResponse(health.value, reason=error.message if error else UNSET), 503)


@router.get("/metrics", **documented(_METRICS))
async def metrics(http: HttpRequest) -> Response:
    """Metrics in Prometheus' text format."""
    metrics = get_registry(http).render_metrics()
    return Response(metrics, media_type="text/plain; version=0.0.4; charset=utf-8")


async def inspect(engine: EngineClient) -> Snapshot:
    """The engine between two steps. Raises EngineNotReady where it does not answer."""
    try:
        async with asyncio.timeout(INSPECT_LIMIT_S):
            return await asyncio.wrap_future(engine.inspect())
    except TimeoutError:
        raise EngineNotReady(f"the engine did not answer within {INSPECT_LIMIT_S:.0f} s") from None


@router.get("/debug/kv", **documented(api.KV_EXAMPLE))
async def debug_kv(http: HttpRequest) -> Response:
    """Show the slots, the KV cells and every lease, taken between two steps.

    `?snapshot=N` shows one of the last snapshots that /live has sent.
    """
    kept: dict[str, Snapshot] = {str(each.number): each for each in http.app.state.live.snapshots}
    if (asked := http.query_params.get("snapshot")) is None:
        snapshot = await inspect(await use_engine(http))
    elif (snapshot := kept.get(asked)) is None:  # type: ignore[assignment]
        raise NotFound("there is no such snapshot: only the last ones that /live has sent are kept")
    total, leased = snapshot.sequences_total, len(snapshot.leases)
    response = api.KVResponse(
        snapshot=snapshot.number,
        sequences=api.SlotCounts(total, leased, total - leased, snapshot.slots_cached),
        cells=api.CellCounts(snapshot.cells_total, snapshot.cells_used, snapshot.cells_cached),
        leases=snapshot.leases,
        cached=[api.CachedSlot(slot, tokens) for slot, tokens in sorted(snapshot.cached.items())],
        preempted=snapshot.preempted,
        counters=api.LeaseCounters(
            snapshot.leased_total,
            snapshot.released_total,
            snapshot.cleared_cells_total,
            snapshot.integrity_failures,
        ),
    )
    return StructResponse(response)


@router.get("/debug/requests", **documented(api.RequestsResponse([_REQUEST])))
async def debug_requests(http: HttpRequest) -> Response:
    """List the accepted requests: stage, age, progress. Never their text."""
    now = time.monotonic()
    requests = [
        api.RequestInfo(
            id=state.request.id,
            place=state.stage.value,
            age_s=round(now - state.arrived, 3),
            prompt_tokens=state.request.input_tokens,
            generated_tokens=state.generated,
            max_tokens=state.request.max_tokens,
        )
        for state in get_registry(http).requests
    ]
    return StructResponse(api.RequestsResponse(requests))


@router.post("/admin/cache/clear", **documented(_CLEARED, errors={507: _NOT_CLEARED}))
async def clear_cache(http: HttpRequest) -> Response:
    """Forget every cached prefix: in slots, in RAM, on disk and saved; and all stored responses.

    What runs is not touched. Of several models, those of the default one, or of `?model=`.
    """
    responses: int = http.app.state.responses.clear()
    done = await asyncio.wrap_future((await use_engine(http)).clear_cache())
    return StructResponse(api.CacheClearedResponse(done.prefixes, done.tokens, responses))


@router.get("/admin/models", **documented(api.MODELS_EXAMPLE))
async def list_models(http: HttpRequest) -> Response:
    """List the served models: state, memory, last use."""
    registry = get_registry(http)
    answer = api.ModelsResponse(
        models=registry.models, memory_bytes=registry.memory, memory_limit_bytes=registry.limit
    )
    return StructResponse(answer)


@router.post("/admin/models/load", **documented(api.MODEL_STATUS_EXAMPLE, errors={507: _DOES_NOT_FIT}))
async def load_model(body: api.ModelNameBody, http: HttpRequest) -> Response:
    """Load a model, and wait until it serves. One that failed a moment ago is tried again at once."""
    find_model(http, body.model).try_again()
    await use_engine(http, body.model)
    return _describe(http, body.model)


@router.post("/admin/models/unload", **documented(api.MODEL_STATUS_EXAMPLE, errors={409: _BUSY}))
async def unload_model(body: api.ModelNameBody, http: HttpRequest) -> Response:
    """Unload a model that no request needs; its prefixes are saved."""
    await get_registry(http).unload(find_model(http, body.model))
    return _describe(http, body.model)


def _describe(http: HttpRequest, name: str) -> Response:
    model = find_model(http, name)
    return StructResponse(model.describe(default=model is get_registry(http).default))


@router.post("/admin/reload", **documented(_RELOADED, errors={409: _NOT_RELOADED}))
async def reload(body: api.ReloadBody, http: HttpRequest) -> Response:
    """Load a model beside the one that serves, then change over; running streams end on the old one."""
    info, limits = loaded(await find_model(http).reload(body.model))
    answer = api.ReloadResponse(info.name, info.description, limits.sequences, limits.request_tokens)
    return StructResponse(answer)
