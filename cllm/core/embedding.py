"""Embeddings: which inputs the next EMBED batch computes, and what its result means.

The scheduler's sibling: the engine core gives them turns. Nothing here holds a slot or a cell of generation.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from cllm.backend.base import Batch, BatchKind, ModelRunner, Row, RowResult, StepResult, StepStatus
from cllm.core.prefill_budget import PrefillBudget
from cllm.errors import BadBatch, CllmError, EngineError, IntegrityError, InvalidRequest
from cllm.types import Failure, FinishReason, Request, RequestOutput, Usage

log = logging.getLogger(__name__)


class EmbeddingRequest:
    """One request for embeddings: its inputs, those still to do, and the results so far."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.todo = deque(range(len(request.embed)))
        self.embeddings: dict[int, bytes] = {}
        self.decoded_tokens = self.steps = self.ubatches = 0

    @property
    def id(self) -> str:
        return self.request.id

    def size(self, index: int) -> int:
        return len(self.request.embed[index])

    @property
    def complete(self) -> bool:
        return len(self.embeddings) == len(self.request.embed)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.request.input_tokens,
            completion_tokens=0,
            decoded_tokens=self.decoded_tokens,
            steps=self.steps,
            ubatches=self.ubatches,
        )


class LongInput:
    """The one input that is computed over several steps."""

    def __init__(self, call: EmbeddingRequest, index: int) -> None:
        self.call = call
        self.index = index
        self.num_computed = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.call.request.embed[self.index]


class EmbeddingScheduler:
    """Owns every request for embeddings from arrival to its one terminal output. Runs on the owner thread.

    A batch takes one input of each request in turn, so that a short one does not wait for a long one.
    """

    def __init__(self, runner: ModelRunner, budget: PrefillBudget, decoding: Callable[[], int]) -> None:
        self.runner = runner
        self.budget = budget
        self._decoding = decoding  # how many wait for their next token meanwhile
        self._limits = runner.limits.embed
        self._calls: dict[str, EmbeddingRequest] = {}  # the one whose turn it is first
        self._planned: dict[
            int, tuple[EmbeddingRequest, int]
        ] = {}  # of the last batch: row id -> whose input
        self._long: LongInput | None = None
        self._outputs: list[RequestOutput] = []

    # What comes in ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Accept a request. It gets exactly one terminal output, whatever happens."""
        assert request.id not in self._calls, f"request {request.id} is here already"
        call = self._calls[request.id] = EmbeddingRequest(request)
        try:
            if not request.embed:
                raise InvalidRequest.no_generation(self.runner.info.name, self.runner.info.architecture)
            self.runner.open_embedding()
        except CllmError as error:
            self._fail(call, error)
        except Exception as error:
            log.error("embedding could not be opened", exc_info=error)
            self._fail(call, EngineError(f"embedding could not be opened: {type(error).__name__}"))

    def cancel(self, request_id: str) -> None:
        """End a call now; one that is unknown or has ended is left alone."""
        if (call := self._calls.get(request_id)) is not None:
            self._finish(call, FinishReason.CANCELLED)

    def fail_all(self, error: CllmError) -> None:
        """The engine ends: every request still here gets the error as its terminal output."""
        for call in list(self._calls.values()):
            self._fail(call, error)

    # The step --------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """The next batch, or None when there is nothing to compute."""
        self._planned = {}
        if not self._calls:
            return None
        # Decoding sequences have no token in this batch: what counts is whether one waits for it.
        room = max(1, self.budget.prefill_tokens(int(self._decoding() > 0)))
        if self._long is None:
            picked = self._pick(room)
            call, index = picked[0]
            if self._limits.chunked and call.size(index) > room:
                self._long = LongInput(call, index)
        if self._long is not None:
            return self._chunk(self._long, room)
        self._planned = dict(enumerate(picked))
        rows = (
            Row(row, 0, call.request.embed[index], 1, None) for row, (call, index) in self._planned.items()
        )
        return Batch(tuple(rows), BatchKind.EMBED)

    def _pick(self, room: int) -> list[tuple[EmbeddingRequest, int]]:
        """Inputs that fit together, at least one; they are no longer to do."""
        picked: list[tuple[EmbeddingRequest, int]] = []
        taken = 0
        found = True
        while found:
            found = False
            for call in self._calls.values():
                if not call.todo or len(picked) == self._limits.rows:
                    continue
                size = call.size(call.todo[0])
                if not picked or taken + size <= room:
                    picked.append((call, call.todo.popleft()))
                    taken += size
                    found = True
        first = next(iter(self._calls))
        self._calls[first] = self._calls.pop(first)  # another request is first next time
        return picked

    def _chunk(self, long: LongInput, room: int) -> Batch:
        self._planned = {0: (long.call, long.index)}
        end = min(long.num_computed + room, len(long.tokens))
        tokens = long.tokens[long.num_computed : end]
        row = Row(0, long.num_computed, tokens, int(end == len(long.tokens)), None)
        return Batch((row,), BatchKind.EMBED)

    def update(self, batch: Batch, result: StepResult) -> None:
        """Process the result of a batch; the outputs are then waiting in `take_outputs`."""
        match result.status:
            case StepStatus.DONE:
                self.budget.cost.observe(batch, result)
                for row, outcome in zip(batch.rows, result.rows, strict=True):
                    self._process_row(row, outcome, result.ubatches)
            case StepStatus.BAD_BATCH | StepStatus.NO_ROOM:
                # The batch was bisected: what is left is the culprit.
                for call, _ in self._inputs(batch):
                    self._fail(call, BadBatch(f"llama.cpp refused this input's tokens (code {result.code})"))
            case StepStatus.ABORTED | StepStatus.FAILED:
                self._put_back(batch)

    def still_scheduled(self, batch: Batch) -> Batch:
        """The rows of a scheduled batch whose requests have not ended meanwhile."""
        rows = (row for row in batch.rows if self._planned[row.seq_id][0].id in self._calls)
        return Batch(tuple(rows), batch.kind)

    def request_id(self, seq_id: int) -> str | None:
        """None: a row is one of many inputs of a request, and not worth interrupting the others for."""
        return None

    def take_outputs(self) -> list[RequestOutput]:
        """What happened since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _inputs(self, batch: Batch) -> list[tuple[EmbeddingRequest, int]]:
        """The inputs of a batch, less those of requests that an earlier row has ended."""
        planned = (self._planned[row.seq_id] for row in batch.rows)
        return [(call, index) for call, index in planned if call.id in self._calls]

    def _process_row(self, row: Row, outcome: RowResult, ubatches: int) -> None:
        call, index = self._planned[row.seq_id]
        if call.id not in self._calls:
            return
        call.decoded_tokens += len(row.tokens)
        call.steps += 1
        call.ubatches += ubatches
        if outcome.error is not None:
            self._fail(call, EngineError(f"input {index}: {outcome.error}"))
        elif not row.outputs:
            assert self._long is not None
            self._long.num_computed += len(row.tokens)
        else:
            self._long = None
            call.embeddings[index] = outcome.embedding
            if call.complete:
                self._finish(call, FinishReason.STOP)

    def _put_back(self, batch: Batch) -> None:
        """A step that failed: its inputs are to do again, from their beginning (the memory is empty)."""
        self._forget_long()
        for call, index in reversed(self._inputs(batch)):
            call.todo.appendleft(index)

    # What can be seen ------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._calls

    @property
    def count(self) -> int:
        return len(self._calls)

    def check_idle(self) -> None:
        """Integrity check: idle means that nothing is half computed."""
        assert self.idle
        if self._long is not None:
            raise IntegrityError("idle, but an input is still half computed")

    # Leaving ---------------------------------------------------------------------------------------

    def _fail(self, call: EmbeddingRequest, error: CllmError) -> None:
        self._finish(call, FinishReason.ERROR, Failure(error.code, error.message))

    def _finish(self, call: EmbeddingRequest, reason: FinishReason, error: Failure | None = None) -> None:
        """The one way out: one terminal output."""
        del self._calls[call.id]
        if self._long is not None and self._long.call is call:
            self._forget_long()
        done = reason is FinishReason.STOP
        embeddings = tuple(call.embeddings[index] for index in range(len(call.embeddings))) if done else ()
        self._outputs.append(
            RequestOutput(
                request_id=call.id,
                finish_reason=reason,
                error=error,
                usage=call.usage(),
                embeddings=embeddings,
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
