"""Request queue: admission, priority and fair share, and the table of all accepted requests.

It lives in the parent. So a refusal never waits for a step, and a crash of the engine loses no request.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from itertools import islice

from cllm.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from cllm.frontend.output_stream import OutputStream
from cllm.frontend.request_state import RequestState, Stage
from cllm.frontend.tenants import DrainRate, Tenant, Tenants
from cllm.types import Limits, Request

MAX_EMBEDDING_REQUESTS = 16  # in the engine at a time


class RequestQueue:
    """A queue in front of the engine, bounded by requests and prompt tokens. `FairQueue` gives the order.

    Tokens that may be generated are not counted: few of them are, and one "as much as fits" would fill it.

    While one tenant is alone, the engine is given a few more requests than it can run, so that a freed slot
    has a successor in the very next step. With several, it is given as many as it can run, because order
    cannot change in the engine. Of those places a tenant keeps, for some seconds after its last request, as
    many as it used lately, up to its share by weight and unless it has had more than the others: its next
    request need not wait for the end of another tenant's.

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
        self.tenants.queues += 1
        self._generation = FairQueue(self.tenants)
        self._embedding = FairQueue(self.tenants)  # these hold no slot: they have a limit of their own
        self.states: dict[str, RequestState] = {}  # every accepted request, by id
        self._engine: dict[str, RequestState] = {}
        # When requests may go that must wait now, though nothing happens; None: only after something does.
        self.look_again_at: float | None = None

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
        state = RequestState(request, stream, tenant)
        tenant.check(request, state.arrived)
        self.refuse_if_full(state.input_tokens)
        timeouts = [each for each in (request.timeout_s, self.max_timeout_s or None) if each is not None]
        state.timeout_s = min(timeouts, default=None)
        self.tenants.queued(tenant)
        if tenant.request_bucket is not None:
            tenant.request_bucket.take(1.0, state.arrived)
        self.states[request.id] = state
        self._get_queue(state).push(state)
        return state

    def position(self, state: RequestState) -> int:
        """How many requests go before this one."""
        return self._get_queue(state).position(state)

    def _get_queue(self, state: RequestState) -> FairQueue:
        return self._embedding if state.request.embed else self._generation

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
        self.tenants.advance(now)
        sent: list[RequestState] = []
        for queue in (self._generation, self._embedding):
            while queue.count and (state := self._pop(queue, limits, now)) is not None:
                state.stage = Stage.ENGINE
                state.dispatched = state.dispatched or now
                self._engine[state.request.id] = state
                queue.running += 1
                self.tenants.entered(state.tenant)
                if not state.charged:
                    state.charged = True
                    state.tenant.charge(state.input_tokens, now)
                sent.append(state)
        # Of all the rules only places that are kept depend on time: with one tenant there are none.
        lapses = self._generation.count and self.tenants.active_count > 1
        self.look_again_at = self.tenants.period_end if lapses else None
        return sent

    def _pop(self, queue: FairQueue, limits: Limits, now: float) -> RequestState | None:
        """The next request of a queue, or None while the engine is to be given no more of them."""
        running = next(iter(self._engine.values()), None)
        first, alone = queue.first_replayed, self._next_alone()
        if running is not None and (running.alone or alone is not None):
            return None
        if alone is not None and alone is not first:
            return None
        generation = queue is self._generation
        if queue.running >= (window(limits.sequences) if generation else MAX_EMBEDDING_REQUESTS):
            return None
        if first is not None:
            queue.remove(first)
            return first
        if not generation:
            return queue.pop(now)
        # A unified KV that is full by now, with the cells known to be needed (embedding needs none): one more
        # request would only wait in the engine.
        known = (len(state.request.prompt) + state.generated for state in self._engine.values())
        if limits.unified and sum(known) >= limits.cells:
            return None
        if self.tenants.active_count == 1:
            return queue.pop(now)
        if (free := limits.sequences - queue.running) <= 0:
            return None
        return queue.pop(now, free, self.tenants.kept_places(limits.sequences))

    def _next_alone(self) -> RequestState | None:
        """The request that must run alone next, of those at the head of either queue."""
        heads = (self._generation.first_replayed, self._embedding.first_replayed)
        alone = (state for state in heads if state is not None and state.alone)
        return min(alone, key=lambda state: state.arrived, default=None)

    def close(self, state: RequestState) -> None:
        """The request has ended: remove it from the table. Exactly once."""
        assert state.stage is not Stage.DONE
        if state.stage is Stage.QUEUED:
            self._get_queue(state).remove(state)
            state.tenant.waiting -= 1
        else:
            self._leave_engine(state)
            state.tenant.drain_rate.note()
            self.drain_rate.note(state.input_tokens)
        del self.states[state.request.id]
        state.stage = Stage.DONE
        if not self.states:
            self.tenants.settle()

    def requeue_after_crash(self) -> tuple[list[RequestState], list[RequestState]]:
        """Sort the requests that were in the engine: (lost, kept). The kept are back at the queue's head.

        Lost: cancelled, or to blame for the crash. The lost are still to be closed by the caller.
        """
        lost: list[RequestState] = []
        kept: list[RequestState] = []
        for state in list(self._engine.values()):
            to_blame = state.blame()
            (lost if state.cancelled or to_blame else kept).append(state)
        for state in reversed(kept):
            self._leave_engine(state)
            state.requeue()
            self.tenants.queued(state.tenant)
            self._get_queue(state).push(state)
        return lost, kept

    def _leave_engine(self, state: RequestState) -> None:
        del self._engine[state.request.id]
        self._get_queue(state).running -= 1
        self.tenants.left(state.tenant, time.monotonic())


def window(sequences: int) -> int:
    """How many the engine is given when order does not matter."""
    return sequences + max(2, sequences // 2)


def _check_inputs(request: Request, limits: Limits | None) -> None:
    for index, tokens in enumerate(request.embed):
        if not tokens:
            raise InvalidRequest(f"input {index} is empty: give at least one token", field="input")
        if limits is not None and len(tokens) > limits.embed.tokens:
            raise ContextLengthExceeded.of_input(index, len(tokens), limits.embed.tokens)


class Line:
    """The waiting requests of one tenant in a priority class, the oldest first. Never empty while it stands.

    A request is taken out anywhere in constant time, as those that are cancelled are.
    """

    __slots__ = ("states", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.states: OrderedDict[RequestState, None] = OrderedDict()

    @property
    def head(self) -> RequestState:
        return next(iter(self.states))


class PriorityClass:
    """The waiting requests of one priority, by tenant. Never empty while it is in the queue.

    Two heaps find the next line without a look at each tenant: the lines of tenants that have not had more
    than virtual time allows, by arrival, and those of tenants that have, by their virtual time. Both keys
    only ever grow, so an entry that is out of date is mended when it comes to the top.
    """

    SPARE = 64  # entries of lines that are gone, in small heaps

    def __init__(self, priority: int, now: float) -> None:
        self.priority = priority
        self.served = now  # when a request of this class was last let in, or when it began to wait
        self.count = 0
        self.lines: OrderedDict[Tenant, Line] = OrderedDict()
        self._even: list[tuple[int, Line]] = []
        self._ahead: list[tuple[float, int, Line]] = []

    def add(self, state: RequestState) -> None:
        self.count += 1
        if (line := self.lines.get(state.tenant)) is None:
            line = self.lines[state.tenant] = Line(state.tenant)
            heapq.heappush(self._even, (state.number, line))
        line.states[state] = None

    def remove(self, state: RequestState) -> None:
        self.count -= 1
        line = self.lines[state.tenant]
        del line.states[state]
        if not line.states:
            del self.lines[state.tenant]
            if len(self._even) + len(self._ahead) > 2 * len(self.lines) + self.SPARE:
                self._ahead.clear()
                self._even = [(line.head.number, line) for line in self.lines.values()]
                heapq.heapify(self._even)

    def next_line(self, virtual_time: float) -> Line:
        """The line of the tenant that has had least, of equals the one that waits longest."""
        even, ahead = self._even, self._ahead
        while ahead and ahead[0][0] <= virtual_time:
            if (line := heapq.heappop(ahead)[2]).states:
                heapq.heappush(even, (line.head.number, line))
        while even:
            number, line = even[0]
            if not line.states:
                heapq.heappop(even)
            elif (had := line.tenant.virtual) > virtual_time:
                heapq.heappop(even)
                heapq.heappush(ahead, (had, line.head.number, line))
            elif line.head.number > number:
                heapq.heapreplace(even, (line.head.number, line))
            else:
                return line
        while True:
            had, number, line = ahead[0]
            if not line.states:
                heapq.heappop(ahead)
            elif line.tenant.virtual > had or line.head.number > number:
                heapq.heapreplace(ahead, (line.tenant.virtual, line.head.number, line))
            else:
                return line


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
    MAX_SAMPLED = 16  # lines from which a position is estimated

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._replayed: deque[RequestState] = deque()  # no more than the engine held
        self._classes: dict[int, PriorityClass] = {}
        self._pushed = 0  # in all
        self.count = 0
        self.tokens = 0  # of the prompts that wait
        self.running = 0  # requests from here that are in the engine

    def __iter__(self) -> Iterator[RequestState]:
        yield from self._replayed
        for _, each in sorted(self._classes.items(), reverse=True):
            yield from sorted(
                (state for line in each.lines.values() for state in line.states),
                key=lambda state: state.number,
            )

    @property
    def first_replayed(self) -> RequestState | None:
        return self._replayed[0] if self._replayed else None

    def push(self, state: RequestState) -> None:
        """Add a request; one that was in a crash goes back to the head, before all others."""
        self.count += 1
        self.tokens += state.input_tokens
        if state.crashes:
            self._replayed.appendleft(state)
            return
        self._pushed += 1
        state.number = self._pushed
        priority = state.request.priority
        if (found := self._classes.get(priority)) is None:
            found = self._classes[priority] = PriorityClass(priority, state.arrived)
        found.add(state)

    def pop(self, now: float, free: int = 1, kept: Mapping[Tenant, int] | None = None) -> RequestState | None:
        """Take the next request and advance virtual time; None if all `free` places are kept for others."""
        classes = list(self._classes.values())
        if len(classes) > 1:
            classes.sort(key=lambda each: each.priority + (now - each.served) / self.AGEING_S, reverse=True)
        for each in classes:
            line = self._next_allowed(each, free, kept or {})
            if line is not None:
                state = line.head
                self._tenants.let_in(state.tenant)
                each.served = now
                self.remove(state)
                return state
        return None

    def _next_allowed(self, each: PriorityClass, free: int, kept: Mapping[Tenant, int]) -> Line | None:
        """The next line whose tenant may take one of the free places.

        Places are kept only from tenants that have had at least as much: else many small requests would keep
        theirs while few large ones take the machine. So where the next line must wait, all that come after
        it must, but for those of tenants with kept places.
        """
        start_tag = self._tenants.start_tag

        def allowed(tenant: Tenant) -> bool:
            tag = start_tag(tenant)
            return free > sum(
                count for other, count in kept.items() if other is not tenant and start_tag(other) <= tag
            )

        line = each.next_line(self._tenants.virtual_time)
        if allowed(line.tenant):
            return line
        return min(
            (each.lines[tenant] for tenant in kept if tenant in each.lines and allowed(tenant)),
            key=lambda line: (start_tag(line.tenant), line.head.number),
            default=None,
        )

    def remove(self, state: RequestState) -> None:
        self.count -= 1
        self.tokens -= state.input_tokens
        if state.crashes:
            self._replayed.remove(state)
            return
        each = self._classes[state.request.priority]
        each.remove(state)
        if not each.count:
            del self._classes[each.priority]

    def position(self, state: RequestState) -> int:
        """How many go before the newest of its tenant's requests, and itself, if no others come.

        Between tenants it is an estimate by weight, with many of them from a sample.
        """
        each = self._classes[state.request.priority]
        own = len(each.lines[state.tenant].states)
        ahead = len(self._replayed)
        ahead += sum(other.count for other in self._classes.values() if other.priority > each.priority)
        others = [
            line for line in islice(each.lines.values(), self.MAX_SAMPLED) if line.tenant is not state.tenant
        ]
        turns = own / state.tenant.limits.weight
        before = sum(min(len(line.states), math.ceil(turns * line.tenant.limits.weight)) for line in others)
        if others:
            before = before * (len(each.lines) - 1) // len(others)
        return ahead + before + own
