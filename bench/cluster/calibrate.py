"""Is the simulation right? The same requests for a real server and for one simulated replica of its speed.

What a step costs is fitted to the real server: prompts of several lengths alone, and answers together. Then
prompts of random lengths come at random times to both, some of them at the same time as others.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np

from bench.cluster.policies import POLICIES
from bench.cluster.replica import ReplicaSize, StepCosts
from bench.cluster.simulation import Setup, Simulation
from bench.cluster.trace import TraceRequest
from bench.command import serving
from bench.peers import ServerSettings
from bench.report import Table

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


class Client:
    """Asks a server for prompts of so many tokens, never cached."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=300, trust_env=False)
        self._random = random.Random(5)
        self._lock = threading.Lock()

    def ask(self, tokens: int, answer_tokens: int) -> list[float]:
        """Seconds from sending to each token."""
        with self._lock:
            prompt = [self._random.randrange(1000, 40_000) for _ in range(tokens)]
        body = {"prompt": prompt, "max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "cache_prompt": False, "speculate": False}
        times, began = [], time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    times.append(time.perf_counter() - began)
        return times


def fit_costs(client: Client, chunk: int) -> StepCosts:
    """What a step takes there, by least squares; no part is less than nothing."""
    samples = []
    for tokens in LENGTHS:
        seconds = min(client.ask(tokens, 2)[0] for _ in range(REPEATS))
        steps = -(-tokens // chunk)
        samples.append(Sample(seconds, steps, tokens, 0, tokens * tokens / 2))
    for rows in ROWS:
        with ThreadPoolExecutor(rows) as pool:
            answers = list(pool.map(lambda _: client.ask(64, 48), range(rows)))
        gap_s = statistics.median(b - a for times in answers for a, b in itertools.pairwise(times))
        samples.append(Sample(gap_s, 1, 0, rows, rows * 88))
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


def play(client: Client, requests: Sequence[TraceRequest]) -> list[float]:
    """Seconds to the first token of each, on the real server."""
    began = time.perf_counter()

    def ask(request: TraceRequest) -> float:
        time.sleep(max(0.0, began + request.at_s - time.perf_counter()))
        return client.ask(request.tokens, request.answer_tokens)[0]

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, requests))


def calibrate(out: Path | None) -> int:
    """Print both; 0 if mean, median and p95 of the time to first token agree within a quarter.

    With `out` what was measured is written there, too.
    """
    assert "least requests" in POLICIES
    chunk = 512
    settings = ServerSettings(parallel=SLOTS, threads=2)
    flags = (
        "--batch-tokens",
        str(chunk),
        "--draft-tokens",
        "0",
        "--ctx-size",
        str(SLOTS * 4096),
    )
    with serving("calibrate", settings, flags=flags) as server:
        client = Client(server.address.url)
        client.ask(200, 8)
        costs = fit_costs(client, chunk)
        requests = make_requests(costs)
        real = play(client, requests)
    if out is not None:
        found = {"costs": asdict(costs), "first_s": real}
        (out / "calibration.json").write_text(json.dumps(found, indent=1) + "\n")
    size = ReplicaSize(slots=SLOTS, chunk_tokens=chunk, cache_blocks=0)
    result = Simulation(Setup("least requests", 1, costs=costs, size=size), requests).run()
    rows, worst = [], 0.0
    for name, figure in (("mean", statistics.fmean), ("median", statistics.median), ("p95", _p95)):
        measured, simulated = figure(real), figure(result.first_s)
        worst = max(worst, abs(simulated / measured - 1))
        rows.append(
            (name, f"{measured:.3f} s", f"{simulated:.3f} s", f"{100 * (simulated / measured - 1):+.0f} %")
        )
    print(Table(("TTFT", "real server", "simulated", "difference"), rows).markdown())
    print(f"\n{REQUESTS} requests; {costs}")
    print(
        "pass"
        if worst <= MAX_ERROR
        else f"FAIL: {100 * worst:.0f} % apart, the bar is {100 * MAX_ERROR:.0f} %"
    )
    return int(worst > MAX_ERROR)


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]
