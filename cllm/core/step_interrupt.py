"""The step interrupt: a prompt whose client has left is not computed to the end of its step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cllm.backend.base import Batch, BatchKind, ModelRunner
from cllm.core.slot_pool import SlotPool
from cllm.core.step_cost import TILE


class StepInterrupt:
    """Ends the running step early when a request whose prefill is in it is cancelled, from any thread.

    Only a prefill is worth it: a decode step is short, and the other rows would lose it for nothing. Nor are
    two steps in a row interrupted while other rows are in them: a client that sends and cancels all the time
    takes at most every second step from its neighbours. Recurrent models are left alone: a step that breaks
    off would cost all slots their states.
    """

    MIN_ROW_TOKENS = TILE // 2

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._lock = threading.Lock()
        self._members: frozenset[str | None] = frozenset()  # requests whose cancel ends the running step
        self._interrupted = False  # the last step was ended early
        self.count = 0

    @contextmanager
    def around(self, batch: Batch, pool: SlotPool) -> Iterator[None]:
        """While a batch is computed. A batch of embeddings is not interrupted: it serves many requests."""
        members: frozenset[str | None] = frozenset()
        spared = self._runner.info.recurrent or (self._interrupted and len(batch.rows) > 1)
        if batch.kind is BatchKind.GENERATE and not spared:
            long_rows = (row.seq_id for row in batch.rows if len(row.tokens) >= self.MIN_ROW_TOKENS)
            members = frozenset(map(pool.holder, long_rows))
        self._interrupted = False
        with self._lock:
            self._runner.interrupt(False)
            self._members = members
        try:
            yield
        finally:
            with self._lock:
                self._members = frozenset()

    def cancelled(self, request_id: str | None) -> None:
        """A request (None: all) will be cancelled as soon as this step is over: end it now."""
        with self._lock:
            if self._members and (request_id is None or request_id in self._members):
                self._members = frozenset()
                self._interrupted = True
                self.count += 1
                self._runner.interrupt(True)
