"""Request queue: admission, priority and fair share, and the table of all accepted requests.

It lives in the parent. So a refusal never waits for a step, and a crash of the engine loses no request.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum

from cllm.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from cllm.frontend.output_stream import OutputStream
from cllm.frontend.tenants import DrainRate, Tenant, Tenants
from cllm.types import Limits, Request
from cllm.workers.supervisor import Attempt

MAX_EMBEDDING_REQUESTS = 16  # in the engine at a time


class Stage(Enum):
    QUEUED = "queued"
    ENGINE = "engine"
    DONE = "done"


class RequestState(Attempt):
    """An accepted request: its stage, its stream, its times (monotonic)."""

    def __init__(self, request: Request, stream: OutputStream, tenant: Tenant, queue: FairQueue) -> None:
        self.request = request
        self.stream = stream
        self.tenant = tenant
        self.queue = queue  # where it waits
        self.stage = Stage.QUEUED
        self.cancelled = False
        self.charged = False  # its prompt counts for its tenant; a replay is not charged again
        self.input_tokens = request.input_tokens
        self.arrived = time.monotonic()
        self.timeout_s: float | None = None  # from arrival to the last token
        self.dispatched: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.generated = 0

    @property
    def begun(self) -> bool:
        """The client may have seen output: it cannot be replayed."""
        return self.first_token is not None


class RequestQueue:
    """A queue in front of the engine, bounded by requests and prompt tokens. `FairQueue` gives the order.

    Tokens that may be generated are not counted: few of them are, and one "as much as fits" would fill it.

    While one tenant is alone, the engine is given a few more requests than it can run, so that a freed slot
    has a successor in the very next step. With several, it is given as many as it can run, because order
    cannot change in the engine. Of those places a tenant keeps, for some seconds after its last request, as
    many as it used lately, up to its share by weight and unless it has had more than the others: its next
    request need not wait for the end of another tenant's.
    """

    def __init__(self, queue_size: int, queue_tokens: int = 0, max_timeout_s: float = 0.0) -> None:
        self.queue_size = queue_size
        self.queue_tokens = queue_tokens  # 0: no limit
        self.max_timeout_s = max_timeout_s  # 0: no limit
        self.drain_rate = DrainRate()
        self.tenants = Tenants()
        self._generation = FairQueue(self.tenants)
        self._embedding = FairQueue(self.tenants)  # these hold no slot: they have a limit of their own
        self.states: dict[str, RequestState] = {}  # every accepted request, by id
        self._engine: dict[str, RequestState] = {}

    @property
    def waiting(self) -> tuple[int, int]:
        """How many requests wait, and how many prompt tokens."""
        generation, embedding = self._generation, self._embedding
        return generation.count + embedding.count, generation.tokens + embedding.tokens

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """All accepted requests, those in the engine first."""
        return (*self._engine.values(), *self._generation, *self._embedding)

    def admit(self, request: Request, stream: OutputStream, limits: Limits | None) -> RequestState:
        """Take a request into the queue, or raise at once why not."""
        if request.embed:
            _check_inputs(request, limits)
        elif not request.prompt:
            raise InvalidRequest("the prompt is empty: give at least one token", field="prompt")
        elif limits is not None and len(request.prompt) >= limits.request_tokens:
            raise ContextLengthExceeded(len(request.prompt), limits.request_tokens)
        assert request.id not in self.states, f"request {request.id} is here already"
        tenant = self.tenants.find(request.tenant)
        queue = self._embedding if request.embed else self._generation
        state = RequestState(request, stream, tenant, queue)
        tenant.check(request, state.arrived)
        self.refuse_if_full(state.input_tokens)
        timeouts = [each for each in (request.timeout_s, self.max_timeout_s or None) if each is not None]
        state.timeout_s = min(timeouts, default=None)
        tenant.waiting += 1
        if tenant.request_bucket is not None:
            tenant.request_bucket.take(1.0, state.arrived)
        self.states[request.id] = state
        queue.push(state)
        return state

    def refuse_if_full(self, tokens: int) -> None:
        """Raise QueueFull if a prompt of so many tokens may not wait."""
        count, waiting_tokens = self.waiting
        if count >= self.queue_size:
            retry_after_s = self.drain_rate.seconds_for(count, waiting_tokens)
            raise QueueFull(count, self.queue_size, retry_after_s)
        # A prompt larger than the whole queue may wait alone: it could never be accepted otherwise.
        if self.queue_tokens and count and waiting_tokens + tokens > self.queue_tokens:
            retry_after_s = self.drain_rate.seconds_for(count, waiting_tokens)
            raise QueueFull(waiting_tokens, self.queue_tokens, retry_after_s, what="prompt tokens")

    def next_for_engine(self, limits: Limits) -> list[RequestState]:
        """The requests to send now; they count as being in the engine from here on."""
        now = time.monotonic()
        sent: list[RequestState] = []
        for queue in (self._generation, self._embedding):
            while queue.count and (state := self._pop(queue, limits, now)) is not None:
                state.stage = Stage.ENGINE
                state.dispatched = now
                self._engine[state.request.id] = state
                state.tenant.waiting -= 1
                state.tenant.running += 1
                state.tenant.peak(now)
                if not state.charged:
                    state.charged = True
                    state.tenant.charge(state.input_tokens, now)
                sent.append(state)
        return sent

    def _pop(self, queue: FairQueue, limits: Limits, now: float) -> RequestState | None:
        """The next request of a queue, or None while the engine is to be given no more of them."""
        running = next(iter(self._engine.values()), None)
        first = queue.replayed[0] if queue.replayed else None
        if running is not None and (running.alone or (first is not None and first.alone)):
            return None
        generation = queue is self._generation
        inside = len([state for state in self._engine.values() if state.queue is queue])
        if inside >= (window(limits.sequences) if generation else MAX_EMBEDDING_REQUESTS):
            return None
        if first is not None:
            queue.remove(first)
            return first
        if not generation:
            return queue.pop(None, now)
        # A unified KV that is full by now, with the cells known to be needed (embedding needs none): one more
        # request would only wait in the engine.
        known = (len(state.request.prompt) + state.generated for state in self._engine.values())
        if limits.unified and sum(known) >= limits.cells:
            return None
        active = self.tenants.active(now)
        if len(active) == 1:
            return queue.pop(None, now)
        free = limits.sequences - inside
        return queue.pop(
            lambda tenant: free > _count_kept(self.tenants, active, tenant, limits.sequences, now), now
        )

    def close(self, state: RequestState) -> None:
        """The request has ended: remove it from the table. Exactly once."""
        assert state.stage is not Stage.DONE
        if state.stage is Stage.QUEUED:
            state.queue.remove(state)
            state.tenant.waiting -= 1
        else:
            del self._engine[state.request.id]
            state.tenant.running -= 1
            state.tenant.drain_rate.note()
            self.drain_rate.note(state.input_tokens)
        del self.states[state.request.id]
        state.stage = Stage.DONE
        if not self.states:
            self.tenants.settle()

    def requeue_after_crash(self) -> tuple[list[RequestState], list[RequestState]]:
        """Sort the requests that were in the engine: (lost, kept). The kept are back at the queue's head.

        Lost: begun, cancelled, or to blame for the crash. The lost are still to be closed by the caller.
        """
        lost: list[RequestState] = []
        kept: list[RequestState] = []
        for state in list(self._engine.values()):
            to_blame = state.blame()
            (lost if state.begun or state.cancelled or to_blame else kept).append(state)
        for state in reversed(kept):
            del self._engine[state.request.id]
            state.stage = Stage.QUEUED
            state.dispatched = None
            state.tenant.waiting += 1
            state.tenant.running -= 1
            state.queue.push(state)
        return lost, kept


def window(sequences: int) -> int:
    """How many the engine is given when order does not matter."""
    return sequences + max(2, sequences // 2)


def _count_kept(tenants: Tenants, active: list[Tenant], tenant: Tenant, sequences: int, now: float) -> int:
    """Free places that a tenant may not take: kept for the next requests of tenants that used them lately.

    They are kept only from tenants that have had at least as much: else many small requests would keep theirs
    while few large ones take the machine.
    """
    weight = sum(each.limits.weight for each in active)
    kept = 0
    for other in active:
        if other is not tenant and tenants.start_tag(other) <= tenants.start_tag(tenant):
            share = int(sequences * other.limits.weight / weight)
            kept += max(0, min(share, other.peak(now)) - other.running)
    return kept


def _check_inputs(request: Request, limits: Limits | None) -> None:
    for index, tokens in enumerate(request.embed):
        if not tokens:
            raise InvalidRequest(f"input {index} is empty: give at least one token", field="input")
        if limits is not None and len(tokens) > limits.embed.tokens:
            raise ContextLengthExceeded.of_input(index, len(tokens), limits.embed.tokens)


class PriorityClass:
    """The waiting requests of one priority, by tenant. Never empty while it is in the queue."""

    def __init__(self, priority: int, now: float) -> None:
        self.priority = priority
        self.served = now  # when a request of this class was last let in, or when it began to wait
        self.lines: dict[Tenant, deque[RequestState]] = {}


class FairQueue:
    """Waiting requests, in the order in which they go to the engine. The rule, outermost first:

    1. **Priority with ageing.** The class with the highest rank goes first: its priority, plus one for each
       `AGEING_S` seconds in which no request of it was let in, so that none starves. The class ages, not
       the request: else the long line of one tenant would, by its age alone, pass those of all others.
    2. **Fair shares.** Within a class, the tenant with the least virtual time (tokens had, prompt and
       generated, divided by its weight). An idle tenant starts at the present virtual time, without credit.
    3. **First come, first served** within a tenant and between tenants that are even.

    Requests replayed after a crash of the engine stand before all of this, in their old order.
    """

    AGEING_S = 1.0

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self.replayed: deque[RequestState] = deque()
        self._classes: dict[int, PriorityClass] = {}
        self.count = 0
        self.tokens = 0  # of the prompts that wait

    def __iter__(self) -> Iterator[RequestState]:
        yield from self.replayed
        for _, each in sorted(self._classes.items(), reverse=True):
            yield from sorted(
                (state for line in each.lines.values() for state in line), key=lambda state: state.arrived
            )

    def push(self, state: RequestState) -> None:
        """Add a request; one that was in a crash goes back to the head, before all others."""
        self.count += 1
        self.tokens += state.input_tokens
        if state.crashes:
            self.replayed.appendleft(state)
            return
        priority = state.request.priority
        if (found := self._classes.get(priority)) is None:
            found = self._classes[priority] = PriorityClass(priority, state.arrived)
        found.lines.setdefault(state.tenant, deque()).append(state)

    def pop(self, may_enter: Callable[[Tenant], bool] | None, now: float) -> RequestState | None:
        """Take the next request of a tenant that may enter (None: any), and advance virtual time."""
        classes = list(self._classes.values())
        if len(classes) > 1:
            classes.sort(key=lambda each: each.priority + (now - each.served) / self.AGEING_S, reverse=True)
        start_tag = self._tenants.start_tag
        for each in classes:
            heads = [line[0] for tenant, line in each.lines.items() if may_enter is None or may_enter(tenant)]
            if heads:
                state = heads[0]
                if len(heads) > 1:
                    state = min(heads, key=lambda state: (start_tag(state.tenant), state.arrived))
                state.tenant.virtual = self._tenants.virtual_time = start_tag(state.tenant)
                each.served = now
                self.remove(state)
                return state
        return None

    def remove(self, state: RequestState) -> None:
        self.count -= 1
        self.tokens -= state.input_tokens
        if state.crashes:
            self.replayed.remove(state)
            return
        each = self._classes[state.request.priority]
        line = each.lines[state.tenant]
        line.remove(state)
        if not line:
            del each.lines[state.tenant]
            if not each.lines:
                del self._classes[each.priority]

    def position(self, state: RequestState) -> int:
        """How many go before it, and itself, if no others come; between tenants an estimate by weight."""
        each = self._classes[state.request.priority]
        own = each.lines[state.tenant].index(state) + 1
        ahead = len(self.replayed)
        for other in self._classes.values():
            if other.priority > each.priority:
                ahead += sum(map(len, other.lines.values()))
        for tenant, line in each.lines.items():
            if tenant is not state.tenant:
                turns = own * tenant.limits.weight / state.tenant.limits.weight
                ahead += min(len(line), math.ceil(turns))
        return ahead + own
