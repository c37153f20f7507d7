"""Ending a long step early, because somebody in it has gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cllm.backend.base import Backend, Batch


class StepInterrupt:
    """Stops the running forward when a request whose prompt is in it is cancelled, from any thread.

    Only a prefill is worth it: the step of somebody who generates is short, and the others in it would lose
    it for nothing. Nor are two steps in a row stopped while others are in them: whoever sends and cancels
    all the time takes at most every second step from his neighbours.
    """

    LONG_ROW_TOKENS = 32

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._members: frozenset[str] = frozenset()  # whose cancel stops the step that runs now
        self._stopped = False  # the last step was stopped
        self.count = 0

    @contextmanager
    def around(self, batch: Batch, request_of: Callable[[int], str | None]) -> Iterator[None]:
        """While a batch is computed. `request_of` tells whose a sequence id is; nobody's are spared."""
        spare = self._stopped and len(batch.rows) > 1
        long_rows = [row.sequence_id for row in batch.rows if len(row.tokens) >= self.LONG_ROW_TOKENS]
        names = () if spare else map(request_of, long_rows)
        members = frozenset(name for name in names if name is not None)
        self._stopped = False
        with self._lock:
            self._backend.interrupt(False)
            self._members = members
        try:
            yield
        finally:
            with self._lock:
                self._members = frozenset()

    def cancelled(self, request_id: str | None) -> None:
        """A request (None: everybody) will be cancelled as soon as this step is over: let that be now."""
        with self._lock:
            if self._members and (request_id is None or request_id in self._members):
                self._members = frozenset()
                self._stopped = True
                self.count += 1
                self._backend.interrupt(True)
