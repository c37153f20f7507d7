"""Who computes what in the next step, and what follows from its result.

`plan` builds a complete batch, `apply` takes its outcome in; between them the runner computes. All of it
runs on the owner thread. Nothing here waits, and nothing here knows where requests come from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Line
from typing import Any

from cllm.backend.base import Batch, ModelRunner, Row, RowResult, StepResult, StepStatus
from cllm.core.kv_cache.host_cache import HostKVCache
from cllm.core.kv_cache.prefix_cache import PrefixCache, PrefixMatch
from cllm.core.kv_cache.transfer import KVTransfer, SwapSpace
from cllm.core.prefill_budget import PrefillBudget, Sharing
from cllm.core.sequence import Sequence, SlotPool, State
from cllm.core.spec_decode import SpecDecodePolicy
from cllm.core.step_cost import choose_padding
from cllm.errors import BadBatch, CllmError, EngineDied, EngineError, IntegrityError, PositionMismatch
from cllm.text.structured_output import GrammarCompilerThread
from cllm.types import (
    Failure,
    FinishReason,
    Request,
    RequestOutput,
    SlotInfo,
    Snapshot,
    TokenLogprob,
    TokenMask,
)

log = logging.getLogger(__name__)


class Scheduler:
    """Owns every sequence from arrival to its one terminal delta."""

    def __init__(
        self,
        runner: ModelRunner,
        budget: PrefillBudget,
        tier: HostKVCache,
        *,
        share_across_tenants: bool = False,
        speculator: SpecDecodePolicy | None = None,
    ) -> None:
        self.runner = runner
        self.budget = budget
        self.pool = SlotPool(runner.limits.sequences, self._clear)
        self._running: dict[int, Sequence] = {}
        self._waiting: list[Sequence] = []  # oldest first; parked ones go back to their old place
        self._arrivals: dict[str, int] = {}  # request id -> arrival number, for every live request
        self._arrived = 0
        self._deltas: list[RequestOutput] = []
        self._kv_full = False  # a step found no room; nobody joins until somebody has left
        self.moves = KVTransfer(runner)
        self.swap = SwapSpace(runner, self.moves, tier)
        self.prefixes = PrefixCache(runner, self.moves, budget, tier, across_tenants=share_across_tenants)
        self._joining = Joining(runner, self.pool, self.swap, self.prefixes)
        self._sharing = Sharing(budget, self._joining.urgency)
        self._constraints = GrammarCompilerThread(runner.vocabulary)
        # A wrong guess is taken back, which not every memory can.
        can_cut = not (runner.info.recurrent or runner.info.sliding_window)
        self._speculator = speculator if speculator is not None and can_cut else SpecDecodePolicy(0)
        self.integrity_failures = 0

    # What comes in ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Accept a request. It gets exactly one terminal delta, whatever happens."""
        assert request.id not in self._arrivals, f"request {request.id} is here already"
        self._arrived += 1
        self._arrivals[request.id] = self._arrived
        sequence = Sequence(request, self.runner.limits.request_tokens, self._arrived)
        sequence.speculation = self._speculator.for_request(request)
        if request.constraint is not None:
            sequence.compiling = self._constraints.submit(request.constraint)
        self._waiting.append(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request now; one that is unknown or has ended is left alone."""
        for sequence in (*self._waiting, *self._running.values()):
            if sequence.id == request_id:
                self._finish(sequence, FinishReason.CANCELLED)
                return

    def fail_all(self, error: CllmError) -> None:
        """The engine ends: everybody still here gets the error as their terminal delta."""
        for sequence in (*self._waiting, *self._running.values()):
            self._fail(sequence, error)

    # The step --------------------------------------------------------------------------------------

    def plan(self) -> Batch | None:
        """The next batch, or None when there is nothing to compute."""
        self.prefixes.new_step()
        self._start_waiting()
        self._check_positions()
        shares = self._sharing.shares(self._running.values())
        masks = self._masks(shares)
        drafts = self._speculator.draft(self._running.values(), self.budget.guesses)
        rows = [
            sequence.row(shares[sequence.id], drafts.get(number, ()), masks.get(sequence.id))
            for number, sequence in sorted(self._running.items())
            if sequence.id in shares
        ]
        if not rows:
            return None
        batch = Batch(tuple(rows), padding=self._padding(rows))
        assert batch.token_count <= self.runner.limits.batch_tokens, "a batch over the limit cannot be built"
        return batch

    def _masks(self, shares: Mapping[str, int]) -> dict[str, TokenMask]:
        """Of those who choose under a grammar in this step, by request id; who cannot go on has failed."""
        choosing = [one for one in self._running.values() if one.needs_mask(shares.get(one.id, 0))]
        masks: dict[str, TokenMask] = {}
        found = self._constraints.masks([one.constraint for one in choosing if one.constraint is not None])
        for sequence, mask in zip(choosing, found, strict=True):
            if isinstance(mask, CllmError):  # a grammar that ran dry
                self._fail(sequence, mask)
            else:
                masks[sequence.id] = mask
        return masks

    def _padding(self, rows: list[Row]) -> tuple[int, ...]:
        """Ids that fill holes between the rows' own, where a hole is dear."""
        limits = self.runner.limits
        if limits.unified or self.runner.info.recurrent:  # no holes; states that must not be moved about
            return ()
        return choose_padding(rows, self.pool.free_ids, self.budget.clock, limits.batch_tokens)

    def apply(self, batch: Batch, result: StepResult) -> None:
        """Take in what became of a batch; the deltas are then waiting in `take_outputs`."""
        match result.status:
            case StepStatus.DONE:
                self.budget.observe(batch, result)
                for row, outcome in zip(batch.rows, result.rows, strict=True):
                    self._process_row(self._running[row.seq_id], row, outcome, result.ubatches)
            case StepStatus.NO_ROOM:
                if not self._speculator.withdraw(batch, self._running):
                    self._preempt()
            case StepStatus.BAD_BATCH:
                # The loop has bisected: what is left is the culprit.
                for row in batch.rows:
                    self._fail(
                        self._running[row.seq_id],
                        BadBatch(f"llama.cpp refused this request's tokens (code {result.code})"),
                    )
            case StepStatus.ABORTED | StepStatus.FAILED:
                self._rollback_step(batch)

    def still_to_do(self, batch: Batch) -> Batch:
        """The rows of a planned batch whose sequences are still where they were when it was planned."""
        rows = (
            row
            for row in batch.rows
            if (sequence := self._running.get(row.seq_id)) is not None
            and sequence.num_computed == row.position
            and sequence.sampler is row.sampler
        )
        return Batch(tuple(rows), batch.kind)

    def request_of(self, seq_id: int) -> str | None:
        """Whose an id in a batch is."""
        return self.pool.holder(seq_id)

    def take_outputs(self) -> list[RequestOutput]:
        """What happened since the last call, in order."""
        deltas, self._deltas = self._deltas, []
        return deltas

    # What can be seen ------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    @property
    def has_work(self) -> bool:
        """False when a step would compute nothing: nobody runs, and who waits cannot start yet."""
        return bool(self._running) or any(sequence.startable for sequence in self._waiting)

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def cells_used(self) -> int:
        return sum(sequence.num_computed for sequence in self._running.values())

    def snapshot(self) -> Snapshot:
        """Every lease and counter."""
        return Snapshot(
            sequences_total=self.pool.size,
            cells_total=self.runner.limits.cells,
            cells_used=self.cells_used,
            leases=slot_infos(self.runner, self.pool, self._running),
            waiting=tuple(sequence.id for sequence in self._waiting),
            leased_total=self.pool.leased_total,
            released_total=self.pool.released_total,
            cleared_cells_total=self.pool.cleared_cells_total,
            integrity_failures=self.integrity_failures,
        )

    def check_idle(self) -> None:
        """Law 7: idle means zero. Raises IntegrityError naming everything that is left over."""
        assert self.idle
        left = left_over(self.runner, self.pool) + [f"request {name}" for name in self._arrivals]
        if left:
            self.integrity_failures += 1
            raise IntegrityError(f"idle, but not empty: {', '.join(left)}")

    def repair_idle(self) -> None:
        """Empty every sequence after a failed idle check, so that the next request starts clean."""
        empty_all(self.runner, self.pool)

    # Joining ---------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        if len(self.pool.retired) == self.pool.size:
            raise EngineDied("no sequence id can be used any more")
        if self._kv_full and self._running:
            return
        self._kv_full = False
        for sequence, origin in self._joining.next(self._waiting, self._running):
            self._start(sequence, origin)

    def _start(self, sequence: Sequence, origin: PrefixMatch | None) -> None:
        """Give a waiting sequence its lease and what KV there is for it already."""
        lease = self.pool.lease(sequence.id)
        assert lease is not None
        self._waiting.remove(sequence)
        sequence.lease = lease
        sequence.move_to(State.RUNNING)
        self._running[lease.seq_id] = sequence
        try:
            self._joining.prepare(sequence, origin)
        except Exception as error:
            self._fail(sequence, _as_engine_error(error))

    def _check_positions(self) -> None:
        """Law 3: the next position is what the memory says; a sequence that disagrees fails alone."""
        for sequence in list(self._running.values()):
            try:
                position = self.runner.next_position(sequence.seq_id)
            except Exception as error:
                self._fail(sequence, _as_engine_error(error))
                continue
            if position != sequence.num_computed:
                message = (
                    f"inconsistent position in seq {sequence.seq_id}: the memory's next position is "
                    f"{position}, the request has computed {sequence.num_computed}"
                )
                log.error("%s (request %s)", message, sequence.id)
                self._fail(sequence, PositionMismatch(message))

    # Going on --------------------------------------------------------------------------------------

    def _process_row(self, sequence: Sequence, row: Row, outcome: RowResult, ubatches: int) -> None:
        drafted = max(0, row.outputs - 1)
        rejected = row.outputs - len(outcome.tokens) if drafted else 0
        sequence.num_computed += len(row.tokens)
        sequence.decoded_tokens += len(row.tokens)
        sequence.steps += 1
        sequence.ubatches += ubatches
        if drafted and sequence.speculation is not None:
            sequence.speculation.observe(drafted, drafted - rejected)
        if rejected and not self._rollback_drafts(sequence, rejected):
            return
        if outcome.error is not None:
            self._fail(sequence, EngineError(outcome.error))
            return
        if not outcome.tokens:
            return
        try:
            taken = sequence.take(outcome.tokens, self.runner.vocabulary)
        except CllmError as error:  # a grammar that ran dry
            self._fail(sequence, error)
            return
        unused = sequence.num_computed - len(sequence.tokens)  # right guesses beyond an end
        if unused > 0 and not self._rollback_drafts(sequence, unused):
            return
        logprobs = tuple(self._spelled(entry) for entry in outcome.logprobs[: len(taken.tokens)])
        if taken.reason is None:
            self._deltas.append(
                RequestOutput(request_id=sequence.id, text=taken.text, tokens=taken.tokens, logprobs=logprobs)
            )
        else:
            self._finish(sequence, taken.reason, text=taken.text, tokens=taken.tokens, logprobs=logprobs)

    def _rollback_drafts(self, sequence: Sequence, count: int) -> bool:
        """Remove the last `count` tokens from its memory: guesses that were wrong, or of no use."""
        sequence.decoded_tokens -= count
        try:
            sequence.num_computed = self.runner.truncate(sequence.seq_id, sequence.num_computed - count)
        except Exception as error:
            self._fail(sequence, _as_engine_error(error))
            return False
        return True

    def _spelled(self, entry: TokenLogprob) -> TokenLogprob:
        """A log-probability with the bytes of its tokens: the parent has no vocabulary."""
        piece = self.runner.vocabulary.piece
        pieces = (piece(entry.token), *(piece(token) for token, _ in entry.top))
        return TokenLogprob(entry.token, entry.logprob, entry.top, pieces)

    def _rollback_step(self, batch: Batch) -> None:
        """Law 10: every member of a failed step is put back to its length before it.

        A recurrent model's states are moved about inside the graph, those of others too: after one that
        broke off nobody's state is certain, so everybody is recomputed.
        """
        if self.runner.info.recurrent:
            lengths = dict.fromkeys(self._running, 0)
        else:
            lengths = {row.seq_id: row.position for row in batch.rows}
        for seq_id, length in lengths.items():
            sequence = self._running[seq_id]
            try:
                sequence.num_computed = self.runner.truncate(seq_id, length)
            except Exception as error:
                self._fail(sequence, _as_engine_error(error))

    # KV pressure -----------------------------------------------------------------------------------

    def _preempt(self) -> None:
        """No cells left: park the youngest of lowest priority. A lone one that cannot go on is done."""
        order = {one: (-one.request.priority, self._arrivals[one.id]) for one in self._running.values()}
        youngest = max(order, key=lambda sequence: order[sequence])
        if len(self._running) == 1:
            self._finish(youngest, FinishReason.LENGTH, text=youngest.detokenizer.finish())
        else:
            self._swap_out(youngest)
            self._kv_full = True

    def _swap_out(self, sequence: Sequence) -> None:
        """Take a running sequence out of KV; it goes back to its old place in the line."""
        self.swap.save(sequence)
        log.debug("parked request %s of seq %d: KV is full", sequence.id, sequence.seq_id)
        sequence.move_to(State.PREEMPTED)
        self._release(sequence)
        self._waiting.append(sequence)
        self._waiting.sort(key=lambda waiting: self._arrivals[waiting.id])

    # Leaving ---------------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, error: CllmError) -> None:
        self._finish(sequence, FinishReason.ERROR, error=Failure(error.code, error.message))

    def _finish(self, sequence: Sequence, reason: FinishReason, **last: Any) -> None:
        """Law 4: the one way out. KV is cleared before the client can hear of the end."""
        usage = sequence.usage()
        sequence.move_to(State.FINISHED)
        if sequence.lease is None:
            self._waiting.remove(sequence)
        else:
            if reason is not FinishReason.ERROR:
                self.prefixes.leave(sequence, others=len(self._running) > 1)
            self._release(sequence)
        self.swap.forget(sequence)
        if sequence.sampler is not None:
            try:
                sequence.sampler.close()
            except Exception:
                log.exception("a sampler could not be closed")
            sequence.sampler = None
        del self._arrivals[sequence.id]
        self._kv_full = False
        self._deltas.append(
            RequestOutput(
                request_id=sequence.id,
                finish_reason=reason,
                usage=usage,
                stop=sequence.detokenizer.stopped_by,
                **last,
            )
        )

    def _release(self, sequence: Sequence) -> None:
        lease, sequence.lease = sequence.lease, None
        assert lease is not None
        del self._running[lease.seq_id]
        lease.release()

    def _clear(self, seq_id: int) -> int:
        """Empty an id for the pool; returns the cells it held."""
        cells = self.runner.next_position(seq_id)
        self.runner.truncate(seq_id, 0)
        if (left := self.runner.next_position(seq_id)) != 0:
            raise IntegrityError(f"seq {seq_id} still holds {left} cells after it was cleared")
        return cells


def _as_engine_error(error: Exception) -> CllmError:
    if isinstance(error, CllmError):
        return error
    log.error("a runner call failed", exc_info=error)
    return EngineError(f"a runner call failed: {type(error).__name__}")


class Joining:
    """Looks at the line, oldest first, and prepares whoever gets a lease."""

    def __init__(
        self, runner: ModelRunner, pool: SlotPool, parking: SwapSpace, prefixes: PrefixCache
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._parking = parking
        self._prefixes = prefixes
        self._awaited: dict[str, int] = {}  # id of who is waited for -> tokens of the shortest who waits

    def next(
        self, waiting: Line[Sequence], running: Mapping[int, Sequence]
    ) -> Iterator[tuple[Sequence, PrefixMatch | None]]:
        """Those who can start now, and from what; each is to be started before the next is asked for."""
        self._awaited.clear()
        for sequence in tuple(waiting):
            if not self._pool.free_count or not self._fits(sequence, running):
                return
            if not sequence.startable:
                continue
            origin = None
            if sequence.saved is None:
                origin = self._prefixes.find(sequence, running.values())
            if origin is not None and not origin.ready:
                # What both begin with is being computed: wait for it, then copy.
                assert origin.donor is not None
                shortest = self._awaited.get(origin.donor.id, sequence.pending)
                self._awaited[origin.donor.id] = min(shortest, sequence.pending)
                continue
            yield sequence, origin

    def urgency(self, sequence: Sequence) -> int:
        """Tokens of the shortest prompt that waits for this one, itself included."""
        return min(sequence.pending, self._awaited.get(sequence.id, sequence.pending))

    def prepare(self, sequence: Sequence, origin: PrefixMatch | None) -> None:
        """Everything a sequence needs under its new lease. Raises what its own grammar or sampler raises."""
        if sequence.compiling is not None:
            sequence.constraint, sequence.compiling = sequence.compiling.result(), None
        if sequence.sampler is None:
            sequence.sampler = self._runner.create_sampler(sequence.request.sampling)
            sequence.sampler.accept(sequence.tokens)
        if sequence.saved is not None:
            self._parking.restore(sequence)
        elif origin is not None:
            self._prefixes.take(sequence, origin)

    def _fits(self, sequence: Sequence, running: Mapping[int, Sequence]) -> bool:
        """With one common pool of cells, do not start what would evict somebody at once."""
        if not self._runner.limits.unified or not running:
            return True
        taken = sum(len(other.tokens) for other in running.values())
        return taken + len(sequence.tokens) < self._runner.limits.cells


def slot_infos(runner: ModelRunner, pool: SlotPool, running: Mapping[int, Sequence]) -> tuple[SlotInfo, ...]:
    """Every lease; positions are read from the memory, so drift would show."""
    now = time.monotonic()
    return tuple(
        SlotInfo(
            seq_id=lease.seq_id,
            request_id=lease.request_id,
            tokens=len(running[lease.seq_id].tokens),
            position=runner.next_position(lease.seq_id),
            state=running[lease.seq_id].state.value,
            age_s=round(now - lease.leased_at, 3),
        )
        for lease in pool.leases
    )


def left_over(runner: ModelRunner, pool: SlotPool) -> list[str]:
    """What is held though nobody runs; nothing, by law 7."""
    left = [f"lease of seq {lease.seq_id}" for lease in pool.leases]
    return left + [
        f"{cells} cells in seq {seq_id}"
        for seq_id in range(pool.size)
        if seq_id not in pool.retired and (cells := runner.next_position(seq_id)) != 0
    ]


def empty_all(runner: ModelRunner, pool: SlotPool) -> None:
    """Empty every sequence, so that the next request starts clean."""
    for seq_id in range(pool.size):
        if seq_id not in pool.retired:
            runner.truncate(seq_id, 0)
