"""`python -m cllm.tune.trial_worker`: a throw-away process that measures settings.

For each line on standard input (a `TrialTask`) it makes a context, times decodes in it, frees it and prints
one line (a `Measurement`). The model stays loaded between lines, unless a setting needs it loaded anew.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from cllm.backend.base import Row
from cllm.backend.llama.context import CELL_BLOCK, LlamaContext, NativeBatch
from cllm.backend.llama.library import DeferredFrees, Library, load
from cllm.backend.llama.model import LlamaModel
from cllm.backend.llama.threads import read_cpu_times
from cllm.config import EngineConfig
from cllm.errors import CllmError, EngineError
from cllm.tune.trial import ALONE, Measurement, Plan, TrialTask

BETWEEN_STEPS_S = 0.0005  # the engine's own work: long enough for threads that do not poll to fall asleep
MIN_S_TO_JUDGE = 0.2  # the system counts in hundredths of a second
LOGIT_ROWS = 128  # of a whole vocabulary each
MAX_BEGINNINGS = 3  # flash attention and layout are varied one after the other


class Beginnings:
    """States of the beginning of our text, by its length and by what makes them interchangeable."""

    def __init__(self) -> None:
        self._states: dict[Hashable, bytes] = {}

    def find(self, key: Hashable) -> bytes | None:
        return self._states.get(key)

    def keep(self, key: Hashable, state: bytes) -> None:
        """One more, and no more than `MAX_BEGINNINGS`: the oldest goes."""
        while len(self._states) >= MAX_BEGINNINGS:
            del self._states[next(iter(self._states))]
        self._states[key] = state


class Bench:
    """A context in which decodes are timed. Sequences are filled once and copied as saved states."""

    def __init__(
        self, context: LlamaContext, text: Sequence[int], task: TrialTask, beginnings: Beginnings
    ) -> None:
        self._context = context
        self._text = text
        self._plan = task.plan
        self._batch = NativeBatch(context.api, context.batch_tokens, task.plan.streams)
        config = task.config
        types = (config.cache_type_k, config.cache_type_v)
        self._kind = (config.model, config.flash_attention, config.unified_kv, *types)
        self._beginnings = beginnings

    def measure(self) -> dict[str, float]:
        """Seconds by case. Raises EngineError where a decode fails."""
        plan, everybody = self._plan, range(self._plan.streams)
        first, rest = everybody[0], everybody[1:]
        seconds: dict[str, float] = {}
        short = b""
        if plan.steps:
            prefill_s = self._fill(first, 0, plan.short)
            if plan.prompt:
                seconds["prefill"] = prefill_s
            short = self._save(first)
            seconds["one_short"] = self._decode([first])
            if rest:
                self._restore(rest, short)
                seconds["all_short"] = self._decode(everybody)
        if plan.long <= plan.short:
            return seconds
        self._clear(everybody)
        begin = max(0, plan.long - plan.prompt)
        self._begin(first, begin)
        seconds["prefill"] = self._fill(first, begin, plan.long)
        if plan.steps:
            long = self._save(first)
            seconds["one_long"] = self._decode([first])
            if rest:
                self._restore(rest, short)
                seconds["ragged"] = self._decode(everybody)
                self._clear(rest)
                self._restore(rest, long)
                seconds["all_long"] = self._decode(everybody)
        return seconds

    def perplexity(self) -> float:
        """Of the text, as one prompt: e to the mean surprise at each token after the first."""
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
        elapsed = time.perf_counter() - started
        if code != 0:
            raise EngineError(f"llama_decode returned {code}")
        return elapsed

    def _begin(self, seq_id: int, length: int) -> None:
        """The beginning of the text without its time: how it was computed does not matter to what follows."""
        key = (*self._kind, length)
        state = self._beginnings.find(key)
        if not length or (state is not None and self._context.restore(seq_id, state)):
            return
        self._clear([seq_id])
        self._fill(seq_id, 0, length)
        self._beginnings.keep(key, self._save(seq_id))

    def _fill(self, seq_id: int, begin: int, end: int) -> float:
        """Compute a part of the text as a prompt, in the largest chunks; seconds for each token."""
        total = 0.0
        for place in range(begin, end, self._batch.capacity):
            tokens = [self._token(at) for at in range(place, min(end, place + self._batch.capacity))]
            total += self._run([Row(seq_id, place, tokens, int(place + len(tokens) == end), None)])
        return total / (end - begin)

    def _decode(self, ids: Iterable[int]) -> float:
        """The median of some steps with a token of each; the first, which lays things out, is not counted."""
        ids, taken = list(ids), []
        for _ in range(_steps(self._plan, len(ids)) + 1):
            positions = {seq_id: self._context.next_position(seq_id) for seq_id in ids}
            rows = [Row(i, position, [self._token(position)], 1, None) for i, position in positions.items()]
            time.sleep(BETWEEN_STEPS_S)
            taken.append(self._run(rows))
        return median(taken[1:])

    def _token(self, position: int) -> int:
        return self._text[position % len(self._text)]

    def _save(self, seq_id: int) -> bytes:
        state = self._context.save(seq_id)
        if state is None:
            raise EngineError("a sequence's state cannot be saved")
        return state

    def _restore(self, ids: Iterable[int], state: bytes) -> None:
        # not llama_memory_seq_cp: in one pool the copies would share their cells, and look cheap
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
        self._loaded: tuple[str, bool, int] | None = None
        self._beginnings = Beginnings()

    def measure(self, task: TrialTask) -> Measurement:
        """One setting. What cllm can tell is wrong with it is an answer, too; the rest kills the process."""
        started, load_s, before = time.perf_counter(), 0.0, read_cpu_times()
        try:
            loaded, model = self._model, self._load(task.config)
            load_s = 0.0 if model is loaded else time.perf_counter() - started
            text = model.vocabulary.tokenize(task.text, add_special=True, parse_special=False)
            plan = task.plan
            with LlamaContext(
                self._library, model, _small(task.config, plan), self._deferred_frees
            ) as context:
                bench = Bench(context, text, task, self._beginnings)
                if plan.perplexity_tokens:
                    measured = Measurement(perplexity=bench.perplexity())
                else:
                    measured = Measurement(seconds=bench.measure())
        except CllmError as error:
            measured = Measurement(problem=error.message)
        elapsed, after = time.perf_counter() - started, read_cpu_times()
        others = None
        if before is not None and after is not None and elapsed >= MIN_S_TO_JUDGE:
            others = max(0.0, after.busy - before.busy - (after.own - before.own)) / elapsed
        return msgspec.structs.replace(measured, load_s=load_s, took_s=elapsed - load_s, others=others)

    def _load(self, config: EngineConfig) -> LlamaModel:
        wanted = (config.model, config.extra_buffers, config.gpu_layers)
        if self._model is not None and self._loaded == wanted:
            return self._model
        if self._model is not None:
            self._model.close()
            self._model = None
        self._model = LlamaModel(
            self._library,
            Path(config.model),
            self._deferred_frees,
            extra_buffers=config.extra_buffers,
            gpu_layers=config.gpu_layers,
        )
        self._loaded = wanted
        return self._model


def _steps(plan: Plan, streams: int) -> int:
    return plan.steps * (ALONE if streams == 1 else 1)


def _small(config: EngineConfig, plan: Plan) -> EngineConfig:
    """The setting with no more cells than the plan touches: how many lie idle beside them does not matter."""
    deepest = max(plan.perplexity_tokens, max(plan.long, plan.short) + plan.room)
    cells = -(-deepest // CELL_BLOCK) * CELL_BLOCK
    return msgspec.structs.replace(
        config, parallel=plan.streams, ctx_size=plan.streams * cells, max_request_tokens=0
    )


def main() -> int:
    """Until the input ends."""
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
