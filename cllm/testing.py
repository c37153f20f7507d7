"""A runner without a model: exact, instant, and able to fail on demand. For the engine's own tests.

Its "model" is a function of the tokens that are in a sequence's memory. So text that comes out right
proves that memory held exactly the right tokens: a leaked cell, a shared id or a lost token shows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from cllm.backend.base import Batch, BatchKind, ModelRunner, Row, RowResult, Sampler, StepResult, StepStatus
from cllm.types import EmbedLimits, InfillTokens, Limits, ModelInfo, Pooling, SamplingParams, TokenLogprob

END_TOKEN = 256
VOCABULARY_SIZE = 258
VECTOR_LENGTH = 8


def next_token(memory: Sequence[int], seed: int = 0, *, ends: bool = True) -> int:
    """The fake model: a small letter (or, rarely, the end) that depends on every token before it."""
    state = 2166136261 ^ seed
    for token in memory:
        state = ((state ^ token) * 16777619) & 0xFFFFFFFF
    if ends and state % 61 == 0:
        return END_TOKEN
    return ord("a") + (state >> 7) % 26


def expected_text(prompt: Sequence[int], max_tokens: int, seed: int = 0, *, ends: bool = True) -> str:
    """What a request must yield, computed without any engine."""
    memory = list(prompt)
    text = ""
    for _ in range(max_tokens):
        token = next_token(memory, seed, ends=ends)
        if token == END_TOKEN:
            break
        memory.append(token)
        text += chr(token)
    return text


def expected_vector(tokens: Sequence[int]) -> bytes:
    """The fake model's vector of an input: what the last tokens would be, as numbers, for all of them."""
    values = [float(next_token(tokens, seed, ends=False)) for seed in range(VECTOR_LENGTH)]
    return np.array([len(tokens), *values[1:]], np.float32).tobytes()


class FakeVocabulary:
    """Bytes are tokens; 256 ends, 257 is a control token spelled `<|x|>`."""

    size = VOCABULARY_SIZE
    special_texts = frozenset({"<|x|>"})
    begin_text = ""
    end_text = "<|end|>"

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if not parse_special:
            return list(text.encode())
        tokens: list[int] = []
        for index, part in enumerate(text.split("<|x|>")):
            tokens += [257] * (index > 0) + list(part.encode())
        return tokens

    def tokenize_pair(self, query: str, document: str) -> list[int]:
        return [*query.encode(), 257, *document.encode()]

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def is_end(self, token: int) -> bool:
        return token == END_TOKEN

    def is_control(self, token: int) -> bool:
        return token >= END_TOKEN

    @property
    def ends(self) -> frozenset[int]:
        return frozenset({END_TOKEN})

    @property
    def infill(self) -> InfillTokens | None:
        return None


class FakeSampler:
    """Counts itself in and out of its runner, so that a leak shows."""

    def __init__(self, runner: FakeRunner, params: SamplingParams) -> None:
        self.runner = runner
        self.params = params
        self.closed = False
        runner.open_samplers += 1

    def accept(self, tokens: Sequence[int]) -> None:
        assert not self.closed

    def clone(self) -> Sampler:
        assert not self.closed
        return FakeSampler(self.runner, self.params)

    def close(self) -> None:
        assert not self.closed, "a sampler was closed twice"
        self.closed = True
        self.runner.open_samplers -= 1


class FakeRunner(ModelRunner):
    """Implements every contract of `ModelRunner`, and checks those of its caller.

    `fail` is asked before each native call, with its running number and name; what it returns happens:
    None (nothing), an exception (raised), or for `collect` a status (that result).
    """

    def __init__(
        self,
        *,
        sequences: int = 4,
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
        self._limits = Limits(
            sequences=sequences,
            cells=cells,
            sequence_cells=cells if unified else cells // sequences,
            request_tokens=request_tokens or (cells if unified else cells // sequences),
            batch_tokens=batch_tokens,
            unified=unified,
            embed=embed or EmbedLimits(tokens=256, batch_tokens=batch_tokens, rows=4, chunked=True),
        )
        self._info = ModelInfo(
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
        self._vocabulary = FakeVocabulary()
        self.memory: list[list[int]] = [[] for _ in range(sequences)]
        self.embedding_memory: list[int] = []  # of the long input that is half computed
        self.embedding_open = False
        self.trimmable = trimmable
        self.step_s = step_s
        self._interrupted = threading.Event()
        self.fail = fail
        self.calls = 0
        self.open_samplers = 0
        self.closed = False
        self._submitted: Batch | None = None

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def vocabulary(self) -> FakeVocabulary:
        return self._vocabulary

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
        if batch.kind is BatchKind.EMBED:
            return self._embed(batch)
        self._check(batch)
        status = self._native("collect")
        if self._interrupted.wait(self.step_s) if self.step_s else self._interrupted.is_set():
            status = StepStatus.ABORTED
        if status is None and self._over_full(batch):
            status = StepStatus.NO_ROOM
        if status not in (None, StepStatus.DONE):
            assert status is not None
            if not status.memory_intact:
                # As llama.cpp does: what was computed before the failure stays in memory.
                first = batch.rows[0]
                self.memory[first.seq_id].extend(first.tokens)
            return StepResult(status, code=-2 if status is StepStatus.FAILED else 1)
        results = []
        for row in batch.rows:
            memory = self.memory[row.seq_id]
            memory.extend(row.tokens)
            if not row.outputs:
                results.append(RowResult())
                continue
            results.append(self._chosen(row))
        return StepResult(StepStatus.DONE, tuple(results), ubatches=1, compute_s=self.step_s)

    def _chosen(self, row: Row) -> RowResult:
        """Token after token, as long as the next draft is what was chosen. Wrong drafts stay in memory."""
        assert isinstance(row.sampler, FakeSampler)
        params = row.sampler.params
        memory = self.memory[row.seq_id]
        drafts = list(row.tokens[len(row.tokens) - row.outputs + 1 :])
        tokens: list[int] = []
        for place in range(row.outputs):
            known = memory[: len(memory) - len(drafts) + place]
            token = self._choose(known, params)
            if row.mask is not None and not row.mask[token]:
                allowed = row.mask.nonzero()[0]  # the first at or after what the model wanted
                token = int(allowed[allowed.searchsorted(token) % len(allowed)])
            tokens.append(token)
            if place < len(drafts) and drafts[place] != token:
                break
        logprobs = (
            tuple(TokenLogprob(token, 0.0, ((token, 0.0),)) for token in tokens) if row.logprobs else ()
        )
        return RowResult(tuple(tokens), logprobs)

    def _embed(self, batch: Batch) -> StepResult:
        limits, held = self._limits.embed, self.embedding_memory
        assert self.embedding_open
        assert [row.seq_id for row in batch.rows] == sorted({row.seq_id for row in batch.rows})
        assert len(batch.rows) <= limits.rows
        assert batch.token_count <= limits.batch_tokens or (len(batch.rows) == 1 and not limits.chunked)
        assert all(row.position == 0 for row in batch.rows) or len(batch.rows) == 1
        assert all(row.tokens and row.position == len(held) for row in batch.rows), "a lost or stale chunk"
        status = self._native("embed")
        if self.step_s:
            time.sleep(self.step_s)
        self.embedding_memory = []
        if status not in (None, StepStatus.DONE):
            return StepResult(status, code=-2 if status is StepStatus.FAILED else 1)
        if any(END_TOKEN in row.tokens for row in batch.rows):  # what this model refuses to read
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

    def _choose(self, memory: Sequence[int], params: SamplingParams) -> int:
        """What the model says next, before any mask."""
        return next_token(memory, params.seed, ends=not params.ignore_eos)

    def _check(self, batch: Batch) -> None:
        ids = [row.seq_id for row in batch.rows]
        assert ids == sorted(set(ids)), f"rows out of order or repeated: {ids}"
        assert 0 < batch.token_count + len(batch.padding) <= self._limits.batch_tokens
        for seq_id in batch.padding:
            assert ids[0] < seq_id < ids[-1] and seq_id not in ids
            assert not self.memory[seq_id], "a padding row must be an empty slot"
        for row in batch.rows:
            assert row.tokens and row.outputs <= len(row.tokens)
            assert row.outputs <= 1 or (self.trimmable and row.mask is None), "drafts cannot be taken back"
            assert row.position == len(self.memory[row.seq_id]), "positions must follow the memory"
            assert row.position + len(row.tokens) <= self._limits.sequence_cells

    def _over_full(self, batch: Batch) -> bool:
        held = sum(len(memory) for memory in self.memory)
        return self._limits.unified and held + batch.token_count > self._limits.cells

    def interrupt(self, stop: bool) -> None:
        if stop:
            self._interrupted.set()
        else:
            self._interrupted.clear()

    def create_sampler(self, params: SamplingParams) -> Sampler:
        self._native("create_sampler")
        return FakeSampler(self, params)

    def next_position(self, seq_id: int) -> int:
        self._native("next_position")
        return len(self.memory[seq_id])

    def truncate(self, seq_id: int, length: int) -> int:
        self._native("truncate")
        memory = self.memory[seq_id]
        if length >= len(memory):
            return len(memory)
        keep = length if self.trimmable else 0
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
        return b"".join(token.to_bytes(2, "little") for token in self.memory[seq_id])

    def restore(self, seq_id: int, state: bytes) -> bool:
        self._native("restore")
        assert not self.memory[seq_id]
        self.memory[seq_id] = [
            int.from_bytes(state[index : index + 2], "little") for index in range(0, len(state), 2)
        ]
        return True

    def close(self) -> None:
        self.closed = True


TURN = 257  # the fake vocabulary's control token: the template opens the assistant's turn with it
# Roles and tools as text, then the token that opens the answer. What it says of tool calls names their
# format, as published templates do.
CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}, to be used as <tool_call>{...}</tool_call>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}\n{% endfor %}<|x|>"
)
BEGIN, END, FAIL = "\x02", "\x03", "\x04"


def say(text: str, *, fails: bool = False) -> str:
    """What to put into a prompt."""
    return f"{BEGIN}{text}{FAIL if fails else ''}{END}"


class Script:
    """An answer as its prompt dictates it, and how much of it has been said."""

    def __init__(self, text: bytes, said: int) -> None:
        self.fails = text.endswith(FAIL.encode())
        self.text = text.removesuffix(FAIL.encode())
        self.said = said

    @property
    def over(self) -> bool:
        return self.said >= len(self.text)


def script_of(memory: Sequence[int]) -> Script | None:
    """The script in a sequence's tokens, if there is one: the last of a conversation, or of a raw prompt."""
    turns = [index for index, token in enumerate(memory) if token == TURN]
    plain = bytes(token if token < 256 else 0 for token in memory)
    begin = plain.rfind(BEGIN.encode(), 0, turns[-1] if turns else len(plain))
    end = plain.find(END.encode(), begin)
    if begin < 0 or end < 0:
        return None
    answer = turns[-1] + 1 if turns else end + 1
    return Script(plain[begin + 1 : end], len(memory) - answer)


class ScriptedRunner(FakeRunner):
    """`FakeRunner`, with the answers of its prompts."""

    def collect(self) -> StepResult:
        assert self._submitted is not None
        for row in self._submitted.rows:
            script = script_of([*self.memory[row.seq_id], *row.tokens]) if row.outputs else None
            if script is not None and script.fails and script.over:
                self._submitted = None
                return StepResult(StepStatus.BAD_BATCH, code=-1)
        return super().collect()

    def _choose(self, memory: Sequence[int], params: SamplingParams) -> int:
        script = script_of(memory)
        if script is None:
            return next_token(memory, params.seed, ends=not params.ignore_eos)
        return END_TOKEN if script.over else script.text[script.said]
