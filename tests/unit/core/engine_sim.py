"""A life of the engine on the fake runner, and the laws of DESIGN section 2, checked after each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from hypothesis import strategies as st

from cllm.backend.base import Drafter, StepStatus
from cllm.config import EngineConfig
from cllm.core.engine_core import EngineCore
from cllm.core.spec_decode import SpecDecodePolicy
from cllm.errors import EngineDied
from cllm.testing import FakeRunner, expected_text
from cllm.types import FinishReason, Request, RequestOutput, SamplingParams
from cllm.workers.messages import Report, StepReport, StepStats

Fail = Callable[[int, str], Exception | StepStatus | None]
FORWARD_FAILURES = (StepStatus.NO_ROOM, StepStatus.ABORTED, StepStatus.BAD_BATCH, StepStatus.FAILED)


def eager_drafts(new_drafter: Callable[[], Drafter], max_tokens: int) -> SpecDecodePolicy:
    """Drafts that are submitted at once, without having come true before."""
    policy = SpecDecodePolicy(max_tokens, new_drafter)
    policy.NGRAM_ACCEPTANCE = policy.MODEL_ACCEPTANCE
    return policy


class EngineSim:
    """An engine on the fake runner, its clients' ledger, and the laws."""

    def __init__(
        self,
        runner: FakeRunner,
        swap_space_mb: int = 1,
        cache_mb: int = 0,
        new_drafter: Callable[[], Drafter] | None = None,
        draft_tokens: int = 8,
    ) -> None:
        self.runner = runner
        self.reports: list[Report] = []
        config = EngineConfig(swap_space_mb=swap_space_mb, cache_ram_mb=cache_mb, draft_tokens=draft_tokens)
        room = max(0, min(draft_tokens, runner.limits.batch_tokens - runner.limits.sequences))
        policy = eager_drafts(new_drafter, room) if new_drafter is not None else None
        self.loop = EngineCore(runner, config, self.reports.append, spec_decode=policy)
        self.requests: dict[str, Request] = {}
        self.deltas: dict[str, list[RequestOutput]] = defaultdict(list)
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
            # As EngineCore.run does.
            self.died = True
            self.loop.scheduler.fail_all(error)
            deltas = tuple(self.loop.scheduler.take_outputs())
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
            for delta in report.outputs:
                before = self.deltas[delta.request_id]
                # Law 4: nothing comes after the terminal delta.
                assert not before or before[-1].finish_reason is None
                before.append(delta)
        self.reports.clear()
        scheduler, pool = self.loop.scheduler, self.loop.scheduler.pool
        # Law 2: ids are held once, by the running; the rest are free or retired.
        held = [lease.seq_id for lease in pool.leases]
        assert len(held) == len(set(held)) == scheduler.running_count
        assert len(held) + pool.free_count + len(pool.retired) == pool.size
        # Laws 2 and 3: an id nobody holds holds nothing; one that is held, just its own tokens.
        for seq_id, memory in enumerate(self.runner.memory):
            if seq_id in pool.retired:
                continue
            if seq_id not in held:
                assert memory == []
        for lease in pool.leases:
            tokens = [token for delta in self.deltas[lease.request_id] for token in delta.tokens]
            known = [*self.requests[lease.request_id].prompt, *tokens]
            memory = self.runner.memory[lease.seq_id]
            assert memory == known[: len(memory)]
        # RAM: never over its limits, and what is cached is what it says it is.
        tier = scheduler.prefix_cache.host
        assert tier.cached_bytes <= tier.cached_limit and tier.swapped_bytes <= tier.swap_limit
        assert tier.cached_bytes + tier.swapped_bytes <= tier.limit
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
        most = min(request.max_tokens, self.runner.limits.request_tokens - len(request.prompt))
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
        assert self.runner.open_samplers == 0
        if not self.died:
            self.runner.fail = None
            if not self.loop.scheduler.pool.retired:
                self.loop.scheduler.check_idle()


class Scenario(NamedTuple):
    """What befalls an engine: its size, who comes and goes, which native calls fail."""

    actions: list[tuple[str, int]]
    sequences: int
    unified: bool
    swap_space_mb: int
    cache_mb: int
    failures: dict[int, StepStatus]  # answers of a forward, by the number of the call
    raises: set[int]

    def fail(self, number: int, name: str) -> Exception | StepStatus | None:
        if name == "collect" and number in self.failures:
            return self.failures[number]
        return RuntimeError(f"{name} failed") if number in self.raises else None

    def runner(self, *, trimmable: bool = True) -> FakeRunner:
        """96 cells; a request may take its sequence's share of them."""
        return FakeRunner(
            sequences=self.sequences,
            cells=96,
            batch_tokens=16,
            unified=self.unified,
            trimmable=trimmable,
            request_tokens=96 // self.sequences,
            fail=self.fail,
        )

    def run(self, life: EngineSim, prompt_of: Callable[[int, int], bytes]) -> None:
        """Live it, and check the end; `prompt_of(value, most)` is a prompt of `most` tokens at most."""
        life.short_of_room = StepStatus.NO_ROOM in self.failures.values()
        for action, value in self.actions:
            if life.died:
                break
            if action == "add":
                prompt = prompt_of(value, 96 // self.sequences - 1)
                life.add(prompt, 1 + value % 40, seed=value % 3, ignore_eos=value % 5 == 0)
            elif action == "cancel" and life.requests:
                life.loop.scheduler.cancel(f"r{value % len(life.requests)}")
            else:
                life.step()
        life.run()
        life.check_end()


SCENARIOS = st.builds(
    Scenario,
    actions=st.lists(
        st.tuples(st.sampled_from(["add", "add", "step", "step", "step", "cancel"]), st.integers(0, 10**6)),
        max_size=60,
    ),
    sequences=st.integers(1, 4),
    unified=st.booleans(),
    swap_space_mb=st.sampled_from([0, 1]),
    cache_mb=st.sampled_from([0, 1]),
    failures=st.dictionaries(st.integers(0, 400), st.sampled_from(FORWARD_FAILURES), max_size=6),
    raises=st.sets(st.integers(0, 400), max_size=4),
)


def fail_each_call_in_turn(begin: Callable[[Fail], EngineSim], status: StepStatus | None) -> EngineSim:
    """As SQLite does with malloc: call k fails, for every k; at most one request may suffer from it.

    `begin` begins the same life each time. With a `status` every forward answers it once; without one
    every call raises once. Returns the life in which nothing failed.
    """
    calls: list[str] = []
    undisturbed = begin(lambda number, name: calls.append(name))
    undisturbed.run()
    undisturbed.check_end()
    assert "collect" in calls
    for k, called in enumerate(calls):
        if status is not None and called != "collect":
            continue  # only a forward has a status to answer; that this call raises is tried without one

        def fail(number: int, name: str, k: int = k) -> Exception | StepStatus | None:
            if number != k:
                return None
            return status if status is not None and name == "collect" else RuntimeError("native call failed")

        life = begin(fail)
        life.short_of_room = status is StepStatus.NO_ROOM
        life.run()
        life.check_end()
        assert not life.died, f"one failure (call {k}) killed the engine"
        failed = [name for name in life.requests if life.outcome(name) is FinishReason.ERROR]
        assert len(failed) <= 1, f"call {k} failed {failed}"
    return undisturbed


def small_runner(*, unified: bool, trimmable: bool, fail: Fail | None = None) -> FakeRunner:
    """Three sequences; in one common pool they do not all fit, so somebody gets parked."""
    cells = 90 if unified else 180
    return FakeRunner(
        sequences=3,
        cells=cells,
        batch_tokens=16,
        request_tokens=60,
        unified=unified,
        trimmable=trimmable,
        fail=fail,
    )
