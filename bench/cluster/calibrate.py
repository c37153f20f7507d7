"""Is the simulation right? The same requests for a real server and for one simulated replica of its speed.

What a step costs is fitted to the real server: prompts of several lengths alone, and answers together. Then
prompts of random lengths come at random times to both, some of them at the same time as others.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.cluster.replica import ReplicaSize, StepCosts
from bench.cluster.simulation import Setup, Simulation
from bench.cluster.trace import TraceRequest
from bench.command import serving
from bench.figures import LoadResult, gaps, percentile
from bench.load import run_load
from bench.peers import RunningPeer, ServerSettings
from bench.report import Table
from bench.wire import OpenAIApi
from bench.workloads import BenchRequest, GroupPlan, Plan, Session
from bench.workloads.text import words

SLOTS = 4
LENGTHS = (64, 192, 448, 896, 1600)
ROWS = (1, 2, 4)
REPEATS = 3
REQUESTS = 40
LOAD = 0.6  # of what the replica can compute
MAX_ERROR = 0.25


class Sample(NamedTuple):
    """A measured step, and what it was made of: the columns of the fit."""

    seconds: float
    base: float
    tokens: float
    rows: float
    attended: float


class Asker:
    """Asks a server for prompts that are never cached."""

    def __init__(self, server: RunningPeer) -> None:
        self._server = server
        self._count = 0

    def ask(self, requests: Sequence[TraceRequest]) -> LoadResult:
        """Each at its own time."""
        sessions = []
        for request in requests:
            self._count += 1
            text = words(f"calibrate {self._count}", request.tokens)  # a word is a token or two
            sessions.append(Session((BenchRequest(text, request.answer_tokens),), request.at_s))
        plan = Plan("calibrate", (GroupPlan("requests", 0, tuple(sessions)),))
        load = run_load(self._server.address, OpenAIApi(cache_prompt=False, speculate=False), plan)
        assert not load.errors, load.errors[0]
        return load


def one(tokens: int, answer_tokens: int) -> TraceRequest:
    return TraceRequest("", 0.0, tokens, answer_tokens, ())


def fit_costs(asker: Asker, chunk: int) -> StepCosts:
    """What a step takes there, by least squares; no part is less than nothing."""
    samples = []
    for length in LENGTHS:
        answers = [asker.ask([one(length, 2)]).completions[0] for _ in range(REPEATS)]
        seconds, tokens = min((each.first_token_s or 0.0, each.prompt_tokens or 0) for each in answers)
        samples.append(Sample(seconds, -(-tokens // chunk), tokens, 0, tokens * tokens / 2))
    for rows in ROWS:
        load = asker.ask([one(64, 48)] * rows)
        context = statistics.mean(each.prompt_tokens or 0 for each in load.completions) + 24
        samples.append(Sample(statistics.median(gaps([load])), 1, 0, rows, rows * context))
    columns = np.array([sample[1:] for sample in samples])
    weights = 1 / np.array([sample.seconds for sample in samples])  # relative errors count
    kept = list(range(columns.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(columns[:, kept] * weights[:, None], np.ones(len(samples)), rcond=None)
        if (found >= 0).all():
            break
        kept.remove(kept[int(found.argmin())])
    costs = dict.fromkeys(range(4), 0.0) | dict(zip(kept, map(float, found), strict=True))
    return StepCosts(costs[0], costs[1], costs[2], costs[3])


def make_requests(costs: StepCosts, seed: int = 3) -> list[TraceRequest]:
    """Random requests, about as many as the replica can compute at this load."""
    source = random.Random(seed)
    requests, now = [], 0.0
    for number in range(REQUESTS):
        tokens, answer = (
            int(source.choice((100, 300, 800, 1500)) * source.uniform(0.7, 1.2)),
            source.randint(8, 40),
        )
        requests.append(TraceRequest(f"r{number}", now, tokens, answer, ()))
        work_s = (
            costs.step_s(tokens, 0, tokens * tokens / 2)
            + answer * costs.step_s(0, SLOTS, SLOTS * tokens) / SLOTS
        )
        now += source.expovariate(LOAD / work_s)
    return requests


def calibrate(out: Path | None) -> int:
    """Print both; 0 if mean, median and p95 of the time to first token agree within a quarter.

    With `out` what was measured is written there, too.
    """
    chunk = 512
    settings = ServerSettings(parallel=SLOTS, ctx_size=SLOTS * 4096, threads=2)
    flags = ("--batch-tokens", str(chunk), "--draft-tokens", "0")
    with serving("calibrate", settings, flags=flags) as server:
        asker = Asker(server)
        asker.ask([one(200, 8)])
        costs = fit_costs(asker, chunk)
        requests = make_requests(costs)
        answers = asker.ask(requests).completions
    real = [each.first_token_s or 0.0 for each in answers]
    # Simulated are prompts of as many tokens as they had.
    asked = zip(requests, answers, strict=True)
    requests = [each._replace(tokens=answer.prompt_tokens or 0) for each, answer in asked]
    if out is not None:
        found = {"costs": asdict(costs), "first_s": real}
        (out / "calibration.json").write_text(json.dumps(found, indent=1) + "\n")
    size = ReplicaSize(slots=SLOTS, chunk_tokens=chunk, cache_blocks=0)
    result = Simulation(Setup("least requests", 1, costs=costs, size=size), requests).run()
    figures: dict[str, Callable[[Sequence[float]], float]] = {
        "mean": statistics.fmean,
        "median": statistics.median,
        "p95": lambda values: percentile(values, 95),
    }
    rows, worst = [], 0.0
    for name, figure in figures.items():
        measured, simulated = figure(real), figure(result.first_s)
        worst = max(worst, abs(simulated / measured - 1))
        apart = f"{100 * (simulated / measured - 1):+.0f} %"
        rows.append((name, f"{measured:.3f} s", f"{simulated:.3f} s", apart))
    print(Table(("TTFT", "real server", "simulated", "difference"), rows).markdown())
    print(f"\n{REQUESTS} requests; {costs}")
    apart = f"{100 * worst:.0f} % apart, the bar is {100 * MAX_ERROR:.0f} %"
    print(f"{'pass' if worst <= MAX_ERROR else 'FAIL'}: {apart}")
    return int(worst > MAX_ERROR)
