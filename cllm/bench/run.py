"""`cllm bench`: cllm and llama-server side by side, in interleaved rounds, held against the bars."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cllm.bench import footprint
from cllm.bench.client import BadAnswer, CllmClient, StepTime
from cllm.bench.comparison import Comparison, Round
from cllm.bench.load import LoadResult, run_load
from cllm.bench.peers import (
    Peer,
    RunningPeer,
    ServerSettings,
    cllm_peer,
    llama_server_peer,
    log_folder,
    running,
)
from cllm.bench.report import write_report
from cllm.bench.workloads import WORKLOADS, Workload
from cllm.errors import SetupError

NO_PEER = (
    "no llama-server to compare with, so cllm is measured alone; "
    "build one from the same source and flags with: python -m cllm.backend.llama.build --with-server"
)
QUICK_ROUNDS = 2
SETTLE_S = 1.0  # compute threads go on polling for some 200 ms after the last token


@dataclass(frozen=True, slots=True)
class _Shown:
    """Progress on stderr, so that stdout holds the report alone."""

    start: float

    def __call__(self, line: str) -> None:
        print(f"[{time.monotonic() - self.start:6.1f} s] {line}", file=sys.stderr, flush=True)


def run_bench(
    model: Path | None = None,
    rounds: int = 5,
    quick: bool = False,
    peer: Path | None = None,
    out: Path | None = None,
    *,
    parallel: int = 8,
    ctx_size: int = 4096,
    threads: int = 0,
    workloads: Sequence[str] = ("distinct", "single"),
    command: Sequence[str] | None = None,
    logs: Path | None = None,
) -> int:
    """Measure and report; 0 if every bar holds, else 1; bench.md and bench.json go into the folder `out`.

    `model` None is the embedded one, `peer` the path of a llama-server, `command` what to start
    instead of the installed `cllm`, `logs` a folder to keep the servers' logs in.
    `quick` halves the work and runs two rounds: mechanics, not figures.
    Raises SetupError if a server does not start or a workload has no such name.
    """
    unknown = sorted(set(workloads) - set(WORKLOADS))
    if unknown:
        raise SetupError(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    show = _Shown(time.monotonic())
    settings = ServerSettings(model=model, parallel=parallel, ctx_size=ctx_size, threads=threads)
    peers = [cllm_peer(settings, command)]
    if peer is None:
        show(NO_PEER)
    else:
        peers.append(llama_server_peer(settings, peer))
    load_average = os.getloadavg()[0]
    with _all_running(peers, logs, show) as servers:
        digests = {server.peer.name: _library(server) for server in servers}
        measured = compare(servers, workloads, QUICK_ROUNDS if quick else rounds, quick, show)
    comparison = Comparison(settings, tuple(measured), digests, load_average, quick)
    print(comparison.markdown())
    if out is not None:
        text, record = write_report(out, "bench", comparison.markdown(), comparison.record())
        show(f"written: {text}, {record}")
    return 0 if comparison.passed else 1


def compare(
    servers: Sequence[RunningPeer],
    workloads: Sequence[str],
    rounds: int,
    quick: bool,
    show: _Shown,
) -> list[Round]:
    """Warm every server up, then A B A B …; every round has prompts of its own, the same for all servers.

    All servers are up the whole time; what the waiting ones burn is measured and kept in `Round`.
    """
    measured = []
    for name in workloads:
        for number in range(rounds + 1):
            workload = _sized(WORKLOADS[name](number), quick)
            for server in servers:
                measurement = measure_round(server, servers, workload, number)
                load = measurement.load
                label = f"round {number} of {rounds}" if number else "warm-up"
                show(f"{name}, {label}, {server.peer.name}: {load.tokens_per_second:.1f} tokens/s")
                for error in load.errors[:3]:
                    show(f"  {error}")
                if number:
                    measured.append(measurement)
    return measured


def measure_round(
    server: RunningPeer, servers: Sequence[RunningPeer], workload: Workload, number: int
) -> Round:
    """One load on one server, and what it and the waiting ones used meanwhile."""
    time.sleep(SETTLE_S)
    waiting = [other.pid for other in servers if other is not server]
    idle_before = sum(footprint.measure(pid).cpu_s for pid in waiting)
    cpu_before = footprint.measure(server.pid).cpu_s
    steps_before = _step_time(server)
    load: LoadResult = run_load(server.address, server.peer.dialect, workload)
    steps_after = _step_time(server)
    steps = steps_after.since(steps_before) if steps_before and steps_after else None
    return Round(
        peer=server.peer.name,
        number=number,
        load=load,
        steps=steps,
        server_cpu_s=footprint.measure(server.pid).cpu_s - cpu_before,
        waiting_cpu_s=sum(footprint.measure(pid).cpu_s for pid in waiting) - idle_before,
    )


@contextmanager
def _all_running(peers: Sequence[Peer], logs: Path | None, show: _Shown) -> Iterator[list[RunningPeer]]:
    with ExitStack() as stack:
        folder = stack.enter_context(log_folder(logs))
        servers = []
        for peer in peers:
            show(f"starting {' '.join(peer.command)}")
            servers.append(stack.enter_context(running(peer, folder / f"{peer.name}.log")))
        yield servers


def _sized(workload: Workload, quick: bool) -> Workload:
    return workload.shortened(max(1, len(workload.requests) // 2)) if quick else workload


def _step_time(server: RunningPeer) -> StepTime | None:
    """cllm's own step counters; None for a server that has none."""
    if server.peer.name != "cllm":
        return None
    with CllmClient(server.address) as client:
        try:
            return client.step_time()
        except BadAnswer:
            return None


def _library(server: RunningPeer) -> str:
    return footprint.library_digest(server.pid, "libggml-cpu") or "not a shared library"
