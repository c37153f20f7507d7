"""Compute turns: one engine computes at a time, and none waits for one that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cllm.backend import compute_turns
from cllm.backend.compute_turns import VARIABLE, ComputeTurns, share_turns

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs files in memory")

# An engine that holds the turn, or takes turns of so many seconds until its input ends.
ENGINE = """
import os, select, sys, time
from cllm.backend.compute_turns import get_turns
turns, step_s = get_turns(), float(sys.argv[1])
steps = 0
if not step_s:
    turns.__enter__()
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0 if step_s else 60)[0]:
    with turns:
        time.sleep(step_s)
    steps += 1
print(steps, flush=True)
"""


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[ComputeTurns]:
    monkeypatch.setenv(VARIABLE, "")
    descriptor = share_turns()
    assert descriptor is not None
    turns = ComputeTurns(os.environ[VARIABLE])
    yield turns
    turns._socket.close()
    os.close(turns._file)
    os.close(descriptor)


@contextmanager
def engine(step_s: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    """With a step of 0 it holds the turn."""
    command = [sys.executable, "-c", ENGINE, str(step_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_an_engine_alone_never_waits(turns: ComputeTurns) -> None:
    for _ in range(100):
        with turns:
            assert not turns.contended
    assert turns.cpu_s > 0


def test_the_turn_of_an_engine_that_is_killed_is_free(turns: ComputeTurns) -> None:
    with engine() as other:
        os.kill(other.pid, signal.SIGKILL)
        other.wait(10)
        started = time.perf_counter()
        with turns:
            assert turns._held
        assert time.perf_counter() - started < compute_turns.MAX_WAIT_S


def test_a_stopped_engine_is_not_waited_for_twice(
    turns: ComputeTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_turns, "MAX_WAIT_S", 0.2)
    with engine():
        with turns:
            assert not turns._held and turns.contended
        started = time.perf_counter()
        for _ in range(10):
            with turns:
                pass
        assert time.perf_counter() - started < 5 * 0.2, "ten waits would take two seconds"


def test_engines_share_by_time_and_not_by_steps(turns: ComputeTurns) -> None:
    steps, spent = 0, 0.0
    with engine(0.002) as other:
        started = time.perf_counter()
        while time.perf_counter() - started < 0.5:
            with turns:
                assert turns._held
                begun = time.perf_counter()
                time.sleep(0.01)
                spent += time.perf_counter() - begun
            steps += 1
        total = time.perf_counter() - started
        assert turns.contended
        output, _ = other.communicate("\n", timeout=30)
    # Each has half of the time, as far as a busy machine lets them.
    assert 0.25 * total < spent < 0.75 * total
    assert int(output) > steps, "the one with shorter steps makes more of them"


def test_one_that_had_far_less_time_does_not_take_turn_after_turn(turns: ComputeTurns) -> None:
    with engine(0.002) as other:
        turns._cells[turns._own] = -100.0  # as after a long prompt of the other
        turns._ended = time.perf_counter()
        started = time.perf_counter()
        while time.perf_counter() - started < 1.0:
            with turns:
                time.sleep(0.02)
        output, _ = other.communicate("\n", timeout=30)
    assert int(output) > 10, "it had turns in between"
