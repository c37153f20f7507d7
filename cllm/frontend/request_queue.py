"""Request queue: admission, priority and fair share, and the table of all accepted requests.

It lives in the parent. So a refusal never waits for a step, and a crash of the engine loses no request.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from cllm.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.frontend.tenants import DrainRate, Tenant, Tenants
from cllm.types import Limits, Request, RequestOutput
from cllm.workers.supervisor import ResumableRequest

MAX_EMBEDDING_REQUESTS = 16  # in the engine at a time
MAX_MEDIA_MB = 1024  # of rows of pictures, which are kept here until their requests end


class Stage(Enum):
    QUEUED = "queued"
    ENGINE = "engine"
    DONE = "done"


@dataclass(eq=False, repr=False, kw_only=True)
class RequestState(ResumableRequest):
    """An accepted request: its stage, its stream, its times (monotonic), its answer so far."""

    number = 0  # in the order of arrival, in its queue
    rank = 0  # the priority that it has before requests of other tenants
    stage = Stage.QUEUED
    prepaid_s: float | None = None  # what its tenant paid when it was sent first, less what it has cost
    backlogged = False  # more of its tenant's waited for a slot when it was sent

    stream: AsyncOutputStream
    tenant: Tenant
    queue: FairQueue
    input_tokens: int  # of the prompt, or of all inputs to embed
    arrived: float
    timeout_s: float | None  # from arrival to the last token
    deadline: asyncio.TimerHandle | None = None
    dispatched: float | None = None  # the first time, if it has begun
    first_token: float | None = None
    last_token: float | None = None
    trace: Trace | None = None  # of the HTTP request it is a part of

    @property
    def ending(self) -> bool:
        """Its next token is the last one: its slot is free when another request has come there."""
        return 0 < self.generated >= self.request.max_tokens - 1

    def pay(self, seconds: float) -> None:
        """It took seconds of steps: what was paid before counts first."""
        used = min(self.prepaid_s or 0.0, seconds)
        self.prepaid_s = (self.prepaid_s or 0.0) - used
        self.tenant.pay(seconds - used)


class Trace:
    """The times of an HTTP request and of its parts. `export` is called once, when these have ended."""

    def __init__(self, export: Callable[[Trace], object]) -> None:
        self.began, self.ended = time.monotonic(), 0.0
        self.calls: list[tuple[str, float, float]] = []  # of the tokenizer: name, begin, end
        self.requests: list[tuple[RequestState, RequestOutput, float]] = []  # the ended ones
        self.open = 1  # the response, and requests that have not ended
        self._export = export

    def close(self) -> None:
        """One of the parts has ended."""
        self.open -= 1
        if not self.open:
            self.ended = time.monotonic()
            self._export(self)


TRACE: ContextVar[Trace | None] = ContextVar("trace", default=None)
"""The trace of the HTTP request that this context serves, if it has one."""


class RequestQueue:
    """A queue in front of the engine, bounded by requests and prompt tokens. `FairQueue` gives the order.

    The bound is for all tenants together; beyond it each may still hold its share. So no tenant can fill the
    queue for another, an accepted request stays, and there are at most twice as many.

    Tokens that may be generated are not counted: few of them are, and one "as much as fits" would fill it.

    While one tenant is alone, the engine is given a few more requests than it can run, so that a freed slot
    has a successor in the very next step. With several, it is given as many as it can run, because order
    cannot change in the engine; one whose next token is its last does not count. Of those places a tenant
    keeps, for some seconds after its last request, as many as it used lately, up to its share by weight and
    unless it has had more than the others: its next request need not wait for another tenant's.

    A request that must run alone (it was in two crashes of the engine) goes when the engine is empty. Until
    it has run, nothing else goes, generation or embedding: so it waits only for what is in the engine.
    """

    def __init__(
        self,
        queue_size: int,
        queue_tokens: int = 0,
        max_timeout_s: float = 0.0,
        tenants: Tenants | None = None,
    ) -> None:
        """`tenants` are shared with the queues of other engines, all on one thread."""
        self.queue_size = queue_size
        self.queue_tokens = queue_tokens  # 0: no limit
        self.max_timeout_s = max_timeout_s  # 0: no limit
        self.drain_rate = DrainRate()
        self.tenants = tenants or Tenants()
        self.tenants.queues.add(self)
        self._generation = FairQueue(self.tenants)
        self._embedding = FairQueue(self.tenants)  # these hold no slot: they have a limit of their own
        self.states: dict[str, RequestState] = {}  # every accepted request, by id
        self._engine: dict[str, RequestState] = {}
        self._slots = 0  # of the engine
        # When requests may go that must wait now, though nothing happens; None: only after something does.
        self.look_again_at: float | None = None

    @property
    def waiting(self) -> tuple[int, int]:
        """Number of requests and of prompt tokens in the queue."""
        generation, embedding = self._generation, self._embedding
        return generation.count + embedding.count, generation.tokens + embedding.tokens

    @property
    def surplus(self) -> list[RequestState]:
        """Requests that the engine was given beyond its slots, in their order. They wait there."""
        if self._generation.running <= self._slots:
            return []
        given = [state for state in self._engine.values() if state.queue is self._generation]
        return given[self._slots :]

    @property
    def without_slot(self) -> tuple[int, int]:
        """Number of requests and of prompt tokens that wait for a slot, in the queue or in the engine."""
        (count, tokens), surplus = self.waiting, self.surplus
        return count + len(surplus), tokens + sum(state.input_tokens for state in surplus)

    def position(self, state: RequestState) -> int:
        """Number of requests, itself included, that get a slot before those after it. 0: it has one."""
        surplus = self.surplus
        if state.stage is Stage.QUEUED:
            return len(surplus) * (state.queue is self._generation) + state.queue.position(state)
        return surplus.index(state) + 1 if state in surplus else 0

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """All accepted requests, those in the engine first."""
        return (*self._engine.values(), *self._generation, *self._embedding)

    def admit(self, request: Request, stream: AsyncOutputStream, limits: Limits | None) -> RequestState:
        """Take a request into the queue, or raise at once why not."""
        tokens, queue = len(request.prompt), self._generation
        if request.embed:
            for index, each in enumerate(request.embed):
                if not each:
                    raise InvalidRequest(f"input {index} is empty: give at least one token", field="input")
                if limits is not None and len(each) > limits.embed.tokens:
                    raise ContextLengthExceeded.of_input(index, len(each), limits.embed.tokens)
            tokens, queue = request.input_tokens, self._embedding
        elif not tokens:
            raise InvalidRequest("the prompt is empty: give at least one token", field="prompt")
        elif limits is not None and tokens >= limits.request_tokens:
            raise ContextLengthExceeded(tokens, limits.request_tokens)
        assert request.id not in self.states, f"request {request.id} is here already"
        tenant = self.tenants.open(request.tenant)
        now = time.monotonic()
        if tenant.limited:
            tenant.check(request, now)
        if self.states:
            self.refuse_if_full(tokens, tenant)
        if request.media:  # the rows of all requests' pictures are kept here
            kept = {id(each.media): each.media for each in (request, *(one.request for one in self.requests))}
            size = sum(len(rows) for media in kept.values() for rows in media.values()) >> 20
            if size > MAX_MEDIA_MB and len(kept) > 1:
                raise QueueFull(size, MAX_MEDIA_MB, 1.0, what="MiB of pictures")
        if tenant.request_bucket is not None:
            tenant.request_bucket.take(1.0, now)
        timeouts = [each for each in (request.timeout_s, self.max_timeout_s or None) if each is not None]
        state = self.states[request.id] = RequestState(
            request=request,
            stream=stream,
            tenant=tenant,
            queue=queue,
            input_tokens=tokens,
            arrived=now,
            timeout_s=min(timeouts, default=None),
        )
        queue.push(state)
        return state

    def refuse_if_full(self, tokens: int, tenant: Tenant) -> None:
        """Raise QueueFull if the queue has no room for a prompt of `tokens` tokens.

        A tenant that holds less than its share of a full queue is let in all the same.
        """
        count, waiting_tokens = self.waiting
        has_share, queues = self.tenants.has_share, (self._generation, self._embedding)
        held = sum(queue.held[tenant] for queue in queues)
        held_tokens = sum(queue.held_tokens[tenant] for queue in queues)
        if count >= self.queue_size and has_share(tenant, held, self.queue_size):
            raise QueueFull(count, self.queue_size, self.drain_rate.seconds_for(count, waiting_tokens))
        # A prompt larger than the whole queue may wait alone: it could never be accepted otherwise.
        full = self.queue_tokens and count and waiting_tokens + tokens > self.queue_tokens
        if full and held and has_share(tenant, held_tokens + tokens, self.queue_tokens):
            retry_after_s = self.drain_rate.seconds_for(count, waiting_tokens)
            raise QueueFull(waiting_tokens, self.queue_tokens, retry_after_s, what="prompt tokens")

    def next_for_engine(self, limits: Limits) -> list[RequestState]:
        """The requests to send now; they count as being in the engine from here on."""
        now = time.monotonic()
        self._slots = limits.max_running
        if now >= self.tenants.period_end:
            self.tenants.advance(now)
        sent: list[RequestState] = []
        for queue in (self._generation, self._embedding):
            while queue.count and (state := self._pop(queue, limits, now)) is not None:
                state.stage = Stage.ENGINE
                state.dispatched = state.dispatched or now
                self._engine[state.request.id] = state
                queue.running += 1
                tenant = state.tenant
                tenant.running += 1
                tenant.peak = max(tenant.peak, tenant.running)
                state.backlogged = queue.held[tenant] > 0 and len(self.tenants.active) > 1
                self.tenants.recent[tenant] = None
                if state.prepaid_s is None:
                    state.prepaid_s = Tenant.TOKEN_S * state.input_tokens
                    tenant.pay(state.prepaid_s)
                    tenant.charge(state.input_tokens, now)
                sent.append(state)
        # Of all the rules only places that are kept depend on time: with one tenant there are none.
        lapses = self._generation.count and len(self.tenants.active) > 1
        self.look_again_at = self.tenants.period_end if lapses else None
        return sent

    def _pop(self, queue: FairQueue, limits: Limits, now: float) -> RequestState | None:
        """The next request of a queue, or None while the engine is to be given no more of them."""
        running = next(iter(self._engine.values()), None)
        if running is not None and running.alone:
            return None
        # Of those replayed, at the head of either queue, the one that must run alone next.
        heads = [each.replayed[0] for each in (self._generation, self._embedding) if each.replayed]
        suspect = min((each for each in heads if each.alone), key=lambda each: each.arrived, default=None)
        if suspect is not None and (running is not None or suspect.queue is not queue):
            return None
        sequences, generation = limits.max_running, queue is self._generation
        # When order does not matter, the engine is given a few more than it can run.
        limit = sequences + max(2, sequences // 2) if generation else MAX_EMBEDDING_REQUESTS
        if queue.running >= limit:
            if generation or queue.replayed:
                return None
            # One beyond the limit for a tenant that has none there: those of others may take long.
            inside = {state.tenant for state in self._engine.values() if state.queue is queue}
            kept = {tenant: 1 for tenant in queue.held if tenant not in inside}
            return queue.pop(now, 0, kept) if kept else None
        if queue.replayed:
            first = queue.replayed[0]
            queue.remove(first)
            return first
        if not generation:
            return queue.pop(now)
        # A unified KV that is full by now, with the cells known to be needed (embedding needs none): one more
        # request would only wait in the engine.
        known = (len(state.request.prompt) + state.generated for state in self._engine.values())
        if limits.unified and sum(known) >= limits.cells:
            return None
        if len(self.tenants.active) == 1:
            return queue.pop(now)
        ending = sum(state.ending for state in self._engine.values())
        if (free := sequences - queue.running + ending) <= 0:
            return None
        return queue.pop(now, free, self.tenants.kept_places(sequences))

    def close(self, state: RequestState) -> None:
        """The request has ended: remove it from the table. Exactly once."""
        assert state.stage is not Stage.DONE
        tenants, tenant = self.tenants, state.tenant
        if state.stage is Stage.QUEUED:
            state.queue.remove(state)
        else:
            now = time.monotonic()
            if now >= tenants.period_end:
                tenants.advance(now)  # it was in the engine until now
            del self._engine[state.request.id]
            state.queue.running -= 1
            tenant.running -= 1
            tenant.drain_rate.ended.append((now, 0))
            self.drain_rate.ended.append((now, state.input_tokens))
        del self.states[state.request.id]
        tenant.credit_s += state.prepaid_s or 0.0
        state.stage = Stage.DONE
        if not self.states and not any(each.waiting or each.running for each in tenants.active):
            # All queues are empty: what a tenant had while it was alone is no debt.
            had = [each.virtual for each in tenants.accounts.values()]
            tenants.virtual_time = max([tenants.virtual_time, *had])

    def requeue_after_crash(self) -> tuple[list[RequestState], list[RequestState]]:
        """Sort the requests that were in the engine: (lost, kept). The kept are back at the queue's head.

        Lost: cancelled, or to blame for the crash. The lost are still to be closed by the caller.
        """
        lost: list[RequestState] = []
        kept: list[RequestState] = []
        for state in list(self._engine.values()):
            (lost if state.blame() or state.cancelled else kept).append(state)
        if (now := time.monotonic()) >= self.tenants.period_end:
            self.tenants.advance(now)  # they were in the engine until now
        for state in reversed(kept):
            del self._engine[state.request.id]
            state.queue.running -= 1
            state.tenant.running -= 1
            state.stage = Stage.QUEUED
            if not state.generated:
                state.dispatched = None
            state.resume()
            state.queue.push(state)
        return lost, kept


class Lane(OrderedDict[RequestState, None]):
    """The waiting requests of one tenant and one priority, the oldest first. Never empty while it stands.

    A request is taken out anywhere in constant time, as those that are cancelled are.
    """

    priority: int
    served: float  # as that of a priority class


class Line(dict[int, Lane]):
    """The waiting requests of one tenant in a priority class, by their own priority."""

    tenant: Tenant

    @property
    def oldest(self) -> int:
        """The number of the request that has waited longest; 0 if there is none."""
        return min((next(iter(lane)).number for lane in self.values()), default=0)


def get_turn(waiting: Lane | PriorityClass, now: float) -> float:
    """When its turn comes, the least first: by priority, one more for each `AGEING_S` without a turn."""
    return -waiting.priority - (now - waiting.served) / FairQueue.AGEING_S


@dataclass(eq=False)
class PriorityClass:
    """The waiting requests of one priority, by tenant. Never empty while it is in the queue.

    Two heaps find the next line without a look at each tenant: the lines of tenants that have not had more
    than virtual time allows, by arrival, and those of tenants that have, by their virtual time. Both keys
    only ever grow, so an entry that is out of date is mended when it comes to the top.
    """

    SPARE = 64  # entries of lines that are gone, in small heaps

    priority: int
    served: float  # when a request of this class was last let in, or when it began to wait
    count: int = 0
    lines: OrderedDict[Tenant, Line] = field(default_factory=OrderedDict)
    even: list[tuple[int, Line]] = field(default_factory=list)
    ahead: list[tuple[float, int, Line]] = field(default_factory=list)

    def next_line(self, virtual_time: float) -> Line:
        """The line of the tenant that has had least, of equals the one that waits longest."""
        even, ahead = self.even, self.ahead
        while ahead and ahead[0][0] <= virtual_time:
            _, number, line = heapq.heappop(ahead)
            heapq.heappush(even, (number, line))
        while even:
            number, line = even[0]
            first = line.oldest
            if not line:
                heapq.heappop(even)
            elif (had := line.tenant.virtual) > virtual_time:
                heapq.heappop(even)
                heapq.heappush(ahead, (had, first, line))
            elif first > number:
                heapq.heapreplace(even, (first, line))
            else:
                return line
        while True:
            had, number, line = ahead[0]
            first = line.oldest
            if not line:
                heapq.heappop(ahead)
            elif line.tenant.virtual > had or first > number:
                heapq.heapreplace(ahead, (line.tenant.virtual, first, line))
            else:
                return line

    def drop_line(self, tenant: Tenant) -> None:
        """Remove an empty line; its entries leave the heaps when they come to the top, or are many."""
        del self.lines[tenant]
        if len(self.even) + len(self.ahead) > 2 * len(self.lines) + self.SPARE:
            self.ahead.clear()
            self.even = [(line.oldest, line) for line in self.lines.values()]
            heapq.heapify(self.even)


class FairQueue:
    """Waiting requests, in the order in which they go to the engine. The rule, outermost first:

    1. **Priority with ageing.** The class with the highest rank goes first: its priority, plus one for each
       `AGEING_S` seconds in which no request of it was let in, so that none starves. The class ages, not
       the request: else the long line of one tenant would, by its age alone, pass those of all others.
       Without a `max_priority`, a tenant's requests are in class 0 or below: so they pass no other's.
    2. **Fair shares.** Within a class, the tenant with the least virtual time (seconds that it had of steps,
       divided by its weight). An idle tenant starts at the present virtual time, without credit.
    3. **A tenant's own priority**, with ageing, orders its requests within a class.
    4. **First come, first served** within a priority of a tenant and between tenants that are even.

    Requests replayed after a crash of the engine stand before all of this, in their old order.
    """

    AGEING_S = 1.0
    MAX_SAMPLED = 16  # lines from which a position is estimated

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self.replayed: deque[RequestState] = deque()  # no more than the engine held
        self._classes: dict[int, PriorityClass] = {}
        self._pushed = 0  # in all
        self.count = 0
        self.tokens = 0  # of the prompts that wait
        self.held, self.held_tokens = Counter[Tenant](), Counter[Tenant]()  # the same, of each tenant
        self.running = 0  # requests from here that are in the engine

    def __iter__(self) -> Iterator[RequestState]:
        yield from self.replayed
        for _, each in sorted(self._classes.items(), reverse=True):
            yield from sorted(
                (state for line in each.lines.values() for lane in line.values() for state in lane),
                key=lambda state: (-state.request.priority, state.number),
            )

    def push(self, state: RequestState) -> None:
        """Add a request; one that was in a crash goes back to the head, before all others."""
        tenant = state.tenant
        tenant.waiting += 1
        self.held[tenant] += 1
        self.held_tokens[tenant] += state.input_tokens
        if tenant not in self._tenants.active:
            self._tenants.activate(tenant)
        self.count += 1
        self.tokens += state.input_tokens
        if state.crashes:
            self.replayed.appendleft(state)
            return
        self._pushed += 1
        state.number = self._pushed
        priority = state.request.priority
        state.rank = min(priority, 0) if tenant.limits.max_priority is None else priority
        if (each := self._classes.get(state.rank)) is None:
            each = self._classes[state.rank] = PriorityClass(state.rank, state.arrived)
        each.count += 1
        if (line := each.lines.get(tenant)) is None:
            line = each.lines[tenant] = Line()
            line.tenant = tenant
            heapq.heappush(each.even, (state.number, line))
        if (lane := line.get(priority)) is None:
            lane = line[priority] = Lane()
            lane.priority, lane.served = priority, state.arrived
        lane[state] = None

    def pop(self, now: float, free: int = 1, kept: Mapping[Tenant, int] | None = None) -> RequestState | None:
        """Take the next request and advance virtual time; None if all `free` places are kept for others."""
        tenants, classes = self._tenants, list(self._classes.values())
        if len(classes) > 1:
            classes.sort(key=lambda each: get_turn(each, now))
        for each in classes:
            line: Line | None = next(iter(each.lines.values()))
            if len(each.lines) > 1:
                line = each.next_line(tenants.virtual_time)
            if kept and line is not None and not self._is_allowed(line.tenant, free, kept):
                # All that come after it must wait, too, but for those of tenants with kept places.
                others = [tenant for tenant in kept if self._is_allowed(tenant, free, kept)]
                line = min(
                    (each.lines[tenant] for tenant in others if tenant in each.lines),
                    key=lambda line: (tenants.start_tag(line.tenant), line.oldest),
                    default=None,
                )
            if line is None:
                continue
            tag = line.tenant.virtual = max(tenants.virtual_time, line.tenant.virtual)
            if len(tenants.queues) > 1:
                # No further than to the least of those that wait: a tenant that is alone in one queue must
                # not take from another, which waits elsewhere, what that has not had.
                least = min(other.virtual for other in tenants.active if other.waiting)
                tag = max(tenants.virtual_time, least)
            tenants.virtual_time = tag
            lane = min(line.values(), key=lambda lane: get_turn(lane, now))
            each.served = lane.served = now
            state = next(iter(lane))
            self.remove(state)
            return state
        return None

    def _is_allowed(self, tenant: Tenant, free: int, kept: Mapping[Tenant, int]) -> bool:
        """Places are kept only from tenants that have had at least as much.

        Else many small requests would keep theirs while few large ones take the machine.
        """
        if not free:  # they alone go beyond the limit
            return tenant in kept
        start_tag = self._tenants.start_tag
        tag = start_tag(tenant)
        return free > sum(
            count for other, count in kept.items() if other is not tenant and start_tag(other) <= tag
        )

    def remove(self, state: RequestState) -> None:
        self.count -= 1
        state.tenant.waiting -= 1
        self.held[state.tenant] -= 1
        self.held_tokens[state.tenant] -= state.input_tokens
        if not self.held[state.tenant]:
            del self.held[state.tenant], self.held_tokens[state.tenant]
        self.tokens -= state.input_tokens
        if state.crashes:
            self.replayed.remove(state)
            return
        each = self._classes[state.rank]
        each.count -= 1
        line, priority = each.lines[state.tenant], state.request.priority
        del line[priority][state]
        if not line[priority]:
            del line[priority]
        if not each.count:
            del self._classes[each.priority]
        elif not line:
            each.drop_line(state.tenant)

    def position(self, state: RequestState) -> int:
        """Number of requests up to the newest of its tenant's, itself included, if no others come.

        Between tenants it is an estimate by weight, with many of them from a sample.
        """
        each = self._classes[state.rank]
        lanes = each.lines[state.tenant].values()
        own = sum(len(lane) for lane in lanes if lane.priority >= state.request.priority)
        ahead = len(self.replayed)
        ahead += sum(other.count for other in self._classes.values() if other.priority > each.priority)
        lines = islice(each.lines.items(), self.MAX_SAMPLED)
        others = [(tenant, len(line)) for tenant, line in lines if tenant is not state.tenant]
        turns = own / state.tenant.limits.weight
        before = sum(min(count, math.ceil(turns * tenant.limits.weight)) for tenant, count in others)
        if others:
            before = before * (len(each.lines) - 1) // len(others)
        return ahead + before + own
