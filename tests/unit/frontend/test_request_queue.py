"""Request queue: bounds, limits of tenants, fair shares, priorities (refusal is an answer)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.errors import ContextLengthExceeded, InvalidRequest, QueueFull, RateLimited
from cllm.frontend import request_queue, tenants
from cllm.frontend.output_stream import AsyncOutputStream
from cllm.frontend.request_queue import (
    MAX_EMBEDDING_REQUESTS,
    FairQueue,
    RequestQueue,
    RequestState,
    Stage,
)
from cllm.frontend.tenants import DrainRate, Tenant, TokenBucket
from cllm.types import EmbedLimits, Limits, Prompt, Request, RequestOutput, TenantLimits
from tests.driver.thread_engine import BlockingEngine, BlockingOutputStream
from tests.unit.frontend.test_engine_client import ScriptedExecutor, last


class Clock:
    """Stands in for the `time` module: it goes only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (request_queue, tenants):
        monkeypatch.setattr(module, "time", clock)
    return clock


def limits(sequences: int = 4, *, cells: int = 100_000, unified: bool = False) -> Limits:
    return Limits(
        sequences=sequences,
        cells=cells,
        sequence_cells=cells,
        request_tokens=cells,
        batch_tokens=512,
        unified=unified,
        embed=EmbedLimits(tokens=512, batch_tokens=512, rows=4),
    )


class Line:
    """An admission with short words for it."""

    def __init__(
        self,
        *,
        queue_size: int = 10_000,
        queue_tokens: int = 0,
        sequences: int = 4,
        shared: tenants.Tenants | None = None,
    ) -> None:
        self.queue = RequestQueue(queue_size, queue_tokens, tenants=shared)
        self.limits = limits(sequences)
        self._count = 0

    def ask(self, tenant: str = "", tokens: int = 10, priority: int = 0, embed: bool = False) -> RequestState:
        self._count += 1
        name = f"{tenant}{self._count}"
        prompt = (1,) * tokens
        request = Request(
            id=name,
            prompt=Prompt(() if embed else prompt),
            max_tokens=100,
            tenant=tenant,
            priority=priority,
            embed=(prompt,) if embed else (),
        )
        return self.queue.admit(request, AsyncOutputStream(name), self.limits)

    def crash(self) -> None:
        lost, _ = self.queue.requeue_after_crash()
        for one in lost:
            self.queue.close(one)

    def feed(self) -> list[RequestState]:
        return self.queue.next_for_engine(self.limits)

    def inside(self) -> list[RequestState]:
        return [each for each in self.queue.requests if each.stage is Stage.ENGINE]

    def generate(self, one: RequestState, tokens: int, now: float) -> None:
        if tokens:
            one.add_tokens(RequestOutput(request_id=one.request.id, tokens=(1,) * tokens))
        one.tenant.pay(tokens * Tenant.TOKEN_S)
        one.tenant.charge(tokens, now)

    def finish(self, one: RequestState, generated: int = 0) -> None:
        self.generate(one, generated, one.arrived)
        one.pay(one.prepaid_s or 0.0)  # it cost what was paid for it
        self.queue.close(one)


# Waiting -------------------------------------------------------------------------------------------


def test_what_the_engine_has_no_slot_for_waits(clock: Clock) -> None:
    """A tenant that is alone fills more places of the engine than there are slots."""
    line = Line(sequences=8)
    positions = []
    for _ in range(13):
        state = line.ask("a", tokens=10)
        line.feed()
        positions.append(line.queue.position(state))
    assert len(line.inside()) == 12, "one more waits in the queue"
    assert positions == [0] * 8 + [1, 2, 3, 4, 5]
    assert line.queue.without_slot == (5, 50) and line.queue.waiting == (1, 10)
    (tenant,) = line.queue.tenants.accounts.values()
    assert line.queue.tenants.count_surplus() == {tenant: 4}
    first, *_, last = line.inside()
    line.finish(first)
    assert line.queue.without_slot == (4, 40) and line.queue.position(last) == 3
    line.ask(embed=True)
    line.feed()
    assert line.queue.without_slot[0] == 4, "an embedding needs no slot"


def test_a_slot_that_is_about_to_be_free_has_a_successor(clock: Clock) -> None:
    """With several tenants, too: where the next token of a request is its last one."""
    line = Line(sequences=2)
    for tenant in ("a", "b", "a", "b"):
        line.ask(tenant)
    first, second = line.feed()
    line.generate(first, 98, 0.0)
    assert not line.feed()
    line.generate(first, 1, 0.0)
    assert len(line.feed()) == 1 and not line.feed()
    line.finish(first, 1)
    assert not line.feed(), "it has its place"
    line.finish(second)
    assert len(line.feed()) == 1


def test_a_tenant_embeds_though_another_has_all_places(clock: Clock) -> None:
    line = Line()
    for _ in range(MAX_EMBEDDING_REQUESTS + 2):
        line.ask("many", embed=True)
    assert len(line.feed()) == MAX_EMBEDDING_REQUESTS
    first, second, third = (line.ask(tenant, embed=True) for tenant in ("few", "few", "one"))
    assert line.feed() == [first, third], "one each, beyond the limit"
    for one in line.inside()[:2]:
        line.finish(one)
    assert not line.feed(), "no more than the limit"
    line.finish(line.inside()[0])
    line.finish(line.inside()[0])
    assert second in line.feed()


def test_slots_that_only_keep_prefixes_run_nothing(clock: Clock) -> None:
    line = Line(sequences=8)
    line.limits = msgspec.structs.replace(line.limits, parallel=2)
    for _ in range(9):
        line.ask("a")
    line.feed()
    assert len(line.inside()) == 4 and line.queue.without_slot[0] == 7


# Bounds --------------------------------------------------------------------------------------------


def test_the_queue_is_bounded_by_tokens_too(clock: Clock) -> None:
    line = Line(queue_tokens=100)
    line.ask(tokens=500)  # larger than the queue, but nobody else waits
    with pytest.raises(QueueFull, match="500 prompt tokens are waiting and the queue holds 100"):
        line.ask(tokens=1)
    line.feed()
    line.ask(tokens=60)
    line.feed()  # goes straight through: the bound is on those who wait
    for _ in range(4):
        line.ask(tokens=50)
        line.feed()
    assert line.queue.waiting[1] == 0
    line.ask(tokens=60)
    line.ask(tokens=40)
    with pytest.raises(QueueFull):
        line.ask(tokens=1)


def test_a_tenant_below_its_share_is_let_into_a_full_queue(clock: Clock) -> None:
    line = Line(queue_size=8, sequences=1)
    line.queue.tenants.register({"hog": TenantLimits(), "b": TenantLimits(weight=2), "c": TenantLimits()})
    accepted = {}
    for name in ("hog", "b", "c", "hog", "d"):
        accepted[name] = 0
        with pytest.raises(QueueFull, match="the queue holds 8"):
            while True:
                line.ask(name)
                accepted[name] += 1
    # Weights 1, 2, 1; the last one has no key, and so is one more of weight 1.
    assert accepted == {"hog": 0, "b": 4, "c": 2, "d": 2} and line.queue.waiting[0] == 8 + 4 + 2 + 2
    for one in [*line.queue.requests]:
        line.queue.close(one)
    assert not any(each.waiting for each in line.queue.tenants.accounts.values())
    assert not line.queue._generation.held and not line.queue._generation.held_tokens


def test_the_share_of_a_tenant_is_that_of_one_queue(clock: Clock) -> None:
    """Not of all models: what it has at another one takes no place here."""
    shared = tenants.Tenants()
    shared.register({"hog": TenantLimits(), "b": TenantLimits()})
    here, there = (Line(queue_size=4, queue_tokens=100, shared=shared) for _ in range(2))
    for _ in range(4):
        there.ask("b", tokens=25)
        here.ask("hog", tokens=25)
    here.ask("b", tokens=10)


def test_a_tenant_below_its_share_of_tokens_is_let_into_a_full_queue(clock: Clock) -> None:
    line = Line(queue_tokens=100, sequences=1)
    line.queue.tenants.register({"hog": TenantLimits(), "b": TenantLimits()})
    line.ask("hog", tokens=100)
    with pytest.raises(QueueFull):
        line.ask("hog", tokens=1)
    line.ask("b", tokens=30)
    line.ask("b", tokens=19)
    with pytest.raises(QueueFull, match="149 prompt tokens are waiting"):
        line.ask("b", tokens=2)


def test_retry_after_is_how_long_the_queue_takes_to_drain(clock: Clock) -> None:
    rate = DrainRate()
    assert rate.seconds_for(100, 10_000) == 1.0, "nothing is known yet"
    for _ in range(11):
        rate.ended.append((clock.now, 50))
        clock.now += 0.5
    # 11 requests and 550 tokens in 5.5 s
    assert rate.seconds_for(10, 0) == pytest.approx(5.0)
    assert rate.seconds_for(10, 1000) == pytest.approx(10.0)
    assert rate.seconds_for(10_000, 0) == 60.0
    clock.now += 3600
    assert rate.seconds_for(10, 1000) == 1.0, "an hour ago says nothing about now"


def test_in_a_unified_pool_running_requests_count_by_their_cells(clock: Clock) -> None:
    line = Line()
    line.limits = limits(8, cells=100, unified=True)
    for _ in range(6):
        line.ask(tokens=30)
    assert len(line.feed()) == 4, "three fit, and one is at the door; the others wait where order can change"
    line.finish(line.inside()[0])
    assert len(line.feed()) == 1


# Limits of tenants ---------------------------------------------------------------------------------


def test_requests_per_second(clock: Clock) -> None:
    line = Line()
    line.queue.tenants.register({"a": TenantLimits(requests_per_s=2)})
    line.ask("a")
    line.ask("a")
    with pytest.raises(RateLimited, match="2 requests a second") as refusal:
        line.ask("a")
    line.ask("b")  # somebody else is not concerned
    clock.now += refusal.value.retry_after_s - 0.01
    with pytest.raises(RateLimited):
        line.ask("a")
    clock.now += 0.02
    line.ask("a")


def test_tokens_per_second_count_the_prompt_and_what_is_generated(clock: Clock) -> None:
    line = Line()
    line.queue.tenants.register({"a": TenantLimits(tokens_per_s=100)})
    one = line.ask("a", tokens=300)
    line.feed()
    line.finish(one, generated=200)  # 500 had, 100 were saved up: 4 s to pay back
    with pytest.raises(RateLimited, match="100 tokens a second") as refusal:
        line.ask("a")
    assert refusal.value.retry_after_s == pytest.approx(4.0)
    clock.now += 4.01
    line.ask("a")


def test_concurrent_requests_are_those_that_wait_and_those_that_run(clock: Clock) -> None:
    line = Line(sequences=1)
    line.queue.tenants.register({"a": TenantLimits(concurrent=2)})
    first = line.ask("a")
    line.feed()
    second = line.ask("a")
    with pytest.raises(RateLimited, match="2 requests at the same time"):
        line.ask("a")
    line.queue.close(second)
    line.ask("a")
    line.finish(first)
    line.ask("a")


def test_a_priority_above_what_a_key_may_use_names_both(clock: Clock) -> None:
    line = Line()
    line.queue.tenants.register({"a": TenantLimits(max_priority=5)})
    line.ask("a", priority=5)
    with pytest.raises(InvalidRequest, match=r"priority is 6.*at most 5") as refusal:
        line.ask("a", priority=6)
    assert refusal.value.field == "priority"


def test_a_refused_request_costs_its_tenant_nothing(clock: Clock) -> None:
    line = Line(queue_size=1, sequences=1)
    line.queue.tenants.register({"a": TenantLimits(requests_per_s=1)})
    first = line.ask("a")
    clock.now += 1
    with pytest.raises(QueueFull):
        line.ask("a")
    line.queue.close(first)
    line.ask("a")  # its one request of this second is still there


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 50)), max_size=30), st.floats(0.1, 100))
def test_a_bucket_gives_no_more_than_its_rate(steps: list[tuple[float, float]], rate: float) -> None:
    bucket, now, taken = TokenBucket(rate, 0.0), 0.0, 0.0
    for pause, amount in steps:
        now += pause
        if bucket.seconds_until(0.0, now) == 0:
            taken_before = taken
            bucket.take(amount, now)
            taken += amount
            assert taken_before <= max(1.0, rate) + rate * now + 1e-6


# Order ---------------------------------------------------------------------------------------------


def serve(line: Line, source: random.Random, rounds: int, top_up: dict[str, int]) -> Counter[str]:
    """Let the engine work with everybody always waiting; tokens had, by tenant."""
    had: Counter[str] = Counter()
    for _ in range(rounds):
        for name, tokens in top_up.items():
            while (tenant := line.queue.tenants.accounts.get(name)) is None or tenant.waiting < 3:
                line.ask(name, tokens=source.randint(1, 2 * tokens))
        line.feed()
        done = source.choice(line.inside())
        generated = source.randint(0, 60)
        had[done.tenant.name] += len(done.request.prompt) + generated
        line.finish(done, generated)
    return had


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), weight=st.sampled_from([1.0, 2.0, 4.0]), factor=st.sampled_from([1, 10]))
def test_shares_of_tokens_are_as_the_weights_whatever_is_sent(seed: int, weight: float, factor: int) -> None:
    line = Line()
    line.queue.tenants.register({"big": TenantLimits(weight=1), "small": TenantLimits(weight=weight)})
    had = serve(line, random.Random(seed), 800, {"big": 20 * factor, "small": 20})
    assert had["small"] / had["big"] == pytest.approx(weight, rel=0.25)


def test_an_idle_tenant_has_no_credit(clock: Clock) -> None:
    line = Line(sequences=1)
    line.queue.tenants.register({"a": TenantLimits(), "b": TenantLimits()})
    line.finish(_run(line, "b"), 0)
    for _ in range(50):
        line.finish(_run(line, "a"), 100)
    clock.now += 60
    a, b = map(line.queue.tenants.accounts.__getitem__, "ab")
    starts = line.queue.tenants.start_tag
    assert starts(a) == starts(b), "what a had while it was alone is no debt, b's absence no credit"


def _run(line: Line, tenant: str) -> RequestState:
    line.ask(tenant)
    (sent,) = line.feed()
    return sent


def test_a_small_tenant_passes_the_line_of_a_big_one(clock: Clock) -> None:
    line = Line(sequences=2)
    for _ in range(20):
        line.ask("big")
    line.feed()
    for one in line.inside():
        line.generate(one, 5, clock.now)
    mine = line.ask("small")
    assert mine.queue.position(mine) == 2, "one of the big one's, then this"
    order: list[RequestState] = []
    while mine.stage is Stage.QUEUED:
        line.finish(line.inside()[0])
        order += line.feed()
    assert order == [mine]


def test_the_places_a_tenant_used_are_kept_for_it_for_a_moment(clock: Clock) -> None:
    line = Line(sequences=4)
    for _ in range(20):
        line.ask("big")
    line.feed()
    mine = line.ask("small")
    while mine.stage is Stage.QUEUED:
        line.finish(line.inside()[0], 10)
        line.feed()
    while len(line.inside()) > 4:
        line.finish(next(each for each in line.inside() if each is not mine), 10)
    line.finish(mine)
    assert line.feed() == [], "its place is kept"
    again = line.ask("small")
    assert line.feed() == [again], "so its next request does not wait"
    line.finish(again)
    clock.now += 2 * Tenant.HOLD_S + 0.1
    assert [each.tenant.name for each in line.feed()] == ["big"] * 3, (
        "alone again: everything, and a few more"
    )


def test_the_priority_of_a_key_orders_its_own_requests(clock: Clock) -> None:
    line = Line(sequences=1)
    line.queue.tenants.register(
        {"a": TenantLimits(), "b": TenantLimits(), "boss": TenantLimits(max_priority=9)}
    )
    running = line.ask("a", tokens=1)
    line.feed()
    low, high = line.ask("a", priority=0), line.ask("a", priority=100)
    other, boss, last = line.ask("b"), line.ask("boss", priority=9), line.ask("b", priority=-1)
    assert [one.queue.position(one) for one in (boss, high, other)] == [1, 3, 3]
    order: list[RequestState] = []
    while line.queue.states:
        line.finish(running, 10)
        order += line.feed()
        running = order[-1]
        if running is last:
            break
    assert order == [boss, other, high, low, last], "a key that may more passes others; 100 does not"


def test_higher_priority_goes_first_and_no_request_starves(clock: Clock) -> None:
    line = Line(sequences=1)
    for _ in range(3):  # a lone tenant's engine gets a few more than it can run
        line.ask()
    line.feed()
    starving, middle, first = line.ask(priority=-3), line.ask(priority=0), line.ask(priority=5)
    assert [each.queue.position(each) for each in (first, middle, starving)] == [1, 2, 3]
    for expected in (first, middle):
        line.finish(line.inside()[0])
        line.ask(priority=0)
        assert line.feed() == [expected]
    for _ in range(40):  # a new one of priority 0 every 0.2 s, for 8 s
        clock.now += 0.2
        line.ask(priority=0)
        line.finish(line.inside()[0])
        line.feed()
        if starving.stage is Stage.ENGINE:
            break
    assert starving.stage is Stage.ENGINE
    assert clock.now - 1000 == pytest.approx(3 * FairQueue.AGEING_S, abs=1.0)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), names=st.integers(1, 12), weighted=st.booleans())
def test_the_next_request_is_the_one_that_a_look_at_every_tenant_finds(
    seed: int, names: int, weighted: bool
) -> None:
    """The rules in words, with kept places, against the heaps that spare the look at every tenant."""
    source, line = random.Random(seed), Line()
    weights = {f"t{n}.": TenantLimits(weight=source.choice([1, 2, 5])) for n in range(names)}
    line.queue.tenants.register(weights if weighted else {})
    queue, tenants = line.queue._generation, line.queue.tenants
    waiting: list[RequestState] = []
    for _ in range(120):
        if source.random() < 0.5 or not waiting:
            name = f"t{source.randrange(names)}."  # request ids are a name and a number
            waiting.append(line.ask(name, priority=source.choice([0, 0, 0, 1])))
        elif source.random() < 0.3:
            queue.remove(waiting.pop(source.randrange(len(waiting))))
        else:
            for tenant in source.sample(list(tenants.accounts.values()), k=min(2, len(tenants.accounts))):
                tenant.pay(source.choice([0, 1, 7, 50]))
            kept = {tenant: source.randint(1, 2) for tenant in tenants.active if source.random() < 0.2}
            free = source.randint(1, 3)
            expected = search(waiting, tenants.start_tag, free, kept)
            found = queue.pop(max(each.arrived for each in waiting), free, kept)
            assert found is expected
            if found is not None:
                waiting.remove(found)
        assert queue.count == len(waiting) and list(queue) == sorted(
            waiting, key=lambda each: (-each.request.priority, each.number)
        )


def search(
    waiting: list[RequestState], tag: Callable[[Tenant], float], free: int, kept: dict[Tenant, int]
) -> RequestState | None:
    """Least virtual time, then arrival, then the tenant's own priority; of those that find a place."""
    oldest: dict[Tenant, int] = {}
    for one in waiting:
        oldest[one.tenant] = min(one.number, oldest.get(one.tenant, one.number))

    def allowed(one: RequestState) -> bool:
        others = (each for each in kept if each is not one.tenant and tag(each) <= tag(one.tenant))
        return free > sum(kept[each] for each in others)

    return min(
        filter(allowed, waiting),
        key=lambda one: (tag(one.tenant), oldest[one.tenant], -one.request.priority, one.number),
        default=None,
    )


def test_the_queue_says_when_a_kept_place_lapses(clock: Clock) -> None:
    line = Line(sequences=4)
    assert line.queue.look_again_at is None
    for _ in range(6):
        line.ask("big")
    line.feed()
    small = line.ask("small")
    while small.stage is Stage.QUEUED:
        line.finish(line.inside()[0], 10)
        line.feed()
    line.finish(small)
    more = [line.ask("big") for _ in range(4)]
    while len(line.inside()) > 3:
        line.finish(line.inside()[0], 10)
    assert line.feed() == [], "a place is free, and kept for the small one"
    looks = 0
    while more[0].stage is Stage.QUEUED:
        due = line.queue.look_again_at
        assert due is not None and clock.now < due <= clock.now + Tenant.HOLD_S
        clock.now = due
        line.feed()
        looks += 1
    assert looks == 2, "kept for the rest of this period and for the next"


@pytest.mark.parametrize("suspect_embeds", [True, False])
def test_a_suspect_runs_before_all_others_and_alone(clock: Clock, suspect_embeds: bool) -> None:
    line = Line(sequences=2)
    suspects = [line.ask(embed=suspect_embeds) for _ in range(3)]
    for _ in range(2):
        assert line.feed() == suspects
        line.crash()
    others = [line.ask(embed=number % 2 == 0) for number in range(20)]
    for suspect in suspects:
        assert line.feed() == [suspect], "nothing goes with it, of either kind"
        line.ask(embed=suspect_embeds)
        line.ask(embed=not suspect_embeds)  # more keep coming
        assert line.feed() == []
        line.finish(suspect)
    while line.queue.states:
        assert line.feed() or line.inside()
        line.finish(line.inside()[0])
    assert all(one.stage is Stage.DONE for one in others)


def test_two_suspects_of_either_kind_run_one_after_the_other(clock: Clock) -> None:
    line = Line(sequences=2)
    suspects = [line.ask(embed=True)]
    clock.now += 1
    suspects.append(line.ask())
    for _ in range(2):
        line.feed()
        line.crash()
    for one in (line.ask(embed=True), line.ask()):
        assert one not in line.feed()
    order: list[RequestState] = line.inside()
    while line.queue.states:
        line.finish(line.inside()[0])
        order += line.feed()
    assert order[:2] == suspects and len(order) == 4


def test_cancelling_a_suspect_that_waits_lets_the_others_go() -> None:
    executor = ScriptedExecutor()
    engine = BlockingEngine(executor)
    engine.start()
    for name in ("suspect", "other"):
        engine.submit(Request(id=name, prompt=Prompt((1,)), max_tokens=5), BlockingOutputStream)
    for _ in range(2):
        engine._backoff.progress()
        executor.die()
    assert executor.submitted() == ["suspect"], "each alone"
    late = engine.submit(Request(id="late", prompt=Prompt((1,)), max_tokens=5), BlockingOutputStream)
    engine.cancel("other")
    executor.say(last("suspect"))
    assert executor.submitted() == ["suspect", "late"] and not late.finished
    engine.stop()


def test_accounts_of_unknown_tenants_do_not_pile_up(clock: Clock) -> None:
    line = Line()
    for number in range(2000):
        clock.now += 1
        line.finish(_run(line, f"t{number}"), 5)
    assert len(line.queue.tenants.accounts) <= 257


def test_what_waits_is_counted_of_both_kinds(clock: Clock) -> None:
    line = Line()
    line.ask(tokens=10)
    line.ask(tokens=7, embed=True)
    assert line.queue.waiting == (2, 17)


def test_what_was_paid_for_cheap_requests_while_alone_is_no_credit(clock: Clock) -> None:
    line = Line(sequences=1)
    kept = line.ask("a")
    for _ in range(50):
        one = line.ask("a", tokens=100)
        line.feed()
        line.queue.close(one)
    line.finish(kept)
    for _ in range(8):
        line.ask("a")
        line.ask("b")
    served = []
    for _ in range(8):
        (one,) = line.feed()
        served.append(one.tenant.name)
        line.finish(one)
    assert served.count("a") == served.count("b")


def test_a_request_is_charged_for_its_prompt_once_however_often_it_is_sent(clock: Clock) -> None:
    line = Line()
    state = line.ask("a", tokens=50)
    assert line.queue.next_for_engine(line.limits) == [state]
    had = state.tenant.virtual
    assert state.dispatched == clock.now and had > 0
    clock.now += 5
    assert line.queue.requeue_after_crash() == ([], [state])
    assert line.queue.next_for_engine(line.limits) == [state]
    assert (state.dispatched, state.tenant.virtual) == (clock.now, had)


def test_an_input_to_embed_may_have_as_many_tokens_as_the_model_takes(clock: Clock) -> None:
    line = Line()
    line.ask(tokens=512, embed=True)
    with pytest.raises(ContextLengthExceeded):
        line.ask(tokens=513, embed=True)
    unknown = Request(id="early", prompt=Prompt(()), max_tokens=0, embed=((1,) * 513,))
    line.queue.admit(unknown, AsyncOutputStream("early"), None)  # the engine has not said its limits yet
