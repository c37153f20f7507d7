"""Media steps: rows of pictures and sounds, which cannot be in one batch with tokens."""

from __future__ import annotations

from operator import attrgetter

from cllm.backend.base import Batch, BatchKind, StepResult
from cllm.core.prefill_budget import PrefillBudget, PromptPart, divide
from cllm.core.scheduler import Scheduler
from cllm.core.sequence import Sequence
from cllm.core.step_groups import StepGroup
from cllm.types import Failure, FinishReason, Request


class MediaGroup(StepGroup[Sequence]):
    """Steps of the scheduler's sequences that have come to a picture or sound.

    Causal rows are computed in chunks that keep the inter-token target, those of several sequences together.
    A picture whose rows attend to each other is computed whole and alone, however long that takes.
    """

    streams = False

    def __init__(self, scheduler: Scheduler, budget: PrefillBudget) -> None:
        super().__init__(scheduler.runner, budget)
        self._scheduler = scheduler
        self.live = scheduler.live

    def add(self, request: Request) -> None:
        self._scheduler.add(request)

    def schedule(self) -> Batch | None:
        self._scheduler.check_positions()
        running = list(self._scheduler.running.values())
        reached = sorted((each for each in running if each.media_end), key=attrgetter("arrival"))
        if not reached:
            return None
        first = reached[0]
        members, parts = [first], [first.computable]
        if first.spans[0].causal:
            causal = [each for each in reached if each.spans[0].causal]
            members = [each for each in causal if each.adapter == first.adapter]
            waiting = [each for each in running if each not in reached]
            streamed = any(each.request.streamed for each in waiting)
            prompts = [PromptPart(each.num_computed, each.computable) for each in members]
            room = self.budget.prefill_tokens(0, prompts=prompts, streamed=streamed, waited=bool(waiting))
            parts = divide(room, [each.computable for each in members])
        chunks = [(each, part) for each, part in zip(members, parts, strict=False) if part]
        self._scheduler.budget.charge_step(running, [], chunks)
        rows = sorted((each.row(part) for each, part in chunks), key=attrgetter("seq_id"))
        return Batch(tuple(rows), BatchKind.MEDIA, adapter=first.adapter)

    def still_scheduled(self, batch: Batch) -> Batch:
        return self._scheduler.still_scheduled(batch)

    def update(self, batch: Batch, result: StepResult) -> None:
        self._scheduler.update(batch, result)

    @property
    def has_work(self) -> bool:
        return any(each.media_end for each in self._scheduler.running.values())

    def _finish(self, member: Sequence, reason: FinishReason, *, error: Failure | None = None) -> None:
        self._scheduler._finish(member, reason, error=error)
