"""Trial: one setting, measured in a throw-away process that may die of it.

The process (`python -m cllm.tune.trial`) reads a line of JSON for each setting, a `TrialTask`. It makes a
context, times decodes in it, frees it and prints one line, a `Measurement`. The model stays loaded between
lines, unless a setting needs it loaded again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from importlib.resources import files
from statistics import median
from typing import Self

import msgspec
import numpy as np

from cllm.backend.base import KVState, Row
from cllm.backend.llama.context import CELL_BLOCK, LlamaContext, NativeBatch
from cllm.backend.llama.devices import wants_gpu
from cllm.backend.llama.library import DeferredFrees, Library, exit_reason, load
from cllm.backend.llama.model import LlamaModel
from cllm.backend.llama.threads import read_cpu_times
from cllm.config import EngineConfig
from cllm.errors import CllmError, EngineError

BATCH1_REPEATS = 3  # a step of one request is short, so there are more of them
START_S = 600.0
BETWEEN_STEPS_S = 0.0005  # stands for the work between steps: threads that do not poll fall asleep
MIN_S_TO_JUDGE = 0.2  # the system counts in hundredths of a second
LOGIT_ROWS = 128  # of a whole vocabulary each
MAX_PREFIXES = 3  # flash attention and layout are varied one after the other

Prefixes = dict[Hashable, KVState]  # saved states, by length and by the settings they depend on


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured. `long` of 0: short contexts only; `perplexity_tokens`: perplexity instead.

    `prompt`: how many tokens at the end of the longest context are timed as a prompt (0: none); the prefix
    before them is computed once and restored afterwards, for each of the `repeats`. `steps` of 0: no decode
    steps.
    """

    requests: int
    short: int = 32
    long: int = 800
    prompt: int = 64
    steps: int = 4
    repeats: int = 1
    perplexity_tokens: int = 0

    @property
    def decode_cells(self) -> int:
        """KV cells that decode steps fill behind a long context: alone, ragged, and all together."""
        return (BATCH1_REPEATS * self.steps + 1) + 2 * (self.steps + 1)


class TrialTask(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure, and how much of it."""

    config: EngineConfig
    plan: Plan


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Time that a setting takes, or the `problem` that prevented the measurement.

    `seconds` by case: of a prefill per token, otherwise per step (the median).
    """

    seconds: dict[str, float] = {}
    perplexity: float | None = None
    load_s: float = 0.0  # loading the model, where this setting needs that
    took_s: float = 0.0  # all the rest
    others: float | None = None  # cores that other programs used meanwhile
    problem: str = ""
    timed_out: bool = False  # the problem is that it takes too long


# The serving mix: tokens of prefill, and steps of one request or of all, after short or long contexts.
MIX = {"prefill": 2000, "one_short": 60, "one_long": 40, "all_short": 60, "ragged": 60, "all_long": 40}


def mix_seconds(seconds: Mapping[str, float]) -> float:
    """Seconds for the mix, from seconds per token (prefill) or per step (the rest)."""
    return sum(amount * seconds[case] for case, amount in MIX.items() if case in seconds)


def sample_text() -> str:
    """The text to measure with (the speed of a mixture of experts depends on it)."""
    return (files("cllm.tune") / "sample.txt").read_text(encoding="utf-8")


class TrialProcess:
    """Runs `command` (a trial program) and asks it. A context manager.

    A crash or a timeout is the result of its setting; the next setting gets a new process.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._stderr.close()

    def _end(self) -> None:
        if self._process is not None:
            with self._process:  # closes its pipes and waits
                self._process.kill()
            self._process = None

    def ask(self, config: EngineConfig, plan: Plan, limit_s: float) -> Measurement:
        """Measure one setting within `limit_s`; a new process may take `START_S` more, to load the model."""
        started = time.monotonic()
        if self._process is None:
            limit_s += START_S
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C is handled here, which then ends it
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        task = msgspec.json.encode(TrialTask(config=config, plan=plan))
        alarm = threading.Timer(limit_s, process.kill)
        alarm.daemon = True  # an interrupt may come before it can be cancelled
        try:
            alarm.start()
            process.stdin.write(task + b"\n")
            process.stdin.flush()
            return msgspec.json.decode(process.stdout.readline(), type=Measurement)
        except (OSError, msgspec.MsgspecError):
            timed_out = alarm.finished.is_set()
            problem = f"it took more than {limit_s:.0f} s" if timed_out else self._exit_reason(process)
            self._end()
            return Measurement(problem=problem, took_s=time.monotonic() - started, timed_out=timed_out)
        finally:
            alarm.cancel()

    def _exit_reason(self, process: subprocess.Popen[bytes]) -> str:
        try:
            code = process.wait(1)
        except subprocess.TimeoutExpired:
            return "it answered nonsense"
        self._stderr.seek(0)
        return exit_reason(code, self._stderr.read())


class Bench:
    """Decode bench: a context in which decodes are timed. Sequences are copied as saved states."""

    def __init__(
        self, context: LlamaContext, text: Sequence[int], task: TrialTask, prefixes: Prefixes
    ) -> None:
        self._context = context
        self._text = text
        self._plan, config = task.plan, task.config
        self._batch = NativeBatch(context.api, context.batch_tokens, task.plan.requests)
        layout = (config.flash_attention, config.unified_kv, config.cache_type_k, config.cache_type_v)
        self._kind = (config.model, *layout)
        self._prefixes = prefixes

    def measure(self) -> dict[str, float]:
        """Seconds by case. Raises EngineError where a decode fails."""
        plan, ids = self._plan, range(self._plan.requests)
        first, rest = ids[0], ids[1:]
        seconds: dict[str, float] = {}
        short: KVState = b""
        if plan.steps:
            prefill_s = self._fill(first, 0, plan.short)
            if plan.prompt:
                seconds["prefill"] = prefill_s
            short = self._save(first)
            seconds["one_short"] = self._decode([first])
            if rest:
                self._restore(rest, short)
                seconds["all_short"] = self._decode(ids)
        if plan.long <= plan.short:
            return seconds
        self._clear(ids)
        begin = max(0, plan.long - plan.prompt)
        taken = []
        for _ in range(plan.repeats):
            self._clear([first])
            self._restore_prefix(first, begin)
            taken.append(self._fill(first, begin, plan.long))
        seconds["prefill"] = median(taken)
        if plan.steps:
            long = self._save(first)
            seconds["one_long"] = self._decode([first])
            if rest:
                self._restore(rest, short)
                seconds["ragged"] = self._decode(ids)
                self._clear(rest)
                self._restore(rest, long)
                seconds["all_long"] = self._decode(ids)
        return seconds

    def perplexity(self) -> float:
        """Perplexity of the text as one prompt: e to the mean surprise at each token after the first."""
        text = self._text[: self._plan.perplexity_tokens]
        surprise = 0.0
        width = min(LOGIT_ROWS, self._batch.capacity)
        for begin in range(0, len(text) - 1, width):
            chunk = text[begin : begin + width]
            self._run([Row(0, begin, chunk, len(chunk), None)])
            following = np.array(text[begin + 1 : begin + 1 + len(chunk)])
            logits = self._context.logits(len(chunk))[: len(following)].astype(np.float64)
            top = logits.max(axis=1)
            total = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
            surprise += float((total - logits[np.arange(len(following)), following]).sum())
        return float(np.exp(surprise / (len(text) - 1)))

    def _run(self, rows: Sequence[Row]) -> float:
        self._batch.fill(rows)
        started = time.perf_counter()
        code = self._context.decode(self._batch.struct)
        self._context.api.llama_synchronize(self._context.pointer)  # until a GPU is done
        elapsed = time.perf_counter() - started
        if code != 0:
            raise EngineError(f"llama_decode returned {code}")
        return elapsed

    def _restore_prefix(self, seq_id: int, length: int) -> None:
        """Put the first tokens of the text into KV, untimed: from a saved state, or computed and saved."""
        key = (*self._kind, length)
        state = self._prefixes.get(key)
        if not length or (state is not None and self._context.restore(seq_id, state)):
            return
        self._clear([seq_id])
        self._fill(seq_id, 0, length)
        while len(self._prefixes) >= MAX_PREFIXES:
            del self._prefixes[next(iter(self._prefixes))]
        self._prefixes[key] = self._save(seq_id)

    def _fill(self, seq_id: int, begin: int, end: int) -> float:
        """Compute a part of the text as a prompt, in the largest chunks; seconds per token."""
        total = 0.0
        for place in range(begin, end, self._batch.capacity):
            tokens = self._tokens(place, min(end, place + self._batch.capacity))
            total += self._run([Row(seq_id, place, tokens, int(place + len(tokens) == end), None)])
        return total / (end - begin)

    def _decode(self, ids: Iterable[int]) -> float:
        """The median of some steps with one token each; the first one, a warm-up, does not count."""
        ids, taken = list(ids), []
        for _ in range(self._plan.steps * (BATCH1_REPEATS if len(ids) == 1 else 1) + 1):
            positions = {seq_id: self._context.next_position(seq_id) for seq_id in ids}
            rows = [Row(i, at, self._tokens(at, at + 1), 1, None) for i, at in positions.items()]
            time.sleep(BETWEEN_STEPS_S)
            taken.append(self._run(rows))
        return median(taken[1:])

    def _tokens(self, begin: int, end: int) -> list[int]:
        return [self._text[position % len(self._text)] for position in range(begin, end)]

    def _save(self, seq_id: int) -> KVState:
        if (state := self._context.save(seq_id)) is None:
            raise EngineError("a sequence's state cannot be saved")
        return state

    def _restore(self, ids: Iterable[int], state: KVState) -> None:
        # Not llama_memory_seq_cp: in a unified pool the copies would share cells, and look cheap.
        for seq_id in ids:
            if not self._context.restore(seq_id, state):
                raise EngineError("a sequence's state cannot be restored")

    def _clear(self, ids: Iterable[int]) -> None:
        for seq_id in ids:
            self._context.remove(seq_id)


class Trial:
    """The loaded model, and a context for each setting that comes in."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._deferred_frees = DeferredFrees()
        self._model: LlamaModel | None = None
        self._loaded: tuple[str, bool, int | str] | None = None
        self._prefixes: Prefixes = {}

    def measure(self, task: TrialTask) -> Measurement:
        """Measure one setting. An error that cllm detects is an answer; others end the process."""
        started, load_s, before = time.perf_counter(), 0.0, read_cpu_times()
        try:
            loaded, model = self._model, self._load(task.config)
            load_s = 0.0 if model is loaded else time.perf_counter() - started
            text = model.vocabulary.tokenize(sample_text(), add_special=True, parse_special=False)
            small = _small(task.config, task.plan)
            with LlamaContext(self._library, model, small, self._deferred_frees) as context:
                bench = Bench(context, text, task, self._prefixes)
                if task.plan.perplexity_tokens:
                    measured = Measurement(perplexity=bench.perplexity())
                else:
                    measured = Measurement(seconds=bench.measure())
        except CllmError as error:
            measured = Measurement(problem=error.message)
        elapsed, after = time.perf_counter() - started, read_cpu_times()
        others = None
        if before is not None and after is not None and elapsed >= MIN_S_TO_JUDGE:
            others = after.others_since(before)
        return msgspec.structs.replace(measured, load_s=load_s, took_s=elapsed - load_s, others=others)

    def _load(self, config: EngineConfig) -> LlamaModel:
        wanted = (config.model, config.extra_buffers, config.gpu_layers)
        if self._model is not None:
            if self._loaded == wanted:
                return self._model
            self._model.close()
            self._model = None
        if wants_gpu(config):
            self._library.load_module()
        self._model = LlamaModel(self._library, config, self._deferred_frees)
        self._loaded = wanted
        return self._model


def _small(config: EngineConfig, plan: Plan) -> EngineConfig:
    """The setting with as many KV cells as the plan touches: idle cells do not change the speed."""
    deepest = max(plan.perplexity_tokens, max(plan.long, plan.short) + plan.decode_cells)
    cells = -(-deepest // CELL_BLOCK) * CELL_BLOCK
    return msgspec.structs.replace(
        config, parallel=plan.requests, slots=0, ctx_size=plan.requests * cells, max_request_tokens=0
    )


def main() -> int:
    """Answer tasks until the input ends."""
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # or an abort would start a debugger first
    decoder = msgspec.json.Decoder(TrialTask)
    trial = Trial(load())
    for line in sys.stdin.buffer:
        answer = msgspec.json.encode(trial.measure(decoder.decode(line)))
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
