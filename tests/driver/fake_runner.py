"""A model runner without a model that checks its caller, and whose native calls may fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

from msgspec.structs import replace

from cllm.adapters import Adapter, split_key
from cllm.backend.base import Batch, BatchKind, KVState, Row, Sampler, StepResult, StepStatus
from cllm.errors import AdapterRefused
from cllm.testing.scripted import END_TOKEN, ScriptedRunner, ScriptedSampler, next_token
from cllm.types import EmbedLimits, Pooling, SamplingParams

TOKEN_BITS = 9  # of a token in memory; the bits above are a mark
MEDIA_WIDTH = 3


def mark(adapter: str) -> int:
    """What tokens are marked with in memory that were computed with a set of adapters."""
    return (crc32(adapter.encode()) % 127 + 1) << TOKEN_BITS if adapter else 0


def expected_text(
    prompt: Sequence[int],
    max_tokens: int,
    seed: int = 0,
    *,
    ends: bool = True,
    adapter: str = "",
    adapter_from: int = 0,
) -> str:
    """The text a request must yield, computed without an engine."""
    computed_with = mark(adapter)
    memory = [*prompt[:adapter_from], *(token | computed_with for token in prompt[adapter_from:])]
    text = ""
    for _ in range(max_tokens):
        token = next_token(memory, seed, ends=ends)
        if token == END_TOKEN:
            break
        memory.append(token | computed_with)
        text += chr(token)
    return text


class FakeSampler(ScriptedSampler):
    """A sampler that its runner counts, so that a leak shows."""

    def __init__(self, runner: FakeRunner, params: SamplingParams) -> None:
        super().__init__(params)
        self.runner = runner
        self.closed = False
        runner.open_samplers += 1

    def accept(self, tokens: Sequence[int]) -> None:
        assert not self.closed

    def skip(self, token: int) -> None:
        assert not self.closed

    def close(self) -> None:
        assert not self.closed, "a sampler was closed twice"
        self.closed = True
        self.runner.open_samplers -= 1


class FakeRunner(ScriptedRunner):
    """A model runner without a model. It keeps every contract of `ModelRunner` and checks its caller's.

    Its next token is a function of all tokens in a sequence's KV memory, so the right text (`expected_text`)
    proves that the memory held exactly the right tokens: a leaked cell, a shared slot or a lost token shows.
    `fail` is called before each native call, with the call's number and name. It returns None, an exception
    to raise, or for a step the status of its result. `step_s` is how long a step takes.
    """

    def __init__(
        self,
        *,
        sequences: int = 4,
        parallel: int = 0,
        cells: int = 4096,
        batch_tokens: int = 64,
        request_tokens: int = 0,
        unified: bool = False,
        trimmable: bool = True,
        step_s: float = 0.0,
        embed: EmbedLimits | None = None,
        generates: bool = True,
        pooling: Pooling = Pooling.MEAN,
        chat_template: str | None = None,
        fail: Callable[[int, str], Exception | StepStatus | None] | None = None,
    ) -> None:
        super().__init__(
            sequences=sequences,
            cells=cells,
            batch_tokens=batch_tokens,
            unified=unified,
            step_s=step_s,
            pooling=pooling,
            chat_template=chat_template,
        )
        limits = self.limits
        self.limits = replace(
            limits,
            parallel=parallel,
            request_tokens=request_tokens or limits.request_tokens,
            embed=embed or limits.embed,
        )
        self.info = replace(self.info, recurrent=not trimmable, generates=generates)
        self.media_width = MEDIA_WIDTH
        self.embedding_open = False
        self.trimmable = trimmable
        self.fail = fail
        self.calls = 0
        self.open_samplers = 0
        self.closed = False
        self.adapters: dict[str, int] = {}
        self._adapter = ""  # key of the set in use
        self.switches = 0  # of it
        self.switch_s = 0.0  # that each takes

    def _native(self, name: str) -> StepStatus | None:
        number, self.calls = self.calls, self.calls + 1
        outcome = self.fail(number, name) if self.fail is not None else None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def submit(self, batch: Batch) -> None:
        assert not self.closed and self._submitted is None, "collect comes before the next submit"
        super().submit(batch)

    def _decode(self, batch: Batch) -> StepResult:
        self._check(batch)
        switched = batch.adapter != self._adapter
        self.switches += switched
        self._adapter = batch.adapter
        status = self._native("collect")
        result = super()._decode(batch) if status in (None, StepStatus.DONE) else _ended(status)
        if result.status in (StepStatus.ABORTED, StepStatus.FAILED):
            self._store(batch.rows[0], batch)  # as in llama.cpp: what was computed before stays in memory
        return result._replace(compute_s=result.compute_s + self.switch_s * switched)

    def _script_fails(self, row: Row) -> bool:
        return False

    def _store(self, row: Row, batch: Batch) -> None:
        self.memory[row.seq_id].extend(token | mark(batch.adapter) for token in row.tokens)

    def _next_token(self, memory: Sequence[int], params: SamplingParams) -> int:
        return next_token(memory, params.seed or 0, ends=not params.ignore_eos)

    def _embed(self, batch: Batch) -> StepResult:
        limits, held = self.limits.embed, self.embedding_memory
        assert self.embedding_open
        assert [row.seq_id for row in batch.rows] == sorted({row.seq_id for row in batch.rows})
        assert len(batch.rows) <= limits.rows
        assert batch.token_count <= limits.batch_tokens or (len(batch.rows) == 1 and not limits.chunked)
        assert all(row.position == 0 for row in batch.rows) or len(batch.rows) == 1
        assert all(row.tokens and row.position == len(held) for row in batch.rows), "a lost or stale chunk"
        status = self._native("embed")
        refused = any(END_TOKEN in row.tokens for row in batch.rows)  # this model rejects it
        if status in (None, StepStatus.DONE) and not refused:
            return super()._embed(batch)
        self.embedding_memory = []
        return _ended(StepStatus.BAD_BATCH if status in (None, StepStatus.DONE) else status)

    def open_embedding(self) -> None:
        self._native("open_embedding")
        self.embedding_open = True

    def reset_embedding(self) -> None:
        self._native("reset_embedding")
        super().reset_embedding()

    def check_adapter(self, adapter: Adapter) -> Adapter:
        """The digest is one of the file's name; a file named `refused` is."""
        self._native("check_adapter")
        digest = f"{crc32(adapter.file.encode()):08x}"
        if "refused" in adapter.file or adapter.digest not in ("", digest):
            raise AdapterRefused(f"adapter {adapter.name}: the fake model refuses it")
        return replace(adapter, digest=digest, size=len(adapter.file))

    def load_adapter(self, adapter: Adapter) -> None:
        self._native("load_adapter")
        self.adapters[adapter.digest] = adapter.size

    def unload_adapter(self, digest: str) -> None:
        self._native("unload_adapter")
        self.adapters.pop(digest, None)

    def _check(self, batch: Batch) -> None:
        ids = [row.seq_id for row in batch.rows]
        assert split_key(batch.adapter).keys() <= self.adapters.keys(), "the set is not loaded"
        assert ids == sorted(set(ids)), f"rows out of order or repeated: {ids}"
        assert 0 < batch.token_count + sum(batch.padding.values()) <= self.limits.batch_tokens
        lengths = {row.seq_id: row.position + len(row.tokens) for row in batch.rows}
        for seq_id, count in batch.padding.items():
            assert ids[0] <= seq_id <= ids[-1] and (seq_id in ids or count == 1)
            assert lengths.get(seq_id, 0) + count <= self.limits.sequence_cells
            assert self.trimmable or not (self.memory[seq_id] or seq_id in ids), "padding is removed again"
        media = [row.media for row in batch.rows if row.media is not None]
        assert len(media) == (len(ids) if batch.kind is BatchKind.MEDIA else 0), "tokens and rows are mixed"
        last = min(self.memory[ids[0]][-1:], default=0)  # negative inside of a picture
        assert all(each.causal for each in media) or (len(ids) == 1 and last >= 0), "cut or not alone"
        for row in batch.rows:
            assert row.media is None or row.media.rows.shape == (len(row.tokens), MEDIA_WIDTH)
            assert row.media is not None or min(row.tokens) >= 0
            assert row.media is None or self.token_rows is not None or max(row.tokens) < 0
            assert row.tokens and row.outputs <= len(row.tokens)
            assert row.outputs <= 1 or (self.trimmable and row.mask is None), "drafts cannot be rolled back"
            assert row.position == len(self.memory[row.seq_id]), "positions must follow the memory"
            assert row.position + len(row.tokens) <= self.limits.sequence_cells

    def create_sampler(self, params: SamplingParams) -> Sampler:
        self._native("create_sampler")
        return FakeSampler(self, params)

    def next_position(self, seq_id: int) -> int:
        self._native("next_position")
        return super().next_position(seq_id)

    def min_length(self, seq_id: int) -> int:
        return 0 if self.trimmable else len(self.memory[seq_id])

    def checkpoint(self, seq_id: int) -> bytes | None:
        return self.save(seq_id)

    def truncate(self, seq_id: int, length: int, checkpoint: KVState | None = None) -> int:
        self._native("truncate")
        assert length >= 0
        if checkpoint is not None:
            state = memoryview(checkpoint).cast("B").cast("i").tolist()
            assert self.memory[seq_id][:length] == state, "the checkpoint is of other tokens"
        usable = length >= self.min_length(seq_id) or checkpoint is not None
        return super().truncate(seq_id, length if usable else 0)

    def copy(self, source: int, target: int, length: int) -> int:
        self._native("copy")
        assert source != target and not self.memory[target] and length <= len(self.memory[source])
        if not self.trimmable and length < len(self.memory[source]):
            return 0
        return super().copy(source, target, length)

    def save(self, seq_id: int) -> bytes | None:
        self._native("save")
        return super().save(seq_id)

    def restore(self, seq_id: int, state: KVState) -> bool:
        self._native("restore")
        assert not self.memory[seq_id]
        return super().restore(seq_id, state)

    def close(self) -> None:
        self.closed = True


def _ended(status: StepStatus | None) -> StepResult:
    assert status is not None
    return StepResult(status, code=status.value)
