"""Preparation: what takes long to make delays no step, wakes the engine when done, and is freed if unused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from cllm.backend.base import Sampler
from cllm.config import EngineConfig
from cllm.core.engine_core import EngineCore
from cllm.errors import InvalidRequest
from cllm.messages import Cancel, Report, StepReport, Stop, Submit
from cllm.types import FinishReason, Prompt, Request, RequestOutput, SamplingParams
from tests.driver.fake_runner import FakeRunner

LIMIT_S = 10.0
PENALISED = SamplingParams(dry_multiplier=0.5, seed=1)


class SlowRunner(FakeRunner):
    """Samplers that look back, and the context of embeddings, are made only when `gate` is open."""

    def __init__(self, fail: Callable[[int, str], Exception | None] | None = None) -> None:
        super().__init__(sequences=4, cells=4096, fail=fail)
        self.gate = threading.Event()
        self.threads: set[int] = set()

    def create_sampler(self, params: SamplingParams) -> Sampler:
        if params.looks_back:
            self.threads.add(threading.get_ident())
            assert self.gate.wait(LIMIT_S)
        return super().create_sampler(params)

    def open_embedding(self) -> None:
        self.threads.add(threading.get_ident())
        assert self.gate.wait(LIMIT_S)
        super().open_embedding()


class RunningCore:
    """An engine core on a thread of its own, as in a worker."""

    def __init__(self, runner: FakeRunner) -> None:
        self.reports: SimpleQueue[Report] = SimpleQueue()
        self.core = EngineCore(runner, EngineConfig(draft_tokens=0), self.reports.put)
        self.thread = threading.Thread(target=self.core.run, daemon=True)
        self.thread.start()

    def submit(self, name: str, **fields: object) -> None:
        settings = {"prompt": Prompt(tuple(b"prompt")), "max_tokens": 20, **fields}
        self.core.post(Submit(Request(id=name, **settings)))  # type: ignore[arg-type]

    def end_of(self, *names: str) -> dict[str, RequestOutput]:
        """The terminal outputs of these requests, in order of arrival; of others none may come before."""
        ends: dict[str, RequestOutput] = {}
        deadline = time.monotonic() + LIMIT_S
        while set(ends) < set(names):
            report = self.reports.get(timeout=max(0.01, deadline - time.monotonic()))
            assert isinstance(report, StepReport)
            ends.update((out.request_id, out) for out in report.outputs if out.finish_reason is not None)
        assert set(ends) == set(names)
        return ends

    def stop(self) -> None:
        self.core.post(Stop())
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


def test_a_sampler_that_takes_long_to_build_delays_no_other_request() -> None:
    runner = SlowRunner()
    running = RunningCore(runner)
    running.submit("slow", sampling=PENALISED)
    running.submit("plain", sampling=SamplingParams(ignore_eos=True))
    assert running.end_of("plain")["plain"].finish_reason is FinishReason.LENGTH
    runner.gate.set()  # nothing else wakes the engine
    assert running.end_of("slow")["slow"].error is None
    assert running.thread.ident not in runner.threads
    running.stop()
    assert runner.open_samplers == 0


def test_opening_the_context_of_embeddings_delays_no_other_request() -> None:
    runner = SlowRunner()
    running = RunningCore(runner)
    running.submit("vector", prompt=(), embed=((1, 2, 3),))
    running.submit("plain", sampling=SamplingParams(ignore_eos=True))
    running.end_of("plain")
    runner.gate.set()
    assert running.end_of("vector")["vector"].embeddings
    running.submit("again", prompt=(), embed=((1, 2, 3),))
    assert running.end_of("again")["again"].embeddings
    running.stop()


def test_what_is_cancelled_while_it_is_prepared_leaves_no_sampler() -> None:
    runner = SlowRunner()
    running = RunningCore(runner)
    running.submit("slow", sampling=PENALISED)
    while not runner.threads:
        time.sleep(0.001)
    running.core.post(Cancel("slow"))
    assert running.end_of("slow")["slow"].finish_reason is FinishReason.CANCELLED
    runner.gate.set()
    deadline = time.monotonic() + LIMIT_S
    running.submit("next", sampling=PENALISED)
    running.end_of("next")
    while runner.open_samplers and time.monotonic() < deadline:
        time.sleep(0.001)
    assert runner.open_samplers == 0
    running.stop()


def test_a_sampler_that_cannot_be_built_fails_its_request_alone() -> None:
    def fail(_: int, name: str) -> Exception | None:
        return InvalidRequest("no such sampler") if name == "create_sampler" else None

    runner = SlowRunner(fail)
    runner.gate.set()
    running = RunningCore(runner)
    running.submit("bad", sampling=PENALISED)
    error = running.end_of("bad")["bad"].error
    assert error is not None and error.message == "no such sampler"
    running.stop()


def test_the_engine_stops_while_something_is_prepared() -> None:
    runner = SlowRunner()
    running = RunningCore(runner)
    running.submit("slow", sampling=PENALISED)
    while not runner.threads:
        time.sleep(0.001)
    running.core.post(Stop())
    runner.gate.set()
    running.thread.join(LIMIT_S)
    assert not running.thread.is_alive()
    assert runner.open_samplers == 0


class CountedRunner(FakeRunner):
    """Builds a sampler with DRY for each permit that is given, and keeps the seeds in their order."""

    def __init__(self) -> None:
        super().__init__(sequences=16, cells=4096)
        self.permits = threading.Semaphore(0)
        self.built: list[int | None] = []

    def create_sampler(self, params: SamplingParams) -> Sampler:
        if params.dry_multiplier:
            self.built.append(params.seed)
            assert self.permits.acquire(timeout=LIMIT_S)
        return super().create_sampler(params)


def test_samplers_with_dry_are_built_in_turns_of_the_tenants() -> None:
    runner = CountedRunner()
    running = RunningCore(runner)
    for seed in range(12):
        sampling = SamplingParams(dry_multiplier=1 + seed, seed=seed)
        running.submit(f"greedy-{seed}", tenant="greedy", sampling=sampling)
    running.submit(
        "penalty", tenant="other", sampling=SamplingParams(repetition_penalty=1.1, ignore_eos=True)
    )
    running.end_of("penalty")  # while all of the others wait
    running.submit("dry", tenant="other", sampling=SamplingParams(dry_multiplier=0.5, seed=99))
    running.submit("plain", tenant="other", sampling=SamplingParams(ignore_eos=True))
    running.end_of("plain")  # so the engine has taken both
    for _ in range(13):
        runner.permits.release()
    running.end_of("dry", *(f"greedy-{seed}" for seed in range(12)))
    assert runner.built[:3] == [0, 99, 1], "one that was being built, then the other tenant's"
    running.stop()
    assert runner.open_samplers == 0
