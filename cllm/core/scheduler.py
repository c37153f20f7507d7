"""Continuous batching: which tokens of which sequence the next step computes, and what its result means.

`schedule` builds a complete batch, `update` processes its result; between them the runner computes. All of it
runs on the owner thread. Nothing here waits, and nothing here knows where requests come from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from cllm import errors
from cllm.adapters import split_key
from cllm.backend.base import Batch, BatchKind, ModelRunner, Row, RowResult, StepResult, StepStatus
from cllm.core.kv_cache.disk_cache import DiskKVCache
from cllm.core.kv_cache.prefix_cache import PrefixCache, PrefixMatch
from cllm.core.kv_cache.tiers import HostKVCache
from cllm.core.kv_cache.transfer import KVTransfer
from cllm.core.output_writer import OutputWriter
from cllm.core.prefill_budget import PrefillBudget, choose_padding, limit_scored
from cllm.core.preparation import Preparation
from cllm.core.sequence import Sequence
from cllm.core.slot_pool import KVLayout, SlotPool
from cllm.core.spec_decode import SpecDecodePolicy, reject_drafts
from cllm.core.step_cost import TILE
from cllm.core.step_groups import AdapterTurns, StepGroup
from cllm.core.token_masks import TokenMasks
from cllm.types import Failure, FinishReason, Request, RequestOutput, TokenLogprob, TokenMask


class FollowingBatch:
    """Finds it, in all but one step of `EVERY`: gaps, samplers' turns and the like belong to a schedule."""

    EVERY = TILE // 2

    def __init__(self, runner: ModelRunner, spec_decode: SpecDecodePolicy) -> None:
        self._runner, self._spec_decode = runner, spec_decode
        self._steps = 0
        self._prepared: tuple[Batch, Batch, list[list[int]]] | None = None  # one, the next, and its tokens

    def prepare(self, batch: Batch, running: Mapping[int, Sequence]) -> None:
        """While this batch is computed: the one after it, unless something else may be due."""
        self._steps += 1
        self._prepared = None
        if batch.kind is BatchKind.MEDIA or len(batch.rows) != len(running) or self._steps % self.EVERY == 0:
            return
        next_position = self._runner.next_position
        rows, tokens = [], []
        for row in batch.rows:
            seq_id, position = row.seq_id, row.position + 1
            plain = len(row.tokens) == row.outputs == 1 and row.mask is None and not row.logprobs
            try:
                if not (plain and running[seq_id].continues and next_position(seq_id) == position):
                    return
            except Exception:  # `schedule` asks again, and fails this sequence alone
                return
            tokens.append([0])  # the token that it will get
            rows.append(Row(seq_id, position, tokens[-1], 1, row.sampler))
        if not self._spec_decode.looks():
            self._prepared = batch, batch._replace(rows=tuple(rows)), tokens

    def complete(self, batch: Batch, result: StepResult) -> Batch | None:
        """The batch after this one, with the tokens of its result; None: it is to be scheduled."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared[0] is not batch or result.status is not StepStatus.DONE:
            return None
        ends = self._runner.vocabulary.ends
        for place, outcome in zip(prepared[2], result.rows, strict=True):
            if len(outcome.tokens) != 1 or outcome.tokens[0] in ends:  # where ends are ignored there is none
                return None
            place[0] = outcome.tokens[0]
        return prepared[1]


log = logging.getLogger(__name__)


class Scheduler(StepGroup[Sequence]):
    """Owns every sequence from arrival to its one terminal output."""

    streams = True

    def __init__(
        self,
        runner: ModelRunner,
        budget: PrefillBudget,
        host: HostKVCache,
        disk: DiskKVCache,
        *,
        preparation: Preparation,
        keep_prefixes: bool = True,
        share_across_tenants: bool = False,
        spec_decode: SpecDecodePolicy | None = None,
    ) -> None:
        super().__init__(runner, budget)
        self.pool = SlotPool(runner)
        self.running: dict[int, Sequence] = {}  # by slot
        self.waiting: list[Sequence] = []  # oldest first; preempted ones go back to their old place
        self._arrived = 0
        self._outputs = OutputWriter(runner.vocabulary)
        self._observed: tuple[Batch, StepResult] | None = None  # a step whose cost is not yet learned
        self._kv_full = False  # a step found no room; no sequence is admitted until one has left
        self._awaited: dict[str, int] = {}  # prefix source -> shortest pending prompt that waits for it
        self.layout = KVLayout(runner.limits)
        self.transfer = KVTransfer(runner, budget, host)
        self.prefix_cache = PrefixCache(
            *(self.pool, self.transfer, disk, self.layout, self.running),
            keeps=keep_prefixes,
            across_tenants=share_across_tenants,
        )
        self._preparation = preparation
        budget.padded_cells = runner.limits.sequence_cells * (self.layout.splits and self.transfer.cuttable)
        self._masks = TokenMasks(runner.vocabulary)
        # A rejected draft is removed from memory, which not every memory can.
        can_cut = self.transfer.cuttable or runner.limits.rollback_tokens > 0
        self._spec_decode = spec_decode if spec_decode is not None and can_cut else SpecDecodePolicy(0)
        self.following = FollowingBatch(runner, self._spec_decode)
        self.turns = AdapterTurns(runner, budget)
        self.scheduled = self.running  # those whose turn it was at the last schedule
        self.integrity_failures = 0

    # Requests in and out ---------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        assert request.id not in self.live, f"request {request.id} is here already"
        self._arrived += 1
        sequence = Sequence(request, self.runner.limits.request_tokens, self._arrived)
        sequence.drafts = self._spec_decode.start(request)
        if request.constraint is not None or request.sampling.looks_back:
            sequence.preparing = self._preparation.submit(request)
        self.live[request.id] = sequence
        self.waiting.append(sequence)
        if not split_key(request.prompt.adapter).keys() <= self.runner.adapters.keys():
            self._fail(sequence, errors.AdapterRefused("the adapter of this request is not loaded any more"))
        if request.prompt.spans:
            try:
                sequence.check_media(self.runner)
            except errors.CllmError as error:
                self._fail(sequence, error)

    def take_outputs(self) -> list[RequestOutput]:
        """What happened since the last call, in order; detokenized while a GPU computes the next step."""
        if self.runner.asynchronous:
            self._spec_decode.learn(self.running.values())
        if self._observed is not None:
            self.budget.cost.observe(*self._observed)
            self._observed = None
        return self._outputs.take()

    # The step --------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        began = time.perf_counter() if self.runner.asynchronous else None
        if self._preparation.unused:
            self._preparation.close_unused()
        self.transfer.step_began_s = self.transfer.seconds
        self._admit_waiting()
        if (len(self.running) > 1 and self.budget.sets == 1) or not self.layout.splits:
            self.prefix_cache.slots.tidy(self.running)
        self.check_positions()
        # Media rows are of another kind: see `MediaGroup`.
        text = self.running
        if any(sequence.media_end for sequence in self.running.values()):
            text = {slot: each for slot, each in self.running.items() if not each.media_end}
        scheduled = self.scheduled = self.turns.choose(text)
        if len(scheduled) < len(self.running) and self.runner.limits.rollback_tokens:
            self._settle([each for slot, each in self.running.items() if slot not in scheduled])
        counts = self.budget.schedule_tokens(scheduled.values(), self._urgency)
        if any(sequence.unscored for sequence in scheduled.values()):
            limit_scored(scheduled.values(), counts, self.runner.vocabulary.size)
        masks: Mapping[str, TokenMask] = {}
        if masked := [sequence for sequence in scheduled.values() if sequence.stopping.masks]:
            masks, exhausted = self._masks.build(masked, counts)
            for sequence, error in exhausted:
                slot = sequence.seq_id
                self._fail(sequence, error)
                scheduled.pop(slot, None)
        limits = self.runner.limits
        drafts: dict[int, list[int]] = {}
        if self._spec_decode.max_tokens:
            able = [each for each in scheduled.values() if each.id in counts or each.pending > 1]
            room, max_step_s = limits.batch_tokens - len(scheduled), self.budget.max_step_s
            cost = self.budget.cost
            drafts = self._spec_decode.draft(able, cost, room=room, max_step_s=max_step_s, began=began)
        rows = [
            sequence.row(counts[sequence.id], drafts.get(seq_id, ()), masks.get(sequence.id))
            for seq_id, sequence in sorted(self.running.items())
            if sequence.id in counts
        ]
        if not rows:
            return None
        padding = {row.seq_id: more for row in rows if (more := self.budget.padding.get(row.seq_id))}
        # A pool has no gaps; recurrent states must not be moved about.
        gaps = rows[-1].seq_id - rows[0].seq_id + 1 > len(rows)
        if gaps and self.layout.splits and not self.runner.info.recurrent:
            unused = dict.fromkeys(self.pool.free, 0) | self.prefix_cache.device.lengths
            left_out = (each for each in self.running.values() if each.id not in counts)
            unused.update((each.seq_id, each.num_computed) for each in left_out)
            room = limits.batch_tokens - sum(padding.values())
            padding |= dict.fromkeys(choose_padding(rows, unused, self.budget.cost, room), 1)
        batch = Batch(tuple(rows), padding=padding, adapter=self.turns.key)
        assert batch.token_count + sum(padding.values()) <= limits.batch_tokens, "over the limit"
        return batch

    def update(self, batch: Batch, result: StepResult) -> None:
        match result.status:
            case StepStatus.DONE:
                self._observed = (batch, result) if self.turns.observe(batch, result) else None
                for row, outcome in zip(batch.rows, result.rows, strict=True):
                    self._process_row(self.running[row.seq_id], row, outcome, result.ubatches)
            case StepStatus.NO_ROOM:
                if not reject_drafts(batch, self.running) and not self.prefix_cache.slots.evict_one():
                    self._preempt()
            case StepStatus.BAD_BATCH:
                # The batch was bisected: what is left is the culprit.
                error = errors.BadBatch(f"llama.cpp refused this request's tokens (code {result.code})")
                for row in batch.rows:
                    self._fail(self.running[row.seq_id], error)
            case StepStatus.ABORTED | StepStatus.FAILED:
                self._rollback_step(batch)

    def still_scheduled(self, batch: Batch) -> Batch:
        """The rows of a scheduled batch whose sequences are still where they were then."""
        rows = (
            row
            for row in batch.rows
            if (sequence := self.running.get(row.seq_id)) is not None
            and sequence.position == row.position
            and sequence.stopping.sampler is row.sampler
        )
        return batch._replace(rows=tuple(rows))

    # Admission -------------------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        """Start waiting sequences, oldest first, while there are slots and cells for them."""
        if len(self.pool.retired) == self.pool.size:
            raise errors.EngineDied("no slot can be used any more")
        if self._kv_full and self.running:
            return
        self._kv_full = False
        self._awaited.clear()
        loading = 0  # their slots are kept free: what is read is needed at once
        free = max(0, self._free_slots)
        for sequence in (*self.prefix_cache.order(self.waiting[:free]), *self.waiting[free:]):
            if self._free_slots <= loading:
                return
            if not self.layout.splits:
                known = sum(len(other.tokens) for other in self.running.values())
                if known and known + len(sequence.tokens) >= self.runner.limits.cells:
                    return  # it would preempt one at once
            match = None
            if startable := sequence.startable:
                match = self.prefix_cache.find(sequence, self.running.values())
            loading += sequence.loading is not None
            if not startable or sequence.loading is not None:
                continue
            if match is not None and isinstance(match.origin, Sequence) and not match.ready:
                # The shared prefix is being computed: wait for it, then copy.
                shortest = self._awaited.get(match.origin.id, sequence.pending)
                self._awaited[match.origin.id] = min(shortest, sequence.pending)
                continue
            self._start(sequence, match)

    @property
    def _free_slots(self) -> int:
        """How many more sequences may run now."""
        return min(len(self.pool.free), self.runner.limits.max_running - len(self.running))

    def _start(self, sequence: Sequence, match: PrefixMatch | None) -> None:
        """Give a waiting sequence its slot and what KV there is for it already."""
        if (chosen := self.prefix_cache.choose_slot(sequence, match, self.running)) is None:
            return  # the last free ones could not be cleared
        slot, match = chosen
        lease = sequence.lease = self.pool.lease(sequence.id, slot)
        assert lease is not None
        self.waiting.remove(sequence)
        sequence.preempted = False
        self.running[lease.seq_id] = sequence
        stopping = sequence.stopping
        begins = stopping.sampler is None  # else it was preempted
        try:
            if sequence.preparing is not None:
                preparing, sequence.preparing = sequence.preparing, None
                stopping.constraint, stopping.sampler = preparing.result()
            if stopping.sampler is None:
                stopping.sampler = self.runner.create_sampler(sequence.request.sampling)
            if begins and sequence.request.generated_prefix:
                sequence.resume(self.runner.vocabulary)
            if sequence.swapped is not None:
                self.transfer.swap_in(sequence)
            cut = self.prefix_cache.apply_match(sequence, match) if match is not None else 0
            if not self.transfer.cuttable:
                self.prefix_cache.plan_checkpoints(sequence)
            log.debug(
                "request %s in seq %d: %d cells kept, %d cut, %d tokens to compute",
                *(sequence.id, slot, sequence.num_computed, cut, sequence.pending),
            )
        except Exception as error:
            self._fail(sequence, error)

    def _urgency(self, sequence: Sequence) -> int:
        """Pending tokens of the shortest prompt that waits for this one's prefix, its own included."""
        return min(sequence.pending, self._awaited.get(sequence.id, sequence.pending))

    def check_positions(self) -> None:
        """Positions are derived: a sequence that disagrees with the KV memory fails alone."""
        for sequence in list(self.running.values()):
            try:
                position = self.runner.next_position(sequence.seq_id)
            except Exception as error:
                self._fail(sequence, error)
                continue
            if position != (expected := sequence.next_position):
                seen = f"the memory's next position is {position}, the request has computed {expected}"
                log.error("request %s: inconsistent position: %s", sequence.id, seen)
                self._fail(sequence, errors.PositionMismatch(f"inconsistent position: {seen}"))

    def _settle(self, left_out: Iterable[Sequence]) -> None:
        """Make sequences safe that take no part in the next steps; one that is lost is computed again."""
        for sequence in left_out:
            if not self.runner.settle(sequence.seq_id):
                sequence.truncate(self.runner, 0)

    # Results ---------------------------------------------------------------------------------------

    def _process_row(self, sequence: Sequence, row: Row, outcome: RowResult, ubatches: int) -> None:
        computed = len(row.tokens)
        sequence.num_computed += computed
        sequence.decoded_tokens += computed
        sequence.steps += 1
        sequence.ubatches += ubatches
        sequence.sample_s = sequence.mask_s + outcome.sample_s
        if sequence.stops and sequence.num_computed >= sequence.stops[0]:
            self.prefix_cache.checkpoint(sequence)
        if row.outputs > 1:
            drafted, rejected = row.outputs - 1, row.outputs - len(outcome.tokens)
            if sequence.drafts is not None:
                sequence.drafts.drafted += drafted
                sequence.drafts.accepted += drafted - rejected
            if rejected and not self._rollback_drafts(sequence, rejected):
                return
        if outcome.error is not None:
            self._fail(sequence, errors.EngineError(outcome.error))
            return
        if sequence.unscored:
            # Spelled step by step: thousands at once would hold up all others.
            sequence.score([*map(self._outputs.spell, outcome.scored)], sequence.unscored)
        if not outcome.tokens:
            if not sequence.pending:  # nothing but the prompt was wanted
                self._finish(sequence, FinishReason.LENGTH)
            return
        known = len(sequence.tokens)
        try:
            appended = sequence.stopping.append(outcome.tokens, self.runner.vocabulary)
        except errors.CllmError as error:  # an exhausted grammar
            self._fail(sequence, error)
            return
        tokens, text, reason, kept = appended
        if row.outputs > 1:
            used = known + kept
            if reason is None:  # one token is computed next, even where it was an accepted draft
                used = min(used, len(sequence.tokens) - 1)
            unused = sequence.num_computed - used  # accepted drafts beyond an end
            if unused > 0 and not self._rollback_drafts(sequence, unused):
                return
        if logprobs := outcome.logprobs:
            # With the prompt's own, that of an end token is reported, too: clients count on one a token.
            logprobs = logprobs[: len(tokens) + bool(sequence.request.prompt_logprobs)]
        if reason is None:
            # Where the engine dies, the client knows what cannot be found out again.
            more = {"usage_so_far": sequence.usage()} if row.outputs > 1 or known == sequence.known else {}
            self._outputs.put(sequence, tokens, text, logprobs, more)
        else:
            self._finish(sequence, reason, tokens, text, logprobs)

    def _rollback_drafts(self, sequence: Sequence, count: int) -> bool:
        """Remove the last `count` tokens from its memory: drafts that were rejected, or not needed."""
        sequence.decoded_tokens -= count
        try:
            sequence.truncate(self.runner, sequence.num_computed - count)
        except Exception as error:
            self._fail(sequence, error)
            return False
        return True

    def _rollback_step(self, batch: Batch) -> None:
        """A failed step is rolled back whole: each member returns to its length before it.

        A recurrent model's states are moved about inside the graph, those of other rows too: after a step
        that broke off no state is certain, so all running sequences are recomputed.
        """
        if self.runner.info.recurrent:
            lengths = dict.fromkeys(self.running, 0)
            self.prefix_cache.clear_slots()
        else:
            lengths = {row.seq_id: self.running[row.seq_id].num_computed for row in batch.rows}
        for seq_id, length in lengths.items():
            sequence = self.running[seq_id]
            try:
                sequence.truncate(self.runner, length)
            except Exception as error:
                self._fail(sequence, error)

    def _preempt(self) -> None:
        """No cells left: swap out the youngest of lowest priority. A lone one that cannot go on is done.

        Of the tenant that came last: a priority orders the requests of one tenant.
        """
        tenant = max(self.running.values(), key=attrgetter("arrival")).request.tenant
        own = (one for one in self.running.values() if one.request.tenant == tenant)
        sequence = min(own, key=lambda one: (one.request.priority, -one.arrival))
        if len(self.running) == 1:
            held = sequence.stopping.detokenizer.finish() if sequence.request.stop else ""
            self._finish(sequence, FinishReason.LENGTH, text=held)
            return
        self.transfer.swap_out(sequence)
        log.debug("preempted request %s of seq %d: KV is full", sequence.id, sequence.seq_id)
        sequence.preempted = True
        self._release(sequence)
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda waiting: waiting.arrival)
        self._kv_full = True

    # Ends ------------------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        if not isinstance(error, errors.CllmError):
            log.error("a runner call failed", exc_info=error)
            error = errors.EngineError(f"a runner call failed: {type(error).__name__}")
        self._finish(sequence, FinishReason.ERROR, error=Failure.of(error))

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        text: str | None = "",
        logprobs: tuple[TokenLogprob, ...] = (),
        error: Failure | None = None,
    ) -> None:
        """The one way out: one terminal output. The slot is free before the client can hear of the end."""
        usage = sequence.usage()
        if sequence.lease is None:
            self.waiting.remove(sequence)
            if sequence.preparing is not None:
                self._preparation.discard(sequence.preparing)
        else:
            self._release(sequence, keep=reason is not FinishReason.ERROR)
        if sequence.swapped is not None:
            self.transfer.discard(sequence)
        stopping = sequence.stopping
        if stopping.sampler is not None:
            try:
                stopping.sampler.close()
            except Exception:
                log.exception("a sampler could not be closed")
            stopping.sampler = None
        del self.live[sequence.id]
        self._kv_full = False
        last: dict[str, Any] = {"finish_reason": reason, "usage": usage}
        if error is not None:
            last["error"] = error
        elif stopping.detokenizer.stopped_by is not None:
            last["stop"] = stopping.detokenizer.stopped_by
        self._outputs.put(sequence, tokens, text, logprobs, last)

    def _release(self, sequence: Sequence, *, keep: bool = False) -> None:
        """Free its slot; with `keep` what it holds stays there, as cache."""
        content = self.prefix_cache.keep(sequence) if keep else None
        lease, sequence.lease = sequence.lease, None
        assert lease is not None
        del self.running[lease.seq_id]
        self.pool.release(lease, keep=sequence.num_computed if content is not None else 0)
        if content is not None:
            self.prefix_cache.insert(content)

    # What can be seen ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """False when a step would compute nothing: none runs, and those waiting cannot start yet."""
        tokens = any(not sequence.media_end for sequence in self.running.values())
        return tokens or any(sequence.startable for sequence in self.waiting)

    @property
    def loading_s(self) -> float | None:
        """How long until a sequence waits no longer for the disk; None if none does."""
        return min((one.loading.left_s for one in self.waiting if one.loading is not None), default=None)

    def check_idle(self) -> None:
        """Integrity check, KV accounting: idle means that only what is cached is held.

        Raises IntegrityError naming what is left over.
        """
        cached = self.prefix_cache.device.by_slot
        left = [f"lease of slot {seq_id}" for seq_id in sorted(self.pool.held)]
        for seq_id in set(range(self.pool.size)) - self.pool.retired:
            cells = self.runner.next_position(seq_id)
            known = cached[seq_id].position if seq_id in cached else 0
            if cells != known:
                left.append(f"{cells} cells in slot {seq_id}" + (f" instead of {known}" if known else ""))
        left += [f"request {name}" for name in self.live]
        if left:
            self.integrity_failures += 1
            raise errors.IntegrityError(f"idle, but not empty: {', '.join(left)}")
