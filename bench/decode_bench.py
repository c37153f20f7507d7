"""Decodes with no server around them: the machine's own pace, a library's, and llama.cpp's own benchmark.

`python -m bench.decode_bench MODEL THREADS SEQUENCES CELLS` is the worker process. For each line
`SEQUENCES PROMPT COUNT` on standard input, that many sequences compute a prompt and generate greedily in one
batch; the seconds of the prompts and of the generation are printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from bench.peers import ServerSettings, embedded_model
from bench.workloads import Definition
from bench.workloads.definition import Length
from cllm.backend.base import Batch, ModelRunner, Row, StepStatus
from cllm.errors import SetupError
from cllm.types import SamplingParams


class DecodeTime(NamedTuple):
    prompt_s: float
    generate_s: float

    @property
    def total_s(self) -> float:
        return self.prompt_s + self.generate_s


class DecodeBench:
    """A running worker. A context manager; SetupError if it does not start."""

    def __init__(
        self,
        model: Path,
        threads: int = 0,
        library: Path | None = None,
        *,
        own_kernels: bool = True,
        sequences: int = 8,
        cells: int = 1024,
    ) -> None:
        """`cells` are those of each sequence."""
        environment = dict(os.environ)
        if library is not None:
            environment["CLLM_LIBRARY"] = str(library)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bench.decode_bench",
                *map(str, (model, threads, sequences, cells, int(own_kernels))),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        if self._answer() != "ready":
            raise SetupError(f"the decode bench does not start with the library {library or 'in use'}")

    def __call__(self, sequences: int, prompt_tokens: int, count: int) -> DecodeTime:
        """Seconds for `sequences` prompts of that length, and to generate `count` tokens after each."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{sequences} {prompt_tokens} {count}\n")
            self._process.stdin.flush()
            return DecodeTime(*map(float, self._answer().split()))
        except (OSError, TypeError):
            raise SetupError("the decode bench died: this library does not work here") from None

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes its input, which ends it, and waits
            pass


class Reference(Protocol):
    """Something that yields figures of a workload, measured once in each round."""

    @property
    def name(self) -> str: ...

    def measure(self) -> dict[str, float]:
        """By the figure's name. Raises SetupError."""


class LlamaBench:
    """llama.cpp's own benchmark: a prompt and an answer of the same lengths, one sequence."""

    name = "llama-bench"

    def __init__(self, executable: Path, settings: ServerSettings, prompt: int, output: int) -> None:
        self._output = output
        self._command = [str(executable), "-m", str(settings.model or embedded_model())]
        self._command += ["-p", "0", "-n", "0", "-pg", f"{prompt},{output}", "-r", "4", "-o", "json"]
        self._command += ["-t", str(settings.thread_count)]

    def measure(self) -> dict[str, float]:
        """The tokens of the answer per second of both, as a client sees it."""
        try:
            done = subprocess.run(self._command, capture_output=True, check=True, timeout=300)
            (test,) = json.loads(done.stdout)
            return {"tokens_per_second": self._output * 1e9 / test["avg_ns"]}
        except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
            raise SetupError(f"llama-bench: {error}") from None


class PlainBuild:
    """Decodes with another build of the library: as many sequences at as much context."""

    name = "plain-build"

    def __init__(self, library: Path, settings: ServerSettings, prompt: int, steps: int = 17) -> None:
        self._library, self._settings = library, settings
        self._prompt, self._steps = prompt, steps

    def measure(self) -> dict[str, float]:
        sequences = self._settings.parallel
        model = self._settings.model or embedded_model()
        with DecodeBench(model, self._settings.thread_count, self._library) as decode:
            took = decode(sequences, self._prompt, self._steps).generate_s / (self._steps - 1)
        return {"step_s": took, "decode_tokens_per_second": sequences / took}


def find_references(
    definition: Definition, settings: ServerSettings, llama_bench: Path | None, plain_library: Path | None
) -> list[Reference]:
    """The references that the workload's bars name and that are installed."""
    wanted = {bar.against for bar in definition.bars}
    group = definition.groups[0]
    prompt, output = _middle(group.prompt_tokens), _middle(group.output_tokens)
    found: list[Reference] = []
    if "llama-bench" in wanted and llama_bench is not None:
        found.append(LlamaBench(llama_bench, settings, prompt, output))
    if "plain-build" in wanted and plain_library is not None:
        found.append(PlainBuild(plain_library, settings, prompt + output // 2))
    return found


def _middle(length: Length) -> int:
    return length if isinstance(length, int) else sum(length) // len(length)


def main(model: str, threads: str, sequences: str, cells: str, own_kernels: str) -> None:
    """The worker: decode what standard input asks for until it ends."""
    from cllm.backend.llama.runner import LlamaRunner
    from cllm.config import EngineConfig

    config = EngineConfig(
        model=model,
        parallel=int(sequences),
        ctx_size=int(sequences) * int(cells),
        threads=int(threads),
        own_kernels=own_kernels == "1",
        poll=0,  # between two probes its threads must not take a core from what is measured
    )
    runner = LlamaRunner(config)
    print("ready", flush=True)
    for line in sys.stdin:
        print(*measure_decode(runner, *map(int, line.split())), flush=True)
    runner.close()


def measure_decode(
    runner: ModelRunner, sequences: int, prompt_tokens: int, count: int
) -> tuple[float, float]:
    """Seconds to compute the prompts, one after the other, and to generate `count` tokens after each."""
    sampler = runner.create_sampler(SamplingParams(temperature=0, ignore_eos=True))

    def step(rows: Iterable[tuple[int, int, list[int]]]) -> list[list[int]]:
        batch = Batch(tuple(Row(seq_id, position, tokens, 1, sampler) for seq_id, position, tokens in rows))
        result = runner.run(batch)
        assert result.status is StepStatus.DONE
        return [list(row.tokens) for row in result.rows]

    chunk = runner.limits.batch_tokens
    started = time.perf_counter()
    pending: list[list[int]] = []
    for seq_id in range(sequences):
        prompt = [100 + (number * 7 + seq_id) % 100 for number in range(prompt_tokens)]
        for begin in range(0, prompt_tokens, chunk):
            (sampled,) = step([(seq_id, begin, prompt[begin : begin + chunk])])
        pending.append(sampled)
    prompts_done = time.perf_counter()
    for number in range(count - 1):
        pending = step((seq_id, prompt_tokens + number, tokens) for seq_id, tokens in enumerate(pending))
    finished = time.perf_counter()
    for seq_id in range(sequences):
        runner.truncate(seq_id, 0)
    return prompts_done - started, finished - prompts_done


if __name__ == "__main__":
    main(*sys.argv[1:])
