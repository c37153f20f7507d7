"""Request timeouts: one thread that ends requests whose time is up."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class RequestTimeouts:
    """Calls `expired(request_id)`, on a thread of its own, when a request's time is up (monotonic clock).

    One thread serves every deadline, so it works with and without an event loop; it starts with the first.
    `expired` may be called for a request that has just ended: the caller checks.
    """

    def __init__(self, expired: Callable[[str], None]) -> None:
        self._expired = expired
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # may hold some that were removed from `_due`
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, request_id: str, due: float) -> None:
        with self._changed:
            if self._stopped:
                return
            self._due[request_id] = due
            heapq.heappush(self._heap, (due, request_id))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cllm-deadlines", daemon=True)
                self._thread.start()
            elif self._heap[0][1] == request_id:
                self._changed.notify()

    def remove(self, request_id: str) -> None:
        """The request has ended; one without a deadline is left alone."""
        with self._changed:
            if self._due.pop(request_id, None) is None:
                return
            # Most requests end long before their time: without this, minutes of them would pile up.
            if len(self._heap) > 2 * len(self._due) + 64:
                self._heap = [(due, name) for name, due in self._due.items()]
                heapq.heapify(self._heap)

    def stop(self) -> None:
        """Nothing fires any more, but for a call that is under way. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        while (due := self._next_due()) is not None:
            for request_id in due:
                try:
                    self._expired(request_id)
                except Exception:  # at the end the event loop may be gone; the others must still expire
                    if not self._stopped:
                        log.exception("request %s could not be ended at its deadline", request_id)

    def _next_due(self) -> list[str] | None:
        """Wait for the next ones whose time is up; None when stopped."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                due: list[str] = []
                while self._heap and self._heap[0][0] <= now:
                    at, request_id = heapq.heappop(self._heap)
                    if self._due.get(request_id) == at:
                        del self._due[request_id]
                        due.append(request_id)
                if due:
                    return due
                self._changed.wait(self._heap[0][0] - now if self._heap else None)
        return None
