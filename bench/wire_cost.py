"""`python -m bench.wire_cost`: what it costs the server process to stream a token.

The whole server runs, on a model that costs nothing (`cllm.testing`), its engine in a child process as
always. Clients in this process read streams over real HTTP. Counted is the CPU time of the server's own
process: the report of a step coming in, the ledger, the events, the sockets; starting and ending requests
too. Steps are slow enough that every token is an event of its own: merged ones would look cheap.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench import footprint
from bench.command import conclude, make_parser, run_command
from bench.figures import LoadResult
from bench.load import run_load
from bench.peers import Peer, RunningPeer, log_folder, running
from bench.report import Spread, Table
from bench.wire import Api, ChatApi, CllmApi, OpenAIApi
from bench.workloads.plan import BenchRequest, Plan, single_requests
from bench.workloads.text import words

MAX_US = 40.0
MIN_EVENTS = 0.9  # per token; below it deltas were merged, and the figure would flatter
COUNTED = ("generated_tokens", "wall_s")
APIS: tuple[Api, ...] = (ChatApi(), OpenAIApi(), CllmApi())


class Cost(NamedTuple):
    """One load on one route."""

    load: LoadResult
    cpu_s: float

    @property
    def us_per_token(self) -> float:
        tokens = self.load.generated_tokens
        return self.cpu_s / tokens * 1e6 if tokens else float("nan")

    @property
    def events(self) -> int:
        """How many events carried text."""
        return sum(len(each.chunks_s) for each in self.load.completions)


def measure(server: RunningPeer, api: Api, workload: Plan) -> Cost:
    """The server's CPU over one load."""
    before = footprint.cpu_seconds(server.pid)
    load = run_load(server.address, api, workload)
    time.sleep(0.05)  # what follows the last byte is part of it
    return Cost(load, footprint.cpu_seconds(server.pid) - before)


def run(streams: int, tokens: int, rounds: int, step_ms: float, out: Path | None) -> int:
    """Print the table; 0 if every route stays under the bar, else 1. Raises SetupError."""
    costs: dict[str, list[Cost]] = {api.post(BenchRequest("", 1)).path: [] for api in APIS}
    command = [sys.executable, "-m", "cllm.testing", "serve", "--parallel", str(streams)]
    command += ["--ctx-size", str(streams * (tokens + 128)), "--step-ms", str(step_ms)]
    peer = Peer("cllm on the fake runner", tuple(command), ChatApi(), "/ready")
    with log_folder(None) as folder, running(peer, folder / "fake.log") as server:
        for number in range(-1, rounds):  # the first is to warm up
            for path, api in zip(costs, APIS, strict=True):
                length = tokens if number >= 0 else 10
                prompts = [words(f"wire {number} {index}", 4) for index in range(streams)]
                asked = [BenchRequest(prompt, length) for prompt in prompts]
                cost = measure(server, api, single_requests("wire cost", asked, streams))
                costs[path] += [cost] if number >= 0 else []
    rows, faults = [], []
    for path, found in costs.items():
        generated, wall_s = (sum(getattr(each.load, name) for each in found) for name in COUNTED)
        spread = Spread.of(each.us_per_token for each in found)
        events = sum(each.events for each in found) / max(1, generated)
        rows.append((path, f"{generated}", f"{events:.2f}", f"{generated / wall_s:.0f}", spread.show()))
        faults += find_faults(path, [error for each in found for error in each.load.errors], spread, events)
    table = Table(("route", "tokens", "events a token", "tokens/s", "server CPU, µs a token"), rows)
    text = "\n".join([table.markdown(), "", *(faults or [f"pass: at most {MAX_US:.0f} µs a token"])])
    return conclude("wire_cost", text, {"rows": rows, "faults": faults}, out, failed=bool(faults))


def find_faults(path: str, errors: Sequence[str], us: Spread, events: float) -> list[str]:
    """Errors, figures over the bar, and figures that cannot be believed."""
    faults = [f"FAIL: {path}: {errors[0]}"] if errors else []
    if not us.median <= MAX_US:
        faults.append(f"FAIL: {path}: {us.median:.1f} µs a token, the bar is {MAX_US:.0f} µs")
    if events < MIN_EVENTS:
        faults.append(f"FAIL: {path}: {events:.2f} events a token: the machine is too busy to measure")
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "bench.wire_cost",
        __doc__,
        "--out",
        streams=(32, "at the same time"),
        tokens=(250, "of each stream"),
        rounds=(3, "of each route, in turn"),
        step_ms=(10.0, "time between two tokens"),
    )
    return run_command(parser, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
