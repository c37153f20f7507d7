"""`python -m bench.decode_worker MODEL THREADS [STREAMS CELLS]`: bare decodes, nothing around them.

For each line `STREAMS PROMPT COUNT` on standard input, that many streams compute a prompt and generate
greedily in one batch; the seconds of the prompts and of the generation are printed. Benchmarks interleave
it with requests (what it takes is the machine's own pace) and compare libraries with it.
"""

from __future__ import annotations

import sys
import time

from cllm.backend.base import Batch, Row, StepStatus
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.types import SamplingParams

STREAMS = 8


def decode(runner: LlamaRunner, streams: int, prompt_tokens: int, count: int) -> tuple[float, float]:
    """Seconds to compute the prompts, one stream after the other, and to generate `count` tokens in each."""
    sampler = runner.create_sampler(SamplingParams(temperature=0, ignore_eos=True))
    chunk = runner.limits.batch_tokens
    started = time.perf_counter()
    pending: list[list[int]] = []
    for stream in range(streams):
        prompt = [100 + (number * 7 + stream) % 100 for number in range(prompt_tokens)]
        for begin in range(0, prompt_tokens, chunk):
            row = Row(stream, begin, prompt[begin : begin + chunk], 1, sampler)
            result = runner.run(Batch((row,)))
        pending.append(list(result.rows[0].tokens))
    prompts_done = time.perf_counter()
    for step in range(count - 1):
        rows = (Row(stream, prompt_tokens + step, pending[stream], 1, sampler) for stream in range(streams))
        result = runner.run(Batch(tuple(rows)))
        assert result.status is StepStatus.DONE
        pending = [list(outcome.tokens) for outcome in result.rows]
    finished = time.perf_counter()
    for stream in range(streams):
        runner.truncate(stream, 0)
    return prompts_done - started, finished - prompts_done


def main(model: str, threads: str, streams: str = str(STREAMS), cells: str = "1024") -> None:
    # No polling: between two probes its threads must not take a core from what is measured.
    config = EngineConfig(
        model=model,
        parallel=int(streams),
        ctx_size=int(streams) * int(cells),
        threads=int(threads),
        poll=0,
    )
    runner = LlamaRunner(config)
    print("ready", flush=True)
    for line in sys.stdin:
        asked, prompt_tokens, count = map(int, line.split())
        print(*decode(runner, asked, prompt_tokens, count), flush=True)
    runner.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
