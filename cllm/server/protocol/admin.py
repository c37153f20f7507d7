"""Requests and responses of the routes for operators."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
from pydantic import ConfigDict, Field

from cllm.server.protocol.base import Body, Text
from cllm.types import SlotInfo, Snapshot

METRICS_EXAMPLE = (
    "# HELP cllm_requests_running Requests being computed\n"
    "# TYPE cllm_requests_running gauge\n"
    "cllm_requests_running 3.0\n"
)


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


class StateFileResponse(msgspec.Struct, frozen=True):
    """The prefixes that were written to a state file, or read from one."""

    EXAMPLE: ClassVar[StateFileResponse]

    entries: int
    tokens: int
    bytes: int
    skipped: int


StateFileResponse.EXAMPLE = StateFileResponse(12, 9216, 212860928, 0)


class ReloadBody(Body):
    """`POST /admin/reload`."""

    model: Text = Field(
        default="",
        max_length=1024,
        description="GGUF file in --model-dir; empty: read the served file again",
        examples=["SmolLM2-360M-Instruct-Q8_0.gguf"],
    )

    model_config = ConfigDict(json_schema_extra={"example": {"model": "SmolLM2-360M-Instruct-Q8_0.gguf"}})


class ReloadResponse(msgspec.Struct, frozen=True):
    """The model that serves now."""

    EXAMPLE: ClassVar[ReloadResponse]

    model: str
    description: str
    sequences: int
    request_tokens: int


ReloadResponse.EXAMPLE = ReloadResponse("SmolLM2-360M-Instruct", "llama 360M Q8_0", 8, 4096)


class HealthResponse(msgspec.Struct, frozen=True, kw_only=True):
    EXAMPLE: ClassVar[HealthResponse]

    status: Literal["ok"] = "ok"
    engine: str


HealthResponse.EXAMPLE = HealthResponse(engine="ready")


class ReadyResponse(msgspec.Struct, frozen=True):
    EXAMPLE: ClassVar[ReadyResponse]

    status: str


ReadyResponse.EXAMPLE = ReadyResponse("ready")


class SlotCounts(msgspec.Struct, frozen=True):
    total: int
    leased: int
    free: int


class CellCounts(msgspec.Struct, frozen=True):
    total: int
    used: int


class LeaseCounters(msgspec.Struct, frozen=True):
    leased_total: int
    released_total: int
    cleared_cells_total: int
    integrity_failures: int


class KVResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The slots and KV cells, and every lease, between two steps."""

    EXAMPLE: ClassVar[KVResponse]

    sequences: SlotCounts
    cells: CellCounts
    leases: tuple[SlotInfo, ...]
    counters: LeaseCounters

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> KVResponse:
        total, leased = snapshot.sequences_total, len(snapshot.leases)
        return cls(
            sequences=SlotCounts(total, leased, total - leased),
            cells=CellCounts(snapshot.cells_total, snapshot.cells_used),
            leases=snapshot.leases,
            counters=LeaseCounters(
                snapshot.leased_total,
                snapshot.released_total,
                snapshot.cleared_cells_total,
                snapshot.integrity_failures,
            ),
        )


KVResponse.EXAMPLE = KVResponse(
    sequences=SlotCounts(8, 1, 7),
    cells=CellCounts(32768, 57),
    leases=(SlotInfo(seq_id=0, request_id="8f0c2d7e", tokens=58, position=57, state="running", age_s=0.31),),
    counters=LeaseCounters(12, 11, 913, 0),
)


class RequestInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted request: its stage, its age, its progress. Never its text."""

    id: str
    place: str
    age_s: float
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int


class RequestsResponse(msgspec.Struct, frozen=True):
    EXAMPLE: ClassVar[RequestsResponse]

    requests: list[RequestInfo]


RequestsResponse.EXAMPLE = RequestsResponse(
    [
        RequestInfo(
            id="8f0c2d7e",
            place="running",
            age_s=0.31,
            prompt_tokens=42,
            generated_tokens=16,
            max_tokens=256,
        )
    ]
)
