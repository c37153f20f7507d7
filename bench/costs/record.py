"""`python -m bench.costs.record NAME`: measure the step costs of this machine into `bench/costs/NAME.json`.

The real runner computes steps of chosen shapes: prompts in chunks below and above a tile, alone and beside
decoding rows, and one to eight decoding rows, each at several lengths of context. The lowest of several times
counts. Three minutes with the embedded model on two cores.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from bench.command import make_parser, run_command
from bench.costs import FOLDER, MachineCosts, split_shape
from bench.footprint import name_processor
from bench.peers import ServerSettings, embedded_model
from cllm.backend.base import Batch, ModelRunner, Row, StepStatus
from cllm.core.step_cost import TILE, StepCost, StepCostModel, StepShape
from cllm.errors import SetupError
from cllm.types import SamplingParams

CONTEXTS = (64, 512, 1536)
CHUNKS = (16, TILE - 1, TILE, 2 * TILE, 4 * TILE)
BESIDE = (TILE // 2, TILE + 1)  # beside decoding rows: the first token is computed along with them
ROWS = (1, 2, 4, 8)
INSTRUCTIONS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_int8",
    "asimddp",
    "i8mm",
    "sve",
)
Clock = Callable[[], float]


class CostRecorder:
    """Drives a runner of at least as many slots as rows are measured."""

    def __init__(self, runner: ModelRunner, repeats: int, clock: Clock = time.perf_counter) -> None:
        self._runner, self._repeats, self._clock = runner, repeats, clock
        self._sampler = runner.create_sampler(SamplingParams(temperature=0, ignore_eos=True))

    def measure_steps(self) -> Iterator[tuple[StepShape, float]]:
        """Shapes of steps, and the lowest seconds that each took."""
        runner = self._runner
        for context in CONTEXTS:
            self._fill(context)
            steps = [[size] for size in CHUNKS] + [[1] * rows for rows in ROWS]
            steps += [[1] * (max(ROWS) - 1) + [size] for size in BESIDE]
            for lengths in steps * self._repeats:
                batch = Batch(tuple(self._row(place, context, size) for place, size in enumerate(lengths)))
                yield split_shape(batch, runner.limits.batch_tokens), self._run(batch)
                for seq_id in range(len(lengths)):
                    runner.truncate(seq_id, context)

    def measure_transfers(self) -> tuple[float, int]:
        """Bytes per second of the longest context saved and restored, and its bytes a token."""
        runner, seconds, size = self._runner, [], 0
        for _ in range(self._repeats):
            started = self._clock()
            state = runner.save(0)
            if state is None:
                raise SetupError("the KV memory of this model cannot be saved")
            runner.truncate(0, 0)
            runner.restore(0, state)
            seconds.append(self._clock() - started)
            size = len(state)
        return 2 * size / min(seconds), size // CONTEXTS[-1]

    def _fill(self, context: int) -> None:
        """All slots hold the same `context` tokens."""
        runner = self._runner
        for seq_id in range(max(ROWS)):
            runner.truncate(seq_id, 0)
        most = runner.limits.batch_tokens
        for begin in range(0, context, most):
            self._run(Batch((self._row(0, begin, min(most, context - begin)),)))
        for seq_id in range(1, max(ROWS)):
            if runner.copy(0, seq_id, context) != context:
                raise SetupError("the KV memory of this model cannot be copied")
        self._run(Batch(tuple(self._row(seq_id, context, 1) for seq_id in range(max(ROWS)))))
        for seq_id in range(max(ROWS)):  # that step was for the copies, which the next one carries out
            runner.truncate(seq_id, context)

    def _row(self, seq_id: int, position: int, count: int) -> Row:
        tokens = [100 + (position + number) * 7 % 100 for number in range(count)]
        return Row(seq_id, position, tokens, 1, self._sampler)

    def _run(self, batch: Batch) -> float:
        result = self._runner.run(batch)
        if result.status is not StepStatus.DONE:
            raise SetupError(f"a step of {batch.token_count} tokens failed: {result.status.name}")
        return result.compute_s


def fit(times: dict[StepShape, float]) -> StepCost:
    """The costs that fit best, as the server's own cost model finds them."""
    model = StepCostModel()
    for shape, seconds in times.items():
        model.observe_shape(shape, seconds)
    assert model.step is not None
    return model.step


def record(
    runner: ModelRunner, labels: Mapping[str, str], repeats: int = 3, clock: Clock = time.perf_counter
) -> tuple[MachineCosts, float]:
    """Measure a runner; the costs with these labels, and the relative error of the step that fits worst."""
    recorder = CostRecorder(runner, repeats, clock)
    times: dict[StepShape, float] = {}
    for shape, seconds in recorder.measure_steps():
        times[shape] = min(seconds, times.get(shape, seconds))
    step, (rate, state_bytes) = fit(times), recorder.measure_transfers()
    copy_s = runner.stream_copy_s
    costs = MachineCosts(
        **labels,
        ubatch_ms=round(1e3 * step.ubatch, 3),
        prefill_token_ms=round(1e3 * step.prefill_token, 4),
        row_ms=round(1e3 * step.row, 3),
        attended_us=round(1e6 * step.attended, 4),
        tiled_us=round(1e6 * step.tiled, 4),
        transfer_gb_s=round(1e-9 * rate, 3),
        state_bytes=state_bytes,
        stream_copy_ms=None if copy_s is None else round(1e3 * copy_s, 3),
        asynchronous=runner.asynchronous,
    )
    return costs, max(abs(step.seconds(shape) / seconds - 1) for shape, seconds in times.items())


def find_instructions() -> str:
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        words = set()
    return ", ".join(name for name in INSTRUCTIONS if name in words) or platform.machine()


def run(name: str, model: Path | None, threads: int, repeats: int, remark: str) -> int:
    from cllm.backend.llama.memory import prepare
    from cllm.backend.llama.runner import LlamaRunner
    from cllm.config import EngineConfig

    slots, cells = max(ROWS), CONTEXTS[-1] + 4 * TILE
    settings = ServerSettings(model or embedded_model(), slots, slots * cells, threads)
    config = EngineConfig(
        model=str(settings.model), threads=threads, parallel=slots, ctx_size=settings.ctx_size
    )
    source = f"recorded on {time.strftime('%Y-%m-%d')} at a load average of {os.getloadavg()[0]:.1f}"
    labels = {
        "machine": f"{name_processor()}, {settings.thread_count} threads",
        "instructions": find_instructions(),
        "model": Path(config.model).name,
        "source": ", ".join(filter(None, (source, remark))),
    }
    runner = LlamaRunner(prepare(config))
    costs, error = record(runner, labels, repeats)
    runner.close()
    path = FOLDER / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=2) + b"\n")
    print(f"{path.read_text()}the worst step differs by {error:.0%}", file=sys.stderr)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(
        "bench.costs.record",
        "Record the step costs of this machine.",
        "--model",
        "--threads",
        repeats=(3, "times that each step is measured"),
        remark=("", "what a reader should know, for example what ran beside it"),
    )
    parser.add_argument("name", help="of the file in bench/costs, as x86-vnni")
    return run_command(parser, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
