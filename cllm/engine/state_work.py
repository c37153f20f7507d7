"""Saving and restoring prefixes beside the steps: one slice between two of them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from cllm.backend.base import Backend
from cllm.engine.messages import Report, RestorePrefixes, SavePrefixes, StateFileDone
from cllm.engine.state_file import Work, path_of, restore, save
from cllm.engine.tier import RamTier
from cllm.errors import CllmError, EngineError
from cllm.types import Failure

log = logging.getLogger(__name__)
MOST_WAITING = 8


class _Job(NamedTuple):
    ticket: int
    what: str
    work: Work


class StateWork:
    """Does one job at a time, in the order they came; each ends with exactly one report."""

    def __init__(self, backend: Backend, tier: RamTier, folder: str, emit: Callable[[Report], None]) -> None:
        self._backend = backend
        self._tier = tier
        self._folder = folder
        self._emit = emit
        self._jobs: deque[_Job] = deque()
        self._identity = ""  # found when it is first needed: that reads from the model's file
        self.waits = False  # for the disk: nothing to do at once

    @property
    def idle(self) -> bool:
        return not self._jobs

    def add(self, command: SavePrefixes | RestorePrefixes) -> None:
        """Begin a job, or report at once why not."""
        try:
            path = path_of(self._folder, command.name)
            if len(self._jobs) >= MOST_WAITING:
                raise EngineError(f"{MOST_WAITING} state files are being written or read already")
            self._identity = self._identity or self._backend.state_identity()
            saving = isinstance(command, SavePrefixes)
            work = (save if saving else restore)(self._tier, path, self._identity)
            self._jobs.append(_Job(command.ticket, f"{'save' if saving else 'restore'} {command.name}", work))
        except Exception as error:
            self._fail(command.ticket, error)

    def slice(self) -> None:
        """Go on with the job at hand, a few milliseconds of it."""
        if not self._jobs:
            return
        job = self._jobs[0]
        try:
            self.waits = next(job.work)
            return
        except StopIteration as end:
            moved = end.value
            log.info("%s: %d entries, %d tokens", job.what, moved.entries, moved.tokens)
            self._emit(StateFileDone(job.ticket, moved.entries, moved.tokens, moved.size, moved.skipped))
        except Exception as error:
            log.warning("%s failed: %s", job.what, error)
            self._fail(job.ticket, error)
        self.waits = False
        self._jobs.popleft()

    def _fail(self, ticket: int, error: Exception) -> None:
        if not isinstance(error, CllmError):
            log.exception("a state file failed", exc_info=error)
            error = EngineError("the state file could not be dealt with; the log has the details")
        self._emit(StateFileDone(ticket, failure=Failure(error.code, error.message)))

    def close(self) -> None:
        """Give up what is left; half-written files are removed."""
        for job in self._jobs:
            job.work.close()
        self._jobs.clear()
