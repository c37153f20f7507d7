"""The scripted model: a runner that answers with the text its prompt holds."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
from cllm.types import EmbedLimits, Limits, ModelInfo, Pooling, SamplingParams, TokenBound, TokenLogprob

END_TOKEN = 256
TURN = 257  # a control token: the chat template opens the assistant's turn with it
VOCABULARY_SIZE = 258
VECTOR_LENGTH = 8
# Roles and tools as text; an answer, earlier or to come, follows on TURN. Calls are written as Hermes does.
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
BEGIN, NEXT, END, FAIL = "\x02", "\x1e", "\x03", "\x04"


def say(text: str, *later: str, fails: bool = False) -> str:
    """A prompt, or a part of one, that makes `ScriptedRunner` answer `text` and then, with `fails`, fail.

    The turns that follow on it without a script of their own, such as the result of a tool call, are answered
    by the texts of `later`, one each; the last of all texts again and again.
    """
    return f"{BEGIN}{NEXT.join((text, *later))}{FAIL if fails else ''}{END}"


def call_tool(name: str, arguments: Mapping[str, Any]) -> str:
    """A tool call as the scripted model writes it: a text for `say`."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def find_script(memory: Sequence[int]) -> tuple[bytes, bool] | None:
    """The rest of the last script in a sequence's tokens; True where it fails after that."""
    tokens = np.asarray(memory, np.uint16)
    turns = np.flatnonzero(tokens == TURN)
    plain = np.where(tokens < END_TOKEN, tokens, 0).astype(np.uint8).tobytes()
    begin = plain.rfind(BEGIN.encode(), 0, int(turns[-1]) if len(turns) else len(plain))
    end = plain.find(END.encode(), begin)
    if begin < 0 or end < 0:
        return None
    answer = int(turns[-1]) + 1 if len(turns) else end + 1
    answered = int(np.count_nonzero(turns > end)) - 1
    texts = plain[begin + 1 : end].split(NEXT.encode())
    text = texts[max(0, min(answered, len(texts) - 1))]
    return text.removesuffix(FAIL.encode())[len(memory) - answer :], text.endswith(FAIL.encode())


def next_token(memory: Sequence[int], seed: int = 0, *, ends: bool = True) -> int:
    """The fake model: a lower-case letter (rarely, the end token) that depends on every token before it."""
    state = 2166136261 ^ seed
    for token in memory:
        state = ((state ^ token) * 16777619) & 0xFFFFFFFF
    if ends and state % 61 == 0:
        return END_TOKEN
    return ord("a") + (state >> 7) % 26


def make_vector(tokens: Sequence[int]) -> bytes:
    """The scripted model's embedding of an input."""
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
    infill: Any = None  # InfillTokens, where a test gives some

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


class ScriptedSampler:
    """Holds what a request asks for; there is nothing to free."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def _do_nothing(self, *_: Any) -> None:
        """It keeps no history."""

    accept = skip = close = _do_nothing


class ScriptedRunner(ModelRunner):
    """A model runner that answers with the text its prompt holds (`say`), else with letters.

    `step_s` is how long a step takes.
    """

    def __init__(
        self,
        *,
        sequences: int = 4,
        cells: int = 4096,
        batch_tokens: int = 64,
        unified: bool = False,
        step_s: float = 0.0,
        pooling: Pooling = Pooling.MEAN,
        chat_template: str | None = None,
    ) -> None:
        sequence_cells = cells if unified else cells // sequences
        self.limits = Limits(
            sequences=sequences,
            cells=cells,
            sequence_cells=sequence_cells,
            request_tokens=sequence_cells,
            batch_tokens=batch_tokens,
            unified=unified,
            embed=EmbedLimits(tokens=256, batch_tokens=batch_tokens, rows=4, chunked=True),
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
            pooling=pooling,
            vector_length=VECTOR_LENGTH,
        )
        self.vocabulary = FakeVocabulary()
        self.memory: list[list[int]] = [[] for _ in range(sequences)]
        self.embedding_memory: list[int] = []  # of a long input that is partly computed
        self.step_s = step_s
        self._interrupted = threading.Event()
        self._submitted: Batch | None = None

    def submit(self, batch: Batch) -> None:
        self._submitted = batch

    def collect(self) -> StepResult:
        batch, self._submitted = self._submitted, None
        assert batch is not None, "nothing was submitted"
        return self._embed(batch) if batch.kind is BatchKind.EMBED else self._decode(batch)

    def _decode(self, batch: Batch) -> StepResult:
        if any(row.outputs and self._script_fails(row) for row in batch.rows):
            return StepResult(StepStatus.BAD_BATCH, code=-1)
        if self._interrupted.wait(self.step_s) if self.step_s else self._interrupted.is_set():
            return StepResult(StepStatus.ABORTED, code=2)
        if self.limits.unified and sum(map(len, self.memory)) + batch.token_count > self.limits.cells:
            return StepResult(StepStatus.NO_ROOM, code=1)
        results = []
        for row in batch.rows:
            self._store(row, batch)
            result = self._sample(row) if row.outputs else RowResult()
            results.append(result._replace(scored=self._score(row)))
        return StepResult(StepStatus.DONE, tuple(results), ubatches=1, compute_s=self.step_s)

    def _script_fails(self, row: Row) -> bool:
        """The script says so, and its text was said."""
        return find_script([*self.memory[row.seq_id], *row.tokens]) == (b"", True)

    def _store(self, row: Row, batch: Batch) -> None:
        self.memory[row.seq_id].extend(row.tokens)

    def _next_token(self, memory: Sequence[int], params: SamplingParams) -> int:
        """The model's next token, before any mask."""
        if (script := find_script(memory)) is None:
            return next_token(memory, params.seed or 0, ends=not params.ignore_eos)
        return script[0][0] if script[0] else END_TOKEN

    def _sample(self, row: Row) -> RowResult:
        """Sample token after token while drafts are accepted. Rejected draft tokens stay in memory."""
        assert isinstance(row.sampler, ScriptedSampler)
        params = row.sampler.params
        memory = self.memory[row.seq_id]
        drafts = list(row.tokens[len(row.tokens) - row.outputs + 1 :])
        tokens: list[int] = []
        for place in range(row.outputs):
            token = self._next_token(memory[: len(memory) - len(drafts) + place], params)
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
        time.sleep(self.step_s)
        held, self.embedding_memory = self.embedding_memory, []
        results = []
        for row in batch.rows:
            tokens = [*held, *row.tokens]
            if not row.outputs:
                self.embedding_memory = tokens
            results.append(RowResult(embedding=make_vector(tokens)) if row.outputs else RowResult())
        return StepResult(StepStatus.DONE, tuple(results), ubatches=1, compute_s=self.step_s)

    def reset_embedding(self) -> None:
        self.embedding_memory = []

    def interrupt(self, stop: bool) -> None:
        (self._interrupted.set if stop else self._interrupted.clear)()

    def create_sampler(self, params: SamplingParams) -> Sampler:
        return ScriptedSampler(params)

    def next_position(self, seq_id: int) -> int:
        batch = self._submitted
        rows = batch.rows if batch is not None and batch.kind is not BatchKind.EMBED else ()
        submitted = next((len(row.tokens) for row in rows if row.seq_id == seq_id), 0)
        return len(self.memory[seq_id]) + submitted

    def truncate(self, seq_id: int, length: int, checkpoint: KVState | None = None) -> int:
        del self.memory[seq_id][length:]
        return len(self.memory[seq_id])

    def copy(self, source: int, target: int, length: int) -> int:
        self.memory[target] = self.memory[source][:length]
        return length

    def save(self, seq_id: int) -> bytes | None:
        return np.array(self.memory[seq_id], np.int32).tobytes()

    def state_bytes(self, seq_id: int) -> int:
        return 4 * len(self.memory[seq_id])

    def restore(self, seq_id: int, state: KVState) -> bool:
        self.memory[seq_id] = np.frombuffer(state, np.int32).tolist()
        return True

    def state_fingerprint(self) -> str:
        return "fake"

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        """There are no adapters, and nothing to allocate or free."""

    open_embedding = load_adapter = unload_adapter = close = _do_nothing
