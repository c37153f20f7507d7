"""Random histories of the request table: tenants, priorities, cancels, timeouts, crashes; invariants hold."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cllm.errors import QueueFull, RateLimited
from cllm.frontend import request_queue, tenants
from cllm.frontend.request_queue import MAX_EMBEDDING_REQUESTS, Stage
from cllm.frontend.tenants import Tenant
from cllm.types import Prompt, Request, TenantLimits
from tests.driver.thread_engine import BlockingEngine, BlockingOutputStream
from tests.profiles import examples
from tests.unit.frontend.test_engine_client import ScriptedExecutor, last, token
from tests.unit.frontend.test_request_queue import Clock, Line

SEQUENCES = 2
QUEUE_SIZE, QUEUE_TOKENS = 12, 200
TENANTS = {"heavy": TenantLimits(weight=3.0), "few": TenantLimits(concurrent=3)}
numbers = st.integers(0, 10**6)


class QueueMachine(RuleBasedStateMachine):
    """Clients keep their own account of accepted and ended requests."""

    def __init__(self) -> None:
        super().__init__()
        self.executor = ScriptedExecutor()
        self.engine = BlockingEngine(self.executor, queue_size=QUEUE_SIZE, queue_tokens=QUEUE_TOKENS)
        self.engine.tenants.register(TENANTS)
        self.engine.start()
        self.streams: dict[str, BlockingOutputStream] = {}
        self.owners: dict[str, str] = {}

    @rule(
        tenant=st.sampled_from(["", "heavy", "few", "other"]),
        priority=st.integers(-2, 2),
        tokens=st.integers(1, 90),
        timed=st.booleans(),
    )
    def ask(self, tenant: str, priority: int, tokens: int, timed: bool) -> None:
        name = f"r{len(self.streams)}"
        request = Request(
            id=name,
            prompt=Prompt((1,) * tokens),
            max_tokens=10,
            tenant=tenant,
            priority=priority,
            timeout_s=3600.0 if timed else None,
        )
        waiting = [each for each in self.engine.requests if each.stage is Stage.QUEUED]
        waiting_tokens = sum(len(each.request.prompt) for each in waiting)
        try:
            self.streams[name] = self.engine.submit(request, BlockingOutputStream)
            self.owners[name] = tenant
        except QueueFull as refusal:
            assert len(waiting) >= QUEUE_SIZE or waiting_tokens + tokens > QUEUE_TOKENS
            own = [len(each.request.prompt) for each in waiting if each.request.tenant == tenant]
            share = TENANTS.get(tenant, TenantLimits()).weight / 6  # of all: "" and "other" have no key
            assert own and (len(own) >= share * QUEUE_SIZE or sum(own) + tokens >= share * QUEUE_TOKENS)
            assert 1 <= refusal.retry_after_s <= 60
        except RateLimited:
            assert tenant == "few" and self.living()["few"] == 3

    def inside(self) -> list[str]:
        return [each.request.id for each in self.engine.requests if each.stage is Stage.ENGINE]

    def living(self) -> Counter[str]:
        return Counter(self.owners[name] for name, stream in self.streams.items() if not stream.finished)

    @precondition(lambda self: self.inside())
    @rule(number=numbers)
    def a_token_comes(self, number: int) -> None:
        self.executor.say(token(self.inside()[number % len(self.inside())]))

    @precondition(lambda self: self.inside())
    @rule(number=numbers)
    def one_is_done(self, number: int) -> None:
        self.executor.say(last(self.inside()[number % len(self.inside())]))

    @precondition(lambda self: self.streams)
    @rule(number=numbers)
    def a_client_leaves(self, number: int) -> None:
        self.engine.cancel(f"r{number % len(self.streams)}")

    @precondition(lambda self: self.streams)
    @rule(number=numbers)
    def time_is_up(self, number: int) -> None:
        state = self.engine._queue.states.get(f"r{number % len(self.streams)}")
        if state is not None and state.request.timeout_s is not None:
            cancelled = state.cancelled
            self.engine._time_out(state)
            assert cancelled or state.stage is Stage.DONE

    @precondition(lambda self: self.engine._backoff.count == 0)
    @rule()
    def the_engine_dies(self) -> None:
        self.executor.die()

    @invariant()
    def every_request_is_in_the_table_exactly_once(self) -> None:
        states = [each.request.id for each in self.engine.requests]
        assert len(states) == len(set(states))
        assert set(states) == {name for name, stream in self.streams.items() if not stream.finished}

    @invariant()
    def bounds_are_kept(self) -> None:
        states = self.engine.requests
        queued = [each for each in states if each.stage is Stage.QUEUED]
        replayed = [each for each in queued if each.crashes]
        assert len(queued) - len(replayed) <= 2 * QUEUE_SIZE + 4, "each of four tenants may have one more"
        assert len(states) - len(queued) <= SEQUENCES + 2
        assert self.living()["few"] <= 3
        queue = self.engine._queue
        assert queue.waiting == (len(queued), sum(len(each.request.prompt) for each in queued))
        for tenant in queue.tenants.accounts.values():
            mine = [each for each in states if each.tenant is tenant]
            assert tenant.waiting == sum(each.stage is Stage.QUEUED for each in mine)
            lengths = (len(each.request.prompt) for each in mine if each.stage is Stage.QUEUED)
            assert queue._generation.held[tenant] == tenant.waiting
            assert queue._generation.held_tokens[tenant] == sum(lengths)
            assert tenant.running == len(mine) - tenant.waiting

    @invariant()
    def the_engine_is_fed(self) -> None:
        """No request waits while the engine is empty."""
        if any(each.stage is Stage.QUEUED for each in self.engine.requests):
            assert self.inside()

    def teardown(self) -> None:
        """None starves: with the engine at work, every request ends."""
        for _ in range(len(self.streams) + 1):
            if inside := self.inside():
                self.executor.say(last(inside[0]))
        assert self.engine.requests == ()
        for stream in self.streams.values():
            assert [delta.finish_reason is not None for delta in stream][-1]
        self.engine.stop()


class TimedQueueMachine(RuleBasedStateMachine):
    """The queue on a clock of its own: as long as requests wait, something or some time lets them go on.

    It is looked at where `EngineClient` does so: when a request comes or ends, and at `look_again_at`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.patch = pytest.MonkeyPatch()
        for module in (request_queue, tenants):
            self.patch.setattr(module, "time", self.clock)
        self.line = Line(sequences=3)
        self.line.queue.tenants.register(TENANTS)

    @rule(
        tenant=st.sampled_from(["", "heavy", "a", "b", "c"]),
        tokens=st.integers(1, 50),
        priority=st.integers(-1, 1),
        embed=st.booleans(),
        count=st.integers(1, 4),
    )
    def ask(self, tenant: str, tokens: int, priority: int, embed: bool, count: int) -> None:
        for _ in range(count):
            self.line.ask(tenant, tokens, priority, embed)
            self.line.feed()

    @precondition(lambda self: self.line.inside())
    @rule(number=numbers, tokens=st.integers(1, 200))
    def tokens_come(self, number: int, tokens: int) -> None:
        inside = self.line.inside()
        self.line.generate(inside[number % len(inside)], tokens, self.clock.now)

    @precondition(lambda self: self.line.inside())
    @rule(number=numbers)
    def one_is_done(self, number: int) -> None:
        inside = self.line.inside()
        self.line.finish(inside[number % len(inside)])
        self.line.feed()

    @precondition(lambda self: self.line.queue.states)
    @rule(number=numbers)
    def a_waiting_one_leaves(self, number: int) -> None:
        waiting = [one for one in self.line.queue.requests if one.stage is Stage.QUEUED]
        if waiting:
            self.line.queue.close(waiting[number % len(waiting)])
            self.line.feed()

    @rule()
    def the_engine_dies(self) -> None:
        self.line.crash()
        self.line.feed()

    @rule(seconds=st.floats(0.01, 3 * Tenant.HOLD_S))
    def time_passes(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while (due := self.line.queue.look_again_at) is not None and due <= end:
            self.clock.now = due
            self.line.feed()
        self.clock.now = end

    def blocked(self) -> bool:
        """Waiting for something in the engine: generation has all its places, or a suspect is alone."""
        inside = self.line.inside()
        return sum(not one.request.embed for one in inside) >= 3 or any(one.alone for one in inside)

    @property
    def waiting(self) -> int:
        return self.line.queue._generation.count

    @invariant()
    def nothing_waits_for_nothing(self) -> None:
        due = self.line.queue.look_again_at
        if self.waiting and not self.blocked():
            assert due is not None and due <= self.clock.now + Tenant.HOLD_S, "places are free"
        if self.line.queue._embedding.count and not any(one.alone for one in self.line.inside()):
            assert sum(bool(one.request.embed) for one in self.line.inside()) >= MAX_EMBEDDING_REQUESTS

    @rule()
    def nothing_happens_for_two_periods(self) -> None:
        self.time_passes(2 * Tenant.HOLD_S)
        assert not self.waiting or self.blocked(), "no place is kept for longer"

    def teardown(self) -> None:
        for _ in range(len(self.line.queue.states)):
            self.time_passes(2 * Tenant.HOLD_S)
            self.line.finish(self.line.inside()[0])
            self.line.feed()
        assert not self.line.queue.states
        self.patch.undo()


TestTimedQueue, TestQueue = TimedQueueMachine.TestCase, QueueMachine.TestCase
TestTimedQueue.settings = TestQueue.settings = settings(
    max_examples=examples(50),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
