"""What the parent has asked the engine and still waits for."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

from cllm.errors import CllmError


class Questions:
    """Open questions by ticket. The engine's lock guards it."""

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._open: dict[int, Future[Any]] = {}

    def ask(self) -> tuple[int, Future[Any]]:
        """A new ticket, and where its answer will be."""
        ticket, future = next(self._tickets), Future[Any]()
        self._open[ticket] = future
        return ticket, future

    def answer(self, ticket: int, answer: object) -> None:
        """Tell whoever asked: a CllmError is raised there. Nobody may be waiting any more."""
        future = self._open.pop(ticket, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(answer, CllmError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def fail_all(self, error: CllmError) -> None:
        """The engine that was asked is gone."""
        for ticket in tuple(self._open):
            self.answer(ticket, error)
