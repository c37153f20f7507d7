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
from dataclasses import dataclass
from pathlib import Path

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
APIS: tuple[Api, ...] = (ChatApi(), OpenAIApi(), CllmApi())


@dataclass(frozen=True, slots=True)
class Cost:
    """One load on one route."""

    path: str
    tokens: int
    events: int
    cpu_s: float
    wall_s: float
    errors: tuple[str, ...]

    @property
    def us_per_token(self) -> float:
        return self.cpu_s / self.tokens * 1e6 if self.tokens else float("nan")


def fake_peer(streams: int, request_tokens: int, step_ms: float) -> Peer:
    """The server on the fake runner."""
    command = [sys.executable, "-m", "cllm.testing", "serve", "--parallel", str(streams)]
    command += ["--ctx-size", str(streams * request_tokens), "--step-ms", str(step_ms)]
    return Peer("cllm on the fake runner", tuple(command), ChatApi(), "/ready")


def measure(server: RunningPeer, api: Api, workload: Plan) -> Cost:
    """The server's CPU over one load."""
    before = footprint.cpu_seconds(server.pid)
    load = run_load(server.address, api, workload)
    time.sleep(0.05)  # what follows the last byte is part of it
    cpu_s = footprint.cpu_seconds(server.pid) - before
    return Cost(_path(api), load.generated_tokens, _events(load), cpu_s, load.wall_s, load.errors)


def _path(api: Api) -> str:
    return api.post(BenchRequest("", 1)).path


def _events(load: LoadResult) -> int:
    """How many events carried text."""
    return sum(len(each.gaps_s) + 1 for each in load.completions if each.first_token_s is not None)


def run(
    streams: int = 32, tokens: int = 250, rounds: int = 3, step_ms: float = 10.0, out: Path | None = None
) -> int:
    """Print the table; 0 if every route stays under the bar, else 1. Raises SetupError."""
    costs: list[Cost] = []
    with log_folder(None) as folder:
        peer = fake_peer(streams, tokens + 128, step_ms)
        with running(peer, folder / "fake.log") as server:
            for number in range(-1, rounds):  # the first is to warm up
                for api in APIS:
                    workload = _workload(number, streams, tokens if number >= 0 else 10)
                    cost = measure(server, api, workload)
                    costs += [cost] if number >= 0 else []
    faults = find_faults(costs)
    text = "\n".join([_table(costs).markdown(), "", *(faults or [f"pass: at most {MAX_US:.0f} µs a token"])])
    return conclude("wire_cost", text, {"costs": costs, "faults": faults}, out, failed=bool(faults))


def _workload(number: int, streams: int, tokens: int) -> Plan:
    requests = [BenchRequest(words(f"wire {number} {index}", 4), tokens) for index in range(streams)]
    return single_requests("wire cost", requests, streams)


def by_path(costs: Sequence[Cost]) -> dict[str, list[Cost]]:
    grouped: dict[str, list[Cost]] = {}
    for cost in costs:
        grouped.setdefault(cost.path, []).append(cost)
    return grouped


def find_faults(costs: Sequence[Cost]) -> list[str]:
    """Errors, figures over the bar, and figures that cannot be believed."""
    faults = [f"FAIL: {cost.path}: {'; '.join(cost.errors[:3])}" for cost in costs if cost.errors]
    for path, group in by_path(costs).items():
        median = Spread.of(cost.us_per_token for cost in group).median
        if not median <= MAX_US:
            faults.append(f"FAIL: {path}: {median:.1f} µs a token, the bar is {MAX_US:.0f} µs")
        events = sum(cost.events for cost in group) / max(1, sum(cost.tokens for cost in group))
        if events < MIN_EVENTS:
            faults.append(f"FAIL: {path}: {events:.2f} events a token: the machine is too busy to measure")
    return faults


def _table(costs: Sequence[Cost]) -> Table:
    columns = ("route", "tokens", "events a token", "tokens/s", "server CPU, µs a token")
    rows = []
    for path, group in by_path(costs).items():
        tokens = sum(cost.tokens for cost in group)
        rows.append(
            (
                path,
                f"{tokens}",
                f"{sum(cost.events for cost in group) / max(1, tokens):.2f}",
                f"{tokens / sum(cost.wall_s for cost in group):.0f}",
                Spread.of(cost.us_per_token for cost in group).show(),
            )
        )
    return Table(columns, rows)


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
