"""A model runner without a model: its next token is a function of all tokens in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np
from msgspec.structs import replace

from cllm.adapters import Adapter, split_key
from cllm.backend.base import (
    Batch,
    BatchKind,
    KVState,
    ModelRunner,
    Row,
    RowResult,
    Sampler,
    StepResult,
    StepStatus,
)
from cllm.errors import AdapterRefused
from cllm.types import (
    EmbedLimits,
    InfillTokens,
    Limits,
    ModelInfo,
    Pooling,
    SamplingParams,
    TokenBound,
    TokenLogprob,
)

END_TOKEN = 256
TURN = 257  # a control token: the chat template opens the assistant's turn with it
VOCABULARY_SIZE = 258
TOKEN_BITS = 9  # of a token in memory; the bits above are a mark
VECTOR_LENGTH = 8
MEDIA_WIDTH = 3


def next_token(memory: Sequence[int], seed: int = 0, *, ends: bool = True) -> int:
    """The fake model: a lower-case letter (rarely, the end token) that depends on every token before it."""
    state = 2166136261 ^ seed
    for token in memory:
        state = ((state ^ token) * 16777619) & 0xFFFFFFFF
    if ends and state % 61 == 0:
        return END_TOKEN
    return ord("a") + (state >> 7) % 26


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


def expected_vector(tokens: Sequence[int]) -> bytes:
    """The fake model's embedding of an input."""
    values = [float(next_token(tokens, seed, ends=False)) for seed in range(VECTOR_LENGTH)]
    return np.array([len(tokens), *values[1:]], np.float32).tobytes()


class FakeVocabulary:
    """A vocabulary of bytes; 256 is the end token, 257 a control token spelled `<|x|>`."""

    size = VOCABULARY_SIZE
    special_texts = frozenset({"<|x|>"})
    begin_text = ""
    end_text = "<|end|>"
    ends = frozenset({END_TOKEN})
    bound = TokenBound(longest=len("<|x|>"))
    infill: InfillTokens | None = None

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        parts = text.split("<|x|>") if parse_special else [text]
        tokens = [token for part in parts for token in (TURN, *part.encode())]
        return tokens[1:]

    def tokenize_pair(self, query: str, document: str) -> list[int]:
        return [*query.encode(), TURN, *document.encode()]

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def spelling(self, token: int) -> str:
        return {END_TOKEN: self.end_text, TURN: "<|x|>"}.get(token, "")

    def is_control(self, token: int) -> bool:
        return token >= END_TOKEN


class FakeSampler:
    """A sampler that its runner counts, so that a leak shows."""

    def __init__(self, runner: FakeRunner, params: SamplingParams) -> None:
        self.runner = runner
        self.params = params
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


def _unpack(state: KVState) -> list[int]:
    return [int(token) for token in np.frombuffer(state, np.int32)]


class FakeRunner(ModelRunner):
    """A model runner without a model. It keeps every contract of `ModelRunner` and checks its caller's.

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
        self.limits = Limits(
            sequences=sequences,
            parallel=parallel,
            cells=cells,
            sequence_cells=cells if unified else cells // sequences,
            request_tokens=request_tokens or (cells if unified else cells // sequences),
            batch_tokens=batch_tokens,
            unified=unified,
            embed=embed or EmbedLimits(tokens=256, batch_tokens=batch_tokens, rows=4, chunked=True),
        )
        self.info = ModelInfo(
            name="fake",
            architecture="fake",
            description="a function of the tokens in memory",
            parameters=0,
            size_bytes=0,
            vocabulary_size=VOCABULARY_SIZE,
            context_train=cells,
            embedding_length=0,
            layers=0,
            chat_template=chat_template,
            recurrent=not trimmable,
            generates=generates,
            pooling=pooling,
            vector_length=VECTOR_LENGTH,
        )
        self.vocabulary = FakeVocabulary()
        self.media_width = MEDIA_WIDTH
        self.memory: list[list[int]] = [[] for _ in range(sequences)]
        self.embedding_memory: list[int] = []  # of a long input that is partly computed
        self.embedding_open = False
        self.trimmable = trimmable
        self.step_s = step_s
        self._interrupted = threading.Event()
        self.fail = fail
        self.calls = 0
        self.open_samplers = 0
        self.closed = False
        self._submitted: Batch | None = None
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
        self._submitted = batch

    def collect(self) -> StepResult:
        batch, self._submitted = self._submitted, None
        assert batch is not None, "nothing was submitted"
        return self._embed(batch) if batch.kind is BatchKind.EMBED else self._decode(batch)

    def _decode(self, batch: Batch) -> StepResult:
        self._check(batch)
        switched = batch.adapter != self._adapter
        self.switches += switched
        self._adapter = batch.adapter
        status = self._native("collect")
        if self._interrupted.wait(self.step_s) if self.step_s else self._interrupted.is_set():
            status = StepStatus.ABORTED
        used = sum(map(len, self.memory)) + batch.token_count
        if status is None and self.limits.unified and used > self.limits.cells:
            status = StepStatus.NO_ROOM
        if status is not None and status is not StepStatus.DONE:
            if status in (StepStatus.ABORTED, StepStatus.FAILED):
                # As in llama.cpp: cells computed before the failure stay in memory.
                first = batch.rows[0]
                self.memory[first.seq_id].extend(token | mark(batch.adapter) for token in first.tokens)
            return StepResult(status, code=-2 if status is StepStatus.FAILED else 1)
        results = []
        for row in batch.rows:
            self.memory[row.seq_id].extend(token | mark(batch.adapter) for token in row.tokens)
            result = self._sample(row) if row.outputs else RowResult()
            results.append(result._replace(scored=self._score(row)))
        compute_s = self.step_s + self.switch_s * switched
        return StepResult(StepStatus.DONE, tuple(results), ubatches=1, compute_s=compute_s)

    def _sample(self, row: Row) -> RowResult:
        """Sample token after token while drafts are accepted. Rejected draft tokens stay in memory."""
        assert isinstance(row.sampler, FakeSampler)
        params = row.sampler.params
        memory = self.memory[row.seq_id]
        drafts = list(row.tokens[len(row.tokens) - row.outputs + 1 :])
        tokens: list[int] = []
        for place in range(row.outputs):
            known = memory[: len(memory) - len(drafts) + place]
            token = self._next_token(known, params)
            if row.mask is not None and not row.mask[token]:
                allowed = row.mask.nonzero()[0]  # the first at or after the model's own token
                token = int(allowed[allowed.searchsorted(token) % len(allowed)])
            tokens.append(token)
            if place < len(drafts) and drafts[place] != token:
                break
        logprobs = tuple(TokenLogprob(token, 0.0, ((token, 0.0),)) for token in tokens)
        return RowResult(tuple(tokens), logprobs if row.logprobs else ())

    def _score(self, row: Row) -> tuple[TokenLogprob, ...]:
        """A token that the model would have sampled is certain, any other has the probability 1/e."""
        memory = self.memory[row.seq_id]
        known = len(memory) - len(row.scored) - row.outputs + 1
        likely = [next_token(memory[: known + place]) for place in range(len(row.scored))]
        return tuple(
            TokenLogprob(token, 0.0 if token == best else -1.0, ((best, 0.0),) * row.scored_top)
            for token, best in zip(row.scored, likely, strict=True)
        )

    def _embed(self, batch: Batch) -> StepResult:
        limits, held = self.limits.embed, self.embedding_memory
        assert self.embedding_open
        assert [row.seq_id for row in batch.rows] == sorted({row.seq_id for row in batch.rows})
        assert len(batch.rows) <= limits.rows
        assert batch.token_count <= limits.batch_tokens or (len(batch.rows) == 1 and not limits.chunked)
        assert all(row.position == 0 for row in batch.rows) or len(batch.rows) == 1
        assert all(row.tokens and row.position == len(held) for row in batch.rows), "a lost or stale chunk"
        status = self._native("embed")
        time.sleep(self.step_s)
        self.embedding_memory = []
        if status not in (None, StepStatus.DONE):
            return StepResult(status, code=-2 if status is StepStatus.FAILED else 1)
        if any(END_TOKEN in row.tokens for row in batch.rows):  # this model rejects it
            return StepResult(StepStatus.BAD_BATCH, code=-1)
        results = []
        for row in batch.rows:
            tokens = [*held, *row.tokens]
            if not row.outputs:
                self.embedding_memory = tokens
            results.append(RowResult(embedding=expected_vector(tokens)) if row.outputs else RowResult())
        return StepResult(StepStatus.DONE, tuple(results), ubatches=1, compute_s=self.step_s)

    def state_fingerprint(self) -> str:
        return "fake"

    def open_embedding(self) -> None:
        self._native("open_embedding")
        self.embedding_open = True

    def reset_embedding(self) -> None:
        self._native("reset_embedding")
        self.embedding_memory = []

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

    def _next_token(self, memory: Sequence[int], params: SamplingParams) -> int:
        """The model's next token, before any mask."""
        return next_token(memory, params.seed or 0, ends=not params.ignore_eos)

    def _check(self, batch: Batch) -> None:
        ids = [row.seq_id for row in batch.rows]
        assert split_key(batch.adapter).keys() <= self.adapters.keys(), "the set is not loaded"
        assert ids == sorted(set(ids)), f"rows out of order or repeated: {ids}"
        assert 0 < batch.token_count + len(batch.padding) <= self.limits.batch_tokens
        for seq_id in batch.padding:
            assert ids[0] < seq_id < ids[-1] and seq_id not in ids
            assert not self.memory[seq_id] or self.trimmable, "padding rows are removed again"
        media = [row.media for row in batch.rows if row.media is not None]
        assert len(media) == (len(ids) if batch.kind is BatchKind.MEDIA else 0), "tokens and rows are mixed"
        assert all(each.causal for each in media) or (len(ids) == 1 and not media[0].first), (
            "cut or not alone"
        )
        for row in batch.rows:
            assert row.media is None or row.media.rows.shape == (len(row.tokens), MEDIA_WIDTH)
            assert all((token < 0) == (row.media is not None) for token in row.tokens)
            assert row.tokens and row.outputs <= len(row.tokens)
            assert row.outputs <= 1 or (self.trimmable and row.mask is None), "drafts cannot be rolled back"
            assert row.position == len(self.memory[row.seq_id]), "positions must follow the memory"
            assert row.position + len(row.tokens) <= self.limits.sequence_cells

    def interrupt(self, stop: bool) -> None:
        (self._interrupted.set if stop else self._interrupted.clear)()

    def create_sampler(self, params: SamplingParams) -> Sampler:
        self._native("create_sampler")
        return FakeSampler(self, params)

    def next_position(self, seq_id: int) -> int:
        self._native("next_position")
        batch = self._submitted
        rows = batch.rows if batch is not None and batch.kind is not BatchKind.EMBED else ()
        submitted = next((len(row.tokens) for row in rows if row.seq_id == seq_id), 0)
        return len(self.memory[seq_id]) + submitted

    def min_length(self, seq_id: int) -> int:
        return 0 if self.trimmable else len(self.memory[seq_id])

    def checkpoint(self, seq_id: int) -> bytes | None:
        return self.save(seq_id)

    def truncate(self, seq_id: int, length: int, checkpoint: KVState | None = None) -> int:
        self._native("truncate")
        assert length >= 0
        memory = self.memory[seq_id]
        if checkpoint is not None:
            assert memory[:length] == _unpack(checkpoint), "the checkpoint is of other tokens"
        usable = length >= self.min_length(seq_id) or checkpoint is not None
        keep = len(memory) if length >= len(memory) else length if usable else 0
        del memory[keep:]
        return keep

    def copy(self, source: int, target: int, length: int) -> int:
        self._native("copy")
        assert source != target and not self.memory[target] and length <= len(self.memory[source])
        if not self.trimmable and length < len(self.memory[source]):
            return 0
        self.memory[target] = self.memory[source][:length]
        return length

    def save(self, seq_id: int) -> bytes | None:
        self._native("save")
        return np.array(self.memory[seq_id], np.int32).tobytes()

    def state_bytes(self, seq_id: int) -> int:
        return 4 * len(self.memory[seq_id])

    def restore(self, seq_id: int, state: KVState) -> bool:
        self._native("restore")
        assert not self.memory[seq_id]
        self.memory[seq_id] = _unpack(state)
        return True

    def close(self) -> None:
        self.closed = True
