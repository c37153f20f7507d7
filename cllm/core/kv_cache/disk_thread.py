"""Disk thread: does what may wait for a disk, in operations of a few mebibytes each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

Result = TypeVar("Result")
Operation = Callable[[], Any]
Slices = Generator[None, None, Result]
"""Runs on the disk thread, slice by slice; `Result` is what it returns."""


class Work(NamedTuple, Generic[Result]):
    """The operations of a job in their order, each of which gets the result of the one before."""

    operations: Generator[Operation, Any, Result]
    discard: Operation  # closes the file and removes what is half-written; always the last


class DiskThread:
    """Does operations one after the other. It is a daemon: one that never returns holds up no exit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._operations: SimpleQueue[tuple[Operation, Future[Any]] | None] = SimpleQueue()  # None: end
        self._thread: threading.Thread | None = None
        self._began_at: float | None = None  # of the operation that runs

    @property
    def busy_s(self) -> float:
        """How long the running operation has taken."""
        began_at = self._began_at
        return 0.0 if began_at is None else time.monotonic() - began_at

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
            self._began_at = time.monotonic()
            try:
                future.set_result(operation())
            except BaseException as error:
                future.set_exception(error)
            self._began_at = None
            del item, operation, future  # their result may be a large state


def run_slices(slices: Slices[Result]) -> Generator[Operation, Any, Result]:
    """Each slice as an operation of its own; the result of the last one is that of all."""
    while True:
        ended = yield partial(_next, slices)
        if ended is not None:
            result: Result = ended.value
            return result


def _next(slices: Slices[Any]) -> StopIteration | None:
    try:
        next(slices)
        return None
    except StopIteration as end:
        return end


def finish(slices: Slices[Result]) -> Result:
    """Do all slices at once."""
    while (ended := _next(slices)) is None:
        pass
    result: Result = ended.value
    return result
