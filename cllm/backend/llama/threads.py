"""Compute threads: as many as there are cores, less those that other programs keep busy.

ggml's threads meet at a barrier after every operation. A thread that has lost its core to another program
makes all others wait for a turn of the system's scheduler: two threads on two busy cores are far slower than
one.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cllm.backend.compute_turns import get_turns
from cllm.backend.llama.library import DeferredFrees, Library, Owned
from cllm.config import EngineConfig

log = logging.getLogger(__name__)
DEFAULT_POLL = 50  # ggml's own: idle threads look for work that long before they sleep


class CpuTimes(NamedTuple):
    """Seconds: by the clock, of work on our cores, and of that the part of this server's engines."""

    now: float
    busy: float
    own: float


def usable_cores() -> frozenset[int] | None:
    """The cores this process may run on; None where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def core_quota(control_group: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores' worth of time the control group allows; None where it sets no limit."""
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


def measurable_cores() -> frozenset[int]:
    """The cores whose times tell of other programs; none where a quota leaves us a part of them."""
    return (core_quota() is None and usable_cores()) or frozenset()


def compute_threads(config: EngineConfig) -> int:
    """Threads that a model is computed with while no other program computes."""
    cores = default_threads()
    return config.threads or min(config.max_threads or cores, cores)


def encoder_threads(threads: int) -> int:
    """Of all threads, those that pictures are encoded with beside streams, which have the others: half."""
    return max(1, threads // 2)


def read_cpu_times(cores: frozenset[int], stat: Path = Path("/proc/stat")) -> CpuTimes | None:
    """CPU times of our cores from the system; None where there are none."""
    if not cores:
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
    turns = get_turns()  # the other engines of this server do not compute at the same time
    own = turns.cpu_s if turns is not None else time.process_time()
    return CpuTimes(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own)


class ThreadGovernor:
    """Decides how many threads the next step uses. Asked before every step; looks four times a second."""

    INTERVAL_S = 0.25
    TAKEN = 0.5  # a core counts as lost when other programs use this much of it
    LOOKS_DOWN = 2  # in a row before a thread is removed: a burst does not count
    LOOKS_UP = 4
    COMPUTING = 0.25  # cores that this process must have used itself

    def __init__(
        self,
        max_threads: int,
        cores: int,
        read: Callable[[], CpuTimes | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.threads = self._max_threads = max_threads
        self._cores = cores
        self._read = read
        self._clock = clock
        self._last = read()
        self._next_look = clock() + self.INTERVAL_S
        self._looks = 0  # in a row that asked for another number

    def look(self) -> int:
        """The number of threads to use now."""
        now = self._clock()
        if self._last is None or now < self._next_look:
            return self.threads
        self._next_look = now + self.INTERVAL_S
        if (times := self._read()) is None:
            return self.threads
        last, self._last = self._last, times
        elapsed, own = times.now - last.now, times.own - last.own
        # An average over a time with hardly any computing says nothing. A long time with much of it is one
        # slow step: the other program is already there.
        if elapsed < self.INTERVAL_S / 2 or own < self.COMPUTING * elapsed:
            return self.threads
        others = max(0.0, times.busy - last.busy - own) / elapsed
        wanted = min(self._max_threads, max(1, self._cores - math.floor(others + 1 - self.TAKEN)))
        self._looks += max(1, int(elapsed / self.INTERVAL_S))
        if wanted == self.threads:
            self._looks = 0
        elif self._looks >= (self.LOOKS_DOWN if wanted < self.threads else self.LOOKS_UP):
            log.info("compute threads: %d → %d (others use %.1f cores)", self.threads, wanted, others)
            self.threads, self._looks = wanted, 0
        return self.threads


class Workers:
    """ggml's thread pools, which compute for one context at a time. Close them after every such context.

    Without one, ggml starts and joins threads at every decode.
    """

    def __init__(self, library: Library, config: EngineConfig, deferred_frees: DeferredFrees) -> None:
        self._library = library
        self._poll = DEFAULT_POLL if config.poll is None else config.poll
        self._deferred_frees = deferred_frees
        self.threads = self._most = compute_threads(config)
        self.left = 0  # threads that the encoder of pictures has now
        read = partial(read_cpu_times, measurable_cores())
        # An explicit number is kept; the default adapts to other programs.
        self.governor = None if config.threads else ThreadGovernor(self.threads, default_threads(), read)
        self._pools: dict[int, Owned] = {}
        self._attached: dict[Any, int] = {}  # by context: its number of threads

    def work_for(self, context: Any) -> None:
        """Attach the right pool; called before each decode. Idle workers of a larger pool would spin."""
        free = self.governor.look() if self.governor is not None else self._most
        self.threads = max(1, min(free, self._most - self.left))
        if self._attached.get(context) == self.threads:
            return
        api = self._library.api
        if (pool := self._pools.get(self.threads)) is None:
            params = api.ggml_threadpool_params()
            api.ggml_threadpool_params_init(params, self.threads)
            params.poll = self._poll
            pool = Owned(api.ggml_threadpool_new(params), api.ggml_threadpool_free, self._deferred_frees)
            self._pools[self.threads] = pool
        api.llama_attach_threadpool(context, pool.pointer, pool.pointer)
        api.llama_set_n_threads(context, self.threads, self.threads)
        self._attached[context] = self.threads

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
