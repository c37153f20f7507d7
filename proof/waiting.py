"""What a request costs while very many wait: submitting, cancelling, ending. No model, no server.

make proof ARGS="waiting --waiting 50000 --tenants 1 10000"
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from cllm.frontend.engine_client import EngineClient
from cllm.frontend.output_stream import OutputStream
from cllm.types import Request
from proof.command import make_parser
from tests.driver.thread_engine import BlockingOutputStream
from tests.unit.frontend.test_engine_client import ScriptedExecutor, last, percentiles

SAMPLES = 2000


def measure(waiting: int, tenants: int) -> str:
    """A line of figures, in microseconds."""
    executor = ScriptedExecutor()
    engine = EngineClient(executor, queue_size=waiting + 2 * SAMPLES)
    engine.start()

    def submit(number: int) -> OutputStream:
        tenant, timeout_s = f"t{number % tenants}", 1000.0 + number
        one = Request(id=f"r{number}", prompt=(1,) * 16, max_tokens=5, tenant=tenant, timeout_s=timeout_s)
        return engine.submit(one, BlockingOutputStream)

    started = time.perf_counter()
    for number in range(waiting):
        submit(number)
    filled_s = time.perf_counter() - started
    figures: dict[str, Sequence[Callable[[], object]]] = {
        "submit": [partial(submit, waiting + number) for number in range(SAMPLES)],
        "cancel": [partial(engine.cancel, f"r{waiting // 2 + number}") for number in range(SAMPLES)],
        "end": [lambda: executor.say(last(next(iter(engine._queue._engine)))) for _ in range(SAMPLES)],
    }
    cells = [f"{waiting:>8,} {tenants:>8,} {filled_s:>9.2f}"]
    for calls in figures.values():
        median, p99 = percentiles(calls)
        cells.append(f"{median * 1e6:>8.1f} {p99 * 1e6:>8.1f}")
    engine.stop()
    return "   ".join(cells)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, waiting=(50_000, "requests"))
    parser.add_argument("--tenants", type=int, nargs="*", default=[1, 100, 10_000])
    options = parser.parse_args(arguments)
    times = "   ".join(f"{what} µs: p50 p99" for what in ("submit", "cancel", "end"))
    print(f"{'waiting':>8} {'tenants':>8} {'filled, s':>9}   {times}")
    for waiting in (2 * SAMPLES, options.waiting):
        for tenants in options.tenants:
            print(measure(waiting, tenants), flush=True)
    return 0
