"""Whose turn it is: the queue in front of the engine."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

from cllm.engine.tenants import Tenant, Tenants
from cllm.engine.ticket import Ticket


class PriorityClass:
    """The waiting requests of one priority, by tenant. Never empty while it is in the queue."""

    def __init__(self, priority: int, now: float) -> None:
        self.priority = priority
        self.served = now  # when somebody of this class was let in last, or when it began to wait
        self.lines: dict[Tenant, deque[Ticket]] = {}

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
        self._replayed: deque[Ticket] = deque()
        self._classes: dict[int, PriorityClass] = {}
        self._count = 0
        self.tokens = 0  # of the prompts that wait

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Ticket]:
        yield from self._replayed
        for _, each in sorted(self._classes.items(), reverse=True):
            yield from sorted(
                (ticket for line in each.lines.values() for ticket in line), key=lambda one: one.arrived
            )

    def push(self, ticket: Ticket, now: float) -> None:
        priority = ticket.request.priority
        if (found := self._classes.get(priority)) is None:
            found = self._classes[priority] = PriorityClass(priority, now)
        found.lines.setdefault(ticket.tenant, deque()).append(ticket)
        self._counted(ticket, 1)

    def push_back(self, tickets: list[Ticket]) -> None:
        """Put replayed requests before everybody, in the order given."""
        self._replayed.extendleft(reversed(tickets))
        for ticket in tickets:
            self._counted(ticket, 1)

    @property
    def replayed(self) -> Ticket | None:
        """The first of those to be replayed; nobody goes before it."""
        return self._replayed[0] if self._replayed else None

    def pop_replayed(self) -> Ticket:
        ticket = self._replayed.popleft()
        self._counted(ticket, -1)
        return ticket

    def pop(self, may_enter: Callable[[Tenant], bool], now: float) -> Ticket | None:
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

    def remove(self, ticket: Ticket) -> None:
        if ticket in self._replayed:
            self._replayed.remove(ticket)
            self._counted(ticket, -1)
        else:
            self._take(self._classes[ticket.request.priority], ticket)

    def position(self, ticket: Ticket) -> int:
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

    def _take(self, each: PriorityClass, ticket: Ticket) -> None:
        line = each.lines[ticket.tenant]
        line.remove(ticket)
        if not line:
            del each.lines[ticket.tenant]
            if not each.lines:
                del self._classes[each.priority]
        self._counted(ticket, -1)

    def _counted(self, ticket: Ticket, sign: int) -> None:
        self._count += sign
        self.tokens += sign * ticket.request.input_tokens
