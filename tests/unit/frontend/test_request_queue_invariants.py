"""Random histories of the request table: tenants, priorities, cancels, timeouts, crashes; invariants hold."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cllm.errors import QueueFull, RateLimited
from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import BlockingOutputStream
from cllm.frontend.request_queue import Stage, window
from cllm.types import Request, TenantLimits
from tests.profiles import examples
from tests.unit.frontend.test_engine_client import ScriptedExecutor, last, token

SEQUENCES = 2
QUEUE_SIZE, QUEUE_TOKENS = 12, 200
TENANTS = {"heavy": TenantLimits(weight=3.0), "few": TenantLimits(concurrent=3)}
numbers = st.integers(0, 10**6)


class QueueMachine(RuleBasedStateMachine):
    """Clients keep their own account of accepted and ended requests."""

    def __init__(self) -> None:
        super().__init__()
        self.executor = ScriptedExecutor()
        self.engine = EngineClient(self.executor, queue_size=QUEUE_SIZE, queue_tokens=QUEUE_TOKENS)
        self.engine.set_tenants(TENANTS)
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
            prompt=(1,) * tokens,
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
            assert len(waiting) == QUEUE_SIZE or waiting_tokens + tokens > QUEUE_TOKENS
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
            self.engine._expire(state.request.id)
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
        assert len(queued) - len(replayed) <= QUEUE_SIZE
        assert len(states) - len(queued) <= window(SEQUENCES)
        assert self.living()["few"] <= 3
        queue = self.engine._queue
        assert queue.waiting == (len(queued), sum(len(each.request.prompt) for each in queued))
        for tenant in queue.tenants._tenants.values():
            mine = [each for each in states if each.tenant is tenant]
            assert tenant.waiting == sum(each.stage is Stage.QUEUED for each in mine)
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


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(
    max_examples=examples(50),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
