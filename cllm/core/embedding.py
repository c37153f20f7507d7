"""Embeddings: which inputs the next EMBED batch computes, and what its result means.

The scheduler's sibling: the engine core gives them turns. Nothing here holds a slot or a cell of generation.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from operator import attrgetter

from cllm.backend.base import Batch, BatchKind, ModelRunner, Row, RowResult, StepResult, StepStatus
from cllm.core.prefill_budget import PrefillBudget
from cllm.core.step_groups import StepGroup
from cllm.errors import BadBatch, CllmError, EngineError, InvalidRequest
from cllm.types import Failure, FinishReason, Request, RequestOutput, Usage

log = logging.getLogger(__name__)


class EmbeddingJob:
    """One request for embeddings: its inputs, those still to do, and the results so far."""

    def __init__(self, request: Request) -> None:
        self.id = request.id
        self.request = request
        self.inputs = request.embed
        self.todo = deque(range(len(request.embed)))
        self.embeddings: dict[int, bytes] = {}
        self.decoded_tokens = self.steps = self.ubatches = 0


Input = tuple[EmbeddingJob, int]  # one input of a job, by its index


class EmbeddingScheduler(StepGroup[EmbeddingJob]):
    """Owns every request for embeddings from arrival to its one terminal output. Runs on the owner thread.

    A batch takes inputs of the tenant first that has had least, and of the request whose next one is the
    shortest; but every second batch begins with the request that has waited longest. One input at a time may
    be longer than a step: it is computed in chunks, the others wait. Streams do not, at whatever price of it.
    """

    streams = False

    def __init__(
        self,
        runner: ModelRunner,
        budget: PrefillBudget,
        decoding: Callable[[], int],
        open_context: Callable[[], Future[None]],
    ) -> None:
        """The first request calls `open_context`; none is computed before it is done."""
        super().__init__(runner, budget)
        self._open_context = open_context
        self._opening: Future[None] | None = None
        self._decoding = decoding  # how many wait for their next token meanwhile
        self._limits = runner.limits.embed
        self._scheduled: dict[int, Input] = {}  # of the last batch, by row id
        self._long: Input | None = None
        self._long_computed = 0  # tokens of the long input
        self._by_length = False  # the last batch began with the shortest input
        self.outputs: list[RequestOutput] = []  # not yet reported

    # What comes in ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """See `StepGroup`. A request that embeds nothing fails: the model does not generate."""
        assert request.id not in self.live, f"request {request.id} is here already"
        job = self.live[request.id] = EmbeddingJob(request)
        if not request.embed:
            info = self.runner.info
            self._fail(job, InvalidRequest.no_generation(info.name, info.architecture))
        elif self._opening is None:
            self._opening = self._open_context()

    def _opened(self) -> bool:
        """Whether the context is open. If that failed, so does the first job; the next one tries again."""
        assert self._opening is not None
        if (error := self._opening.exception()) is None:
            return True
        if not isinstance(error, CllmError):
            log.error("embedding could not be opened", exc_info=error)
            error = EngineError(f"embedding could not be opened: {type(error).__name__}")
        self._fail(next(iter(self.live.values())), error)
        self._opening = self._open_context() if self.live else None
        return False

    # The step --------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        self._scheduled = {}
        if not self.has_work or not self._opened():
            return None
        room = max(1, self.budget.prefill_tokens(0, waited=self._decoding() > 0))
        if self._long is None:
            picked = self._pick(room)
            job, index = picked[0]
            if self._limits.chunked and len(job.inputs[index]) > room:
                self._long, self._long_computed = (job, index), 0
        if self._long is not None:
            self._scheduled = {0: self._long}
            tokens, begin = self._long[0].inputs[self._long[1]], self._long_computed
            end = min(begin + room, len(tokens))
            row = Row(0, begin, tokens[begin:end], int(end == len(tokens)), None)
            return Batch((row,), BatchKind.EMBED)
        self._scheduled = dict(enumerate(picked))
        rows = (Row(row, 0, job.inputs[index], 1, None) for row, (job, index) in self._scheduled.items())
        return Batch(tuple(rows), BatchKind.EMBED)

    def _pick(self, room: int) -> list[Input]:
        """Inputs that fit together, at least one; they are no longer to do."""
        self._by_length = not self._by_length
        picked: list[Input] = []
        taken = 0
        jobs = sorted(filter(attrgetter("todo"), self.live.values()), key=self._get_turn)
        first = jobs[0].id
        while jobs:  # those of which another one may fit
            for job in tuple(jobs):
                size = len(job.inputs[job.todo[0]])
                fits = not picked or (taken + size <= room and len(picked) < self._limits.rows)
                if fits:
                    picked.append((job, job.todo.popleft()))
                    taken += size
                if not (fits and job.todo):
                    jobs.remove(job)
        self.live[first] = self.live.pop(first)  # it has waited least now
        return picked

    def _get_turn(self, job: EmbeddingJob) -> tuple[float, int]:
        ahead_s = self.budget.shares.get_ahead_s(job.request.tenant)
        return ahead_s, len(job.inputs[job.todo[0]]) if self._by_length else 0

    def update(self, batch: Batch, result: StepResult) -> None:
        match result.status:
            case StepStatus.DONE:
                self.budget.cost.observe(batch, result)
                token_s = result.compute_s / batch.token_count
                spent = [(job.request, 0.0) for job in self.live.values()]  # those that wait, too
                for row in batch.rows:
                    spent.append((self._scheduled[row.seq_id][0].request, token_s * len(row.tokens)))
                self.budget.charge(spent)
                for row, outcome in zip(batch.rows, result.rows, strict=True):
                    self._process_row(row, outcome, result.ubatches)
            case StepStatus.BAD_BATCH | StepStatus.NO_ROOM:
                # The batch was bisected: what is left is the culprit.
                for job, _ in self._inputs(batch):
                    self._fail(job, BadBatch(f"llama.cpp refused this input's tokens (code {result.code})"))
            case StepStatus.ABORTED | StepStatus.FAILED:
                # Its inputs are to do again, from their beginning: the memory is empty.
                self._forget_long()
                for job, index in reversed(self._inputs(batch)):
                    job.todo.appendleft(index)

    def still_scheduled(self, batch: Batch) -> Batch:
        rows = (row for row in batch.rows if self._scheduled[row.seq_id][0].id in self.live)
        return Batch(tuple(rows), batch.kind)

    def _inputs(self, batch: Batch) -> list[Input]:
        """The inputs of a batch, less those of requests that an earlier row has ended."""
        scheduled = (self._scheduled[row.seq_id] for row in batch.rows)
        return [(job, index) for job, index in scheduled if job.id in self.live]

    def _process_row(self, row: Row, outcome: RowResult, ubatches: int) -> None:
        job, index = self._scheduled[row.seq_id]
        if job.id not in self.live:
            return
        job.decoded_tokens += len(row.tokens)
        job.steps += 1
        job.ubatches += ubatches
        if outcome.error is not None:
            self._fail(job, EngineError(f"input {index}: {outcome.error}"))
        elif not row.outputs:
            self._long_computed += len(row.tokens)
        else:
            self._long = None
            job.embeddings[index] = outcome.embedding
            if len(job.embeddings) == len(job.inputs):
                self._finish(job, FinishReason.STOP)

    @property
    def has_work(self) -> bool:
        return bool(self.live) and self._opening is not None and self._opening.done()

    # Leaving ---------------------------------------------------------------------------------------

    def _fail(self, job: EmbeddingJob, error: CllmError) -> None:
        self._finish(job, FinishReason.ERROR, Failure.of(error))

    def _finish(self, job: EmbeddingJob, reason: FinishReason, error: Failure | None = None) -> None:
        """The one way out: one terminal output."""
        del self.live[job.id]
        if self._long is not None and self._long[0] is job:
            self._forget_long()
        done = reason is FinishReason.STOP
        embeddings = tuple(job.embeddings[index] for index in range(len(job.embeddings))) if done else ()
        usage = Usage(
            prompt_tokens=job.request.input_tokens,
            completion_tokens=0,
            decoded_tokens=job.decoded_tokens,
            steps=job.steps,
            ubatches=job.ubatches,
        )
        self.outputs.append(
            RequestOutput(
                request_id=job.id, finish_reason=reason, error=error, usage=usage, embeddings=embeddings
            )
        )

    def _forget_long(self) -> None:
        """Whatever was computed of a long input is dropped."""
        if self._long is None:
            return
        self._long = None
        try:
            self.runner.reset_embedding()
        except Exception:
            log.exception("the memory of embeddings could not be cleared")
