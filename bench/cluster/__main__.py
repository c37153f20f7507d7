"""`python -m bench.cluster`: the trace against every way to place requests; bars, table and plot.

The times are those of simulated replicas: trust their order. `--out FOLDER` writes the table and the plot;
`--calibrate` compares the simulation with a real server instead (`bench.cluster.calibrate`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from bench.cluster.calibrate import calibrate
from bench.cluster.policies import POLICIES
from bench.cluster.simulation import COSTS, Result, Setup, Simulation
from bench.cluster.trace import BLOCK_TOKENS, load_trace
from bench.plots import COLOURS, load_pyplot
from bench.report import Table
from cllm.cluster.placer import BLOCK_TOKENS as PLACED_TOKENS
from cllm.cluster.placer import ReplicaPlacer, ReplicaReport, ReplicaSpeed
from cllm.errors import SetupError

REPLICAS = 100
COMPRESS = 5.0  # for as many replicas
MIXED = (1.75, 1.0, 0.25)
MAX_DECISION_S = 0.5e-3
MAX_RUN_S = 60.0
# By what the p95 of cllm's time to first token is divided, and how much it may be of that.
BARS = {"least requests": 0.5, "cache-aware": 0.45, "prefix hash": 0.45, "oracle": 1.05}
MAX_GATEWAYS = 1.35  # four of them, by one

Runs = dict[str, Result]


def run_one(scenario: str, setup: Setup, count: int | None) -> Result:
    """In a process of its own."""
    trace = load_trace(compress=COMPRESS * setup.replicas / REPLICAS, count=count)
    result = Simulation(setup, trace).run()
    print(f"{scenario}: {setup.policy}", file=sys.stderr, flush=True)
    return result


def run_all(count: int | None, quick: bool, jobs: int) -> dict[str, Runs]:
    """The results of each scenario, by policy."""
    every, ours = tuple(POLICIES), ("least requests", "cache-aware", "cllm", "oracle")
    scenarios: dict[str, tuple[Sequence[str], Setup]] = {
        f"{REPLICAS} replicas": (every, Setup("", REPLICAS)),
        "four gateways": (("least requests", "cache-aware", "cllm"), Setup("", REPLICAS, gateways=4)),
        "ten kills": (ours, Setup("", REPLICAS, kills=10)),
        "mixed speeds": (ours, Setup("", REPLICAS, speeds=MIXED)),
        "10 replicas": (every, Setup("", REPLICAS // 10)),
    }
    if quick:
        del scenarios["10 replicas"]
    with ProcessPoolExecutor(jobs) as pool:
        found = {
            name: {each: pool.submit(run_one, name, replace(setup, policy=each), count) for each in policies}
            for name, (policies, setup) in scenarios.items()
        }
        return {name: {each: run.result() for each, run in runs.items()} for name, runs in found.items()}


def measure_decisions(count: int = 2000) -> tuple[float, float]:
    """Median and p99 of a decision for 100 replicas, with blocks of 64 tokens; seconds of a core."""
    placer = ReplicaPlacer()
    speed = ReplicaSpeed(prefill_token_s=3e-4, slot_s=10.0, slots=16)
    for number in range(REPLICAS):
        placer.report(number, ReplicaReport(speed=speed, requests={}, blocks=()))
    parts = range(BLOCK_TOKENS // PLACED_TOKENS)
    times = []
    for request in load_trace(count=count):
        blocks = [block * len(parts) + part for block in request.blocks for part in parts]
        began = time.thread_time()
        placement = placer.place(request.name, request.tokens, blocks)
        times.append(time.thread_time() - began)
        placer.ended(placement)
    return statistics.median(times), statistics.quantiles(times, n=100)[-1]


def find_faults(found: Mapping[str, Runs], decision_s: float) -> list[str]:
    main, ours = found[f"{REPLICAS} replicas"], found[f"{REPLICAS} replicas"]["cllm"]
    faults = [
        f"p95 is {ours.p95_s / main[other].p95_s:.2f} of {other}'s, the bar is {bar}"
        for other, bar in BARS.items()
        if ours.p95_s > bar * main[other].p95_s
    ]
    four = found["four gateways"]["cllm"].p95_s / ours.p95_s
    if four > MAX_GATEWAYS:
        faults.append(f"p95 of four gateways is {four:.2f} of one's, the bar is {MAX_GATEWAYS}")
    if decision_s > MAX_DECISION_S:
        faults.append(f"a decision took {1e3 * decision_s:.2f} ms, the bar is {1e3 * MAX_DECISION_S} ms")
    if ours.took_s > MAX_RUN_S:
        faults.append(f"it took {ours.took_s:.0f} s, the bar is {MAX_RUN_S:.0f} s")
    lost = {name: sum(result.lost for result in runs.values()) for name, runs in found.items()}
    return faults + [f"{name}: {count} requests were lost" for name, count in lost.items() if count]


def make_table(found: Mapping[str, Runs]) -> Table:
    columns = ("scenario", "placed by", "TTFT p50", "p95", "mean", "p95 / cllm", "reused", "moved", "lost")
    rows = []
    for scenario, runs in found.items():
        for policy, result in runs.items():
            spans = (statistics.median(result.first_s), result.p95_s, statistics.fmean(result.first_s))
            parts = (f"{result.p95_s / runs['cllm'].p95_s:.2f}", f"{100 * result.reused:.0f} %")
            counts = (f"{result.moved}", f"{result.lost}")
            rows.append((scenario, policy, *(f"{each:.2f} s" for each in spans), *parts, *counts))
    return Table(columns, rows)


def draw(runs: Mapping[str, Result], path: Path) -> None:
    """The time to first token of each policy: how many requests had theirs by then."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(7.2, 4.0))
    for number, (policy, result) in enumerate(runs.items()):
        times = sorted(max(each, 0.02) for each in result.first_s)
        parts = [100 * (place + 1) / len(times) for place in range(len(times))]
        style = {"color": COLOURS[number % len(COLOURS)], "linewidth": 2.4 if policy == "cllm" else 1.2}
        axes.plot(
            times[::20], parts[::20], label=policy, linestyle="--" if policy == "oracle" else "-", **style
        )
    axes.set_xscale("log")
    axes.set_xlabel("time to first token, s (simulated)")
    axes.set_ylabel("requests, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(f"Mooncake conversations, {COMPRESS:g} times as fast, {REPLICAS} replicas", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def simulate(out: Path | None, count: int | None, quick: bool, jobs: int) -> int:
    found = run_all(count, quick, jobs)
    median_s, decision_s = measure_decisions()
    main = found[f"{REPLICAS} replicas"]
    faults = find_faults(found, decision_s)
    lines = [
        make_table(found).markdown(),
        "",
        f"A decision for {REPLICAS} replicas, blocks of {PLACED_TOKENS} tokens: "
        f"median {1e3 * median_s:.3f} ms, p99 {1e3 * decision_s:.3f} ms.",
        f"One run with {REPLICAS} replicas takes {main['cllm'].took_s:.0f} s of a core. A step: {COSTS}.",
        "",
        *([f"FAIL: {fault}" for fault in faults] or ["pass: all bars are kept"]),
    ]
    print("\n".join(lines))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "placement-table.md").write_text("\n".join(lines) + "\n")
        try:
            draw(main, out / "placement.png")
        except SetupError as error:
            print(error, file=sys.stderr)
    return 1 if faults else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the table and the plot")
    parser.add_argument("--count", type=int, help="only the first requests of the trace")
    parser.add_argument("--quick", action="store_true", help="100 replicas only")
    parser.add_argument("--calibrate", action="store_true", help="compare with a real server instead")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    options = parser.parse_args(arguments)
    if options.calibrate:
        return calibrate(options.out)
    return simulate(options.out, options.count, options.quick, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
