"""The loop: plan, forward, apply. One thread runs it and owns everything native."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from cllm.backend.base import Backend, Batch, StepResult, StepStatus
from cllm.config import EngineConfig
from cllm.engine.budget import StepBudget
from cllm.engine.messages import (
    Cancel,
    Command,
    Inspect,
    Inspection,
    Report,
    StepReport,
    StepStats,
    Stop,
    Submit,
)
from cllm.engine.scheduler import Scheduler, bisect
from cllm.engine.speculation import Speculator
from cllm.errors import CllmError, EngineDied, IntegrityError

log = logging.getLogger(__name__)

GRAMMAR_POLL_S = 0.005


class StepLoop:
    """Takes commands from `inbox`, gives reports to `emit`: at most one per step, with all its deltas."""

    def __init__(self, backend: Backend, config: EngineConfig, emit: Callable[[Report], None]) -> None:
        self.backend = backend
        self.inbox: SimpleQueue[Command] = SimpleQueue()
        self._emit = emit
        self.scheduler = Scheduler(
            backend,
            StepBudget(backend.limits.batch_tokens, config.target_itl_ms / 1000),
            park_bytes=config.park_mb << 20,
            speculator=Speculator(config.draft_tokens),
        )
        self.step_started: float | None = None  # read by the heartbeat thread
        self._busy_since: float | None = None  # end of the last step, while there is more to do

    def run(self) -> None:
        """Run until told to stop. Whatever ends it, everybody still here gets a terminal delta."""
        error: CllmError = EngineDied("the engine was stopped")
        try:
            while self._take_commands():
                self.step()
        except Exception as exception:
            log.critical("the engine loop died", exc_info=exception)
            error = exception if isinstance(exception, CllmError) else EngineDied("the engine loop died")
            raise
        finally:
            self.scheduler.fail_all(error)
            self._emit(StepReport(deltas=tuple(self.scheduler.take_deltas()), stats=self._stats()))

    def step(self) -> None:
        """One step of everybody: plan, forward, apply."""
        self.step_started = time.perf_counter()
        # What lies between two steps (telling the last one, reading commands) is part of this one.
        started = self._busy_since or self.step_started
        compute_s = sample_s = 0.0
        steps = rows = tokens = 0
        batch = self.scheduler.plan()
        if batch is not None:
            for part, result in self._forward(batch):
                self.scheduler.apply(part, result)
                compute_s += result.compute_s
                sample_s += result.sample_s
                steps += 1
            rows, tokens = len(batch.rows), batch.token_count
        self.step_started = None
        deltas = tuple(self.scheduler.take_deltas())
        now = time.perf_counter()
        self._busy_since = None if self.scheduler.idle else now
        if deltas or batch is not None:
            step_s = now - started
            self._emit(
                StepReport(
                    deltas=deltas,
                    stats=self._stats(
                        steps=steps,
                        rows=rows,
                        tokens=tokens,
                        step_s=step_s,
                        compute_s=compute_s,
                        sample_s=sample_s,
                    ),
                )
            )

    def _forward(self, batch: Batch) -> Iterator[tuple[Batch, StepResult]]:
        """Compute a batch; one that is refused is halved until the culprit stands alone."""
        try:
            result = self.backend.forward(batch)
        except Exception as exception:
            log.error("forward raised", exc_info=exception)
            result = StepResult(StepStatus.FAILED, code=-99)
        if result.status is StepStatus.BAD_BATCH and len(batch.rows) > 1:
            for half in bisect(batch):
                # What became of the first half may have parked or ended somebody of the second.
                if (left := self.scheduler.still_to_do(half)).rows:
                    yield from self._forward(left)
        else:
            yield batch, result

    def _take_commands(self) -> bool:
        """Handle what is in the inbox, waiting for something when idle; False when told to stop."""
        try:
            if self.scheduler.idle:
                command = self._idle_wait()
            elif self.scheduler.has_work:
                command = self.inbox.get_nowait()
            else:  # everybody here waits for a grammar
                command = self.inbox.get(timeout=GRAMMAR_POLL_S)
            while self._handle(command):
                command = self.inbox.get_nowait()
            return False
        except Empty:
            return True

    def _idle_wait(self) -> Command:
        try:
            self.scheduler.check_idle()
        except IntegrityError as error:
            log.error("%s", error)
            self.scheduler.repair_idle()
        return self.inbox.get()

    def _handle(self, command: Command) -> bool:
        match command:
            case Submit(request):
                self.scheduler.add(request)
            case Cancel(request_id):
                self.scheduler.cancel(request_id)
            case Inspect(ticket):
                self._emit(Inspection(ticket, self.scheduler.snapshot()))
            case Stop():
                return False
        return True

    def _stats(
        self,
        *,
        steps: int = 0,
        rows: int = 0,
        tokens: int = 0,
        step_s: float = 0.0,
        compute_s: float = 0.0,
        sample_s: float = 0.0,
    ) -> StepStats:
        return StepStats(
            steps=steps,
            rows=rows,
            tokens=tokens,
            step_s=step_s,
            compute_s=compute_s,
            sample_s=sample_s,
            running=self.scheduler.running_count,
            waiting=self.scheduler.waiting_count,
            leases=len(self.scheduler.pool.leases),
            cells_used=self.scheduler.cells_used,
            integrity_failures=self.scheduler.integrity_failures,
        )
