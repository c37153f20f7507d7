"""What the contract tests share: a runner that is watched, a loop driven by hand, small words for both."""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from cllm.backend.base import Batch, BatchKind, Drafter, ModelRunner, Row, Sampler, StepResult, StepStatus
from cllm.backend.llama.runner import LlamaRunner
from cllm.backend.llama.sampler import LlamaSampler
from cllm.config import EngineConfig
from cllm.core.engine_core import EngineCore
from cllm.core.step_cost import StepCostModel
from cllm.testing import FakeSampler
from cllm.types import (
    FinishReason,
    Limits,
    ModelInfo,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    Usage,
    Vocabulary,
)
from cllm.workers.messages import Report, StepReport
from tests.unit.core.engine_sim import eager_drafts

GREEDY = SamplingParams(temperature=0)
Tokens = tuple[int, ...]


class CheckedRunner(ModelRunner):
    """A runner that checks what its caller hands it, remembers it, and fails where `fail` says so.

    `fail` gets the running number of a forward and its batch; a result that it returns is the forward's.
    """

    def __init__(self, inner: ModelRunner) -> None:
        self.inner = inner
        self.fail: Callable[[int, Batch], StepResult | None] = lambda number, batch: None
        self.batches: list[Batch] = []
        self.samplers: list[Sampler] = []
        self.saves = 0

    @property
    def info(self) -> ModelInfo:
        return self.inner.info

    @property
    def limits(self) -> Limits:
        return self.inner.limits

    @property
    def vocabulary(self) -> Vocabulary:
        return self.inner.vocabulary

    def submit(self, batch: Batch) -> None:
        self.failed: StepResult | None = None
        ids = [row.seq_id for row in batch.rows]
        assert ids == sorted(set(ids)), f"rows out of order or repeated: {ids}"
        assert batch.token_count <= self.limits.batch_tokens
        for row in batch.rows if batch.kind is BatchKind.GENERATE else ():
            assert row.position == self.inner.next_position(row.seq_id), "law 3"
        self.batches.append(batch)
        self.failed = self.fail(len(self.batches) - 1, batch)
        if self.failed is None:
            self.inner.submit(batch)

    def collect(self) -> StepResult:
        return self.inner.collect() if self.failed is None else self.failed

    def interrupt(self, stop: bool) -> None:
        self.inner.interrupt(stop)

    def create_sampler(self, params: SamplingParams) -> Sampler:
        self.samplers.append(self.inner.create_sampler(params))
        return self.samplers[-1]

    def next_position(self, seq_id: int) -> int:
        return self.inner.next_position(seq_id)

    def truncate(self, seq_id: int, length: int) -> int:
        return self.inner.truncate(seq_id, length)

    def copy(self, source: int, target: int, length: int) -> int:
        return self.inner.copy(source, target, length)

    def save(self, seq_id: int) -> bytes | None:
        self.saves += 1
        return self.inner.save(seq_id)

    def restore(self, seq_id: int, state: bytes) -> bool:
        return self.inner.restore(seq_id, state)

    def open_embedding(self) -> None:
        self.inner.open_embedding()

    def reset_embedding(self) -> None:
        self.inner.reset_embedding()

    def create_drafter(self) -> Drafter | None:
        return self.inner.create_drafter()

    def close(self) -> None:
        self.inner.close()

    @property
    def open_samplers(self) -> int:
        return sum(map(_is_open, self.samplers))


def _is_open(sampler: Sampler) -> bool:
    if isinstance(sampler, FakeSampler):
        return not sampler.closed
    assert isinstance(sampler, LlamaSampler)
    return sampler.chain is not None and sampler.chain._finalizer.alive


@dataclass
class Answer:
    """Everything a request was told."""

    text: str = ""
    tokens: Tokens = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error_code: str | None = None
    error_message: str = ""
    ids: set[int] = field(default_factory=set)  # sequence ids it was computed under

    def take(self, delta: RequestOutput) -> None:
        assert self.finish_reason is None, "law 4: a delta after the last one"
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.usage = delta.usage
        if delta.error is not None:
            self.error_code, self.error_message = delta.error.code, delta.error.message

    @property
    def work(self) -> Usage:
        assert self.usage is not None
        return self.usage

    @property
    def recomputed(self) -> int:
        """Tokens that went through the model a second time."""
        return self.work.decoded_tokens + self.work.cached_tokens - self.work.cells


class StepDriver:
    """A step loop on the test's own thread, one step at a time, and what it answered."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        swap_space_mb: int = 64,
        cache_mb: int = 0,
        new_drafter: Callable[[], Drafter] | None = None,
        cost: StepCostModel | None = None,
        **settings: Any,
    ) -> None:
        """`cost` frozen: no measurement decides what pays, or how much is computed at once."""
        self.runner = runner if isinstance(runner, CheckedRunner) else CheckedRunner(runner)
        config = EngineConfig(threads=1, swap_space_mb=swap_space_mb, cache_ram_mb=cache_mb, **settings)
        policy = eager_drafts(new_drafter, config.draft_tokens) if new_drafter is not None else None
        self.loop = EngineCore(self.runner, config, self._take, cost=cost, spec_decode=policy)
        self.scheduler = self.loop.scheduler
        self.answers: dict[str, Answer] = {}

    def freeze_cost(self) -> Self:
        """From now on no measurement decides what pays, or how much is computed at once."""
        self.scheduler.budget.cost.frozen = True
        return self

    def _take(self, report: Report) -> None:
        if isinstance(report, StepReport):
            for delta in report.outputs:
                self.answers[delta.request_id].take(delta)

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.answers[request.id] = Answer()
            self.scheduler.add(request)

    def step(self, count: int = 1) -> None:
        """Some steps; after each, nobody shares a sequence id (law 2)."""
        for _ in range(count):
            self.loop.step()
            leases = self.scheduler.pool.leases
            assert len({lease.seq_id for lease in leases}) == len(leases)
            assert len({lease.request_id for lease in leases}) == len(leases)
            for lease in leases:
                self.answers[lease.request_id].ids.add(lease.seq_id)

    def finish(self, steps: int = 20_000) -> dict[str, Answer]:
        """Step until everybody is answered; then everything is zero (law 7)."""
        for _ in range(steps):
            self.step()  # once at least: it brings the deltas of cancelled requests, too
            if self.scheduler.idle:
                break
        assert self.scheduler.idle, f"not done after {steps} steps"
        self.check_idle()
        return self.answers

    def check_idle(self) -> None:
        self.scheduler.check_idle()
        assert self.scheduler.pool.leases == () and not self.scheduler.pool.retired
        assert self.scheduler.cells_used == 0
        assert [self.runner.next_position(i) for i in range(self.runner.limits.sequences)] == [
            0
        ] * self.runner.limits.sequences
        assert self.runner.open_samplers == 0
        assert all(answer.finish_reason is not None for answer in self.answers.values())


def ask(
    name: str, prompt: Sequence[int], max_tokens: int = 8, *, logprobs: int = 2, **sampling: Any
) -> Request:
    """A greedy request, unless `sampling` says otherwise."""
    params = SamplingParams(**{"temperature": 0, **sampling})
    return Request(id=name, prompt=tuple(prompt), max_tokens=max_tokens, sampling=params, logprobs=logprobs)


def words(seed: int, length: int) -> Tokens:
    """A prompt of `length` tokens, the same for the same seed."""
    source = random.Random(seed)
    return tuple(source.randrange(32, 127) for _ in range(length))


def text_of(vocabulary: Vocabulary, tokens: Sequence[int]) -> str:
    """The text of tokens, without the bytes of a last character that is not complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(b"".join(map(vocabulary.piece, tokens)))


def feed(runner: ModelRunner, seq_id: int, tokens: Sequence[int], logprobs: int = 0) -> TokenLogprob | None:
    """Put tokens behind what a sequence holds, in steps as large as they may be.

    With `logprobs`, what the model says of the next token; the choice is greedy.
    """
    size = runner.limits.batch_tokens
    sampler = runner.create_sampler(GREEDY)
    found: TokenLogprob | None = None
    for begin in range(0, len(tokens), size):
        chunk = tokens[begin : begin + size]
        last = begin + size >= len(tokens)
        position = runner.next_position(seq_id)
        outputs = 1 if last and logprobs else 0
        result = runner.run(
            Batch((Row(seq_id, position, chunk, outputs, sampler, logprobs=logprobs * outputs),))
        )
        assert result.status is StepStatus.DONE
        if outputs:
            (found,) = result.rows[0].logprobs
    sampler.close()
    return found


def says(runner: ModelRunner, seq_id: int, token: int, count: int = 8) -> dict[int, float]:
    """What a sequence says after one more token: the likeliest tokens and their logprobs."""
    found = feed(runner, seq_id, [token], count)
    assert found is not None
    return dict(found.top)


def row(runner: ModelRunner, seq_id: int, tokens: Sequence[int], outputs: int = 0) -> Row:
    return Row(seq_id, runner.next_position(seq_id), tokens, outputs, runner.create_sampler(GREEDY))


class Aborts:
    """llama.cpp's abort callback: counts the graph nodes of a decode, and stops it at node `at`."""

    def __init__(self, runner: LlamaRunner) -> None:
        self.nodes = 0
        self.at: int | None = None
        self._callback = runner._api.ggml_abort_callback(self._called)
        self.runner = runner

    def _called(self, _: Any) -> bool:
        self.nodes += 1
        return self.at is not None and self.nodes > self.at

    @contextmanager
    def watching(self) -> Iterator[Aborts]:
        api, pointer = self.runner._api, self.runner._context.pointer
        api.llama_set_abort_callback(pointer, self._callback, None)
        try:
            yield self
        finally:
            api.llama_set_abort_callback(pointer, api.ggml_abort_callback(), None)


def native(runner: ModelRunner) -> LlamaRunner:
    """The real runner inside."""
    inner = runner.inner if isinstance(runner, CheckedRunner) else runner
    assert isinstance(inner, LlamaRunner)
    return inner
