"""Disk thread: does what may wait for a disk, one operation after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

Operation = Callable[[], Any]


class DiskThread:
    """Does operations one after the other. It is a daemon: one that never returns holds up no exit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._operations: SimpleQueue[tuple[Operation, Future[Any]] | None] = SimpleQueue()  # None: end
        self._thread: threading.Thread | None = None
        self._began_at: float | None = None  # of the operation that runs

    @property
    def busy_s(self) -> float:
        """How long the running operation has taken, or has not called `beat`."""
        began_at = self._began_at
        return 0.0 if began_at is None else time.monotonic() - began_at

    def beat(self) -> None:
        """The operation that calls this takes long, but the disk answers."""
        self._began_at = time.monotonic()

    def submit(self, operation: Operation) -> Future[Any]:
        future: Future[Any] = Future()
        self._operations.put((operation, future))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """Let the thread end when it has done what it was given; nothing is submitted any more."""
        if self._thread is not None:
            self._operations.put(None)

    def _run(self) -> None:
        while (item := self._operations.get()) is not None:
            operation, future = item
            self.beat()
            try:
                future.set_result(operation())
            except BaseException as error:
                future.set_exception(error)
            self._began_at = None
            del item, operation, future  # their result may be a large state
