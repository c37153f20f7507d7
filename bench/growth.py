"""`python -m bench.growth`: how cost grows with context, sequences and vocabulary, and what bounds it.

Decodes with no server around them, and sampling from made-up logits. Beside them what memory and arithmetic
can do at best here: read bandwidth and single-precision matrix products, measured with NumPy on all cores.
About three minutes with the embedded model on two quiet cores.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from bench.command import conclude, make_parser, run_command
from bench.decode_bench import DecodeBench
from bench.peers import ServerSettings, embedded_model
from bench.plots import load_pyplot
from bench.report import Table
from cllm.errors import SetupError
from cllm.types import SamplingParams

CONTEXTS = (32, 256, 800, 1600)
SEQUENCES = (1, 2, 4, 8, 16, 32)
FEW_AND_MANY = (1, 8)  # sequences, at every context
VOCABULARIES = (32_000, 49_152, 152_000, 262_144)
STEPS = 12
ROWS, TIMES = 8, 25  # of sampling


class Machine(NamedTuple):
    """The best of several tries."""

    read_bytes_per_s: float
    flops: float

    @classmethod
    def measured(cls, cores: int) -> Machine:
        return cls(max(_read_rate(cores) for _ in range(5)), max(_product_rate() for _ in range(5)))


def _read_rate(cores: int) -> float:
    """Bytes per second that all cores together read from memory."""
    blocks = [np.ones(32 << 20, np.float32) for _ in range(cores)]  # 128 MiB each: no cache holds them
    with ThreadPoolExecutor(cores) as pool:
        started = time.perf_counter()
        list(pool.map(np.max, blocks))
        return sum(block.nbytes for block in blocks) / (time.perf_counter() - started)


def _product_rate(size: int = 1536) -> float:
    """Floating-point operations per second of a product of square matrices."""
    left, right = np.ones((size, size), np.float32), np.ones((size, size), np.float32)
    started = time.perf_counter()
    np.matmul(left, right)
    return 2 * size**3 / (time.perf_counter() - started)


def step_times(
    model: Path, points: Sequence[tuple[int, int]], rounds: int, seconds: float
) -> dict[tuple[int, int], float]:
    """Milliseconds a step, medians over the rounds, by (sequences, context). No round begins late."""
    times: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    sequences = max(point[0] for point in points)
    cells = max(point[1] for point in points) + STEPS + 1
    started = time.monotonic()
    with DecodeBench(model, sequences=sequences, cells=-(-cells // 256) * 256) as decode:
        for number in range(rounds + 1):  # the first is a warm-up
            if number > 1 and time.monotonic() - started > seconds:
                break
            for point in points:
                found = decode(point[0], point[1], STEPS + 1).generate_s / STEPS
                if number:
                    times[point].append(1000 * found)
            done = f"{len(points)} points, round {number} of {rounds}"
            print(f"{done}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return {point: median(found) for point, found in times.items()}


def sampling_times(sizes: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Microseconds a token by size of the vocabulary: as cllm samples, and llama.cpp's chain over all of it.

    In a process of its own: the native library must not be loaded here.
    """
    program = f"from bench.growth import sampling_seconds as s\nfor size in {list(sizes)}: print(*s(size))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"sampling could not be measured: {done.stderr.strip()[-300:]}")
    found = [tuple(1e6 * float(value) for value in line.split()) for line in done.stdout.splitlines()]
    return {size: (ours, plain) for size, (ours, plain) in zip(sizes, found, strict=True)}


def sampling_seconds(size: int) -> tuple[float, float]:
    """Seconds a token from made-up logits: with the prefilter, and with llama.cpp's chain over all."""
    from cllm.backend.llama.candidates import Candidates, TopKPrefilter
    from cllm.backend.llama.library import DeferredFrees, load
    from cllm.backend.llama.sampler import DryPrototypes, build_chain

    api = load().api
    params = SamplingParams(seed=1)
    dry = DryPrototypes(api, None, 0, DeferredFrees())  # the default chain has none
    chain = build_chain(api, params, dry=dry, vocabulary_size=size, context=0)
    candidates = Candidates(api, size)
    drawn = np.random.default_rng(1).normal(0, 3, (ROWS, size)).astype(np.float32)
    try:
        cut, whole = TopKPrefilter(params), TopKPrefilter(SamplingParams(temperature=0))
        return (
            _median_s(lambda row: candidates.sample(chain, drawn[row], cut)),
            _median_s(lambda row: candidates.sample(chain, drawn[row], whole)),
        )
    finally:
        api.llama_sampler_free(chain)


def _median_s(sample: Callable[[int], int]) -> float:
    taken = []
    for number in range(ROWS * (TIMES + 1)):  # the first of each row warms up
        started = time.perf_counter()
        sample(number % ROWS)
        taken.append(time.perf_counter() - started)
    return median(taken[ROWS:])


@dataclass(frozen=True, slots=True)
class Growth:
    """All that was measured: milliseconds by (sequences, context), microseconds by size of the vocabulary."""

    machine: Machine
    model_bytes: int
    by_context: dict[tuple[int, int], float]
    by_sequences: dict[tuple[int, int], float]
    by_vocabulary: dict[int, tuple[float, float]]

    def text(self) -> str:
        """Three tables, and what bounds them."""
        weights_ms = 1000 * self.model_bytes / self.machine.read_bytes_per_s
        contexts = [
            (f"{context}", *(f"{self.by_context[sequences, context]:.1f} ms" for sequences in FEW_AND_MANY))
            for context in CONTEXTS
        ]
        sequences = [
            (f"{count}", f"{ms:.1f} ms", f"{1000 * count / ms:.0f}", f"{ms / weights_ms:.1f} ×")
            for (count, _), ms in self.by_sequences.items()
        ]
        vocabularies = [
            (f"{size}", f"{ours:.0f} µs", f"{plain:.0f} µs")
            for size, (ours, plain) in self.by_vocabulary.items()
        ]
        few, many = FEW_AND_MANY
        tables = (
            Table(("context, tokens", f"a step of {few} sequence", f"of {many}"), contexts),
            Table(("sequences", "a step", "tokens/s", "against reading the weights once"), sequences),
            Table(("vocabulary", "sampling a token", "llama.cpp's chain over all of it"), vocabularies),
        )
        return "\n\n".join(
            [
                *(table.markdown() for table in tables),
                f"Memory is read at {self.machine.read_bytes_per_s / 1e9:.1f} GB/s, so the "
                f"{self.model_bytes / 1e6:.0f} MB of weights take at least {weights_ms:.1f} ms a step. "
                f"Matrix products in single precision: {self.machine.flops / 1e9:.0f} GFLOP/s.",
            ]
        )

    def draw(self, path: Path) -> None:
        """Three panels. Raises SetupError without matplotlib."""
        pyplot = load_pyplot()
        figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4))
        for sequences in FEW_AND_MANY:
            times = [self.by_context[sequences, context] for context in CONTEXTS]
            left.plot(CONTEXTS, times, "o-", label=f"{sequences} sequence{'s' * (sequences > 1)}")
        left.set(xlabel="tokens of context", ylabel="ms a step", title="a step grows with context")
        rates = [1000 * count / step_ms for (count, _), step_ms in self.by_sequences.items()]
        middle.plot(SEQUENCES, rates, "s-")
        middle.set(xlabel="sequences", ylabel="tokens/s", title="throughput grows with sequences")
        for number, label in enumerate(("cllm", "llama.cpp's chain over all of it")):
            right.plot(
                VOCABULARIES, [self.by_vocabulary[size][number] for size in VOCABULARIES], "o-", label=label
            )
        right.set(xlabel="tokens of vocabulary", ylabel="µs a token", title="sampling grows with vocabulary")
        for axis in (left, right):
            axis.legend()
        for axis in (left, middle, right):
            axis.set_ylim(0, None)
            axis.grid(alpha=0.3)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def run(model: Path | None, out: Path | None, rounds: int, seconds: float) -> int:
    """Measure and report; 0."""
    file = model or embedded_model()
    points = [(sequences, context) for sequences in FEW_AND_MANY for context in CONTEXTS]
    growth = Growth(
        machine=Machine.measured(ServerSettings().thread_count),
        model_bytes=file.stat().st_size,
        by_sequences=step_times(
            file, [(sequences, CONTEXTS[0]) for sequences in SEQUENCES], rounds, 0.2 * seconds
        ),
        by_context=step_times(file, points, rounds, 0.5 * seconds),
        by_vocabulary=sampling_times(VOCABULARIES),
    )
    data = {
        "machine": growth.machine._asdict(),
        "ms_by_sequences": {f"{sequences}": step for (sequences, _), step in growth.by_sequences.items()},
        "ms_by_sequences_and_context": {f"{point}": step for point, step in growth.by_context.items()},
        "us_by_vocabulary": growth.by_vocabulary,
    }
    code = conclude("growth", growth.text(), data, out, failed=False)
    if out is not None:
        growth.draw(out / "plots" / "growth.png")
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "bench.growth",
        __doc__,
        *("--model", "--out"),
        rounds=(3, "rounds of each point"),
        seconds=(300.0, "limit, about: a round that has begun is ended"),
    )
    return run_command(parser, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
