"""Step groups: what a step may compute together, and whose turn it is.

A llama.cpp batch has one kind, and a context one set of adapters. So each step belongs to one group: tokens
of sequences, or inputs to embed. Groups with work share the time that steps take; so do sets of adapters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

from cllm.backend.base import RECORDED_AFTER, Batch, ModelRunner, StepResult
from cllm.core.prefill_budget import PrefillBudget
from cllm.errors import CllmError
from cllm.types import Failure, FinishReason, Request

Member = TypeVar("Member")


class HasAdapter(Protocol):
    @property
    def adapter(self) -> str: ...


Scheduled = TypeVar("Scheduled", bound=HasAdapter)


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


class AdapterTurns:
    """Gives steps to the sequences of one set of adapters at a time: a context computes with one.

    Where the set changes, llama.cpp builds another graph, and a GPU has no recording of the steps. The first
    steps of a turn show what that costs. So a set keeps its turn until its steps took `MIN_SWITCHES` times
    that, unless others would wait longer than they may, or it has no sequence left. The next is the set that
    has taken the least time. With one set, there are no turns.
    """

    MIN_SWITCHES = 10  # a tenth of the time at most goes into switches
    REMEMBERED = 5  # switches: noise makes one longer, and another one shorter

    def __init__(self, runner: ModelRunner, budget: PrefillBudget) -> None:
        self._runner, self._budget = runner, budget
        self.key = ""  # of the set whose turn it is
        self._spent_s: dict[str, float] = {}  # by the sets that have sequences, while there are several
        self._turn_s = 0.0  # taken by this turn
        self._computed = ""  # the set of the last step
        self._first: list[tuple[int, float]] = []  # tokens and seconds of this turn's first steps
        self._switches_s: deque[float] = deque(maxlen=self.REMEMBERED)

    @property
    def switch_s(self) -> float:
        """What a change of the set costs, of the last ones; 0 before the first."""
        return median(self._switches_s or (0.0,))

    @property
    def due(self) -> bool:
        """Whether another set waits and this turn is over."""
        others = len(self._spent_s) - 1
        if others < 1 or self._turn_s >= self._budget.max_wait_s / others:
            return others > 0
        if len(self._switches_s) < self.REMEMBERED and len(self._first) <= self._slowed:
            return False  # long enough to measure its switch
        return self._turn_s >= self.MIN_SWITCHES * self.switch_s

    @property
    def _slowed(self) -> int:
        """Steps that a switch makes longer."""
        return 1 + (RECORDED_AFTER if self._runner.asynchronous else 0)

    def choose(self, running: dict[int, Scheduled]) -> dict[int, Scheduled]:
        """The sequences, by slot, of the set whose turn it is; all of them where they have the same."""
        keys = {each.adapter for each in running.values()} if self._runner.adapters else {""}
        self._budget.sets = max(1, len(keys))
        if len(keys) < 2:
            self.key = next(iter(keys), self.key)
            self._spent_s.clear()
            return running
        level = min((self._spent_s[key] for key in keys & self._spent_s.keys()), default=0.0)
        self._spent_s = {key: self._spent_s.get(key, level) for key in keys}  # time is not saved up
        if self.key not in keys or self.due:
            self.key = min(keys - {self.key}, key=lambda key: (self._spent_s[key], key))
            self._turn_s = 0.0
        return {slot: each for slot, each in running.items() if each.adapter == self.key}

    def observe(self, batch: Batch, result: StepResult) -> bool:
        """Count the time of a step. False for the first one after a switch: it is no measure of others."""
        steady = batch.adapter == self._computed
        self._computed = batch.adapter
        step_s = result.compute_s + result.sample_s
        self._turn_s += step_s
        if batch.adapter in self._spent_s:
            self._spent_s[batch.adapter] += step_s
        if not steady:
            self._first.clear()
        if len(self._first) <= self._slowed:
            unswitched = steady and not self._first
            self._first.append((-1 if unswitched else batch.token_count, result.compute_s))
            self._measure()
        return steady

    def _measure(self) -> None:
        """Compare the first steps of a turn with the one after them, if all compute as many tokens."""
        counts, seconds = zip(*self._first, strict=True)
        if len(seconds) > self._slowed and len(set(counts)) == 1:
            self._switches_s.append(max(0.0, sum(seconds) - len(seconds) * seconds[-1]))
