"""How many threads compute: as many as there are cores, less those that other programs keep busy.

ggml's threads meet at a barrier after every operation. One that has lost its core to a neighbour makes all
the others wait for a scheduler's turn: two threads on two busy cores are far slower than one.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cllm.backend.llama.library import DeferredFrees, Library, Owned, ThreadpoolParams
from cllm.config import EngineConfig

log = logging.getLogger(__name__)


class CpuTimes(NamedTuple):
    """Seconds since some beginning: the clock's, what our cores worked, and what of it this process did."""

    now: float
    busy: float
    own: float


def usable_cores() -> frozenset[int] | None:
    """The cores this process may run on; None where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def core_quota(control_group: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores' worth of time the control group allows; None: no limit."""
    try:
        quota, period = (control_group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def default_threads() -> int:
    """One thread for each core this process may use."""
    cores = usable_cores()
    count = len(cores) if cores is not None else os.cpu_count() or 1
    quota = core_quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def read_cpu_times(stat: Path = Path("/proc/stat")) -> CpuTimes | None:
    """The system's account; None where there is none, or where it is not about our cores alone."""
    cores = usable_cores()
    if cores is None or core_quota() is not None:
        return None
    ticks = 0
    try:
        for line in stat.read_text().splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
                user, nice, system, _idle, _waiting, *interrupts_and_steal = map(int, fields[:8])
                ticks += user + nice + system + sum(interrupts_and_steal)
    except (OSError, ValueError):
        return None
    return CpuTimes(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


class ThreadGovernor:
    """Says how many threads the next step should use. Asked before every step; looks four times a second."""

    INTERVAL_S = 0.25
    TAKEN = 0.5  # a core of which others use this much is lost to us
    LOOKS_DOWN = 2  # in a row before a thread is taken away: a burst is not a neighbour
    LOOKS_UP = 4
    COMPUTING = 0.25  # cores we must have used ourselves

    def __init__(
        self,
        most: int,
        cores: int,
        read: Callable[[], CpuTimes | None] = read_cpu_times,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.threads = most
        self._most = most
        self._cores = cores
        self._read = read
        self._clock = clock
        self._last = read()
        self._next_look = clock() + self.INTERVAL_S
        self._looks = 0  # in a row that said something else than what we do

    def look(self) -> int:
        """How many threads to use now."""
        now = self._clock()
        if self._last is None or now < self._next_look:
            return self.threads
        self._next_look = now + self.INTERVAL_S
        times = self._read()
        if times is None:
            return self.threads
        last, self._last = self._last, times
        elapsed = times.now - last.now
        own = times.own - last.own
        # Where hardly anything was computed meanwhile, an average over that time says nothing. A long time in
        # which much was is one slow step: the neighbour is here already.
        if elapsed < self.INTERVAL_S / 2 or own < self.COMPUTING * elapsed:
            return self.threads
        others = max(0.0, (times.busy - last.busy) - own) / elapsed
        self._decide(others, looks=max(1, int(elapsed / self.INTERVAL_S)))
        return self.threads

    def _decide(self, others: float, looks: int) -> None:
        wanted = min(self._most, max(1, self._cores - math.floor(others + 1 - self.TAKEN)))
        if wanted == self.threads:
            self._looks = 0
            return
        self._looks += looks
        if self._looks >= (self.LOOKS_DOWN if wanted < self.threads else self.LOOKS_UP):
            log.info("compute threads: %d → %d (others use %.1f cores)", self.threads, wanted, others)
            self.threads, self._looks = wanted, 0


def cores_used_by_others(window_s: float = 0.4) -> float | None:
    """How many cores other programs keep busy now, looked at for a moment; None where nobody can tell."""
    before = read_cpu_times()
    if before is None:
        return None
    time.sleep(window_s)
    after = read_cpu_times()
    if after is None:
        return None
    others = (after.busy - before.busy) - (after.own - before.own)
    return max(0.0, others) / (after.now - before.now)


class Threadpool(Owned):
    """Persistent ggml workers. Without one, ggml starts and joins threads at every decode."""

    def __init__(self, library: Library, threads: int, poll: int, deferred_frees: DeferredFrees) -> None:
        params = ThreadpoolParams()
        library.threadpool_params(ctypes.byref(params), threads)
        params.poll = poll
        super().__init__(
            library.threadpool_new(ctypes.byref(params)), library.threadpool_free, deferred_frees
        )


class Workers:
    """Work for one context at a time. Close them after every context they work for."""

    def __init__(self, library: Library, config: EngineConfig, deferred_frees: DeferredFrees) -> None:
        self._library = library
        self._poll = config.poll
        self._deferred_frees = deferred_frees
        cores = default_threads()
        self.threads = config.threads or min(config.max_threads or cores, cores)
        # A number that was asked for is kept; our own default makes room for neighbours.
        self.governor = None if config.threads else ThreadGovernor(self.threads, cores)
        self._pools: dict[int, Threadpool] = {}
        self._attached: dict[Any, int] = {}  # by context: how many threads work for it

    def work_for(self, context: Any) -> None:
        """Called before each decode. Pools are swapped: one with idle workers would have them spin."""
        if self.governor is not None:
            self.threads = self.governor.look()
        if self._attached.get(context) == self.threads:
            return
        pool = self._pools.get(self.threads)
        if pool is None:
            pool = Threadpool(self._library, self.threads, self._poll, self._deferred_frees)
            self._pools[self.threads] = pool
        self._library.attach_threadpool(context, pool.pointer, pool.pointer)
        self._library.api.llama_set_n_threads(context, self.threads, self.threads)
        self._attached[context] = self.threads

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
