"""`python -P bench/step_driver.py [REQUESTS]`: the work and the cost of a checkout's scheduler.

`compare_trees` runs it as a file, with `PYTHONPATH` at the checkout to measure; it imports nothing else of
`bench`. It drives the scheduler on the fake runner, in the layout before the redesign (`cllm.engine.loop`)
and in the one since (`cllm.core`). Prints JSON: work counters, and seconds of Python CPU a step outside the
runner.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

SEQUENCES, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 96, 64
PASSES = 3  # after one that warms up
NATIVE = ("forward", "submit", "collect", "save", "restore", "copy", "truncate", "next_position")


class Layout:
    """Where a checkout has what is driven here."""

    def __init__(self) -> None:
        package = Path(import_module("cllm").__file__ or "").parent
        moved = (package / "messages.py").is_file()  # it was in workers/
        self.messages = import_module("cllm.messages" if moved else "cllm.workers.messages")
        self.make_core = import_module("cllm.core.engine_core").EngineCore
        fake = "tests.driver.fake_runner"  # it was shipped
        shipped = not (package.parent / f"{fake.replace('.', '/')}.py").is_file()
        self.make_runner = import_module("cllm.testing" if shipped else fake).FakeRunner
        self.types = import_module("cllm.types")
        self.config = import_module("cllm.config").EngineConfig


class NativeClock:
    """CPU seconds inside the runner's calls: the fake's own cost is none of the scheduler's."""

    def __init__(self, runner: Any) -> None:
        self.seconds = 0.0
        self._depth = 0
        for name in NATIVE:
            if hasattr(runner, name):
                setattr(runner, name, self._timed(getattr(runner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.thread_time()
            self._depth += 1
            try:
                return call(*arguments)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - started

        return timed


def drive(layout: Layout, requests: int, seed: int) -> tuple[dict[str, int], float]:
    """One pass over the workload: its work counters, and the CPU seconds a step."""
    runner = layout.make_runner(sequences=SEQUENCES, cells=SEQUENCES * 512, batch_tokens=256)
    clock = NativeClock(runner)
    work = dict.fromkeys(("tokens", "steps", "decoded_tokens", "request_steps", "ubatches"), 0)
    left = requests

    def emit(report: Any) -> None:
        nonlocal left
        stats = getattr(report, "stats", None)
        if stats is None:
            return
        work["steps"] += stats.steps
        work["tokens"] += stats.tokens
        for output in report.outputs if hasattr(report, "outputs") else report.deltas:
            if output.finish_reason is not None:
                assert output.error is None, output.error
                work["decoded_tokens"] += output.usage.decoded_tokens
                work["request_steps"] += output.usage.steps
                work["ubatches"] += output.usage.ubatches
                left -= 1
                if not left:
                    core.post(layout.messages.Stop())

    # No target between tokens: prefill chunks must not depend on how fast this machine is.
    core = layout.make_core(runner, layout.config(draft_tokens=0, target_itl_ms=1_000_000), emit)
    numbers = random.Random(seed)
    greedy = layout.types.SamplingParams(temperature=0, ignore_eos=True)
    make_prompt = getattr(layout.types, "Prompt", tuple)  # older trees have tokens alone
    for number in range(requests):
        prompt = make_prompt(tuple(numbers.randrange(256) for _ in range(PROMPT_TOKENS)))
        request = layout.types.Request(
            id=str(number), prompt=prompt, max_tokens=OUTPUT_TOKENS - number % 8, sampling=greedy
        )
        core.post(layout.messages.Submit(request))
    started = time.thread_time()
    core.run()
    seconds = time.thread_time() - started - clock.seconds
    return work, seconds / work["steps"]


def main(requests: str = "64") -> None:
    layout = Layout()
    passes = [drive(layout, int(requests), seed) for seed in range(PASSES + 1)][1:]
    work = {name: sum(counted[name] for counted, _ in passes) for name in passes[0][0]}
    print(json.dumps({"work": work, "cpu_s": sorted(seconds for _, seconds in passes)[PASSES // 2]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
