"""Requests and responses of the routes for operators."""

from __future__ import annotations

import msgspec
from pydantic import ConfigDict, Field

from cllm.frontend.served_model import ModelState, ModelStatus
from cllm.server.protocol.base import Body, Text
from cllm.types import SlotInfo


class ReloadBody(Body):
    """`POST /admin/reload`."""

    model: Text = Field(
        default="",
        max_length=1024,
        description="GGUF file in --model-dir; empty: read the served file again",
        examples=["SmolLM2-360M-Instruct-Q8_0.gguf"],
    )

    model_config = ConfigDict(json_schema_extra={"example": {"model": "SmolLM2-360M-Instruct-Q8_0.gguf"}})


class ModelNameBody(Body):
    """`POST /admin/models/load` and `/admin/models/unload`."""

    model: Text = Field(
        min_length=1,
        max_length=256,
        description="Name or alias of a served model",
        examples=["SmolLM2-135M-Instruct"],
    )

    model_config = ConfigDict(json_schema_extra={"example": {"model": "SmolLM2-135M-Instruct"}})


class ModelsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Every served model, and the memory that the loaded ones take together, as predicted; by device."""

    models: tuple[ModelStatus, ...]
    memory_bytes: dict[str, int]
    memory_limit_bytes: dict[str, int]


MODEL_STATUS_EXAMPLE = ModelStatus(
    name="SmolLM2-135M-Instruct",
    state=ModelState.READY,
    default=True,
    memory_bytes={"host": 1879048192},
    last_used=1767225600.0,
    loaded_at=1767225590.0,
    context=4096,
    slots=8,
    size_bytes=96862464,
    parameters=134515584,
    architecture="llama",
    quantization="Q4_1",
    file="SmolLM2-135M-Instruct-Q4_1.gguf",
)
MODELS_EXAMPLE = ModelsResponse(
    models=(MODEL_STATUS_EXAMPLE,),
    memory_bytes={"host": 1879048192},
    memory_limit_bytes={"host": 8589934592},
)


class ReloadResponse(msgspec.Struct, frozen=True):
    """The model that serves now."""

    model: str
    description: str
    sequences: int
    request_tokens: int


class CacheClearedResponse(msgspec.Struct, frozen=True):
    """What was forgotten."""

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


_LEASE = SlotInfo(
    seq_id=0,
    request_id="8f0c2d7e",
    tokens=58,
    position=57,
    state="running",
    age_s=0.31,
    prompt_tokens=42,
    cached_tokens=32,
)
KV_EXAMPLE = KVResponse(
    snapshot=17,
    sequences=SlotCounts(8, 1, 7, 2),
    cells=CellCounts(32768, 57, 913),
    leases=(_LEASE,),
    cached=[CachedSlot(1, 600), CachedSlot(2, 313)],
    preempted=(),
    counters=LeaseCounters(12, 11, 913, 0),
)


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
