"""`python -m cllm.bench.growth`: how a step's time grows with context and streams, and the machine's limits.

Bare decodes, nothing of the server around them. Beside them what memory and arithmetic can do at best here:
read bandwidth and single-precision matrix products, measured with NumPy on all cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from cllm.bench.bare import BareDecode
from cllm.bench.peers import ServerSettings, embedded_model
from cllm.bench.report import Table, write_report
from cllm.errors import SetupError

CONTEXTS = (32, 256, 800, 1600)
STREAMS = (1, 2, 4, 8, 16, 32)
STEPS = 12


@dataclass(frozen=True, slots=True)
class Machine:
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


def step_times(model: Path, points: Sequence[tuple[int, int]], rounds: int) -> dict[tuple[int, int], float]:
    """Milliseconds a step, medians over the rounds, by (streams, context)."""
    times: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    streams = max(point[0] for point in points)
    cells = max(point[1] for point in points) + 64
    with BareDecode(model, streams=streams, cells=-(-cells // 256) * 256) as bare:
        for number in range(rounds + 1):  # the first is a warm-up
            for point in points:
                found = bare(point[0], point[1], STEPS + 1).generate_s / STEPS
                if number:
                    times[point].append(1000 * found)
    return {point: median(found) for point, found in times.items()}


def tables(
    by_context: dict[tuple[int, int], float],
    by_streams: dict[tuple[int, int], float],
    machine: Machine,
    model_bytes: int,
) -> list[str]:
    least_ms = 1000 * model_bytes / machine.read_bytes_per_s
    context_rows = [
        (f"{context}", *(f"{by_context[streams, context]:.1f} ms" for streams in (1, 8)))
        for context in CONTEXTS
    ]
    stream_rows = [
        (
            f"{streams}",
            f"{by_streams[streams, 32]:.1f} ms",
            f"{1000 * streams / by_streams[streams, 32]:.0f}",
            f"{least_ms / by_streams[streams, 32]:.0%}",
        )
        for streams in STREAMS
    ]
    return [
        Table(("context, tokens", "a step of 1 stream", "of 8"), context_rows).markdown(),
        "",
        Table(("streams", "a step", "tokens/s", "of what reading the weights takes"), stream_rows).markdown(),
        "",
        f"Memory is read at {machine.read_bytes_per_s / 1e9:.1f} GB/s, so the {model_bytes / 1e6:.0f} MB of "
        f"weights take at least {least_ms:.1f} ms a step. Matrix products in single precision: "
        f"{machine.flops / 1e9:.0f} GFLOP/s.",
    ]


def draw(
    by_context: dict[tuple[int, int], float], by_streams: dict[tuple[int, int], float], path: Path
) -> None:
    """Two panels. Raises SetupError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise SetupError("no plots: matplotlib is not installed (pip install 'cllm[bench]')") from None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for streams in (1, 8):
        times = [by_context[streams, context] for context in CONTEXTS]
        left.plot(CONTEXTS, times, "o-", label=f"{streams} stream{'s' * (streams > 1)}")
    left.set(
        xlabel="tokens of context", ylabel="ms a step", title="a step grows with context", ylim=(0, None)
    )
    left.legend()
    right.plot(STREAMS, [1000 * streams / by_streams[streams, 32] for streams in STREAMS], "s-")
    right.set(xlabel="streams", ylabel="tokens/s", title="throughput grows with streams", ylim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cllm.bench.growth", description=__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file (default: the embedded one)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for growth.md, growth.json and plots/growth.png")
    options = parser.parse_args(arguments)
    model = options.model or embedded_model()
    try:
        machine = Machine.measured(ServerSettings().thread_count)
        by_streams = step_times(model, [(streams, 32) for streams in STREAMS], options.rounds)
        points = [(streams, context) for streams in (1, 8) for context in CONTEXTS]
        by_context = step_times(model, points, options.rounds)
        text = "\n".join(tables(by_context, by_streams, machine, model.stat().st_size))
        print(text)
        if options.out is not None:
            data = {
                "machine": machine,
                "by_context": {f"{key}": value for key, value in by_context.items()},
                "by_streams": {f"{key}": value for key, value in by_streams.items()},
            }
            write_report(options.out, "growth", text, data)
            draw(by_context, by_streams, options.out / "plots" / "growth.png")
    except SetupError as error:
        print(f"growth: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
