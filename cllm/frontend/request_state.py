"""The state of an accepted request: its stage, its times, and what an engine has said of its answer."""

from __future__ import annotations

import time
from array import array
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from cllm.frontend.output_stream import OutputStream
from cllm.frontend.tenants import Tenant
from cllm.types import Request, RequestOutput, Usage
from cllm.workers.supervisor import Attempt

if TYPE_CHECKING:
    from cllm.frontend.request_queue import FairQueue


class Stage(Enum):
    QUEUED = "queued"
    ENGINE = "engine"
    DONE = "done"


class RequestState(Attempt):
    """An accepted request: its stage, its stream, its times (monotonic), its answer so far.

    When the engine dies, another one goes on from there. A request that crashed the engine before is cleared
    of that by `CLEARING_TOKENS` more of its answer: what kills each time it is computed gets no further.
    """

    CLEARING_TOKENS = 16

    def __init__(self, request: Request, stream: OutputStream, tenant: Tenant, queue: FairQueue) -> None:
        self.request = request
        self.stream = stream
        self.tenant = tenant
        self.queue = queue  # where it waits
        self.number = 0  # in the order of arrival, in its queue
        self.stage = Stage.QUEUED
        self.cancelled = False
        self.charged = False  # its prompt counts for its tenant; a replay is not charged again
        self.input_tokens = request.input_tokens
        self.arrived = time.monotonic()
        self.timeout_s: float | None = None  # from arrival to the last token
        self.dispatched: float | None = None  # the first time, if it has begun
        self.first_token: float | None = None
        self.last_token: float | None = None
        self._answer = array("i")  # the tokens generated
        self._resumed_at = 0  # how many of them came from engines that died
        self._clearing_tokens = self.CLEARING_TOKENS
        self._usage: Usage | None = None  # as far as it is known
        self._earlier: Usage | None = None  # the same, when the last engine died

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self._answer)

    @property
    def begun(self) -> bool:
        """The client may have seen output: an engine that takes it over must go on from there."""
        return self.first_token is not None

    @property
    def submission(self) -> Request:
        """The request as an engine is to have it: with what was generated before."""
        if not self._answer:
            return self.request
        return msgspec.structs.replace(self.request, generated_prefix=tuple(self._answer))

    def add(self, output: RequestOutput, now: float) -> None:
        """Tokens have come."""
        self.first_token = self.first_token or now
        self.last_token = now
        self._answer.extend(output.tokens)
        if output.usage_so_far is not None:
            self._usage = self.whole_usage(output.usage_so_far)

    def clear_by_progress(self) -> bool:
        """Clear it of earlier crashes, if it has come far enough since the last of them."""
        if self.generated < self._resumed_at + self._clearing_tokens:
            return False
        self._clearing_tokens *= 2  # one that kills now and then is found out all the same
        self.clear()
        return True

    def requeue(self) -> None:
        """The engine died: it waits for another."""
        self.stage = Stage.QUEUED
        if not self.begun:
            self.dispatched = None
        self._resumed_at = self.generated
        self._earlier = self._usage

    def whole_usage(self, usage: Usage) -> Usage:
        """The usage over all engines that have computed it. What one took from its cache counts once."""
        if (earlier := self._earlier) is None:
            return usage
        return msgspec.structs.replace(
            usage,
            cached_tokens=earlier.cached_tokens,
            cached_from=earlier.cached_from,
            drafted_tokens=earlier.drafted_tokens + usage.drafted_tokens,
            accepted_tokens=earlier.accepted_tokens + usage.accepted_tokens,
        )
