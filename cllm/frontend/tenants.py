"""Tenants: the limits of each, and the account of what each has had."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from cllm.errors import InvalidRequest, RateLimited
from cllm.types import Request, TenantLimits


class TokenBucket:
    """Fills at `rate` a second up to one second's worth; may be overdrawn, and then refills from below 0."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._level = max(1.0, rate)
        self._at = now

    def seconds_until(self, level: float, now: float) -> float:
        """How long until it holds `level` (at most what fits); 0 when it does."""
        self._fill(now)
        return max(0.0, (min(level, max(1.0, self.rate)) - self._level) / self.rate)

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(max(1.0, self.rate), self._level + (now - self._at) * self.rate)
        self._at = now


class DrainRate:
    """Recent throughput in requests and tokens: gives a refused client its `Retry-After`."""

    REMEMBERED_S = 60.0  # older ones say nothing about now

    def __init__(self) -> None:
        self.ended: deque[tuple[float, int]] = deque(maxlen=64)  # when a request did, and its tokens

    def seconds_for(self, count: int, tokens: int = 0) -> float:
        """How long `count` requests, or `tokens` tokens if that is longer, take; between 1 s and 60 s."""
        now = time.monotonic()
        while self.ended and now - self.ended[0][0] > self.REMEMBERED_S:
            self.ended.popleft()
        if len(self.ended) < 2:
            return 1.0
        elapsed = now - self.ended[0][0]
        seconds = count * elapsed / len(self.ended)
        if passed := sum(each for _, each in self.ended):
            seconds = max(seconds, tokens * elapsed / passed)
        return min(60.0, max(1.0, seconds))


class Tenant:
    """One tenant's account. `virtual` is its virtual time: seconds of steps, divided by weight."""

    TOKEN_S = 1e-3  # of a prompt, to be paid before anything is known; what it did not cost is given back
    HOLD_S = 2.0  # a period. What a tenant used of the engine is kept for it to the end of the next

    def __init__(self, name: str, limits: TenantLimits) -> None:
        self.name = name
        self.virtual = 0.0
        self.tokens = 0  # had in all, prompt and generated
        self.credit_s = 0.0  # paid for requests that cost less
        self.waiting = self.running = 0  # requests, in the queues of all engines
        self.drain_rate = DrainRate()
        self.peak = self.last_peak = 0  # maximum in the engine at once: of this period, of the last one
        self.limit(limits)

    def limit(self, limits: TenantLimits) -> None:
        """Set its limits; the buckets start anew."""
        self.limits = limits
        defaults = TenantLimits(name=limits.name, role=limits.role, weight=limits.weight)
        self.limited = limits != defaults  # there is something to `check`
        now = time.monotonic()
        self.request_bucket = TokenBucket(limits.requests_per_s, now) if limits.requests_per_s else None
        self.token_bucket = TokenBucket(limits.tokens_per_s, now) if limits.tokens_per_s else None

    def check(self, request: Request, now: float) -> None:
        """Raise why this request is refused now. Changes nothing."""
        limits = self.limits
        if limits.max_priority is not None and request.priority > limits.max_priority:
            raise InvalidRequest(
                f"priority is {request.priority}: this key may use at most {limits.max_priority}",
                field="priority",
            )
        if limits.concurrent and self.waiting + self.running >= limits.concurrent:
            raise RateLimited(
                f"{limits.concurrent} requests at the same time", self.drain_rate.seconds_for(1)
            )
        if self.request_bucket is not None and (wait := self.request_bucket.seconds_until(1.0, now)) > 0:
            raise RateLimited(f"{limits.requests_per_s:g} requests a second", wait)
        if self.token_bucket is not None and (wait := self.token_bucket.seconds_until(0.0, now)) > 0:
            raise RateLimited(f"{limits.tokens_per_s:g} tokens a second", wait)

    def pay(self, seconds: float) -> None:
        """Count seconds of steps against its share."""
        used = min(self.credit_s, seconds)
        self.credit_s -= used
        self.virtual += (seconds - used) / self.limits.weight

    def charge(self, tokens: int, now: float) -> None:
        """Count tokens, prompt or generated, against its limit."""
        self.tokens += tokens
        if self.token_bucket is not None:
            self.token_bucket.take(tokens, now)


class Tenants:
    """All tenants by name. Names that are not registered are tenants too, without limits.

    Those with requests here, or in the engine a moment ago, are active. All lose that, and the places kept
    for them, at the end of a period and at no other time: so there is one moment to look at the queue again.
    """

    MAX_UNKNOWN = 256  # accounts of unregistered names that are kept

    def __init__(self) -> None:
        self._limits: dict[str, TenantLimits] = {}
        self._registered_weight = 0.0
        self.accounts: dict[str, Tenant] = {}
        self._forget_at = self.MAX_UNKNOWN  # number of accounts
        self.active: dict[Tenant, None] = {}
        self.recent: dict[Tenant, None] = {}  # of the active, those in the engine now or a moment ago
        self.period_end = 0.0  # next time at which something may lapse
        self._weight = self._max_weight = 0.0  # of the active: the sum, and the largest
        self.virtual_time = 0.0  # start tag of the request that was let in last
        self.queues: WeakSet[Any] = WeakSet()  # the `RequestQueue` of each engine

    def count_surplus(self) -> Counter[Tenant]:
        """Requests of each tenant that are in an engine and wait for a slot there."""
        return Counter(state.tenant for queue in tuple(self.queues) for state in queue.surplus)

    def register(self, limits: Mapping[str, TenantLimits]) -> None:
        """Replace all limits. Accounts go on; changed limits count from now."""
        self._limits = dict(limits)
        self._registered_weight = sum(each.weight for each in limits.values())
        self._forget_at = len(self._limits) + self.MAX_UNKNOWN
        for tenant in self.accounts.values():
            if (new := self._limits.get(tenant.name, TenantLimits())) != tenant.limits:
                tenant.limit(new)
        self._weigh()

    def open(self, name: str) -> Tenant:
        """The account of a tenant, opened where it has none."""
        if name not in self.accounts:
            if len(self.accounts) >= self._forget_at:
                self.accounts = {
                    name: tenant
                    for name, tenant in self.accounts.items()
                    if tenant in self.active or name in self._limits or tenant.virtual > self.virtual_time
                }
                # Not to look through all of them for each new name while most are busy.
                self._forget_at = max(len(self._limits) + self.MAX_UNKNOWN, 2 * len(self.accounts))
            self.accounts[name] = Tenant(name, self._limits.get(name, TenantLimits()))
        return self.accounts[name]

    def has_share(self, tenant: Tenant, held: int, size: int) -> bool:
        """False while `held` is less than its share of `size` by weight, among all keys and active tenants.

        One of something is no tenant's whole share, unless there is nothing to share.
        """
        others = (each for each in {*self.active, tenant} if each.name not in self._limits)
        weight = self._registered_weight + sum(each.limits.weight for each in others)
        return held >= max(min(1, size), size * tenant.limits.weight / weight)

    # Active tenants --------------------------------------------------------------------------------

    def activate(self, tenant: Tenant) -> None:
        """Count a tenant as active: its first request waits."""
        self.active[tenant] = None
        if len(self.active) <= 2:  # while one was alone, nothing of what it paid was used
            for each in self.active:
                each.credit_s = 0.0
        self._weight += tenant.limits.weight
        self._max_weight = max(self._max_weight, tenant.limits.weight)

    def advance(self, now: float) -> None:
        """Begin the period of `now`, after `period_end`: what was kept longer than a period lapses."""
        follows = now < self.period_end + Tenant.HOLD_S
        self.period_end = (now // Tenant.HOLD_S + 1) * Tenant.HOLD_S
        for tenant in self.recent:
            tenant.last_peak = tenant.peak if follows else tenant.running
            tenant.peak = tenant.running
        self.recent = {tenant: None for tenant in self.recent if tenant.last_peak or tenant.peak}
        self.active = {tenant: None for tenant in self.active if tenant.waiting or tenant in self.recent}
        self._weigh()

    def _weigh(self) -> None:
        weights = [tenant.limits.weight for tenant in self.active]
        self._weight, self._max_weight = sum(weights), max(weights, default=0.0)

    def kept_places(self, places: int) -> dict[Tenant, int]:
        """Of the engine's places, those kept for the next requests of tenants that used them lately.

        A tenant's share by weight is the limit.
        """
        if places * self._max_weight < self._weight:
            return {}  # the usual case with many tenants: not one has a share of a whole place
        kept = {}
        for tenant in self.recent:
            share = int(places * tenant.limits.weight / self._weight)
            if (count := min(share, max(tenant.last_peak, tenant.peak)) - tenant.running) > 0:
                kept[tenant] = count
        return kept

    def start_tag(self, tenant: Tenant) -> float:
        """Its place in virtual time; an idle tenant starts now, without credit for the past."""
        return max(self.virtual_time, tenant.virtual)
