"""Timers: one thread that calls when a time has come: a request's deadline, the next look at the queue."""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
Key = TypeVar("Key")


class Timers(Generic[Key]):
    """Calls `fire(key)`, on a thread of its own, when the time set for a key has come (monotonic clock).

    One thread serves all timers, so it works with and without an event loop; it starts with the first.
    `fire` may be called for a key that is being cancelled at that moment: the caller checks.
    """

    SPARE = 64  # cancelled entries that may stay in a small heap

    def __init__(self, fire: Callable[[Key], None]) -> None:
        self._fire = fire
        self._due: dict[Key, tuple[float, int]] = {}  # when, and the number of its entry in the heap
        self._heap: list[tuple[float, int, Key]] = []  # with entries that were cancelled or set anew
        self._count = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def set(self, key: Key, due: float) -> None:
        """Fire once at `due`, instead of when the key was set for before. Infinity is no time: no timer."""
        with self._changed:
            if self._stopped or not due < math.inf:
                self._due.pop(key, None)
                return
            if (known := self._due.get(key)) is not None and known[0] == due:
                return
            self._count += 1
            self._due[key] = (due, self._count)
            heapq.heappush(self._heap, (due, self._count, key))
            if self._thread is None:
                self._start()
            elif self._heap[0][1] == self._count:  # the thread waits for a later one
                self._changed.notify()
            self._tidy()

    def cancel(self, key: Key) -> None:
        """Forget a timer; one that is not set is left alone."""
        with self._changed:
            if self._due.pop(key, None) is not None:
                self._tidy()

    def stop(self) -> None:
        """Nothing fires any more, but for a call that is under way. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="cllm-timers", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be had now: the next timer tries again
            log.exception("the timer thread could not be started")
        else:
            self._thread = thread

    def _tidy(self) -> None:
        """Entries that will not fire never outnumber those that will, so each costs O(log n) in the mean."""
        if len(self._heap) > 2 * len(self._due) + self.SPARE:
            self._heap = [(due, number, key) for key, (due, number) in self._due.items()]
            heapq.heapify(self._heap)

    def _run(self) -> None:
        while not self._stopped:
            try:
                for key in self._wait_for_due():
                    self._fire_one(key)
            except Exception:
                log.exception("the timer thread failed and goes on")

    def _fire_one(self, key: Key) -> None:
        try:
            self._fire(key)
        except Exception:  # at the end the event loop may be gone; the others must still fire
            if not self._stopped:
                log.exception("the timer of %s failed", key)

    def _wait_for_due(self) -> list[Key]:
        """The keys whose time has come, the earliest first; none when it is to be asked again."""
        with self._changed:
            if self._stopped:
                return []
            if not self._heap:
                self._changed.wait()
                return []
            if (wait_s := self._heap[0][0] - time.monotonic()) > 0:
                self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
                return []
            keys: list[Key] = []
            now = time.monotonic()
            while self._heap and self._heap[0][0] <= now:
                _, number, key = heapq.heappop(self._heap)
                if self._due.get(key, (now, 0))[1] == number:
                    del self._due[key]
                    keys.append(key)
            return keys
