"""A neighbour takes a core: a thread goes; the neighbour leaves: it comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm.backend.llama.threads import (
    CpuTimes,
    ThreadGovernor,
    core_quota,
    default_threads,
    read_cpu_times,
    usable_cores,
)


class Machine:
    """Cores on which we use `own` and others `others`, and a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = self.busy = self.process = 0.0
        self.own = 2.0
        self.others = 0.0
        self.reads = 0

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds * (self.own + self.others)
        self.process += seconds * self.own

    def read(self) -> CpuTimes:
        self.reads += 1
        return CpuTimes(self.now, self.busy, self.process)

    def governor(self, max_threads: int = 2, cores: int = 2) -> ThreadGovernor:
        return ThreadGovernor(max_threads, cores, self.read, lambda: self.now)

    def run(self, governor: ThreadGovernor, seconds: float, step_s: float = 0.02) -> int:
        for _ in range(round(seconds / step_s)):
            self.pass_time(step_s)
            governor.look()
        return governor.threads


def test_a_quiet_machine_keeps_all_threads_and_is_looked_at_rarely() -> None:
    machine = Machine()
    governor = machine.governor()
    assert machine.run(governor, 10) == 2
    assert machine.reads <= 42


def test_a_neighbour_takes_a_thread_and_gives_it_back() -> None:
    machine = Machine()
    governor = machine.governor()
    machine.run(governor, 1)
    machine.own, machine.others = 1.3, 0.67  # three threads on two cores
    assert machine.run(governor, 1) == 1
    machine.own, machine.others = 1.0, 1.0
    assert machine.run(governor, 5) == 1
    machine.others = 0.05
    assert machine.run(governor, 0.5) == 1, "not at once"
    assert machine.run(governor, 1.5) == 2


def test_a_burst_and_a_small_neighbour_change_nothing() -> None:
    machine = Machine()
    governor = machine.governor()
    for _ in range(10):
        machine.others = 1.0
        machine.run(governor, 0.1)
        machine.others = 0.3
        assert machine.run(governor, 0.8) == 2


@pytest.mark.parametrize(
    ("others", "threads"), [(0.0, 8), (0.6, 8), (4.0, 8), (9.0, 7), (14.4, 2), (40.0, 1)]
)
def test_cores_we_do_not_use_may_be_used_by_others(others: float, threads: int) -> None:
    machine = Machine()
    governor = machine.governor(max_threads=8, cores=16)
    machine.others = others
    assert machine.run(governor, 2) == threads


def test_a_step_that_takes_seconds_is_a_measurement() -> None:
    machine = Machine()
    governor = machine.governor()
    machine.own, machine.others = 1.2, 0.7
    machine.pass_time(4)  # one step, with both threads waiting for each other
    assert governor.look() == 1


def test_a_long_pause_is_no_measurement() -> None:
    machine = Machine()
    governor = machine.governor()
    machine.own, machine.others = 0.01, 2.0
    for _ in range(20):
        machine.pass_time(30)
        assert governor.look() == 2


def test_without_an_account_of_the_system_nothing_changes() -> None:
    governor = ThreadGovernor(4, 4, lambda: None)
    assert governor.look() == 4


def test_the_systems_account_is_read() -> None:
    cores = usable_cores() or frozenset()
    times = read_cpu_times(cores)
    if times is not None:  # some systems have none
        later = read_cpu_times(cores)
        assert later is not None and later.now >= times.now and later.busy >= times.busy >= 0
    assert default_threads() >= 1


def test_a_quota_is_read_and_nonsense_is_none(tmp_path: Path) -> None:
    assert core_quota(tmp_path) is None
    for text, quota in (("max 100000", None), ("150000 100000", 1.5), ("nonsense", None)):
        (tmp_path / "cpu.max").write_text(text)
        assert core_quota(tmp_path) == quota
    assert read_cpu_times(frozenset({0}), tmp_path / "stat") is None
    assert read_cpu_times(frozenset()) is None
