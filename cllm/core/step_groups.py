"""Step groups: what a step may compute together, and whose turn it is.

A llama.cpp batch has one kind, and a context one set of adapters. So each step belongs to one group: tokens
of sequences, or inputs to embed. Groups with work share the time that steps take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from cllm.backend.base import Batch, ModelRunner, StepResult
from cllm.core.prefill_budget import PrefillBudget
from cllm.errors import CllmError
from cllm.types import Failure, FinishReason, Request

Member = TypeVar("Member")


class StepGroup(ABC, Generic[Member]):
    """Owns requests from arrival to their one terminal output. Runs on the owner thread."""

    streams: bool  # its outputs are read as they come: no two steps of others lie between two of its own

    def __init__(self, runner: ModelRunner, budget: PrefillBudget) -> None:
        self.runner = runner
        self.budget = budget
        self.spent_s = 0.0  # by its steps
        self.live: dict[str, Member] = {}  # the requests that are here, by their id

    @abstractmethod
    def add(self, request: Request) -> None:
        """Accept a request. It gets exactly one terminal output, whatever happens."""

    def cancel(self, request_id: str) -> None:
        """End a request now; one that is unknown or has ended is left alone."""
        if (member := self.live.get(request_id)) is not None:
            self._finish(member, FinishReason.CANCELLED)

    def fail_all(self, error: CllmError) -> None:
        """The engine ends: every request still here gets the error as its terminal output."""
        for member in list(self.live.values()):
            self._finish(member, FinishReason.ERROR, error=Failure.of(error))

    @abstractmethod
    def schedule(self) -> Batch | None:
        """The next batch, or None when there is nothing to compute."""

    @abstractmethod
    def still_scheduled(self, batch: Batch) -> Batch:
        """The rows of a scheduled batch whose requests have not ended or moved meanwhile."""

    @abstractmethod
    def update(self, batch: Batch, result: StepResult) -> None:
        """Process the result of a batch; the outputs then wait to be taken."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step would compute something; asked only while a request is here."""

    @abstractmethod
    def _finish(self, member: Member, reason: FinishReason, *, error: Failure | None = None) -> None:
        """The one way out: one terminal output."""


class GroupTurns:
    """Gives the next step to the group with work that has taken the least time, unless a stream waits.

    A group that was without work starts level with the others: time is not saved up.
    """

    def __init__(self, groups: Sequence[StepGroup[Any]]) -> None:
        self._groups = tuple(groups)
        self._working: set[int] = set()
        self._last = 0
        self._contended: bool | None = None  # as the budgets have it

    def next(self, *, contended: bool) -> StepGroup[Any]:
        """The group whose turn it is; the first where none has work. `contended`: other engines compute."""
        groups = self._groups
        working = {index for index, group in enumerate(groups) if group.live and group.has_work}
        if working == self._working and len(working) < 2 and contended == self._contended:
            return groups[self._last]  # nearly always: one group, as before
        self._contended = contended
        level = min((groups[index].spent_s for index in working & self._working), default=0.0)
        for index in working - self._working:
            groups[index].spent_s = level
        self._working = working
        for group in groups:
            group.budget.alternates, group.budget.contended = len(working) > 1 or contended, contended
        waiting = [index for index in working if groups[index].streams]
        again = not groups[self._last].streams and self._last in working
        candidates = waiting if again and waiting else working
        self._last = min(candidates, key=lambda index: (groups[index].spent_s, index), default=0)
        return groups[self._last]
