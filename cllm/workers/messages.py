"""What crosses between the parent and the engine, in either host: commands down, reports up.

The same objects travel through a queue (thread) or, as MessagePack, through a socket (child process).
"""

from __future__ import annotations

import msgspec

from cllm.types import Failure, Limits, ModelInfo, Request, RequestOutput, Snapshot


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Inspect(msgspec.Struct, frozen=True, tag=True):
    ticket: int


class SavePrefixes(msgspec.Struct, frozen=True, tag=True):
    """Write the RAM tier to a state file."""

    ticket: int
    name: str


class RestorePrefixes(msgspec.Struct, frozen=True, tag=True):
    """Read a state file into the RAM tier."""

    ticket: int
    name: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


class StepStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Work done since the last report, and the engine's state at its end."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    step_s: float = 0.0
    compute_s: float = 0.0
    sample_s: float = 0.0
    transfer_s: float = 0.0  # of KV memory, to RAM and back
    running: int = 0
    waiting: int = 0
    leases: int = 0
    cells_used: int = 0
    integrity_failures: int = 0
    interrupted: int = 0  # steps ended early since the start, because somebody in them had gone
    prefix_hits: int = 0  # requests that began with something computed before
    prefix_tokens: int = 0  # tokens they did not have to compute
    prefix_saves: int = 0  # states put into RAM
    prefix_evictions: int = 0  # states pushed out of it
    prefix_bytes: int = 0
    swapped_bytes: int = 0
    preemptions: int = 0  # requests that made room for others
    swap_ins: int = 0  # and went on from what was saved of them


class StepReport(msgspec.Struct, frozen=True, tag=True):
    """Everything one step brought, for all requests together."""

    deltas: tuple[RequestOutput, ...]
    stats: StepStats


class Inspection(msgspec.Struct, frozen=True, tag=True):
    ticket: int
    snapshot: Snapshot


class StateFileDone(msgspec.Struct, frozen=True, tag=True):
    """What became of a SavePrefixes or RestorePrefixes."""

    ticket: int
    entries: int = 0
    tokens: int = 0
    size: int = 0  # bytes of RAM
    skipped: int = 0  # known already, or no room
    failure: Failure | None = None


class Loading(msgspec.Struct, frozen=True, tag=True):
    progress: float  # 0 to 1


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: ModelInfo
    limits: Limits
    memory: dict[str, int] = {}  # bytes, by part


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    step_age_s: float  # how long the step now running has run; 0 between steps


class Died(msgspec.Struct, frozen=True, tag=True):
    """The engine ended. From the engine itself while it can still speak, else made up by its host."""

    code: str
    message: str


Command = Submit | Cancel | Inspect | SavePrefixes | RestorePrefixes | Stop
Report = StepReport | Inspection | StateFileDone | Loading | Ready | Heartbeat | Died
