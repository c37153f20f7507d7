"""Who may come in, who waits, who is in the engine: the ledger of requests. Lives in the parent.

Law 8: because it is here, a refusal never waits for a step and the engine's death loses nobody.
"""

from __future__ import annotations

import time
from collections import deque
from enum import Enum

from cllm.engine.stream import Stream
from cllm.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from cllm.types import Limits, Request

EMBED_WINDOW = 16  # calls for vectors in the engine at a time


class Place(Enum):
    QUEUED = "queued"
    ENGINE = "engine"
    DONE = "done"


class Ticket:
    """One accepted request in the ledger, with its times (monotonic)."""

    def __init__(self, request: Request, stream: Stream) -> None:
        self.request = request
        self.stream = stream
        self.place = Place.QUEUED
        self.cancelled = False
        self.deaths = 0  # how often the engine died while this was in it and had sent nothing
        self.arrived = time.monotonic()
        self.dispatched: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.generated = 0

    @property
    def begun(self) -> bool:
        """The client may have seen something: no replay any more."""
        return self.first_token is not None

    @property
    def alone(self) -> bool:
        """Was there when the engine died twice: runs by itself now, so that the poison is told."""
        return self.deaths > 1


class DrainRate:
    """Requests finished per second, over the last ones: what a refused client's wait is computed from."""

    def __init__(self, remembered: int = 64) -> None:
        self._times: deque[float] = deque(maxlen=remembered)

    def note(self) -> None:
        self._times.append(time.monotonic())

    def seconds_for(self, count: int) -> float:
        """How long `count` requests take to drain; between 1 s and 60 s."""
        if len(self._times) < 2:
            return 1.0
        elapsed = time.monotonic() - self._times[0]
        return min(60.0, max(1.0, count * elapsed / len(self._times)))


class Admission:
    """A bounded queue in front of the engine, first come first served.

    The engine is given a few more than it can run, so that a freed sequence has a successor in the very
    next step; the rest wait here, where they can be cancelled, refused and replayed.
    """

    def __init__(self, queue_size: int) -> None:
        self.queue_size = queue_size
        self.drain_rate = DrainRate()
        self._queue: deque[Ticket] = deque()
        self._engine: dict[str, Ticket] = {}

    @property
    def waiting_count(self) -> int:
        return len(self._queue)

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """Everybody, those in the engine first."""
        return (*self._engine.values(), *self._queue)

    def admit(self, request: Request, stream: Stream, limits: Limits | None) -> Ticket:
        """Take a request into the queue, or raise at once why not."""
        if request.embed:
            _check_inputs(request, limits)
        elif not request.prompt:
            raise InvalidRequest("the prompt is empty: give at least one token", field="prompt")
        elif limits is not None and len(request.prompt) >= limits.request_tokens:
            raise ContextLengthExceeded(len(request.prompt), limits.request_tokens)
        if len(self._queue) >= self.queue_size:
            raise QueueFull(len(self._queue), self.queue_size, self.drain_rate.seconds_for(len(self._queue)))
        ticket = Ticket(request, stream)
        self._queue.append(ticket)
        return ticket

    def next_for_engine(self, limits: Limits) -> list[Ticket]:
        """Whom to send now; they count as being in the engine from here on."""
        # Calls for vectors hold no sequence: they have a window of their own.
        embedding = sum(bool(ticket.request.embed) for ticket in self._engine.values())
        running = len(self._engine) - embedding
        window = limits.sequences + max(2, limits.sequences // 2)
        room = {True: EMBED_WINDOW - embedding, False: window - running}
        sent: list[Ticket] = []
        if any(ticket.alone for ticket in self._engine.values()):
            return sent
        for ticket in list(self._queue):
            kind = bool(ticket.request.embed)
            if (ticket.alone and self._engine) or max(room.values()) <= 0:
                break
            if room[kind] <= 0:
                continue
            room[kind] -= 1
            self._queue.remove(ticket)
            ticket.place = Place.ENGINE
            ticket.dispatched = time.monotonic()
            self._engine[ticket.request.id] = ticket
            sent.append(ticket)
            if ticket.alone:
                break
        return sent

    def find(self, request_id: str) -> Ticket | None:
        if (ticket := self._engine.get(request_id)) is not None:
            return ticket
        return next((ticket for ticket in self._queue if ticket.request.id == request_id), None)

    def close(self, ticket: Ticket) -> None:
        """The request has ended: out of the ledger. Exactly once."""
        assert ticket.place is not Place.DONE
        if ticket.place is Place.QUEUED:
            self._queue.remove(ticket)
        else:
            del self._engine[ticket.request.id]
            self.drain_rate.note()
        ticket.place = Place.DONE

    def engine_died(self) -> tuple[list[Ticket], list[Ticket]]:
        """Sort out whom the death concerns: (lost, kept). The kept are back at the head of the queue.

        Lost: begun or cancelled, or present at a death while running alone (poison). The lost are still
        to be closed by the caller.
        """
        lost: list[Ticket] = []
        kept: list[Ticket] = []
        for ticket in list(self._engine.values()):
            was_alone = ticket.alone
            ticket.deaths += 1
            (lost if ticket.begun or ticket.cancelled or was_alone else kept).append(ticket)
        for ticket in reversed(kept):
            del self._engine[ticket.request.id]
            ticket.place = Place.QUEUED
            ticket.dispatched = None
            self._queue.appendleft(ticket)
        return lost, kept


def _check_inputs(request: Request, limits: Limits | None) -> None:
    """Raise what is wrong with the inputs of a call for vectors."""
    for index, tokens in enumerate(request.embed):
        if not tokens:
            raise InvalidRequest(f"input {index} is empty: give at least one token", field="input")
        if limits is not None and len(tokens) > limits.embed.tokens:
            raise ContextLengthExceeded.of_input(index, len(tokens), limits.embed.tokens)
