"""`python -m tests.soak.stopped`: workers are stopped under load, and nothing else stops.

For `--seconds` clients generate, while in turn the tokenizer and the engine get SIGSTOP; then requests come
that are more than the buffer of a socket takes. Each worker is to be killed after its silence limit and
replaced; all requests are answered; `/health` answers at once
throughout. At the end both are stopped, and SIGTERM must end the server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.command import conclude, make_parser, run_command, serving
from bench.peers import RunningPeer, ServerSettings
from cllm.errors import SetupError
from tests.driver.http import HealthWatch
from tests.driver.server import alive, find_workers

PARALLEL = 16
CLIENTS = 4
BUFFER = 1 << 18  # bytes: more than a socket takes by default
# What is sent to a worker once it is stopped. The second one has a long list for each of its requests.
TEXT = {"text": "many words " * (BUFFER // 11)}
BIASED = {
    "prompt": "1, 2, 3,",
    "max_tokens": 4,
    "logit_bias": {str(token): 0.5 for token in range(1000, 2000)},
}
FLOODS: dict[str, list[tuple[str, Mapping[str, Any]]]] = {
    "tokenizer": [("/encode", TEXT)] * 4,
    "engine": [("/generate", BIASED)] * (PARALLEL * 3 // 2),
}
DRAIN_S = 2
MAX_HEALTH_S = 0.1
MAX_REPLACE_S = 30.0  # silence limit, a new interpreter, loading
MAX_END_S = DRAIN_S + 8.0


@dataclass
class Outcome:
    """What the clients, the stopped workers and the server's end have shown."""

    answers: Counter[str] = field(default_factory=Counter)  # by status and error code
    health_s: list[float] = field(default_factory=list)
    replaced_s: list[tuple[str, float]] = field(default_factory=list)
    ended_s: float = 0.0


def run_stopped(
    seconds: float = 60.0,
    model: Path | None = None,
    out: Path | None = None,
    command: Sequence[str] | None = None,
    logs: Path | None = None,
) -> int:
    """Stop workers, print what happened; 0 if nothing else stopped. Raises SetupError."""
    flags = ("--drain-s", str(DRAIN_S))
    settings = ServerSettings(model=model, parallel=PARALLEL)
    with serving("stopped", settings, command, logs, flags, fails=True) as server:
        outcome = _stop_workers(server, seconds)
    faults = find_faults(outcome)
    text = "\n".join([*_lines(outcome), *(faults or ["pass"])])
    return conclude("stopped", text, {"outcome": outcome, "faults": faults}, out, failed=bool(faults))


def find_faults(outcome: Outcome) -> list[str]:
    """What must not have happened."""
    faults = []
    if max(outcome.health_s) > MAX_HEALTH_S:
        faults.append(f"FAIL: /health took {max(outcome.health_s):.3f} s, allowed are {MAX_HEALTH_S} s")
    if strange := [status for status in outcome.answers if status != "200"]:
        faults.append(f"FAIL: requests were answered with {', '.join(strange)}")
    if slow := [role for role, took in outcome.replaced_s if took > MAX_REPLACE_S]:
        faults.append(f"FAIL: not replaced within {MAX_REPLACE_S:.0f} s: {', '.join(slow)}")
    if outcome.ended_s > MAX_END_S:
        faults.append(f"FAIL: it ended {outcome.ended_s:.1f} s after SIGTERM, allowed are {MAX_END_S:.0f} s")
    return faults


def _stop_workers(server: RunningPeer, seconds: float) -> Outcome:
    outcome = Outcome()
    over = threading.Event()
    with (
        httpx.Client(base_url=server.address.url, timeout=2 * MAX_REPLACE_S, trust_env=False) as client,
        ThreadPoolExecutor(CLIENTS + 32) as pool,
    ):
        with HealthWatch(server.address.url) as health:
            generating = [pool.submit(_generate, client, over, outcome) for _ in range(CLIENTS)]
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for role in FLOODS:
                    time.sleep(1.0)
                    old = _stop(server.pid, role)
                    flood = [_submit(pool, client, outcome, *each) for each in FLOODS[role]]
                    outcome.replaced_s.append((role, _wait_replaced(server.pid, role, old)))
                    wait(flood, 2 * MAX_REPLACE_S)
            over.set()
            wait(generating, 2 * MAX_REPLACE_S)
            outcome.health_s = health.took
        stopped = [_stop(server.pid, role) for role in FLOODS]
        for each in FLOODS["tokenizer"]:
            _submit(pool, client, Outcome(), *each)  # what becomes of them does not count
        outcome.ended_s = _end(server.pid)
    for worker in stopped:  # of a server that had to be killed: they exit at the end of their input
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)
    return outcome


def _submit(pool: ThreadPoolExecutor, *arguments: Any) -> Future[None]:
    time.sleep(0.02)  # reading many bodies at once takes time, too
    return pool.submit(_ask, *arguments)


def _generate(client: httpx.Client, over: threading.Event, outcome: Outcome) -> None:
    """One client after the other, until it is over."""
    while not over.is_set():
        _ask(client, outcome, "/generate", {"prompt": "1, 2, 3,", "max_tokens": 24})


def _ask(client: httpx.Client, outcome: Outcome, path: str, body: Mapping[str, Any]) -> None:
    try:
        answer = client.post(path, json=body)
        status = str(answer.status_code)
        outcome.answers[status if status == "200" else f"{status} {answer.json()['error']}"] += 1
    except httpx.HTTPError as error:
        outcome.answers[type(error).__name__] += 1


def _worker(pid: int, role: str) -> int:
    """A server's worker of that role; it may be about to be started."""
    deadline = time.monotonic() + MAX_REPLACE_S
    while not (found := find_workers(pid, role)):
        if time.monotonic() > deadline:
            raise SetupError(f"there is no {role} process")
        time.sleep(0.05)
    return found[0]


def _stop(pid: int, role: str) -> int:
    worker = _worker(pid, role)
    os.kill(worker, signal.SIGSTOP)
    return worker


def _wait_replaced(pid: int, role: str, old: int) -> float:
    """The seconds until another worker has taken the place of the old one; if there is none, that goes on."""
    began = time.monotonic()
    while alive(old) and time.monotonic() < began + 2 * MAX_REPLACE_S:
        time.sleep(0.05)
    if alive(old):
        os.kill(old, signal.SIGCONT)
    else:
        _worker(pid, role)
    took = time.monotonic() - began
    print(f"{role} stopped and replaced in {took:.1f} s", file=sys.stderr, flush=True)
    return took


def _end(pid: int) -> float:
    """The seconds from SIGTERM to the end of the server; one that does not end is killed."""
    began = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    while alive(pid) and time.monotonic() < began + 60.0:
        time.sleep(0.05)
    took = time.monotonic() - began
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return took


def _lines(outcome: Outcome) -> list[str]:
    health = sorted(outcome.health_s)
    counts = ", ".join(f"{count} × {status}" for status, count in sorted(outcome.answers.items()))
    replaced = ", ".join(f"{role} {took:.1f} s" for role, took in outcome.replaced_s)
    return [
        f"/health: {len(health)} answers, median {1000 * health[len(health) // 2]:.1f} ms, "
        f"99 of 100 within {1000 * health[len(health) * 99 // 100]:.1f} ms, worst {1000 * health[-1]:.1f} ms",
        f"requests: {counts}",
        f"stopped and replaced: {replaced}",
        f"SIGTERM with both stopped: ended after {outcome.ended_s:.1f} s",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    shared = ("--model", "--out", "--logs", "--command")
    parser = make_parser("tests.soak.stopped", __doc__, *shared, seconds=(60.0, "of stopping workers"))
    return run_command(parser, arguments, run_stopped)


if __name__ == "__main__":
    sys.exit(main())
