"""A runner that checks its caller, and what tests do on a bare runner."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cllm.backend.base import (
    Batch,
    BatchKind,
    KVState,
    ModelRunner,
    Row,
    Sampler,
    StepResult,
    StepStatus,
)
from cllm.backend.llama.runner import LlamaRunner
from cllm.backend.llama.sampler import LlamaSampler
from cllm.types import SamplingParams, TokenLogprob, Vocabulary
from tests.driver.fake_runner import FakeRunner, FakeSampler

GREEDY = SamplingParams(temperature=0)


def forward(name: str) -> Any:
    """A method that the runner inside has."""
    return lambda self, *given: getattr(self.inner, name)(*given)


class CheckedRunner(ModelRunner):
    """A runner that checks the batches it is given, records them, and fails where `fail` says so.

    `fail` gets the number of a step and its batch; a result that it returns becomes the step's result.
    """

    def __init__(self, inner: ModelRunner) -> None:
        self.inner = inner
        self.info, self.limits, self.vocabulary = inner.info, inner.limits, inner.vocabulary
        self.adapters = inner.adapters
        self.media_width, self.has_head = inner.media_width, inner.has_head
        self.token_rows = inner.token_rows
        self.fail: Callable[[int, Batch], StepResult | None] = lambda number, batch: None
        self.batches: list[Batch] = []
        self.samplers: list[Sampler] = []
        self.saves = 0
        self._cells: list[list[int]] = [[] for _ in range(inner.limits.sequences)]  # by name, of each slot
        self._cell_count = 0
        self._failed: StepResult | None = None  # of the step in flight

    interrupt, close, create_drafter = map(forward, ("interrupt", "close", "create_drafter"))
    next_position, min_length, settle = map(forward, ("next_position", "min_length", "settle"))
    checkpoint, state_bytes = map(forward, ("checkpoint", "state_bytes"))
    state_fingerprint, draft = forward("state_fingerprint"), forward("draft")
    open_embedding, reset_embedding = map(forward, ("open_embedding", "reset_embedding"))
    check_adapter, load_adapter, unload_adapter = map(
        forward, ("check_adapter", "load_adapter", "unload_adapter")
    )

    def submit(self, batch: Batch) -> None:
        ids = [row.seq_id for row in batch.rows]
        assert ids == sorted(set(ids)), f"rows out of order or repeated: {ids}"
        if batch.kind is BatchKind.GENERATE:
            assert batch.token_count <= self.limits.batch_tokens
            # The fake checks positions itself; asking it here would count as one of its native calls.
            for row in () if isinstance(self.inner, FakeRunner) else batch.rows:
                # After a picture with M-RoPE, text goes on some positions later.
                jumps = isinstance(self.inner, LlamaRunner) and self.inner._position_sections > 1
                position = (
                    row.position if not jumps else min(row.position, self.inner.next_position(row.seq_id))
                )
                assert position == self.inner.next_position(row.seq_id), "positions are derived"
        self.batches.append(batch)
        self._failed = self.fail(len(self.batches) - 1, batch)
        if self._failed is None:
            self.inner.submit(batch)

    def collect(self) -> StepResult:
        try:
            return self.inner.collect() if self._failed is None else self._failed
        finally:
            for seq_id in range(self.limits.sequences):
                self._follow(seq_id)

    def _follow(self, seq_id: int) -> int:
        """Give names to the cells that a slot has got, and forget those that it has no more."""
        if isinstance(self.inner, FakeRunner):  # asking it would count as one of its native calls
            length = len(self.inner.memory[seq_id])
        else:
            length = self.inner.next_position(seq_id)
        cells = self._cells[seq_id]
        del cells[length:]
        new = length - len(cells)
        cells += range(self._cell_count, self._cell_count + new)
        self._cell_count += new
        return length

    @property
    def cells_used(self) -> int:
        """Cells in use, as a unified KV counts them: a copy shares those of its source."""
        return len({cell for cells in self._cells for cell in cells})

    def create_sampler(self, params: SamplingParams) -> Sampler:
        self.samplers.append(self.inner.create_sampler(params))
        return self.samplers[-1]

    def truncate(self, seq_id: int, length: int, checkpoint: KVState | None = None) -> int:
        try:
            return self.inner.truncate(seq_id, length, checkpoint)
        finally:
            self._follow(seq_id)

    def copy(self, source: int, target: int, length: int) -> int:
        held = self.inner.copy(source, target, length)
        self._cells[target] = self._cells[source][:held]
        return held

    def save(self, seq_id: int) -> KVState | None:
        self.saves += 1
        return self.inner.save(seq_id)

    def restore(self, seq_id: int, state: KVState) -> bool:
        restored = self.inner.restore(seq_id, state)
        self._follow(seq_id)
        return restored

    @property
    def open_samplers(self) -> int:
        if isinstance(self.inner, FakeRunner):
            return self.inner.open_samplers
        return sum(map(_is_open, self.samplers))


def _is_open(sampler: Sampler) -> bool:
    if isinstance(sampler, FakeSampler):
        return not sampler.closed
    assert isinstance(sampler, LlamaSampler)
    return sampler.chain is not None and sampler.chain._finalizer.alive


def decode_pieces(pieces: Iterable[bytes]) -> str:
    """The text of token pieces as a client may see it: an incomplete last character is left out."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(pieces))


def text_of(vocabulary: Vocabulary, tokens: Sequence[int]) -> str:
    return decode_pieces(map(vocabulary.piece, tokens))


def feed(runner: ModelRunner, seq_id: int, tokens: Sequence[int], logprobs: int = 0) -> TokenLogprob | None:
    """Append tokens to a sequence, in batches as large as possible.

    With `logprobs`, the greedy next token and the logprobs of the likeliest.
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
    """The likeliest tokens after one more token, and their logprobs."""
    found = feed(runner, seq_id, [token], count)
    assert found is not None
    return dict(found.top)


def row(runner: ModelRunner, seq_id: int, tokens: Sequence[int], outputs: int = 0) -> Row:
    """A row that continues a sequence."""
    return Row(seq_id, runner.next_position(seq_id), tokens, outputs, runner.create_sampler(GREEDY))


class Aborts:
    """llama.cpp's abort callback: counts the graph nodes of a decode, and stops it at node `at`."""

    def __init__(self, runner: LlamaRunner) -> None:
        self.nodes = 0
        self.at: int | None = None
        self._callback = runner.api.ggml_abort_callback(self._called)
        self.runner = runner

    def _called(self, _: Any) -> bool:
        self.nodes += 1
        return self.at is not None and self.nodes > self.at

    @contextmanager
    def watching(self) -> Iterator[Aborts]:
        api, pointer = self.runner.api, self.runner.pointer
        api.llama_set_abort_callback(pointer, self._callback, None)
        try:
            yield self
        finally:
            api.llama_set_abort_callback(pointer, api.ggml_abort_callback(), None)


def native(runner: ModelRunner) -> LlamaRunner:
    """The llama.cpp runner inside."""
    inner = runner.inner if isinstance(runner, CheckedRunner) else runner
    assert isinstance(inner, LlamaRunner)
    return inner
