"""The engine core: schedule, submit, collect, update. One thread runs it and owns everything native."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from cllm import messages
from cllm.backend.base import Batch, BatchKind, ModelRunner, StepResult, StepStatus
from cllm.backend.compute_turns import get_turns
from cllm.config import EngineConfig, get_cache_ram_mb, settle_itl
from cllm.core.adapter_calls import AdapterCalls
from cllm.core.embedding import EmbeddingScheduler
from cllm.core.kv_cache.cache_calls import CacheCalls
from cllm.core.kv_cache.disk_cache import STALL_LIMIT_S, DiskKVCache
from cllm.core.kv_cache.disk_folder import CacheFolder, get_cache_folder
from cllm.core.kv_cache.tiers import MIB, HostKVCache
from cllm.core.media import MediaGroup
from cllm.core.prefill_budget import PrefillBudget
from cllm.core.preparation import Preparation
from cllm.core.scheduler import Scheduler
from cllm.core.sequence import Sequence
from cllm.core.spec_decode import SpecDecodePolicy
from cllm.core.step_cost import MILLISECOND, TILE, StepCostModel
from cllm.core.step_groups import GroupTurns, StepGroup
from cllm.errors import EngineDied, IntegrityError
from cllm.types import SlotInfo, Snapshot


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
        self._members: frozenset[str] = frozenset()  # requests whose cancel ends the running step
        self.interrupted = False  # the last step was ended early
        self.count = 0

    @contextmanager
    def around(self, batch: Batch, running: Mapping[int, Sequence]) -> Iterator[None]:
        """While a batch with a long row is computed. One of embeddings is spared: it serves many requests."""
        spared = self._runner.info.recurrent or (self.interrupted and len(batch.rows) > 1)
        self.interrupted = False
        if batch.kind is not BatchKind.EMBED and not spared:
            long_rows = (row.seq_id for row in batch.rows if len(row.tokens) >= self.MIN_ROW_TOKENS)
            self._members = frozenset(running[seq_id].id for seq_id in long_rows)
        try:
            yield
        finally:
            with self._lock:
                self._members = frozenset()
                self._runner.interrupt(False)

    def cancelled(self, request_id: str | None) -> None:
        """A request (None: all) will be cancelled as soon as this step is over: end it now."""
        with self._lock:
            if self._members and (request_id is None or request_id in self._members):
                self._members = frozenset()
                self.interrupted = True
                self.count += 1
                self._runner.interrupt(True)


log = logging.getLogger(__name__)


class EngineCore:
    """Takes commands from `inbox`, gives reports to `emit`: at most one per step, with all its outputs."""

    _snapshots = 0  # taken so far
    _collected: float | None = None  # when the last result came, unless idle since
    _ahead: tuple[Batch, StepResult | None] | None = None  # a batch that is submitted, or failed so
    step_started: float | None = None  # read by the heartbeat thread
    _busy_since: float | None = None  # end of the last step, while there is more to do
    _unreported: dict[str, float] | None = None  # the work of the last step

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        emit: Callable[[messages.Report], None],
        *,
        cost: StepCostModel | None = None,
        spec_decode: SpecDecodePolicy | None = None,
        preparation: Callable[..., Preparation] = Preparation,
    ) -> None:
        """`cost`, `spec_decode` and `preparation` replace what is made here, for tests."""
        self.runner, self._emit = runner, emit
        self.inbox: SimpleQueue[messages.Command] = SimpleQueue()
        wake = partial(self.inbox.put, messages.Wake())
        self.preparation, limits = preparation(runner, wake=wake), runner.limits
        cost = cost or StepCostModel(
            split=not limits.unified, batch1=runner.draft_cost, records=runner.asynchronous
        )
        config = settle_itl(config)
        target_s, max_overrun = config.target_itl_ms * MILLISECOND, config.max_itl_ms / config.target_itl_ms
        make_budget = partial(PrefillBudget, target_s=target_s, max_overrun=max_overrun)
        # Drafts and the newest token of each sequence go into one batch.
        room = max(0, limits.batch_tokens - limits.sequences) if config.drafter != "off" else 0
        draft_tokens = min(config.draft_tokens, room, limits.rollback_tokens or room)
        disk_mb = config.cache_disk_mb if config.prefix_cache and runner.info.generates else 0
        folder = CacheFolder(get_cache_folder(config.cache_dir), runner.state_fingerprint)
        self.disk = DiskKVCache(folder, (disk_mb or 0) * MIB, wake)
        self.scheduler = Scheduler(
            runner,
            make_budget(limits.batch_tokens, cost=cost, defers=not runner.info.recurrent),
            HostKVCache(cached_limit=get_cache_ram_mb(config) * MIB, swap_limit=config.swap_space_mb * MIB),
            self.disk,
            preparation=self.preparation,
            keep_prefixes=config.prefix_cache,
            share_across_tenants=config.share_prefixes_across_tenants,
            spec_decode=spec_decode
            or SpecDecodePolicy(
                draft_tokens,
                draft_model=runner.create_drafter if config.drafter == "model" else None,
                head=runner.draft if runner.has_head else None,
                share_across_tenants=config.share_prefixes_across_tenants,
            ),
        )
        self.cache_calls = CacheCalls(self.scheduler.prefix_cache, self.disk, emit)
        self._adapter_calls = AdapterCalls(runner, self.preparation, self.scheduler.live.values, emit)
        self._interrupt = StepInterrupt(runner)
        first = PrefillBudget.MIN_CHUNK
        self.embedding = EmbeddingScheduler(
            runner,
            PrefillBudget(limits.embed.batch_tokens, target_s, StepCostModel(split=False), first_chunk=first),
            decoding=lambda: len(self.scheduler.running),
            open_context=self.preparation.open_embedding,
        )
        media = MediaGroup(self.scheduler, make_budget(limits.batch_tokens, cost=cost))
        self.groups: tuple[StepGroup[Any], ...] = (self.scheduler, self.embedding, media)
        self._group_turns = GroupTurns(self.groups)
        self._turns = None if runner.asynchronous else get_turns()
        self._failed_steps: Counter[BatchKind] = Counter()  # in a row
        self._computed_at = time.monotonic()  # end of the last step
        self._reported: Counter[str] = Counter()  # counters as of the last report

    @property
    def ready(self) -> messages.Ready:
        """What the HTTP process hears when it may send requests."""
        tier = {"ram_tier_limit": self.scheduler.prefix_cache.host.limit, "ram_tier": 0}
        return messages.Ready(self.runner.info, self.runner.limits, {**self.runner.memory_bytes(), **tier})

    def post(self, command: messages.Command) -> None:
        """Hand in a command, from any thread. One that ends a request ends its prefill step, too."""
        self.inbox.put(command)
        match command:
            case messages.Cancel(request_id):
                self._interrupt.cancelled(request_id)
            case messages.Stop():
                self._interrupt.cancelled(None)

    def run(self) -> None:
        """Run until stopped. Whatever ends it, everything native of the requests still here is released.

        They get no output: the client ends them, or replays them in the next engine.
        """
        stopped = False
        try:
            while self._ahead is not None or self._take_commands():
                self.step(follow=self.runner.asynchronous)
            stopped = True
        except Exception as exception:
            log.critical("the engine loop died", exc_info=exception)
            raise
        finally:
            self.disk.close(self.scheduler.prefix_cache.loader.candidates() if stopped else ())
            for group in self.groups:
                group.fail_all(EngineDied("the engine has ended"))
            self.preparation.close()

    def step(self, *, follow: bool = False) -> None:
        """One step of the group whose turn it is: schedule, submit, collect, update.

        With `follow` the batch after it may be submitted before its own result is processed; then nothing but
        the next step may come in between.
        """
        self.step_started = time.perf_counter()
        # What lies between two steps (reporting the last one, reading commands) is part of this one.
        started = self._busy_since or self.step_started
        transferred_s = self.scheduler.transfer.seconds
        contended = self._turns is not None and self._turns.contended
        group = self._group_turns.next(contended=contended) if self._ahead is None else self.scheduler
        results: list[StepResult] = []
        ended: float | None = None
        ahead, self._ahead = self._ahead, None
        batch = group.schedule() if ahead is None else ahead[0]
        if batch is not None:
            if batch.token_count >= len(batch.rows) + TILE:  # to submit it takes long
                self._report()
            for part, result in self._compute(group, batch, ahead, follow=follow):
                collected, before = time.perf_counter(), self._collected
                if follow and part is batch:
                    ended = self._follow(batch, result)
                if self.runner.asynchronous and before is not None:
                    result = result._replace(period_s=collected - before)
                self._collected = collected
                group.update(part, result)
                results.append(result)
                if result.status is StepStatus.DONE:
                    self._failed_steps[part.kind] = 0
                elif result.status is StepStatus.FAILED:
                    self._count_failure(part.kind, result.code)
            self._computed_at = time.monotonic()
        self.step_started = None
        now = ended or time.perf_counter()
        group.spent_s += now - started
        self._busy_since, self._collected = (None, None) if self.idle else (now, self._collected)
        if batch is not None:
            self._unreported = {
                "steps": len(results),
                "tokens": batch.token_count,
                "step_s": now - started,
                "compute_s": sum(result.compute_s for result in results),
                "sample_s": sum(result.sample_s for result in results),
                "transfer_s": self.scheduler.transfer.seconds - transferred_s,
            }
        if batch is None or not self.runner.asynchronous or not self.has_work:
            self._report()

    def _follow(self, batch: Batch, result: StepResult) -> float | None:
        """Submit the batch after this one, if that is known already; when that was, or None."""
        scheduler = self.scheduler
        if not self.inbox.empty() or self.cache_calls.calls or self.embedding.has_work or scheduler.turns.due:
            return None
        if (following := scheduler.following.complete(batch, result)) is None:
            return None
        now = time.perf_counter()
        self._ahead = following, self._guarded(partial(self.runner.submit, following))
        scheduler.budget.charge_step(rows := [*scheduler.scheduled.values()], rows)
        return now

    def _report(self) -> None:
        """Report the last step. On a GPU that is done while the device computes the next one."""
        outputs = (*self.scheduler.take_outputs(), *self.embedding.outputs)
        self.embedding.outputs.clear()
        work, self._unreported = self._unreported or {}, None
        if not outputs and not work:
            return
        scheduler, pool = self.scheduler, self.scheduler.pool
        cache, transfer = scheduler.prefix_cache, scheduler.transfer
        counters = Counter(
            prefix_hits=cache.hits,
            prefix_tokens=cache.hit_tokens,
            prefix_saves=transfer.saves,
            prefix_evictions=cache.host.evictions,
            disk_loads=self.disk.loads,
            disk_writes=self.disk.writes,
            disk_failures=self.disk.failures,
            slot_evictions=cache.device.evictions,
            preemptions=transfer.swap_outs,
            swap_ins=transfer.swap_ins,
            draft_gaps=self.runner.draft_gaps,
        )
        new, self._reported = counters - self._reported, counters
        cells_used, cells_cached = cache.count_cells(scheduler.running.values())
        stats = messages.StepStats(
            running=len(scheduler.running) + len(self.embedding.live),
            leases=len(pool.held),
            cells_used=cells_used,
            cells_cached=cells_cached,
            integrity_failures=scheduler.integrity_failures,
            interrupted=self._interrupt.count,
            prefix_bytes=cache.host.cached_bytes,
            disk_bytes=self.disk.bytes,
            swapped_bytes=cache.host.swapped_bytes,
            draft_bytes=sum(each.drafts.memory_bytes for each in scheduler.live.values() if each.drafts),
            **new,
            **work,  # type: ignore[arg-type]
        )
        spent = scheduler.budget.spent | self.embedding.budget.spent
        scheduler.budget.spent, self.embedding.budget.spent = {}, {}
        self._emit(messages.StepReport(outputs, stats, spent))

    @property
    def idle(self) -> bool:
        return not (self.scheduler.live or self.embedding.live)

    @property
    def has_work(self) -> bool:
        """False when a step would compute nothing."""
        return any(group.live and group.has_work for group in self.groups)

    def _compute(
        self,
        group: StepGroup[Any],
        batch: Batch,
        ahead: tuple[Batch, StepResult | None] | None = None,
        *,
        follow: bool = False,
    ) -> Iterator[tuple[Batch, StepResult]]:
        """Compute a batch; one that is refused is bisected until the culprit stands alone."""
        interruptible: AbstractContextManager[None] = nullcontext()
        if batch.token_count >= StepInterrupt.MIN_ROW_TOKENS:
            interruptible = self._interrupt.around(batch, self.scheduler.running)
        else:
            self._interrupt.interrupted = False
        with self._turns or nullcontext(), interruptible:
            result = self._guarded(partial(self.runner.submit, batch)) if ahead is None else ahead[1]
            if result is None:
                if self.runner.asynchronous:
                    self._report()
                if follow:
                    # None follows where a request waits for a slot.
                    running = {} if self.scheduler.waiting else self.scheduler.scheduled
                    self.scheduler.following.prepare(batch, running)
                result = self._guarded(self.runner.collect)
        assert result is not None
        refused = result.status is StepStatus.BAD_BATCH or (
            result.status is StepStatus.NO_ROOM and batch.kind is BatchKind.EMBED  # no row to preempt there
        )
        if refused and len(batch.rows) > 1:
            half = len(batch.rows) // 2
            for rows in (batch.rows[:half], batch.rows[half:]):
                # The outcome of the first half may have preempted or ended a sequence of the second.
                if (left := group.still_scheduled(batch._replace(rows=rows, padding={}))).rows:
                    yield from self._compute(group, left)
        else:
            yield batch, result

    @staticmethod
    def _guarded(call: Callable[[], StepResult | None]) -> StepResult | None:
        """The result of the runner's call; one that raises is a failed step."""
        try:
            return call()
        except Exception as exception:
            log.error("a step raised", exc_info=exception)
            return StepResult(StepStatus.FAILED)

    def _count_failure(self, kind: BatchKind, code: int) -> None:
        """One failed step has been rolled back and is tried again; two in a row are the end."""
        self._failed_steps[kind] += 1
        log.error("a step (%s) failed with code %d and was rolled back", kind.value, code)
        if self._failed_steps[kind] > 1:
            raise EngineDied(f"two steps in a row failed, the last with code {code}")

    # Commands --------------------------------------------------------------------------------------

    def _take_commands(self) -> bool:
        """Handle what is in the inbox, waiting for something when idle; False when to stop."""
        if self.cache_calls.calls:
            self.cache_calls.advance()
        stall_s = STALL_LIMIT_S if self.cache_calls.calls else None
        try:
            if self.idle:
                try:
                    self.scheduler.check_idle()
                except IntegrityError as error:
                    log.error("%s", error)
                    self.scheduler.prefix_cache.clear_slots()
                again_s: float | None = None
                if self.disk.limit:
                    candidates = self.scheduler.prefix_cache.loader.candidates()
                    again_s = self.disk.idle(candidates, time.monotonic() - self._computed_at)
                command = self.inbox.get(timeout=stall_s or again_s)
            elif self.has_work:
                command = self.inbox.get_nowait()
            else:  # what every request here waits for ends with Wake, unless the disk stalls
                limits_s = (self.scheduler.loading_s, stall_s)
                limit_s = min((each for each in limits_s if each is not None), default=None)
                command = self.inbox.get(timeout=limit_s)
            while self._handle(command):
                command = self.inbox.get_nowait()
            return False
        except Empty:
            return True

    def _handle(self, command: messages.Command) -> bool:
        match command:
            case messages.Submit(request):
                embeds = request.embed or not self.runner.info.generates
                (self.embedding if embeds else self.scheduler).add(request)
            case messages.Cancel(request_id):
                for group in self.groups:
                    group.cancel(request_id)
            case messages.Inspect(call_id):
                self._emit(messages.Inspection(call_id, self.snapshot()))
            case messages.ClearCache() | messages.UseSlot():
                self.cache_calls.add(command)
            case messages.LoadAdapter() | messages.UnloadAdapter():
                self._adapter_calls.add(command, idle=self.idle)
            case messages.Wake():
                self._adapter_calls.advance()
            case messages.Encoding(active):
                self.runner.encoding = active
            case messages.Stop():
                return False
        return True

    def snapshot(self) -> Snapshot:
        """Every lease and counter; positions are read from the memory, so drift would show."""
        now = time.monotonic()
        self._snapshots += 1
        scheduler, pool = self.scheduler, self.scheduler.pool

        def describe(one: Sequence, seq_id: int, age_s: float = 0.0) -> SlotInfo:
            return SlotInfo(
                seq_id=seq_id,
                request_id=one.id,
                tokens=len(one.tokens),
                position=self.runner.next_position(seq_id) if seq_id >= 0 else 0,
                state="preempted" if one.preempted else "running",
                age_s=age_s,
                prompt_tokens=len(one.request.prompt),
                cached_tokens=one.cached_tokens,
            )

        leases = tuple(
            describe(scheduler.running[seq_id], seq_id, now - lease.leased_at)
            for seq_id, lease in sorted(pool.held.items())
        )
        cells_used, cells_cached = scheduler.prefix_cache.count_cells(scheduler.running.values())
        return Snapshot(
            number=self._snapshots,
            sequences_total=pool.size,
            cells_total=self.runner.limits.cells,
            cells_used=cells_used,
            cells_cached=cells_cached,
            slots_cached=len(scheduler.prefix_cache.device.entries),
            leases=leases,
            waiting=tuple(one.id for one in scheduler.waiting),
            cached=scheduler.prefix_cache.device.lengths,
            preempted=tuple(describe(one, -1) for one in scheduler.waiting if one.preempted),
            leased_total=pool.leased_total,
            released_total=pool.released_total,
            cleared_cells_total=pool.cleared_cells_total,
            integrity_failures=scheduler.integrity_failures,
        )
