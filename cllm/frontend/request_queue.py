"""Who may come in, who waits, who is in the engine: the ledger of requests. Lives in the parent.

Law 8: because it is here, a refusal never waits for a step and the engine's death loses nobody.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum

from cllm.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from cllm.frontend.output_stream import OutputStream
from cllm.frontend.tenants import DrainRate, Tenant, Tenants
from cllm.types import Limits, Request, TenantLimits

EMBED_WINDOW = 16  # calls for vectors in the engine at a time


class RequestQueue:
    """A bounded queue in front of the engine. `FairQueue` says who is next, this says when.

    While one tenant is alone, the engine is given a few more than it can run, so that a freed sequence has
    a successor in the very next step. With several, it is given as many as it can run: whoever is in the
    engine cannot be overtaken any more. Of those places a tenant keeps, for some seconds after its last
    request, as many as it used lately, up to its share by weight and unless it has had more than the
    others: its next request need not wait until one of somebody else's has ended. Everybody else waits
    here, where order can still change, and where they can be cancelled, refused and replayed.

    The queue is bounded by requests and by prompt tokens. What may be generated is not counted: it is
    rarely generated, and a client that asks for "as much as fits" would close the queue by itself.
    """

    def __init__(self, queue_size: int, queue_tokens: int = 0, max_timeout_s: float = 0.0) -> None:
        self.queue_size = queue_size
        self.queue_tokens = queue_tokens  # 0: no limit
        self.max_timeout_s = max_timeout_s  # 0: no limit
        self.drain_rate = DrainRate()
        self.tenants = Tenants()
        # Calls for vectors hold no sequence: they have a line and a window of their own.
        self._queue = FairQueue(self.tenants)
        self._vectors = FairQueue(self.tenants)
        self._tickets: dict[str, RequestState] = {}
        self._engine: dict[str, RequestState] = {}

    @property
    def waiting_count(self) -> int:
        return len(self._queue) + len(self._vectors)

    @property
    def waiting_tokens(self) -> int:
        return self._queue.tokens + self._vectors.tokens

    def _line(self, ticket: RequestState) -> FairQueue:
        return self._vectors if ticket.request.embed else self._queue

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """Everybody, those in the engine first."""
        return (*self._engine.values(), *self._queue, *self._vectors)

    def set_tenants(self, limits: Mapping[str, TenantLimits]) -> None:
        self.tenants.register(limits)

    def admit(self, request: Request, stream: OutputStream, limits: Limits | None) -> RequestState:
        """Take a request into the queue, or raise at once why not."""
        if request.embed:
            _check_inputs(request, limits)
        elif not request.prompt:
            raise InvalidRequest("the prompt is empty: give at least one token", field="prompt")
        elif limits is not None and len(request.prompt) >= limits.request_tokens:
            raise ContextLengthExceeded(len(request.prompt), limits.request_tokens)
        assert request.id not in self._tickets, f"request {request.id} is here already"
        tenant = self.tenants.find(request.tenant)
        now = time.monotonic()
        tenant.check(request, now)
        self.refuse_if_full(request.input_tokens)
        ticket = RequestState(request, stream, tenant)
        timeouts = [each for each in (request.timeout_s, self.max_timeout_s or None) if each is not None]
        ticket.timeout_s = min(timeouts, default=None)
        tenant.admitted(now)
        self._tickets[request.id] = ticket
        self._line(ticket).push(ticket, now)
        return ticket

    def refuse_if_full(self, tokens: int) -> None:
        """Raise QueueFull if a prompt of so many tokens may not wait."""
        waiting, waiting_tokens = self.waiting_count, self.waiting_tokens
        retry_after_s = self.drain_rate.seconds_for(waiting, waiting_tokens)
        if waiting >= self.queue_size:
            raise QueueFull(waiting, self.queue_size, retry_after_s)
        # A prompt larger than the whole queue may wait alone: it could never come in otherwise.
        if self.queue_tokens and waiting and waiting_tokens + tokens > self.queue_tokens:
            raise QueueFull(waiting_tokens, self.queue_tokens, retry_after_s, what="prompt tokens")

    def position(self, ticket: RequestState) -> int:
        """0 for who is in the engine, else the place in the queue."""
        return self._line(ticket).position(ticket) if ticket.stage is Stage.QUEUED else 0

    def next_for_engine(self, limits: Limits) -> list[RequestState]:
        """Whom to send now; they count as being in the engine from here on."""
        now = time.monotonic()
        running = [ticket for ticket in self._engine.values() if not ticket.request.embed]
        gates = (
            (self._queue, lambda: self._gate(limits, now), window(limits.sequences), len(running)),
            (self._vectors, lambda: _anybody, EMBED_WINDOW, len(self._engine) - len(running)),
        )
        sent: list[RequestState] = []
        for queue, gate, most, inside in gates:
            while queue and not any(ticket.alone for ticket in self._engine.values()):
                if inside >= most:
                    break
                if (first := queue.replayed) is not None:
                    if first.alone and self._engine:
                        break
                    ticket = queue.pop_replayed()
                elif queue is self._queue and self._cells_taken(limits):
                    break
                elif (found := queue.pop(gate(), now)) is not None:
                    ticket = found
                else:
                    break
                self._enter(ticket, now)
                inside += 1
                sent.append(ticket)
        return sent

    def _cells_taken(self, limits: Limits) -> bool:
        """With one pool of cells: what those inside hold by now fills it, so one more would only wait."""
        return limits.unified and sum(each.cells for each in self._engine.values()) >= limits.cells

    def _gate(self, limits: Limits, now: float) -> _Gate:
        inside = sum(not ticket.request.embed for ticket in self._engine.values())
        return _Gate(self.tenants, limits.sequences, inside, now)

    def _enter(self, ticket: RequestState, now: float) -> None:
        ticket.stage = Stage.ENGINE
        ticket.dispatched = now
        self._engine[ticket.request.id] = ticket
        tenant = ticket.tenant
        tenant.waiting -= 1
        tenant.running += 1
        tenant.peak(now)
        if not ticket.charged:
            ticket.charged = True
            tenant.charge(ticket.request.input_tokens, now)

    def generated(self, ticket: RequestState, tokens: int, now: float) -> None:
        """A running request got tokens: its tenant is charged."""
        ticket.generated += tokens
        ticket.tenant.charge(tokens, now)

    def find(self, request_id: str) -> RequestState | None:
        return self._tickets.get(request_id)

    def close(self, ticket: RequestState) -> None:
        """The request has ended: out of the ledger. Exactly once."""
        assert ticket.stage is not Stage.DONE
        if ticket.stage is Stage.QUEUED:
            self._line(ticket).remove(ticket)
            ticket.tenant.waiting -= 1
        else:
            del self._engine[ticket.request.id]
            ticket.tenant.running -= 1
            ticket.tenant.drain_rate.note()
            self.drain_rate.note(ticket.request.input_tokens)
        del self._tickets[ticket.request.id]
        ticket.stage = Stage.DONE
        if not self._tickets:
            self.tenants.settle()

    def engine_died(self) -> tuple[list[RequestState], list[RequestState]]:
        """Sort out whom the death concerns: (lost, kept). The kept are back at the head of the queue.

        Lost: begun or cancelled, or present at a death while running alone (poison). The lost are still
        to be closed by the caller.
        """
        lost: list[RequestState] = []
        kept: list[RequestState] = []
        for ticket in list(self._engine.values()):
            was_alone = ticket.alone
            ticket.deaths += 1
            (lost if ticket.begun or ticket.cancelled or was_alone else kept).append(ticket)
        for ticket in kept:
            del self._engine[ticket.request.id]
            ticket.stage = Stage.QUEUED
            ticket.dispatched = None
            ticket.tenant.waiting += 1
            ticket.tenant.running -= 1
        for queue in (self._queue, self._vectors):
            queue.push_back([ticket for ticket in kept if self._line(ticket) is queue])
        return lost, kept


def window(sequences: int) -> int:
    """How many the engine is given when order does not matter."""
    return sequences + max(2, sequences // 2)


class _Gate:
    """Whether one more request of a tenant may go into the engine now."""

    def __init__(self, tenants: Tenants, sequences: int, inside: int, now: float) -> None:
        self._tenants = tenants
        active = tenants.active(now)
        self._room = (window(sequences) if len(active) == 1 else sequences) - inside
        weight = sum(tenant.limits.weight for tenant in active)
        self._kept: list[tuple[Tenant, int]] = []  # places that are free, but somebody's
        for tenant in active if len(active) > 1 else ():
            share = int(sequences * tenant.limits.weight / weight)
            if (kept := min(share, tenant.peak(now)) - tenant.running) > 0:
                self._kept.append((tenant, kept))

    def __call__(self, tenant: Tenant) -> bool:
        # Places are kept only from those who have had at least as much: else many small requests would
        # keep theirs while few large ones take the machine.
        tag = self._tenants.start_tag(tenant)
        kept = sum(
            kept
            for other, kept in self._kept
            if other is not tenant and self._tenants.start_tag(other) <= tag
        )
        return self._room > kept


def _anybody(_: Tenant) -> bool:
    return True


def _check_inputs(request: Request, limits: Limits | None) -> None:
    """Raise what is wrong with the inputs of a call for vectors."""
    for index, tokens in enumerate(request.embed):
        if not tokens:
            raise InvalidRequest(f"input {index} is empty: give at least one token", field="input")
        if limits is not None and len(tokens) > limits.embed.tokens:
            raise ContextLengthExceeded.of_input(index, len(tokens), limits.embed.tokens)


class PriorityClass:
    """The waiting requests of one priority, by tenant. Never empty while it is in the queue."""

    def __init__(self, priority: int, now: float) -> None:
        self.priority = priority
        self.served = now  # when somebody of this class was let in last, or when it began to wait
        self.lines: dict[Tenant, deque[RequestState]] = {}

    def rank(self, now: float, ageing_s: float) -> float:
        return self.priority + (now - self.served) / ageing_s

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))


class FairQueue:
    """Waiting requests, in the order in which they go to the engine. The rule, outermost first:

    1. **Priority with ageing.** The class with the highest rank goes first: its priority, plus one for each
       `AGEING_S` seconds in which nobody of it was let in. So a class that is n points below a
       busy one still lets one in every n × AGEING_S seconds: nobody starves. It is the class that ages and
       not the request: else the long line of one tenant would, by its age alone, pass everybody else's.
    2. **Fair shares.** Within a class, the tenant with the least virtual time (tokens had, prompt and
       generated, divided by its weight). Tokens are charged as they become known: the prompt when it
       goes to the engine, generated ones as they come. Whoever was idle starts at the present virtual time,
       without credit.
    3. **First come, first served** within a tenant and between tenants that are even.

    Requests replayed after a death of the engine stand before all of this, in their old order.
    """

    AGEING_S = 1.0

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._replayed: deque[RequestState] = deque()
        self._classes: dict[int, PriorityClass] = {}
        self._count = 0
        self.tokens = 0  # of the prompts that wait

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[RequestState]:
        yield from self._replayed
        for _, each in sorted(self._classes.items(), reverse=True):
            yield from sorted(
                (ticket for line in each.lines.values() for ticket in line), key=lambda one: one.arrived
            )

    def push(self, ticket: RequestState, now: float) -> None:
        priority = ticket.request.priority
        if (found := self._classes.get(priority)) is None:
            found = self._classes[priority] = PriorityClass(priority, now)
        found.lines.setdefault(ticket.tenant, deque()).append(ticket)
        self._counted(ticket, 1)

    def push_back(self, tickets: list[RequestState]) -> None:
        """Put replayed requests before everybody, in the order given."""
        self._replayed.extendleft(reversed(tickets))
        for ticket in tickets:
            self._counted(ticket, 1)

    @property
    def replayed(self) -> RequestState | None:
        """The first of those to be replayed; nobody goes before it."""
        return self._replayed[0] if self._replayed else None

    def pop_replayed(self) -> RequestState:
        ticket = self._replayed.popleft()
        self._counted(ticket, -1)
        return ticket

    def pop(self, may_enter: Callable[[Tenant], bool], now: float) -> RequestState | None:
        """Take out whose turn it is among the tenants that may enter, and advance virtual time."""
        ranked = sorted(self._classes.values(), key=lambda each: each.rank(now, self.AGEING_S), reverse=True)
        for each in ranked:
            lines = [(tenant, line[0]) for tenant, line in each.lines.items() if may_enter(tenant)]
            if lines:
                tenant, ticket = min(
                    lines, key=lambda pair: (self._tenants.start_tag(pair[0]), pair[1].arrived)
                )
                tenant.virtual = self._tenants.virtual_time = self._tenants.start_tag(tenant)
                each.served = now
                self._take(each, ticket)
                return ticket
        return None

    def remove(self, ticket: RequestState) -> None:
        if ticket in self._replayed:
            self._replayed.remove(ticket)
            self._counted(ticket, -1)
        else:
            self._take(self._classes[ticket.request.priority], ticket)

    def position(self, ticket: RequestState) -> int:
        """How many go before it and itself, if nobody else comes; between tenants an estimate by weight."""
        each = self._classes[ticket.request.priority]
        own = each.lines[ticket.tenant].index(ticket) + 1
        ahead = len(self._replayed)
        ahead += sum(len(other) for other in self._classes.values() if other.priority > each.priority)
        for tenant, line in each.lines.items():
            if tenant is not ticket.tenant:
                turns = own * tenant.limits.weight / ticket.tenant.limits.weight
                ahead += min(len(line), math.ceil(turns))
        return ahead + own

    def _take(self, each: PriorityClass, ticket: RequestState) -> None:
        line = each.lines[ticket.tenant]
        line.remove(ticket)
        if not line:
            del each.lines[ticket.tenant]
            if not each.lines:
                del self._classes[each.priority]
        self._counted(ticket, -1)

    def _counted(self, ticket: RequestState, sign: int) -> None:
        self._count += sign
        self.tokens += sign * ticket.request.input_tokens


class Stage(Enum):
    QUEUED = "queued"
    ENGINE = "engine"
    DONE = "done"


class RequestState:
    """A request's way through the ledger, with its times (monotonic)."""

    def __init__(self, request: Request, stream: OutputStream, tenant: Tenant) -> None:
        self.request = request
        self.stream = stream
        self.tenant = tenant
        self.stage = Stage.QUEUED
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
