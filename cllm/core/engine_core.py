"""The loop: plan, forward, apply. One thread runs it and owns everything native."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

from cllm.backend.base import Batch, BatchKind, Drafter, ModelRunner, StepResult, StepStatus
from cllm.config import EngineConfig
from cllm.core.embedding import EmbeddingScheduler
from cllm.core.kv_cache.cache_file import CacheFileJobs
from cllm.core.kv_cache.host_cache import HostKVCache
from cllm.core.prefill_budget import PrefillBudget
from cllm.core.scheduler import Scheduler
from cllm.core.spec_decode import NgramDrafter, Proven, SpecDecodePolicy
from cllm.errors import CllmError, EngineDied, IntegrityError
from cllm.types import RequestOutput
from cllm.workers.messages import (
    Cancel,
    Command,
    Inspect,
    Inspection,
    Ready,
    Report,
    RestorePrefixes,
    SavePrefixes,
    StepReport,
    StepStats,
    Stop,
    Submit,
)

log = logging.getLogger(__name__)

GRAMMAR_POLL_S = 0.005


class EngineCore:
    """Takes commands from `inbox`, gives reports to `emit`: at most one per step, with all its deltas."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        emit: Callable[[Report], None],
        *,
        new_drafter: Callable[[], Drafter] | None = None,
    ) -> None:
        self.runner = runner
        self.inbox: SimpleQueue[Command] = SimpleQueue()
        self._emit = emit
        # Guesses and everybody's newest token go into one batch.
        guesses = min(config.draft_tokens, runner.limits.batch_tokens - runner.limits.sequences)
        self.scheduler = Scheduler(
            runner,
            PrefillBudget(
                runner.limits.batch_tokens, config.target_itl_ms / 1000, split=not runner.limits.unified
            ),
            HostKVCache(cached_limit=config.cache_ram_mb << 20, swap_limit=config.swap_space_mb << 20),
            share_across_tenants=config.share_prefixes_across_tenants,
            speculator=SpecDecodePolicy(
                max(0, guesses),
                new_drafter or (lambda: runner.create_drafter() or Proven(NgramDrafter())),
                dear=bool(config.draft_model),
            ),
        )
        self.state_work = CacheFileJobs(runner, self.scheduler.prefixes.tier, config.state_dir, emit)
        self._interrupt = StepInterrupt(runner)
        self.embedding = EmbeddingScheduler(
            runner,
            PrefillBudget(runner.limits.embed.batch_tokens, config.target_itl_ms / 1000, split=False),
            generating=lambda: self.scheduler.running_count,
        )
        self._embedded_last = False
        self._failed_steps: Counter[BatchKind] = Counter()  # in a row
        self.step_started: float | None = None  # read by the heartbeat thread
        self._busy_since: float | None = None  # end of the last step, while there is more to do

    @property
    def ready(self) -> Ready:
        """What the parent is told when it may send requests."""
        tier = self.scheduler.prefixes.tier
        memory = {**self.runner.memory_bytes(), "ram_tier_limit": tier.limit, "ram_tier": 0}
        return Ready(self.runner.info, self.runner.limits, memory)

    def post(self, command: Command) -> None:
        """Hand in a command, from any thread. One that ends a request ends the step of its prompt, too."""
        self.inbox.put(command)
        match command:
            case Cancel(request_id):
                self._interrupt.cancelled(request_id)
            case Stop():
                self._interrupt.cancelled(None)

    def run(self) -> None:
        """Run until told to stop. Whatever ends it, everybody still here gets a terminal delta."""
        error: CllmError = EngineDied("the engine was stopped")
        try:
            while self._take_commands():
                self.step()
                self.state_work.slice()
        except Exception as exception:
            log.critical("the engine loop died", exc_info=exception)
            error = exception if isinstance(exception, CllmError) else EngineDied("the engine loop died")
            raise
        finally:
            self.state_work.close()
            self.scheduler.fail_all(error)
            self.embedding.fail_all(error)
            self._emit(StepReport(outputs=self._take_outputs(), stats=self._stats()))

    def step(self) -> None:
        """One step of everybody who generates, or one of vectors: plan, forward, apply."""
        self.step_started = time.perf_counter()
        # What lies between two steps (telling the last one, reading commands) is part of this one.
        started = self._busy_since or self.step_started
        compute_s = sample_s = 0.0
        moved_before_s = self.scheduler.moves.seconds
        steps = rows = tokens = 0
        planner = self._whose_turn()
        batch = planner.plan()
        if batch is not None:
            for part, result in self._forward(planner, batch):
                planner.apply(part, result)
                self._count_failures(part.kind, result)
                compute_s += result.compute_s
                sample_s += result.sample_s
                steps += 1
            rows, tokens = len(batch.rows), batch.token_count
        self.step_started = None
        deltas = self._take_outputs()
        now = time.perf_counter()
        self._busy_since = None if self.idle else now
        if deltas or batch is not None:
            step_s = now - started
            self._emit(
                StepReport(
                    outputs=deltas,
                    stats=self._stats(
                        steps=steps,
                        rows=rows,
                        tokens=tokens,
                        step_s=step_s,
                        compute_s=compute_s,
                        sample_s=sample_s,
                        transfer_s=self.scheduler.moves.seconds - moved_before_s,
                    ),
                )
            )

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and self.embedding.idle

    def _whose_turn(self) -> Scheduler | EmbeddingScheduler:
        """Where both have work they alternate: at most one batch of vectors between two steps of tokens."""
        waits = not self.embedding.idle
        self._embedded_last = waits and not (self.scheduler.has_work and self._embedded_last)
        return self.embedding if self._embedded_last else self.scheduler

    def _take_outputs(self) -> tuple[RequestOutput, ...]:
        return (*self.scheduler.take_outputs(), *self.embedding.take_outputs())

    def _forward(
        self, planner: Scheduler | EmbeddingScheduler, batch: Batch
    ) -> Iterator[tuple[Batch, StepResult]]:
        """Compute a batch; one that is refused is halved until the culprit stands alone."""
        try:
            with self._interrupt.around(batch, planner.request_of):
                result = self.runner.forward(batch)
        except Exception as exception:
            log.error("forward raised", exc_info=exception)
            result = StepResult(StepStatus.FAILED, code=-99)
        refused = result.status is StepStatus.BAD_BATCH or (
            result.status is StepStatus.NO_ROOM and batch.kind is BatchKind.EMBED  # nobody to park there
        )
        if refused and len(batch.rows) > 1:
            for half in batch.halves():
                # What became of the first half may have parked or ended somebody of the second.
                if (left := planner.still_to_do(half)).rows:
                    yield from self._forward(planner, left)
        else:
            yield batch, result

    def _count_failures(self, kind: BatchKind, result: StepResult) -> None:
        """One failed step has been undone and is tried again; two in a row are the end."""
        if result.status is StepStatus.DONE:
            self._failed_steps[kind] = 0
        elif result.status is StepStatus.FAILED:
            self._failed_steps[kind] += 1
            log.error("a step (%s) failed with code %d and was undone", kind.value, result.code)
            if self._failed_steps[kind] > 1:
                raise EngineDied(f"two steps in a row failed, the last with code {result.code}")

    def _take_commands(self) -> bool:
        """Handle what is in the inbox, waiting for something when idle; False when told to stop."""
        try:
            if self.idle and self.state_work.idle:
                command = self._idle_wait()
            elif self._at_once:
                command = self.inbox.get_nowait()
            else:  # everybody here waits for a grammar, or for the disk
                command = self.inbox.get(timeout=GRAMMAR_POLL_S)
            while self._handle(command):
                command = self.inbox.get_nowait()
            return False
        except Empty:
            return True

    @property
    def _at_once(self) -> bool:
        """There is something to do that waits for nobody."""
        files = not self.state_work.idle and not self.state_work.waits
        return self.scheduler.has_work or not self.embedding.idle or files

    def _idle_wait(self) -> Command:
        try:
            self.scheduler.check_idle()
            self.embedding.check_idle()
        except IntegrityError as error:
            log.error("%s", error)
            self.scheduler.repair_idle()
        return self.inbox.get()

    def _handle(self, command: Command) -> bool:
        match command:
            case Submit(request):
                if request.embed or not self.runner.info.generates:
                    self.embedding.add(request)
                else:
                    self.scheduler.add(request)
            case Cancel(request_id):
                self.scheduler.cancel(request_id)
                self.embedding.cancel(request_id)
            case Inspect(call_id):
                self._emit(Inspection(call_id, self.scheduler.snapshot()))
            case SavePrefixes() | RestorePrefixes():
                self.state_work.add(command)
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
        transfer_s: float = 0.0,
    ) -> StepStats:
        preemptions, swap_ins = self.scheduler.swap.take_counts()
        prefixes, tier = self.scheduler.prefixes.take_counts(), self.scheduler.prefixes.tier
        return StepStats(
            steps=steps,
            rows=rows,
            tokens=tokens,
            step_s=step_s,
            compute_s=compute_s,
            sample_s=sample_s,
            transfer_s=transfer_s,
            running=self.scheduler.running_count + self.embedding.count,
            waiting=self.scheduler.waiting_count,
            leases=self.scheduler.pool.held_count,
            cells_used=self.scheduler.cells_used,
            integrity_failures=self.scheduler.integrity_failures,
            interrupted=self._interrupt.count,
            prefix_hits=prefixes.hits,
            prefix_tokens=prefixes.tokens,
            prefix_saves=prefixes.saves,
            prefix_evictions=prefixes.evictions,
            prefix_bytes=tier.cached_bytes,
            swapped_bytes=tier.swapped_bytes,
            preemptions=preemptions,
            swap_ins=swap_ins,
        )


class StepInterrupt:
    """Stops the running forward when a request whose prompt is in it is cancelled, from any thread.

    Only a prefill is worth it: the step of somebody who generates is short, and the others in it would lose
    it for nothing. Nor are two steps in a row stopped while others are in them: whoever sends and cancels
    all the time takes at most every second step from his neighbours.
    """

    LONG_ROW_TOKENS = 32

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._lock = threading.Lock()
        self._members: frozenset[str] = frozenset()  # whose cancel stops the step that runs now
        self._stopped = False  # the last step was stopped
        self.count = 0

    @contextmanager
    def around(self, batch: Batch, request_of: Callable[[int], str | None]) -> Iterator[None]:
        """While a batch is computed. `request_of` tells whose a sequence id is; nobody's are spared."""
        spare = self._stopped and len(batch.rows) > 1
        long_rows = [row.seq_id for row in batch.rows if len(row.tokens) >= self.LONG_ROW_TOKENS]
        names = () if spare else map(request_of, long_rows)
        members = frozenset(name for name in names if name is not None)
        self._stopped = False
        with self._lock:
            self._runner.interrupt(False)
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
                self._runner.interrupt(True)
