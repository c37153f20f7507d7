"""The laws of DESIGN section 2, checked after every step of random lives: arrivals, cancels, failures."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.backend.base import Drafter, StepStatus
from cllm.backend.fake import FakeBackend, expected_text
from cllm.config import EngineConfig
from cllm.engine import prefix
from cllm.engine.loop import StepLoop
from cllm.engine.messages import Report, StepReport, StepStats
from cllm.errors import EngineDied
from cllm.types import Delta, FinishReason, Request, SamplingParams

Fail = Callable[[int, str], Exception | StepStatus | None]
FORWARD_FAILURES = (StepStatus.NO_ROOM, StepStatus.ABORTED, StepStatus.BAD_BATCH, StepStatus.FAILED)


@pytest.fixture(autouse=True)
def short_prefixes_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "WORTH_COPYING", 4)


class Life:
    """An engine on the fake backend, its clients' ledger, and the laws."""

    def __init__(
        self,
        backend: FakeBackend,
        park_mb: int = 1,
        cache_mb: int = 0,
        new_drafter: Callable[[], Drafter] | None = None,
        draft_tokens: int = 8,
    ) -> None:
        self.backend = backend
        self.reports: list[Report] = []
        config = EngineConfig(park_mb=park_mb, cache_ram_mb=cache_mb, draft_tokens=draft_tokens)
        self.loop = StepLoop(backend, config, self.reports.append, new_drafter=new_drafter)
        self.requests: dict[str, Request] = {}
        self.deltas: dict[str, list[Delta]] = defaultdict(list)
        self.died = False
        self.short_of_room = False  # then a lone request may end early, with `length`

    def add(self, prompt: bytes, max_tokens: int, seed: int = 0, *, ignore_eos: bool = False) -> str:
        name = f"r{len(self.requests)}"
        request = Request(
            id=name,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(seed=seed, ignore_eos=ignore_eos),
        )
        self.requests[name] = request
        self.loop.scheduler.add(request)
        return name

    def step(self) -> None:
        try:
            self.loop.step()
        except EngineDied as error:
            # As StepLoop.run does.
            self.died = True
            self.loop.scheduler.fail_all(error)
            deltas = tuple(self.loop.scheduler.take_deltas())
            self.reports.append(StepReport(deltas, StepStats()))
        self.check()

    def run(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if self.loop.scheduler.idle or self.died:
                break
            self.step()
        assert self.loop.scheduler.idle, "the engine did not come to rest"
        if not self.died:
            self.step()  # tells what a cancel has ended

    def check(self) -> None:
        for report in self.reports:
            assert isinstance(report, StepReport)
            for delta in report.deltas:
                before = self.deltas[delta.request_id]
                # Law 4: nothing comes after the terminal delta.
                assert not before or before[-1].finish_reason is None
                before.append(delta)
        self.reports.clear()
        scheduler, pool = self.loop.scheduler, self.loop.scheduler.pool
        # Law 2: ids are held once, by the running; the rest are free or retired.
        held = [lease.sequence_id for lease in pool.leases]
        assert len(held) == len(set(held)) == scheduler.running_count
        assert len(held) + pool.free_count + len(pool.retired) == pool.size
        # Laws 2 and 3: an id nobody holds holds nothing; one that is held, just its own tokens.
        for sequence_id, memory in enumerate(self.backend.memory):
            if sequence_id in pool.retired:
                continue
            if sequence_id not in held:
                assert memory == []
        for lease in pool.leases:
            tokens = [token for delta in self.deltas[lease.request_id] for token in delta.tokens]
            known = [*self.requests[lease.request_id].prompt, *tokens]
            memory = self.backend.memory[lease.sequence_id]
            assert memory == known[: len(memory)]
        # RAM: never over its limits, and what is cached is what it says it is.
        tier = scheduler.prefixes.tier
        assert tier.cached_bytes <= tier.cached_limit and tier.parked_bytes <= tier.parked_limit
        assert tier.cached_bytes + tier.parked_bytes <= tier.limit
        assert tier.cached_bytes == sum(entry.size for entry in tier._entries)
        for entry in tier._entries:
            assert entry.state == b"".join(token.to_bytes(2, "little") for token in entry.tokens)

    def outcome(self, name: str) -> FinishReason:
        ends = [delta for delta in self.deltas[name] if delta.finish_reason is not None]
        assert len(ends) == 1, f"{name} has {len(ends)} terminal deltas"
        assert ends[0].finish_reason is not None
        return ends[0].finish_reason

    def text(self, name: str) -> str:
        return "".join(delta.text for delta in self.deltas[name])

    def expected(self, name: str) -> str:
        request = self.requests[name]
        most = min(request.max_tokens, self.backend.limits.request_tokens - len(request.prompt))
        return expected_text(
            request.prompt, most, request.sampling.seed, ends=not request.sampling.ignore_eos
        )

    def check_end(self) -> None:
        """Everybody has ended once; whoever ended well has the right text; nothing is left."""
        for name in self.requests:
            reason = self.outcome(name)
            if reason is FinishReason.STOP or (reason is FinishReason.LENGTH and not self.short_of_room):
                assert self.text(name) == self.expected(name), name
            else:
                assert self.expected(name).startswith(self.text(name)), name
        assert self.backend.open_samplers == 0
        if not self.died:
            self.backend.fail = None
            if not self.loop.scheduler.pool.retired:
                self.loop.scheduler.check_idle()


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "step", "step", "step", "cancel"]), st.integers(0, 10**6)),
    max_size=60,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    actions=ACTIONS,
    sequences=st.integers(1, 4),
    unified=st.booleans(),
    trimmable=st.booleans(),
    park_mb=st.sampled_from([0, 1]),
    cache_mb=st.sampled_from([0, 1]),
    failures=st.dictionaries(st.integers(0, 400), st.sampled_from(FORWARD_FAILURES), max_size=6),
    raises=st.sets(st.integers(0, 400), max_size=4),
)
def test_the_laws_hold_through_any_life(
    actions: list[tuple[str, int]],
    sequences: int,
    unified: bool,
    trimmable: bool,
    park_mb: int,
    cache_mb: int,
    failures: dict[int, StepStatus],
    raises: set[int],
) -> None:
    def fail(number: int, name: str) -> Exception | StepStatus | None:
        if name == "forward" and number in failures:
            return failures[number]
        return RuntimeError(f"{name} failed") if number in raises else None

    backend = FakeBackend(
        sequences=sequences,
        cells=96,
        batch_tokens=16,
        unified=unified,
        trimmable=trimmable,
        request_tokens=96 // sequences,
        fail=fail,
    )
    life = Life(backend, park_mb, cache_mb)
    tier = life.loop.scheduler.prefixes.tier
    tier.cached_limit = min(tier.cached_limit, 700)  # bytes: two or three states
    tier.parked_limit = min(tier.parked_limit, 400)
    tier.limit = max(tier.cached_limit, tier.parked_limit)
    life.short_of_room = StepStatus.NO_ROOM in failures.values()
    for action, value in actions:
        if life.died:
            break
        if action == "add":
            # Three families of prompts with a common beginning, so that prefixes are shared.
            letters = random.Random(value % 3).choices(range(97, 123), k=96)
            prompt = bytes([*letters, *b"%d" % value][-1 - value % (96 // sequences - 1) :])
            prompt = bytes(letters[: len(prompt) // 2]) + prompt[len(prompt) // 2 :]
            life.add(prompt, 1 + value % 40, seed=value % 3, ignore_eos=value % 5 == 0)
        elif action == "cancel" and life.requests:
            life.loop.scheduler.cancel(f"r{value % len(life.requests)}")
        else:
            life.step()
    life.run()
    life.check_end()


def small_backend(*, unified: bool, trimmable: bool, fail: Fail | None = None) -> FakeBackend:
    """Three sequences; in one common pool they do not all fit, so somebody gets parked."""
    cells = 90 if unified else 180
    return FakeBackend(
        sequences=3,
        cells=cells,
        batch_tokens=16,
        request_tokens=60,
        unified=unified,
        trimmable=trimmable,
        fail=fail,
    )


def a_busy_life(backend: FakeBackend, cache_mb: int) -> Life:
    life = Life(backend, cache_mb=cache_mb)
    for number in range(6):
        life.add(b"prompt %d " % number * (1 + number % 3), 12, ignore_eos=True)
    if cache_mb:  # these find what the first have left behind
        for number in range(3):
            life.add(b"prompt %d " % number * (1 + number % 3) + b"more", 6, ignore_eos=True)
    return life


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("trimmable", [False, True])
@pytest.mark.parametrize("status", [None, *FORWARD_FAILURES])
@pytest.mark.parametrize("cache_mb", [0, 1])
def test_one_failure_at_every_native_call_in_turn(
    cache_mb: int, status: StepStatus | None, trimmable: bool, unified: bool
) -> None:
    """As SQLite does with malloc: call k fails, for every k; at most one request may suffer from it."""
    undisturbed = a_busy_life(small_backend(unified=unified, trimmable=trimmable), cache_mb)
    undisturbed.run()
    for k in range(undisturbed.backend.calls):

        def fail(number: int, name: str, k: int = k) -> Exception | StepStatus | None:
            if number != k:
                return None
            return status if status is not None and name == "forward" else RuntimeError("native call failed")

        life = a_busy_life(small_backend(unified=unified, trimmable=trimmable, fail=fail), cache_mb)
        life.short_of_room = status is StepStatus.NO_ROOM
        life.run()
        life.check_end()
        assert not life.died, f"one failure (call {k}) killed the engine"
        failed = [name for name in life.requests if life.outcome(name) is FinishReason.ERROR]
        assert len(failed) <= 1, f"call {k} failed {failed}"


@pytest.mark.parametrize("unified", [False, True])
def test_the_busy_life_finds_what_was_left_behind(unified: bool) -> None:
    life = a_busy_life(small_backend(unified=unified, trimmable=True), cache_mb=1)
    life.run()
    cached = [life.deltas[name][-1].usage for name in ("r6", "r7", "r8")]
    assert all(usage is not None and usage.cached_tokens >= 4 for usage in cached)


def test_two_failed_steps_in_a_row_end_the_engine_and_tell_everybody() -> None:
    backend = FakeBackend(fail=lambda _, name: StepStatus.FAILED if name == "forward" else None)
    life = Life(backend)
    names = [life.add(b"abc", 5) for _ in range(6)]
    life.run()
    assert life.died
    assert [life.outcome(name) for name in names] == [FinishReason.ERROR] * 6


def test_a_refused_batch_is_bisected_and_only_the_culprit_fails() -> None:
    backend = FakeBackend(sequences=4, batch_tokens=256)
    life = Life(backend)
    names = [life.add(b"prompt %d" % number, 8, ignore_eos=True) for number in range(4)]
    original = backend.forward

    def refuse_third(batch):  # type: ignore[no-untyped-def]
        if any(row.sequence_id == 2 for row in batch.rows):
            from cllm.backend.base import StepResult

            return StepResult(StepStatus.BAD_BATCH, code=-1)
        return original(batch)

    backend.forward = refuse_third  # type: ignore[method-assign]
    life.run()
    outcomes = [life.outcome(name) for name in names]
    assert outcomes == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert life.deltas["r2"][-1].error is not None
    assert life.deltas["r2"][-1].error.code == "bad_batch"


def test_a_sequence_whose_memory_was_tampered_with_fails_alone() -> None:
    life = Life(FakeBackend(sequences=2))
    names = [life.add(b"prompt %d" % number, 20, ignore_eos=True) for number in range(2)]
    life.step()
    life.step()
    life.backend.memory[0].pop()
    life.loop.step()
    life.run()
    assert [life.outcome(name) for name in names] == [FinishReason.ERROR, FinishReason.LENGTH]
    assert life.deltas["r0"][-1].error is not None
    assert life.deltas["r0"][-1].error.code == "position_mismatch"
    assert life.text("r1") == life.expected("r1")


def test_kv_pressure_parks_the_youngest_and_everybody_completes() -> None:
    for park_mb in (0, 1):
        backend = FakeBackend(sequences=4, cells=64, unified=True, request_tokens=60)
        life = Life(backend, park_mb)
        names = [life.add(b"prompt %d" % number, 40, ignore_eos=True) for number in range(4)]
        life.run()
        assert [life.outcome(name) for name in names] == [FinishReason.LENGTH] * 4
        life.check_end()


def test_identical_requests_cost_exactly_the_same_from_first_to_last() -> None:
    life = Life(FakeBackend(sequences=4))
    usages = []
    for _ in range(300):
        name = life.add(b"the same prompt", 16, ignore_eos=True)
        life.run()
        usages.append(life.deltas[name][-1].usage)
    assert len(set(usages)) == 1


def test_identical_prompts_that_arrive_together_are_computed_once() -> None:
    backend = FakeBackend(sequences=4, cells=4096, batch_tokens=64)
    life = Life(backend)
    names = [life.add(b"x" * 500, 4, seed, ignore_eos=True) for seed in range(4)]
    life.run()
    life.check_end()
    usages = [life.deltas[name][-1].usage for name in names]
    assert [usage.cached_tokens for usage in usages if usage] == [0, 499, 499, 499]
    assert [usage.decoded_tokens for usage in usages if usage] == [503, 4, 4, 4]


def test_a_prompt_that_goes_another_way_keeps_what_is_common() -> None:
    life = Life(FakeBackend(sequences=2, cells=4096, batch_tokens=64))
    first = life.add(b"x" * 300 + b"a" * 100, 40, ignore_eos=True)
    second = life.add(b"x" * 300 + b"b" * 100, 40, ignore_eos=True)
    life.run()
    life.check_end()
    usages = [life.deltas[name][-1].usage for name in (first, second)]
    assert [usage.cached_tokens for usage in usages if usage] == [0, 300]
