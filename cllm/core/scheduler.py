"""Who computes what in the next step, and what follows from its result.

`plan` builds a complete batch, `apply` takes its outcome in; between them the backend computes. All of it
runs on the owner thread. Nothing here waits, and nothing here knows where requests come from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Line
from typing import Any

from cllm.backend.base import Backend, Batch, Row, RowResult, StepResult, StepStatus
from cllm.core.kv_cache.host_cache import RamTier
from cllm.core.kv_cache.prefix_cache import Origin, Prefixes
from cllm.core.kv_cache.transfer import Moves, Parking
from cllm.core.prefill_budget import Sharing, StepBudget
from cllm.core.sequence import Sequence, SequencePool, State
from cllm.core.spec_decode import Speculator
from cllm.core.step_cost import fill_holes
from cllm.errors import BadBatch, CllmError, EngineDied, EngineError, IntegrityError, PositionMismatch
from cllm.text.structured_output import ConstraintShop
from cllm.types import Delta, Failure, FinishReason, LeaseFacts, Request, Snapshot, TokenLogprob, TokenMask

log = logging.getLogger(__name__)


class Scheduler:
    """Owns every sequence from arrival to its one terminal delta."""

    def __init__(
        self,
        backend: Backend,
        budget: StepBudget,
        tier: RamTier,
        *,
        share_across_tenants: bool = False,
        speculator: Speculator | None = None,
    ) -> None:
        self.backend = backend
        self.budget = budget
        self.pool = SequencePool(backend.limits.sequences, self._clear)
        self._running: dict[int, Sequence] = {}
        self._waiting: list[Sequence] = []  # oldest first; parked ones go back to their old place
        self._arrivals: dict[str, int] = {}  # request id -> arrival number, for every live request
        self._arrived = 0
        self._deltas: list[Delta] = []
        self._kv_full = False  # a step found no room; nobody joins until somebody has left
        self.moves = Moves(backend)
        self.parking = Parking(backend, self.moves, tier)
        self.prefixes = Prefixes(backend, self.moves, budget, tier, across_tenants=share_across_tenants)
        self._joining = Joining(backend, self.pool, self.parking, self.prefixes)
        self._sharing = Sharing(budget, self._joining.urgency)
        self._constraints = ConstraintShop(backend.vocabulary)
        # A wrong guess is taken back, which not every memory can.
        can_cut = not (backend.facts.recurrent or backend.facts.sliding_window)
        self._speculator = speculator if speculator is not None and can_cut else Speculator(0)
        self.integrity_failures = 0

    # What comes in ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Accept a request. It gets exactly one terminal delta, whatever happens."""
        assert request.id not in self._arrivals, f"request {request.id} is here already"
        self._arrived += 1
        self._arrivals[request.id] = self._arrived
        sequence = Sequence(request, self.backend.limits.request_tokens, self._arrived)
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
        batch = Batch(tuple(rows), fillers=self._fillers(rows))
        assert batch.token_count <= self.backend.limits.batch_tokens, "a batch over the limit cannot be built"
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

    def _fillers(self, rows: list[Row]) -> tuple[int, ...]:
        """Ids that fill holes between the rows' own, where a hole is dear."""
        limits = self.backend.limits
        if limits.unified or self.backend.facts.recurrent:  # no holes; states that must not be moved about
            return ()
        return fill_holes(rows, self.pool.free_ids, self.budget.clock, limits.batch_tokens)

    def apply(self, batch: Batch, result: StepResult) -> None:
        """Take in what became of a batch; the deltas are then waiting in `take_deltas`."""
        match result.status:
            case StepStatus.DONE:
                self.budget.observe(batch, result)
                for row, outcome in zip(batch.rows, result.rows, strict=True):
                    self._advance(self._running[row.sequence_id], row, outcome, result.ubatches)
            case StepStatus.NO_ROOM:
                if not self._speculator.withdraw(batch, self._running):
                    self._make_room()
            case StepStatus.BAD_BATCH:
                # The loop has bisected: what is left is the culprit.
                for row in batch.rows:
                    self._fail(
                        self._running[row.sequence_id],
                        BadBatch(f"llama.cpp refused this request's tokens (code {result.code})"),
                    )
            case StepStatus.ABORTED | StepStatus.FAILED:
                self._cut_back(batch)

    def still_to_do(self, batch: Batch) -> Batch:
        """The rows of a planned batch whose sequences are still where they were when it was planned."""
        rows = (
            row
            for row in batch.rows
            if (sequence := self._running.get(row.sequence_id)) is not None
            and sequence.computed == row.position
            and sequence.sampler is row.sampler
        )
        return Batch(tuple(rows), batch.kind)

    def request_of(self, sequence_id: int) -> str | None:
        """Whose an id in a batch is."""
        return self.pool.holder(sequence_id)

    def take_deltas(self) -> list[Delta]:
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
        return sum(sequence.computed for sequence in self._running.values())

    def snapshot(self) -> Snapshot:
        """Every lease and counter."""
        return Snapshot(
            sequences_total=self.pool.size,
            cells_total=self.backend.limits.cells,
            cells_used=self.cells_used,
            leases=lease_facts(self.backend, self.pool, self._running),
            waiting=tuple(sequence.id for sequence in self._waiting),
            leased_total=self.pool.leased_total,
            released_total=self.pool.released_total,
            cleared_cells_total=self.pool.cleared_cells_total,
            integrity_failures=self.integrity_failures,
        )

    def check_idle(self) -> None:
        """Law 7: idle means zero. Raises IntegrityError naming everything that is left over."""
        assert self.idle
        left = left_over(self.backend, self.pool) + [f"request {name}" for name in self._arrivals]
        if left:
            self.integrity_failures += 1
            raise IntegrityError(f"idle, but not empty: {', '.join(left)}")

    def repair_idle(self) -> None:
        """Empty every sequence after a failed idle check, so that the next request starts clean."""
        empty_all(self.backend, self.pool)

    # Joining ---------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        if len(self.pool.retired) == self.pool.size:
            raise EngineDied("no sequence id can be used any more")
        if self._kv_full and self._running:
            return
        self._kv_full = False
        for sequence, origin in self._joining.next(self._waiting, self._running):
            self._start(sequence, origin)

    def _start(self, sequence: Sequence, origin: Origin | None) -> None:
        """Give a waiting sequence its lease and what KV there is for it already."""
        lease = self.pool.lease(sequence.id)
        assert lease is not None
        self._waiting.remove(sequence)
        sequence.lease = lease
        sequence.move_to(State.RUNNING)
        self._running[lease.sequence_id] = sequence
        try:
            self._joining.prepare(sequence, origin)
        except Exception as error:
            self._fail(sequence, _as_engine_error(error))

    def _check_positions(self) -> None:
        """Law 3: the next position is what the memory says; a sequence that disagrees fails alone."""
        for sequence in list(self._running.values()):
            try:
                position = self.backend.next_position(sequence.sequence_id)
            except Exception as error:
                self._fail(sequence, _as_engine_error(error))
                continue
            if position != sequence.computed:
                message = (
                    f"inconsistent position in seq {sequence.sequence_id}: the memory's next position is "
                    f"{position}, the request has computed {sequence.computed}"
                )
                log.error("%s (request %s)", message, sequence.id)
                self._fail(sequence, PositionMismatch(message))

    # Going on --------------------------------------------------------------------------------------

    def _advance(self, sequence: Sequence, row: Row, outcome: RowResult, ubatches: int) -> None:
        drafted = max(0, row.outputs - 1)
        rejected = row.outputs - len(outcome.tokens) if drafted else 0
        sequence.computed += len(row.tokens)
        sequence.decoded_tokens += len(row.tokens)
        sequence.steps += 1
        sequence.ubatches += ubatches
        if drafted and sequence.speculation is not None:
            sequence.speculation.observe(drafted, drafted - rejected)
        if rejected and not self._take_back(sequence, rejected):
            return
        if outcome.error is not None:
            self._fail(sequence, EngineError(outcome.error))
            return
        if not outcome.tokens:
            return
        try:
            taken = sequence.take(outcome.tokens, self.backend.vocabulary)
        except CllmError as error:  # a grammar that ran dry
            self._fail(sequence, error)
            return
        unused = sequence.computed - len(sequence.tokens)  # right guesses beyond an end
        if unused > 0 and not self._take_back(sequence, unused):
            return
        logprobs = tuple(self._spelled(entry) for entry in outcome.logprobs[: len(taken.tokens)])
        if taken.reason is None:
            self._deltas.append(
                Delta(request_id=sequence.id, text=taken.text, tokens=taken.tokens, logprobs=logprobs)
            )
        else:
            self._finish(sequence, taken.reason, text=taken.text, tokens=taken.tokens, logprobs=logprobs)

    def _take_back(self, sequence: Sequence, count: int) -> bool:
        """Remove the last `count` tokens from its memory: guesses that were wrong, or of no use."""
        sequence.decoded_tokens -= count
        try:
            sequence.computed = self.backend.truncate(sequence.sequence_id, sequence.computed - count)
        except Exception as error:
            self._fail(sequence, _as_engine_error(error))
            return False
        return True

    def _spelled(self, entry: TokenLogprob) -> TokenLogprob:
        """A log-probability with the bytes of its tokens: the parent has no vocabulary."""
        piece = self.backend.vocabulary.piece
        pieces = (piece(entry.token), *(piece(token) for token, _ in entry.top))
        return TokenLogprob(entry.token, entry.logprob, entry.top, pieces)

    def _cut_back(self, batch: Batch) -> None:
        """Law 10: every member of a failed step is put back to its length before it.

        A recurrent model's states are moved about inside the graph, those of others too: after one that
        broke off nobody's state is certain, so everybody is recomputed.
        """
        if self.backend.facts.recurrent:
            lengths = dict.fromkeys(self._running, 0)
        else:
            lengths = {row.sequence_id: row.position for row in batch.rows}
        for sequence_id, length in lengths.items():
            sequence = self._running[sequence_id]
            try:
                sequence.computed = self.backend.truncate(sequence_id, length)
            except Exception as error:
                self._fail(sequence, _as_engine_error(error))

    # KV pressure -----------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """No cells left: park the youngest of lowest priority. A lone one that cannot go on is done."""
        order = {one: (-one.request.priority, self._arrivals[one.id]) for one in self._running.values()}
        youngest = max(order, key=lambda sequence: order[sequence])
        if len(self._running) == 1:
            self._finish(youngest, FinishReason.LENGTH, text=youngest.assembler.finish())
        else:
            self._park(youngest)
            self._kv_full = True

    def _park(self, sequence: Sequence) -> None:
        """Take a running sequence out of KV; it goes back to its old place in the line."""
        self.parking.save(sequence)
        log.debug("parked request %s of seq %d: KV is full", sequence.id, sequence.sequence_id)
        sequence.move_to(State.PARKED)
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
        self.parking.forget(sequence)
        if sequence.sampler is not None:
            try:
                sequence.sampler.close()
            except Exception:
                log.exception("a sampler could not be closed")
            sequence.sampler = None
        del self._arrivals[sequence.id]
        self._kv_full = False
        self._deltas.append(
            Delta(
                request_id=sequence.id,
                finish_reason=reason,
                usage=usage,
                stop=sequence.assembler.stopped_by,
                **last,
            )
        )

    def _release(self, sequence: Sequence) -> None:
        lease, sequence.lease = sequence.lease, None
        assert lease is not None
        del self._running[lease.sequence_id]
        lease.release()

    def _clear(self, sequence_id: int) -> int:
        """Empty an id for the pool; returns the cells it held."""
        cells = self.backend.next_position(sequence_id)
        self.backend.truncate(sequence_id, 0)
        if (left := self.backend.next_position(sequence_id)) != 0:
            raise IntegrityError(f"seq {sequence_id} still holds {left} cells after it was cleared")
        return cells


def _as_engine_error(error: Exception) -> CllmError:
    if isinstance(error, CllmError):
        return error
    log.error("a backend call failed", exc_info=error)
    return EngineError(f"a backend call failed: {type(error).__name__}")


class Joining:
    """Looks at the line, oldest first, and prepares whoever gets a lease."""

    def __init__(self, backend: Backend, pool: SequencePool, parking: Parking, prefixes: Prefixes) -> None:
        self._backend = backend
        self._pool = pool
        self._parking = parking
        self._prefixes = prefixes
        self._awaited: dict[str, int] = {}  # id of who is waited for -> tokens of the shortest who waits

    def next(
        self, waiting: Line[Sequence], running: Mapping[int, Sequence]
    ) -> Iterator[tuple[Sequence, Origin | None]]:
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

    def prepare(self, sequence: Sequence, origin: Origin | None) -> None:
        """Everything a sequence needs under its new lease. Raises what its own grammar or sampler raises."""
        if sequence.compiling is not None:
            sequence.constraint, sequence.compiling = sequence.compiling.result(), None
        if sequence.sampler is None:
            sequence.sampler = self._backend.create_sampler(sequence.request.sampling)
            sequence.sampler.accept(sequence.tokens)
        if sequence.saved is not None:
            self._parking.restore(sequence)
        elif origin is not None:
            self._prefixes.take(sequence, origin)

    def _fits(self, sequence: Sequence, running: Mapping[int, Sequence]) -> bool:
        """With one common pool of cells, do not start what would evict somebody at once."""
        if not self._backend.limits.unified or not running:
            return True
        taken = sum(len(other.tokens) for other in running.values())
        return taken + len(sequence.tokens) < self._backend.limits.cells


def lease_facts(
    backend: Backend, pool: SequencePool, running: Mapping[int, Sequence]
) -> tuple[LeaseFacts, ...]:
    """Every lease; positions are read from the memory, so drift would show."""
    now = time.monotonic()
    return tuple(
        LeaseFacts(
            seq_id=lease.sequence_id,
            request_id=lease.request_id,
            tokens=len(running[lease.sequence_id].tokens),
            position=backend.next_position(lease.sequence_id),
            state=running[lease.sequence_id].state.value,
            age_s=round(now - lease.leased_at, 3),
        )
        for lease in pool.leases
    )


def left_over(backend: Backend, pool: SequencePool) -> list[str]:
    """What is held though nobody runs; nothing, by law 7."""
    left = [f"lease of seq {lease.sequence_id}" for lease in pool.leases]
    return left + [
        f"{cells} cells in seq {sequence_id}"
        for sequence_id in range(pool.size)
        if sequence_id not in pool.retired and (cells := backend.next_position(sequence_id)) != 0
    ]


def empty_all(backend: Backend, pool: SequencePool) -> None:
    """Empty every sequence, so that the next request starts clean."""
    for sequence_id in range(pool.size):
        if sequence_id not in pool.retired:
            backend.truncate(sequence_id, 0)
