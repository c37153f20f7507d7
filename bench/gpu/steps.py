"""Where the time of a step goes on this machine, inside the engine: no HTTP, no other process.

    python -m bench.gpu.steps MODEL STREAMS OUTPUT_TOKENS [TEMPERATURE [DRAFT_TOKENS]]

Prints a line of JSON for each of three rounds: tokens per second while all streams generate, and milliseconds
of a step by part. `sync` is waiting for the device; `report` and `prepare` (the next batch) go on meanwhile.
`gap` is how long the device waits for the host between two steps.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from cllm.backend.llama.memory import prepare
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.core.engine_core import EngineCore
from cllm.types import Prompt, Request, SamplingParams

PROMPT, SLOTS, CELLS, ROUNDS = 64, 64, 1024, 3


class PartTimes:
    """Seconds inside some calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, name: str, part: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds[part] += time.perf_counter() - started

        setattr(owner, name, timed)

    def between(self, first: tuple[Any, str], second: tuple[Any, str], part: str) -> None:
        """Watch from the end of one call to the beginning of another."""
        ended = 0.0
        call: Callable[..., Any] = getattr(*first)
        next_call: Callable[..., Any] = getattr(*second)

        def end(*arguments: Any) -> Any:
            nonlocal ended
            result = call(*arguments)
            ended = time.perf_counter()
            return result

        def begin(*arguments: Any) -> Any:
            self.seconds[part] += time.perf_counter() - ended
            return next_call(*arguments)

        setattr(*first, end)
        setattr(*second, begin)


def main(model: str, streams: int, output: int, temperature: float = 0.0, drafts: int = 0) -> None:
    asked = EngineConfig(model=model, parallel=SLOTS, ctx_size=SLOTS * CELLS, draft_tokens=drafts)
    config = msgspec.structs.replace(prepare(asked), cache_disk_mb=0)
    runner = LlamaRunner(config)
    core = EngineCore(runner, config, lambda report: None)
    times = PartTimes()
    scheduler = core.scheduler
    watched = ((scheduler, "schedule"), (scheduler, "update"), (scheduler.following, "prepare"))
    for owner, name in (*watched, (core, "_report"), (runner, "submit"), (runner.batch_sampler, "sample")):
        times.watch(owner, name, name.strip("_"))
    times.watch(runner, "_wait", "sync")
    times.between((runner, "_wait"), (runner.workers, "work_for"), "gap")
    size = runner.vocabulary.size
    sampling = SamplingParams(temperature=temperature, top_p=0.95 if temperature else 1.0, ignore_eos=True)
    running = core.scheduler.running
    for number in range(ROUNDS):
        for i in range(streams):
            prompt = tuple((1000 + i * 37 + j * (i + 3)) % (size // 2) for j in range(PROMPT))
            request = Request(id=f"{number}-{i}", prompt=Prompt(prompt), max_tokens=output, sampling=sampling)
            core.scheduler.add(request)
        while core.scheduler.waiting or any(each.pending > 1 for each in running.values()):
            core.step()
        times.seconds.clear()
        known = sum(len(each.tokens) for each in running.values())
        started, steps = time.perf_counter(), 0
        while all(each.stopping.token_limit - len(each.tokens) > 1 + drafts for each in running.values()):
            core.step(follow=runner.asynchronous)
            steps += 1
        taken_s = time.perf_counter() - started
        tokens = sum(len(each.tokens) for each in running.values()) - known
        parts = {part: round(1e3 * total / steps, 3) for part, total in sorted(times.seconds.items())}
        shown = {"streams": streams, "tokens_per_second": round(tokens / taken_s, 1)}
        print(json.dumps({**shown, "step_ms": round(1e3 * taken_s / steps, 3), **parts}), flush=True)
        while not core.idle:
            core.step()
    runner.close()


if __name__ == "__main__":
    streams, output = map(int, sys.argv[2:4])
    rest = sys.argv[4:]
    main(sys.argv[1], streams, output, float(rest[0]) if rest else 0.0, int(rest[1]) if len(rest) > 1 else 0)
