"""One accepted request in the parent's ledger."""

from __future__ import annotations

import time
from enum import Enum

from cllm.engine.stream import Stream
from cllm.engine.tenants import Tenant
from cllm.types import Request


class Place(Enum):
    QUEUED = "queued"
    ENGINE = "engine"
    DONE = "done"


class Ticket:
    """A request's way through the ledger, with its times (monotonic)."""

    def __init__(self, request: Request, stream: Stream, tenant: Tenant) -> None:
        self.request = request
        self.stream = stream
        self.tenant = tenant
        self.place = Place.QUEUED
        self.cancelled = False
        self.deaths = 0  # how often the engine died while this was in it and had sent nothing
        self.charged = False  # its prompt counts for its tenant; a replay is not charged again
        self.arrived = time.monotonic()
        self.timeout_s: float | None = None  # from arrival to the last token
        self.dispatched: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.generated = 0

    @property
    def cells(self) -> int:
        """What it needs of KV as far as is known: not what it might need. Calls for vectors hold none."""
        return len(self.request.prompt) + self.generated

    @property
    def begun(self) -> bool:
        """The client may have seen something: no replay any more."""
        return self.first_token is not None

    @property
    def alone(self) -> bool:
        """Was there when the engine died twice: runs by itself now, so that the poison is told."""
        return self.deaths > 1
