"""The life cycle of requests, slots and cached cells as a model: every order of events in a small world.

The states are those of the real engine core on the fake runner. Each path of events is played from the start;
paths that lead to the same state are followed once. After every event the invariants are checked, and from
every state the engine is run until it is idle.
"""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cllm.backend.base import StepStatus
from cllm.errors import EngineDied
from cllm.messages import ClearCache
from cllm.types import FinishReason, Prompt, Request, SamplingParams
from tests.driver.engine import StepDriver
from tests.driver.fake_runner import FakeRunner

Path = tuple[str, ...]
MAX_DRAIN_STEPS = 80
FAILURES = {
    "no room": StepStatus.NO_ROOM,
    "failed": StepStatus.FAILED,
    "aborted": StepStatus.ABORTED,
    "bad batch": StepStatus.BAD_BATCH,
}


class World(NamedTuple):
    """Two slots and few cells. In a unified KV two requests outgrow them, so that one is preempted."""

    unified: bool
    trimmable: bool = True
    swap_space_mb: int = 1
    cells: int = 22

    def start(self) -> StepDriver:
        cells = self.cells if self.unified else 2 * self.cells
        runner = FakeRunner(
            sequences=2, cells=cells, batch_tokens=10, unified=self.unified, trimmable=self.trimmable
        )
        driver = StepDriver(runner, swap_space_mb=self.swap_space_mb, cache_mb=1)
        driver.kv_runs_out = True
        return driver


WORLDS = (
    World(unified=True),
    World(unified=True, swap_space_mb=0),
    World(unified=True, trimmable=False),
    World(unified=False),
)


def _request(name: str, prompt: bytes, max_tokens: int, **fields: Any) -> Request:
    sampling = SamplingParams(seed=fields.pop("seed", 0), ignore_eos=True)
    return Request(id=name, prompt=Prompt(tuple(prompt)), max_tokens=max_tokens, sampling=sampling, **fields)


# Two choices of one request, and one that shares its prefix but leaves nothing behind.
REQUESTS = (
    _request("r0", b"the same", 6),
    _request("r1", b"the same", 6, seed=1),
    _request("r2", b"the same one", 3, reuse=False),
)
LAST = _request("last", b"the same again", 4)


class Life:
    """One path of events, played on an engine of its own."""

    def __init__(self, world: World, path: Sequence[str]) -> None:
        self.driver = world.start()
        self.added: list[str] = []
        self.preempted = False
        self.reached: tuple[object, ...] = ()  # the state before it was drained
        self.next_events: tuple[str, ...] = ()
        for event in path:
            self.play(event)

    def events(self) -> Iterator[str]:
        """What may happen next."""
        if self.driver.died:
            return
        for request in REQUESTS:
            yield f"{'cancel' if request.id in self.added else 'add'} {request.id}"
        if self.driver.scheduler.has_work:
            yield "step"
            yield from FAILURES
        if self.driver.prefix_cache.device.entries or self.driver.host_cache.entries:
            yield "clear"

    def play(self, event: str) -> None:
        action, _, name = event.partition(" ")
        driver = self.driver
        match action:
            case "add":
                self.added.append(name)
                driver.submit(next(request for request in REQUESTS if request.id == name))
            case "cancel":
                driver.cancel(name)
            case "clear":
                driver.core._handle(ClearCache(1))
            case _:
                self._step(FAILURES.get(event))
        self.check()

    def _step(self, status: StepStatus | None) -> None:
        """One step; with a status its first decode ends with that."""
        left = [status]

        def fail(_: int, name: str) -> StepStatus | None:
            return left.pop() if name == "collect" and left else None

        self.driver.fake.fail = fail
        try:
            self.driver.step()
        except EngineDied:
            assert status is StepStatus.FAILED, "only a second failed step ends the engine"
        finally:
            self.driver.fake.fail = None

    def check(self) -> None:
        """What holds in every state, beside what the driver checks after each step."""
        driver, scheduler = self.driver, self.driver.scheduler
        driver.check_invariants()
        leased = list(scheduler.pool.held)
        cached = driver.prefix_cache.device.lengths
        assert len(leased) == len(set(leased)), "a slot is leased twice"
        assert not set(leased) & cached.keys(), "a slot is both leased and cached"
        used = sum(driver.prefix_cache.count_cells(scheduler.running.values()))
        assert used <= driver.runner.limits.cells
        for seq_id, sequence in scheduler.running.items():
            assert driver.runner.next_position(seq_id) == sequence.num_computed
        for seq_id, length in cached.items():
            assert driver.runner.next_position(seq_id) == length
        if not scheduler.live and not driver.died:
            scheduler.check_idle()
        for name in self.added:
            ended = driver.answers[name].finish_reason is not None
            assert not (ended and name in scheduler.live), "a request goes on after its terminal event"
        self.preempted = self.preempted or scheduler.transfer.swap_outs > 0

    def state(self) -> tuple[object, ...]:
        """What the next events depend on."""
        driver, scheduler = self.driver, self.driver.scheduler
        requests = tuple(self._describe(request.id) for request in REQUESTS)
        device, host = driver.prefix_cache.device, driver.host_cache
        return (
            *(driver.died, requests, tuple(one.id for one in scheduler.waiting), scheduler._kv_full),
            tuple((entry.seq_id, *entry.tokens) for entry in device.entries),
            tuple(tuple(entry.tokens) for entry in host.entries),
            tuple(driver.core._failed_steps.values()),
            tuple(map(len, driver.fake.memory)),
        )

    def _describe(self, name: str) -> tuple[object, ...]:
        if name not in self.added:
            return ()
        if (sequence := self.driver.scheduler.live.get(name)) is None:
            return (self.driver.answers[name].finish_reason,)  # None: it is told with the next step
        slot = sequence.lease.seq_id if sequence.lease is not None else None
        return (
            sequence.preempted,
            slot,
            len(sequence.tokens),
            sequence.num_computed,
            sequence.swapped is None,
        )

    def drain(self) -> None:
        """Run until idle: each request has ended once, with the right text, and the engine serves another."""
        driver = self.driver
        driver.run(MAX_DRAIN_STEPS)
        driver.check_end()
        if not driver.died:
            self.check()
            driver.submit(LAST)
            driver.run(MAX_DRAIN_STEPS)
            driver.check_end()
            assert driver.outcome(LAST.id) is FinishReason.LENGTH
            assert driver.text(LAST.id) == driver.expected(LAST.id)


@dataclass
class Explored:
    """How much was seen."""

    states: int = 0
    transitions: int = 0
    depth: int = 0  # of the longest path
    complete: bool = True  # every state within the depth was followed
    preempted: int = 0  # states after a preemption
    outcomes: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        whole = "" if self.complete else ", not all of them followed"
        return f"{self.states} states, {self.transitions} transitions, depth {self.depth}{whole}"


@contextmanager
def small_scale() -> Iterator[None]:
    """Prefixes of a few tokens are reused, as long ones are elsewhere; failed steps are not logged."""
    prefix_cache: Any = importlib.import_module("cllm.core.kv_cache.prefix_cache")
    before = prefix_cache.MIN_PREFIX_TOKENS
    prefix_cache.MIN_PREFIX_TOKENS = 4
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        prefix_cache.MIN_PREFIX_TOKENS = before
        logging.disable(logging.NOTSET)


def explore(world: World, max_depth: int, begin: Path = (), until: float = math.inf) -> Explored:
    """Breadth first, every path of at most `max_depth` events after `begin`, until that moment."""
    found = Explored()
    first = Life(world, begin)
    seen = {first.state()}
    waiting: deque[tuple[Path, tuple[str, ...]]] = deque([((), tuple(first.events()))])
    while waiting and found.complete:
        path, events = waiting.popleft()
        for event in events if len(path) < max_depth else ():
            if time.monotonic() > until:
                found.complete = False
                break
            life = _play(world, (*begin, *path, event), found)
            if life.reached not in seen:
                seen.add(life.reached)
                found.preempted += life.preempted
                waiting.append(((*path, event), life.next_events))
        found.depth = max(found.depth, len(path) + bool(events) if len(path) < max_depth else 0)
    found.states = len(seen)
    return found


def _play(world: World, path: Path, found: Explored) -> Life:
    """Play one path to its end."""
    try:
        life = Life(world, path)
        life.reached, life.next_events = life.state(), tuple(life.events())
        life.drain()
    except BaseException as error:
        error.add_note(f"{world}: {' → '.join(path)}")
        raise
    found.transitions += 1
    found.outcomes |= {str(life.driver.outcome(name).value) for name in life.added}
    return life
