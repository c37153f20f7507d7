"""Routes for operators: health, readiness, metrics, KV and request tables, models, the live feed."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta
from starlette.background import BackgroundTask
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from cllm.adapters import Adapter, AdapterName, AdapterScale
from cllm.errors import EngineNotReady, NotFound
from cllm.frontend.async_calls import loaded
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.served_model import ModelStatus, ServedModel
from cllm.server.body import Body, ModelName
from cllm.server.dialect import EVENTS, JSON, to_json
from cllm.server.dialects.cllm import CllmDialect
from cllm.server.examples import TEXTS
from cllm.server.job_store import JobDatabase, JobStore
from cllm.server.submit import find_model, get_registry, use_engine
from cllm.types import Health, SlotInfo, Snapshot


class OperationDialect(CllmDialect):
    """The routes of operators."""

    name = "operation"
    about = "Health, metrics, debugging and administration."
    prefix = "/admin/"


operation = OperationDialect()


class ReloadBody(msgspec.Struct, Body, kw_only=True):
    """`POST /admin/reload`."""

    model: Annotated[str, Meta(max_length=1024)] = ""


class ModelNameBody(msgspec.Struct, Body, kw_only=True):
    """`POST /admin/models/load` and `/admin/models/unload`."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]


class AdapterBody(msgspec.Struct, Body, kw_only=True):
    """`POST /admin/adapters`."""

    model: ModelName = None
    name: AdapterName
    file: Annotated[str, Meta(min_length=1, max_length=1024)]
    scale: AdapterScale = 1.0


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded LoRA adapter. `digest` is of its file."""

    name: str
    model: str
    file: str
    scale: float
    size_bytes: int
    digest: str
    activated: bool  # an aLoRA: the model itself computes what stands before its invocation tokens


class AdaptersResponse(msgspec.Struct, frozen=True):
    adapters: list[AdapterStatus]


class ModelsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Every served model, and the memory that the loaded ones take together, as predicted; by device."""

    models: tuple[ModelStatus, ...]
    memory_bytes: dict[str, int]
    memory_limit_bytes: dict[str, int]


class ReloadResponse(msgspec.Struct, frozen=True):
    """The model that serves now."""

    model: str
    description: str
    sequences: int
    request_tokens: int


class CacheClearedResponse(msgspec.Struct, frozen=True):
    """Result of `/admin/cache/clear`."""

    prefixes: int
    tokens: int
    responses: int  # stored ones, of all tenants


class HealthResponse(msgspec.Struct, frozen=True):
    status: str
    engine: str | msgspec.UnsetType = msgspec.UNSET
    reason: str | msgspec.UnsetType = msgspec.UNSET  # why requests are not computed now


class SlotCounts(msgspec.Struct, frozen=True):
    total: int
    leased: int
    free: int
    cached: int  # of the free ones: those that keep what a request computed


class CellCounts(msgspec.Struct, frozen=True):
    total: int
    used: int  # by running requests
    cached: int  # by free slots


class CachedSlot(msgspec.Struct, frozen=True):
    """A free slot that keeps what a request computed."""

    seq_id: int
    tokens: int


class LeaseCounters(msgspec.Struct, frozen=True):
    leased_total: int
    released_total: int
    cleared_cells_total: int
    integrity_failures: int


class KVResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The slots and KV cells, and every lease, between two steps."""

    snapshot: int  # its number, since the engine started
    sequences: SlotCounts
    cells: CellCounts
    leases: tuple[SlotInfo, ...]
    cached: list[CachedSlot]
    preempted: tuple[SlotInfo, ...]  # requests that wait for room
    counters: LeaseCounters


class CancelledResponse(msgspec.Struct, frozen=True):
    """The request that was ended."""

    cancelled: str


class RequestInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted request: its stage, its age, its progress. Never its text."""

    id: str
    place: str
    age_s: float
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int


class RequestsResponse(msgspec.Struct, frozen=True):
    requests: list[RequestInfo]


INSPECT_LIMIT_S = 10.0
_STARTED_AT = int(time.time())


def get_health(http: HttpRequest) -> Health:
    """Of the server; with `?model=`, of that model."""
    return find_model(http).health if "model" in http.query_params else get_registry(http).health


@operation.get("/health", HealthResponse("ok", "ready"))
async def health(http: HttpRequest) -> Response:
    """Alive: 200, also while the engine restarts; 503 once it has crashed too often in a row."""
    health = get_health(http)
    status, code = ("failed", 503) if health is Health.FAILED else ("ok", 200)
    return Response(to_json(HealthResponse(status, health.value)), code, media_type=JSON)


@operation.get("/ready", HealthResponse("ready"))
async def ready(http: HttpRequest) -> HealthResponse | Response:
    """Ready: 200 when a request sent now would be computed."""
    if (health := get_health(http)) in (Health.READY, Health.SLEEPING):
        return HealthResponse(health.value)
    engine = find_model(http).engine
    error = engine.error if engine is not None else None
    answer = HealthResponse(health.value, reason=error.message if error else UNSET)
    return Response(to_json(answer), 503, media_type=JSON)


@operation.get("/metrics", TEXTS.answers["/metrics"][0])
async def metrics(http: HttpRequest) -> Response:
    """Metrics in Prometheus' text format."""
    metrics = get_registry(http).render_metrics()
    headers = {"Process-Start-Time-Unix": str(_STARTED_AT)}  # as llama-server has it
    return Response(metrics, headers=headers, media_type="text/plain; version=0.0.4; charset=utf-8")


async def inspect(engine: EngineClient) -> Snapshot:
    """The engine between two steps. Raises EngineNotReady where it does not answer."""
    try:
        async with asyncio.timeout(INSPECT_LIMIT_S):
            return await asyncio.wrap_future(engine.inspect())
    except TimeoutError:
        raise EngineNotReady(f"the engine did not answer within {INSPECT_LIMIT_S:.0f} s") from None


@operation.get("/debug/kv")
async def debug_kv(http: HttpRequest) -> KVResponse:
    """Show the slots, the KV cells and every lease, taken between two steps.

    `?snapshot=N` shows one of the last snapshots that /live has sent.
    """
    kept: dict[str, Snapshot] = {str(each.number): each for each in http.app.state.live.snapshots}
    if (asked := http.query_params.get("snapshot")) is None:
        snapshot = await inspect(await use_engine(http))
    elif (snapshot := kept.get(asked)) is None:  # type: ignore[assignment]
        raise NotFound("there is no such snapshot: only the last ones that /live has sent are kept")
    total, leased = snapshot.sequences_total, len(snapshot.leases)
    return KVResponse(
        snapshot=snapshot.number,
        sequences=SlotCounts(total, leased, total - leased, snapshot.slots_cached),
        cells=CellCounts(snapshot.cells_total, snapshot.cells_used, snapshot.cells_cached),
        leases=snapshot.leases,
        cached=[CachedSlot(slot, tokens) for slot, tokens in sorted(snapshot.cached.items())],
        preempted=snapshot.preempted,
        counters=msgspec.convert(snapshot, LeaseCounters, from_attributes=True),
    )


@operation.get("/debug/requests")
async def debug_requests(http: HttpRequest) -> RequestsResponse:
    """List the accepted requests: stage, age, progress. Never their text."""
    now = time.monotonic()
    requests = [
        RequestInfo(
            id=state.request.id,
            place=state.stage.value,
            age_s=round(now - state.arrived, 3),
            prompt_tokens=state.request.input_tokens,
            generated_tokens=state.generated,
            max_tokens=state.request.max_tokens,
        )
        for state in get_registry(http).requests
    ]
    return RequestsResponse(requests)


@operation.post("/admin/cache/clear")
async def clear_cache(http: HttpRequest) -> CacheClearedResponse:
    """Forget every cached prefix: in slots, in RAM, on disk and saved; and all stored responses.

    What runs is not touched. Of several models, those of the default one, or of `?model=`.
    """
    jobs: JobStore = http.app.state.jobs
    responses = await jobs.run(JobDatabase.clear_responses) if jobs.enabled else 0
    done = await asyncio.wrap_future((await use_engine(http)).clear_cache())
    return CacheClearedResponse(done.prefixes, done.tokens, responses)


@operation.get("/admin/models")
async def list_models(http: HttpRequest) -> ModelsResponse:
    """List the served models: state, memory, last use."""
    registry = get_registry(http)
    return ModelsResponse(
        models=registry.models, memory_bytes=registry.memory, memory_limit_bytes=registry.limit
    )


@operation.post("/admin/models/load")
async def load_model(body: ModelNameBody, http: HttpRequest) -> ModelStatus:
    """Load a model, and wait until it serves. One that failed a moment ago is tried again at once."""
    find_model(http, body.model).try_again()
    await use_engine(http, body.model)
    return _describe(http, body.model)


@operation.post("/admin/models/unload")
async def unload_model(body: ModelNameBody, http: HttpRequest) -> ModelStatus:
    """Unload a model that no request needs; its prefixes are saved."""
    await get_registry(http).unload(find_model(http, body.model))
    return _describe(http, body.model)


@operation.get("/admin/adapters")
async def list_adapters(http: HttpRequest) -> AdaptersResponse:
    """List the LoRA adapters of all models."""
    served = [model for model in get_registry(http).served if model.engine is not None]
    return AdaptersResponse(
        [_describe_adapter(model, each) for model in served for each in model.engine.adapters.loaded]  # type: ignore[union-attr]
    )


@operation.post("/admin/adapters")
async def load_adapter(body: AdapterBody, http: HttpRequest) -> AdapterStatus:
    """Load a LoRA adapter; streams go on meanwhile. A file that does not suit the model is refused."""
    await use_engine(http, body.model)
    model = find_model(http, body.model)
    loading = asyncio.ensure_future(model.load_adapter(body.name, body.file, body.scale))
    return _describe_adapter(model, await asyncio.shield(loading))  # to its end, if the client leaves


@operation.delete("/admin/adapters/{name}")
async def unload_adapter(name: str, http: HttpRequest) -> AdapterStatus:
    """Unload a LoRA adapter that no request needs; of several models, that of `?model=`."""
    engine = await use_engine(http)
    unloading = asyncio.ensure_future(engine.adapters.unload(name))
    return _describe_adapter(find_model(http), await asyncio.shield(unloading))


def _describe_adapter(model: ServedModel, adapter: Adapter) -> AdapterStatus:
    return AdapterStatus(
        name=adapter.name,
        model=model.name if model.info is None else model.info.name,
        file=Path(adapter.file).name,
        scale=adapter.scale,
        size_bytes=adapter.size,
        digest=adapter.digest,
        activated=bool(adapter.invocation),
    )


def _describe(http: HttpRequest, name: str) -> ModelStatus:
    model = find_model(http, name)
    return model.describe(default=model is get_registry(http).default)


@operation.post("/admin/reload")
async def reload(body: ReloadBody, http: HttpRequest) -> ReloadResponse:
    """Load a model beside the one that serves, then change over; running streams end on the old one."""
    info, limits = loaded(await find_model(http).reload(body.model))
    return ReloadResponse(info.name, info.description, limits.sequences, limits.request_tokens)


@operation.get("/live", shown=False)
async def live(http: HttpRequest) -> Response:
    """Send the live feed, once a second, after an hour of history; until the client leaves or it drains."""
    listening = AsyncExitStack()
    events = listening.enter_context(http.app.state.live.listen())
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    ended = BackgroundTask(listening.aclose)
    return StreamingResponse(events, headers=headers, media_type=EVENTS, background=ended)


@operation.post("/admin/requests/{request_id}/cancel")
async def cancel(request_id: str, http: HttpRequest) -> CancelledResponse:
    """End a request that waits or runs; its client gets what there is of the answer."""
    if not get_registry(http).cancel(request_id):
        raise NotFound("no request of this id waits or runs: GET /debug/requests lists them")
    return CancelledResponse(request_id)
