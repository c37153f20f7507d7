"""Request timeouts: one thread that ends requests whose time is up."""

from __future__ import annotations

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
        self._wakes_at = float("inf")  # not later than the earliest of them
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, request_id: str, due: float) -> None:
        with self._changed:
            if self._stopped:
                return
            self._due[request_id] = due
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cllm-timeouts", daemon=True)
                self._thread.start()
            elif due < self._wakes_at:
                self._changed.notify()

    def remove(self, request_id: str) -> None:
        """The request has ended; one without a deadline is left alone."""
        with self._changed:
            self._due.pop(request_id, None)

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
                if due := sorted((at, request_id) for request_id, at in self._due.items() if at <= now):
                    for _, request_id in due:
                        del self._due[request_id]
                    return [request_id for _, request_id in due]
                # Most requests end long before their time, so this looks through all of them rarely.
                self._wakes_at = min(self._due.values(), default=float("inf"))
                self._changed.wait(self._wakes_at - now if self._due else None)
        return None
