"""The state of an accepted request: its stage, its times, and what an engine has said of its answer."""

from __future__ import annotations

import time
from enum import Enum

from cllm.frontend.output_stream import OutputStream
from cllm.frontend.tenants import Tenant
from cllm.types import Request, RequestOutput
from cllm.workers.resumption import ResumableRequest


class Stage(Enum):
    QUEUED = "queued"
    ENGINE = "engine"
    DONE = "done"


class RequestState(ResumableRequest):
    """An accepted request: its stage, its stream, its times (monotonic), its answer so far.

    When the engine dies, another one goes on from there.
    """

    def __init__(self, request: Request, stream: OutputStream, tenant: Tenant) -> None:
        super().__init__(request)
        self.stream = stream
        self.tenant = tenant
        self.number = 0  # in the order of arrival, in its queue
        self.stage = Stage.QUEUED
        self.charged = False  # its prompt counts for its tenant; a replay is not charged again
        self.input_tokens = request.input_tokens
        self.arrived = time.monotonic()
        self.timeout_s: float | None = None  # from arrival to the last token
        self.dispatched: float | None = None  # the first time, if it has begun
        self.first_token: float | None = None
        self.last_token: float | None = None

    @property
    def begun(self) -> bool:
        """The client may have seen output: an engine that takes it over must go on from there."""
        return self.first_token is not None

    def add(self, output: RequestOutput, now: float) -> None:
        """Tokens have come."""
        self.first_token = self.first_token or now
        self.last_token = now
        self.add_tokens(output)

    def requeue(self) -> None:
        """The engine died: it waits for another."""
        self.stage = Stage.QUEUED
        if not self.begun:
            self.dispatched = None
        self.resume()
