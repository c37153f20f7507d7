"""`python -m bench.growth`: how cost grows with context, streams and vocabulary, and what bounds it.

Bare decodes, nothing of the server around them, and choosing a token from made-up logits. Beside them what
memory and arithmetic can do at best here: read bandwidth and single-precision matrix products, measured with
NumPy on all cores. About three minutes with the embedded model on two quiet cores.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from bench.command import conclude, make_parser, run_command
from bench.decode_bench import BareDecode
from bench.peers import ServerSettings, embedded_model
from bench.plots import load_pyplot
from bench.report import Table
from cllm.errors import SetupError

CONTEXTS = (32, 256, 800, 1600)
STREAMS = (1, 2, 4, 8, 16, 32)
FEW_AND_MANY = (1, 8)  # streams, at every context
VOCABULARIES = (32_000, 49_152, 152_000, 262_144)
STEPS = 12


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
    """Milliseconds a step, medians over the rounds, by (streams, context). No round begins late."""
    times: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    streams = max(point[0] for point in points)
    cells = max(point[1] for point in points) + STEPS + 1
    started = time.monotonic()
    with BareDecode(model, streams=streams, cells=-(-cells // 256) * 256) as bare:
        for number in range(rounds + 1):  # the first is a warm-up
            if number > 1 and time.monotonic() - started > seconds:
                break
            for point in points:
                found = bare(point[0], point[1], STEPS + 1).generate_s / STEPS
                if number:
                    times[point].append(1000 * found)
            done = f"{len(points)} points, round {number} of {rounds}"
            print(f"{done}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return {point: median(found) for point, found in times.items()}


def choosing_times(sizes: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Microseconds for a token by size of the vocabulary: as cllm chooses, and llama.cpp's chain over all."""
    command = [sys.executable, "-m", "bench.sampling_bench", *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"choosing tokens could not be measured: {done.stderr.strip()[-300:]}")
    found = [tuple(1e6 * float(value) for value in line.split()) for line in done.stdout.splitlines()]
    return {size: (ours, plain) for size, (ours, plain) in zip(sizes, found, strict=True)}


@dataclass(frozen=True, slots=True)
class Growth:
    """All that was measured: milliseconds by (streams, context), microseconds by size of the vocabulary."""

    machine: Machine
    model_bytes: int
    by_context: dict[tuple[int, int], float]
    by_streams: dict[tuple[int, int], float]
    by_vocabulary: dict[int, tuple[float, float]]

    def text(self) -> str:
        """Three tables, and what bounds them."""
        least_ms = 1000 * self.model_bytes / self.machine.read_bytes_per_s
        contexts = [
            (f"{context}", *(f"{self.by_context[streams, context]:.1f} ms" for streams in FEW_AND_MANY))
            for context in CONTEXTS
        ]
        streams = [
            (f"{count}", f"{step_ms:.1f} ms", f"{1000 * count / step_ms:.0f}", f"{step_ms / least_ms:.1f} ×")
            for (count, _), step_ms in self.by_streams.items()
        ]
        vocabularies = [
            (f"{size}", f"{ours:.0f} µs", f"{plain:.0f} µs")
            for size, (ours, plain) in self.by_vocabulary.items()
        ]
        few, many = FEW_AND_MANY
        tables = (
            Table(("context, tokens", f"a step of {few} stream", f"of {many}"), contexts),
            Table(("streams", "a step", "tokens/s", "against reading the weights once"), streams),
            Table(("vocabulary", "choosing a token", "llama.cpp's chain over all of it"), vocabularies),
        )
        return "\n\n".join(
            [
                *(table.markdown() for table in tables),
                f"Memory is read at {self.machine.read_bytes_per_s / 1e9:.1f} GB/s, so the "
                f"{self.model_bytes / 1e6:.0f} MB of weights take at least {least_ms:.1f} ms a step. Matrix "
                f"products in single precision: {self.machine.flops / 1e9:.0f} GFLOP/s.",
            ]
        )

    def draw(self, path: Path) -> None:
        """Three panels. Raises SetupError without matplotlib."""
        pyplot = load_pyplot()
        figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4))
        for streams in FEW_AND_MANY:
            times = [self.by_context[streams, context] for context in CONTEXTS]
            left.plot(CONTEXTS, times, "o-", label=f"{streams} stream{'s' * (streams > 1)}")
        left.set(xlabel="tokens of context", ylabel="ms a step", title="a step grows with context")
        rates = [1000 * count / step_ms for (count, _), step_ms in self.by_streams.items()]
        middle.plot(STREAMS, rates, "s-")
        middle.set(xlabel="streams", ylabel="tokens/s", title="throughput grows with streams")
        for number, label in enumerate(("cllm", "llama.cpp's chain over all of it")):
            right.plot(
                VOCABULARIES, [self.by_vocabulary[size][number] for size in VOCABULARIES], "o-", label=label
            )
        right.set(xlabel="tokens of vocabulary", ylabel="µs a token", title="choosing grows with vocabulary")
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
    points = [(streams, context) for streams in FEW_AND_MANY for context in CONTEXTS]
    growth = Growth(
        machine=Machine.measured(ServerSettings().thread_count),
        model_bytes=file.stat().st_size,
        by_streams=step_times(file, [(streams, CONTEXTS[0]) for streams in STREAMS], rounds, 0.2 * seconds),
        by_context=step_times(file, points, rounds, 0.5 * seconds),
        by_vocabulary=choosing_times(VOCABULARIES),
    )
    data = {
        "machine": growth.machine._asdict(),
        "ms_by_streams": {f"{streams}": step for (streams, _), step in growth.by_streams.items()},
        "ms_by_streams_and_context": {f"{point}": step for point, step in growth.by_context.items()},
        "us_by_vocabulary": growth.by_vocabulary,
    }
    code = conclude("growth", growth.text(), data, out, failed=False)
    if out is not None:
        growth.draw(out / "plots" / "growth.png")
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "growth",
        __doc__,
        *("--model", "--out"),
        rounds=(3, "most rounds of each point"),
        seconds=(300.0, "most seconds, about: a round that has begun is ended"),
    )
    return run_command(parser, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
