"""Compute turns: the engines of one server that compute on the CPU do so one after the other.

The threads of a step meet at a barrier after every operation. Of two steps on the same cores each would wait
for threads that the other has displaced. So an engine holds the turn while it computes a step; of those that
wait, the one with the least compute time goes next.

What they share is a file in memory: its first byte is locked by the engine that has the turn, another one by
each engine for as long as it lives. The kernel releases the locks of a process that dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import socket
import time
from functools import cache

log = logging.getLogger(__name__)
VARIABLE = "CLLM_COMPUTE_TURNS"  # the file's path, for the engines of a server
MAX_ENGINES = 64
LOOK_S = 0.05  # between two looks of a waiting engine
MAX_WAIT_S = 2.0  # then it computes without the turn: the engine that has it may be stopped
IDLE_S = 0.1  # an engine that paused longer has no claim to the time it did not use
MAX_CLAIM_S = 0.1  # of one that waited: more would be several steps in a row, a gap in the others' streams
CONTENDED_S = 2.0  # others count as computing until then after they did
_CPU_S, _VIRTUAL_S, _COUNT, _FIRST = 0, 1, 2, 3  # cells of the file, each a double
_USED_S, _WAITS, _SEEN_S, _CELLS = 0, 1, 2, 3  # of each engine; when it last began or ended a step


def share_turns() -> int | None:
    """Make the file for the engines that this process starts from now on; its descriptor, to be kept open.

    None where the system has no such files: engines then compute without turns.
    """
    if not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create("cllm-compute-turns")
    os.truncate(descriptor, 8 * (_FIRST + _CELLS * MAX_ENGINES))
    os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{descriptor}"
    return descriptor


@cache
def get_turns() -> ComputeTurns | None:
    """The turns of this process, if it is an engine of a server with several models."""
    if path := os.environ.get(VARIABLE):
        try:
            return ComputeTurns(path)
        except OSError as error:
            log.warning("engines compute without turns: %s", error.strerror)
    return None


class ComputeTurns:
    """One engine's part in the turns: a context manager around each step, for the thread that computes."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._cells = memoryview(mmap.mmap(self._file, 0)).cast("d")
        self._name = f"\0cllm-turns-{os.fstat(self._file).st_ino}-{path}"
        self._number = next((number for number in range(MAX_ENGINES) if self._lock(1 + number)), -1)
        if self._number < 0:
            raise OSError(0, f"more than {MAX_ENGINES} engines")
        self._cells[_COUNT] = max(self._cells[_COUNT], self._number + 1)
        self._own = _FIRST + _CELLS * self._number
        self._cells[self._own + _USED_S] = self._cells[_VIRTUAL_S]
        self._cells[self._own + _WAITS] = self._cells[self._own + _SEEN_S] = 0.0
        # A datagram wakes the engine that waits; one that is lost costs `LOOK_S`.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(self._address(self._number))
        self._socket.settimeout(LOOK_S)
        self._held = False
        self._started = self._ended = 0.0
        self._cpu_s = time.process_time()
        self._alone_until = 0.0  # no turn is waited for: the engine that has it does not end

    def _address(self, number: int) -> str:
        return f"{self._name}-{number}"

    def _lock(self, byte: int) -> bool:
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            return True
        return False

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all engines so far, as far as they have reported them."""
        return self._cells[_CPU_S] + time.process_time() - self._cpu_s

    @property
    def contended(self) -> bool:
        """True if another engine computes, too, or did a moment ago."""
        since = time.monotonic() - CONTENDED_S
        numbers = (number for number in range(int(self._cells[_COUNT])) if number != self._number)
        return any(self._cells[_FIRST + _CELLS * number + _SEEN_S] > since for number in numbers)

    def __enter__(self) -> None:
        """Take the turn, after those that wait and have computed less. Waits at most `MAX_WAIT_S`."""
        cells, own = self._cells, self._own
        now = time.perf_counter()
        cells[own + _SEEN_S] = time.monotonic()
        claim_s = MAX_CLAIM_S if now - self._ended <= IDLE_S else 0.0
        cells[own] = max(cells[own], cells[_VIRTUAL_S] - claim_s)
        self._held = self._next_waiting(cells[own]) < 0 and self._lock(0)
        if not self._held and now > self._alone_until:
            self._wait(now)
        cells[_VIRTUAL_S] = max(cells[_VIRTUAL_S], cells[own])
        self._started = time.perf_counter()

    def _next_waiting(self, limit_s: float = float("inf")) -> int:
        """The waiting engine with the least compute time below the limit; -1 if there is none."""
        cells, found = self._cells, -1
        for number in range(int(cells[_COUNT])):
            at = _FIRST + _CELLS * number
            if cells[at + _WAITS] and number != self._number and cells[at] < limit_s:
                found, limit_s = number, cells[at]
        return found

    def _wait(self, started: float) -> None:
        cells, own = self._cells, self._own
        while time.perf_counter() - started < MAX_WAIT_S:
            cells[own + _WAITS] = 1.0  # another engine clears it where this one does not take its turn
            ahead = self._next_waiting(cells[own])
            if ahead < 0 and self._lock(0):
                break
            try:
                self._socket.recv(1)
            except TimeoutError:
                if ahead >= 0 and self._lock(0):  # the turn is free, and that engine has not taken it
                    cells[_FIRST + _CELLS * ahead + _WAITS] = 0.0
                    self._unlock()
        else:
            self._alone_until = started + 5 * MAX_WAIT_S
            log.warning("another engine has computed for %.0f s: this one goes on beside it", MAX_WAIT_S)
            cells[own + _WAITS] = 0.0
            return
        cells[own + _WAITS] = 0.0
        self._held = True

    def _unlock(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)

    def __exit__(self, *_: object) -> None:
        """Give the turn to the engine that is next."""
        cells, now, cpu_s = self._cells, time.perf_counter(), time.process_time()
        cells[self._own] += now - self._started
        cells[self._own + _SEEN_S] = time.monotonic()
        cells[_CPU_S] += cpu_s - self._cpu_s
        self._cpu_s, self._ended = cpu_s, now
        if self._held:
            self._unlock()
            self._held = False
        if (following := self._next_waiting()) >= 0:
            with contextlib.suppress(OSError):  # it has ended, or has been woken already
                self._socket.sendto(b"\0", socket.MSG_DONTWAIT, self._address(following))
