"""Scenarios on the fake runner: random workloads with failures, and each native call failing in turn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from hypothesis import strategies as st

from cllm.backend.base import StepStatus
from cllm.errors import EngineDied
from cllm.types import FinishReason
from tests.driver.engine import StepDriver
from tests.driver.fake_runner import FakeRunner
from tests.profiles import is_random

Fail = Callable[[int, str], Exception | StepStatus | None]
STEP_FAILURES = (StepStatus.NO_ROOM, StepStatus.ABORTED, StepStatus.BAD_BATCH, StepStatus.FAILED)


class Scenario(NamedTuple):
    """A run of the engine: its size, the requests that arrive or are cancelled, the calls that fail."""

    actions: list[tuple[str, int]]
    sequences: int
    unified: bool
    swap_space_mb: int
    cache_mb: int
    failures: dict[int, StepStatus]  # statuses of a step, by the number of the call
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

    def run(self, driver: StepDriver, make_prompt: Callable[[int, int], bytes]) -> None:
        """Play it and check the end; `make_prompt(value, max_tokens)` gives the prompts."""
        driver.kv_runs_out = StepStatus.NO_ROOM in self.failures.values()
        with suppress(EngineDied):
            for action, value in self.actions:
                if action == "add":
                    prompt = make_prompt(value, 96 // self.sequences - 1)
                    driver.add(prompt, 1 + value % 40, seed=value % 3, ignore_eos=value % 5 == 0)
                elif action == "cancel" and driver.requests:
                    driver.cancel(f"r{value % len(driver.requests)}")
                else:
                    driver.step()
        driver.run()
        driver.check_end()


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
    failures=st.dictionaries(st.integers(0, 400), st.sampled_from(STEP_FAILURES), max_size=6),
    raises=st.sets(st.integers(0, 400), max_size=4),
)


def fail_each_call_in_turn(begin: Callable[[Fail], StepDriver], status: StepStatus | None) -> StepDriver:
    """As SQLite does with malloc: native call k fails, for every k; at most one request may suffer from it.

    `begin` starts the same run each time. With a `status` every step ends with it once; without one every
    call raises once. Returns the run in which nothing failed. Every fifth call is taken, another fifth for
    each status; the profile `random` takes all (`proof/life_cycle.py`).
    """
    calls: list[str] = []
    undisturbed = begin(lambda number, name: calls.append(name))
    undisturbed.run()
    undisturbed.check_end()
    assert "collect" in calls
    # A status is the answer of a step only; that other calls raise is tried without one.
    numbers = [k for k, name in enumerate(calls) if status is None or name == "collect"]
    first = (None, *STEP_FAILURES).index(status)
    for k in numbers if is_random() else numbers[first :: len(STEP_FAILURES) + 1]:
        driver = begin(_fail_once(k, status))
        driver.kv_runs_out = status is StepStatus.NO_ROOM
        driver.run()
        driver.check_end()
        assert not driver.died, f"one failure (call {k}) killed the engine"
        failed = [name for name in driver.requests if driver.outcome(name) is FinishReason.ERROR]
        assert len(failed) <= 1, f"call {k} failed {failed}"
    return undisturbed


def _fail_once(k: int, status: StepStatus | None) -> Fail:
    def fail(number: int, name: str) -> Exception | StepStatus | None:
        return (status or RuntimeError("native call failed")) if number == k else None

    return fail


def small_runner(*, unified: bool, trimmable: bool, fail: Fail | None = None) -> FakeRunner:
    """Three slots; in a unified KV cache three requests do not fit, so that one is preempted."""
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
