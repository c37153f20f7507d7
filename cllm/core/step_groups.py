"""Step groups: what a step may compute together, and whose turn it is.

A llama.cpp batch has one kind, and a context one set of adapters. So each step belongs to one group: tokens
of sequences, or inputs to embed. Groups with work share the time that steps take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cllm.backend.base import Batch, StepResult
from cllm.core.prefill_budget import PrefillBudget
from cllm.errors import CllmError
from cllm.types import Request, RequestOutput


class StepGroup(Protocol):
    """Owns requests from arrival to their one terminal output. Runs on the owner thread."""

    budget: PrefillBudget
    streams: bool  # its outputs are read as they come: no two steps of others lie between two of its own

    def accepts(self, request: Request) -> bool:
        """Whether steps of this group compute a request."""

    def add(self, request: Request) -> None:
        """Accept a request. It gets exactly one terminal output, whatever happens."""

    def cancel(self, request_id: str) -> None:
        """End a request now; one that is unknown or has ended is left alone."""

    def fail_all(self, error: CllmError) -> None:
        """The engine ends: every request still here gets the error as its terminal output."""

    def schedule(self) -> Batch | None:
        """The next batch, or None when there is nothing to compute."""

    def still_scheduled(self, batch: Batch) -> Batch:
        """The rows of a scheduled batch whose requests have not ended or moved meanwhile."""

    def update(self, batch: Batch, result: StepResult) -> None:
        """Process the result of a batch; the outputs are then waiting in `take_outputs`."""

    def take_outputs(self) -> list[RequestOutput]:
        """What happened since the last call, in order."""

    @property
    def idle(self) -> bool:
        """Whether no request is here."""

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something."""

    def check_idle(self) -> None:
        """Integrity check of an idle group. Raises IntegrityError."""


class GroupTurns:
    """Gives the next step to the group with work that has taken the least time, unless a stream waits.

    A group that was without work starts level with the others: time is not saved up.
    """

    def __init__(self, groups: Sequence[StepGroup]) -> None:
        self._groups = tuple(groups)
        self._spent_s = [0.0] * len(self._groups)
        self._working: set[int] = set()
        self._last = 0
        self._contended: bool | None = None  # as the budgets have it

    def next(self, *, contended: bool) -> StepGroup:
        """The group whose turn it is; the first where none has work. `contended`: other engines compute."""
        working = {index for index, group in enumerate(self._groups) if group.has_work}
        if working == self._working and len(working) < 2 and contended == self._contended:
            return self._groups[self._last]  # nearly always: one group, as before
        self._contended = contended
        level = min((self._spent_s[index] for index in working & self._working), default=0.0)
        for index in working - self._working:
            self._spent_s[index] = level
        self._working = working
        for group in self._groups:
            group.budget.alternates, group.budget.contended = len(working) > 1 or contended, contended
        waiting = [index for index in working if self._groups[index].streams]
        again = not self._groups[self._last].streams and self._last in working
        candidates = waiting if again and waiting else working
        self._last = min(candidates, key=lambda index: (self._spent_s[index], index), default=0)
        return self._groups[self._last]

    def charge(self, group: StepGroup, seconds: float) -> None:
        """A step of a group has taken this long."""
        self._spent_s[self._groups.index(group)] += seconds
