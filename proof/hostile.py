"""What plain streams and `/health` notice of 20,000 hostile requests beside them.

Every field of every route at and beyond its limits, nested, repeated, escaped, from another tenant, to the
embedded model on this machine. Four plain streams go on beside them, and a probe asks for `/health`. Then
the same for as long without them, since the worst of more gaps is longer, and a machine may have neighbours:
the worst gap of a stream may be 1.5 times that, and the inter-token target more. The target is set: the
default one may be exceeded where keeping it costs throughput. The engine has one thread, as in all tests.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from cllm.server.keys import add_key
from proof.command import make_parser
from proof.evidence import Bar, Evidence, record
from proof.neighbours import PROSE, TARGET_S
from proof.shared.hostile import PREVIOUS, HostileRequests
from tests.driver.http import HealthWatch
from tests.driver.server import PATIENCE_S, Server, Stopwatch, wait_for

COUNT, STREAMS, SENDERS = 20_000, 4, 12
LIMIT_S = 3600.0
NICENESS = 19
MAX_RATIO, MAX_HEALTH_S = 1.5, 0.1
# Refusals, and what a server may say under load; anything else is a fault.
EXPECTED = {200, 400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 431, 501, 503, 504}


class PlainStreams:
    """Streams of another tenant, one after another on each of some connections; the gaps between tokens."""

    def __init__(self, url: str, key: str, watch: Stopwatch) -> None:
        self._url, self._watch = url, watch
        self._headers = {"authorization": f"Bearer {key}"}
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(STREAMS)
        self.gaps: list[tuple[float, float]] = []  # by the clock, and less what waited for a core
        self.ended = 0

    def __enter__(self) -> PlainStreams:
        self._running = [self._pool.submit(self._run, number) for number in range(STREAMS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._running:
            each.result(PATIENCE_S)
        self._pool.shutdown()

    def _run(self, number: int) -> None:
        body = {"prompt": f"{number} {PROSE}", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.Client(
            base_url=self._url, headers=self._headers, timeout=PATIENCE_S, trust_env=False
        ) as client:
            while not self._over.is_set():
                times: list[tuple[float, float]] = []
                with client.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code == 200, response.read()
                    for line in response.iter_lines():
                        if line.startswith("data: {"):
                            times.append((time.monotonic(), self._watch.seconds))
                        if self._over.is_set():
                            break
                self.gaps += [
                    (after[0] - before[0], after[1] - before[1]) for before, after in pairwise(times)
                ]
                self.ended += 1

    @property
    def worst(self) -> tuple[float, float]:
        return max(gap for gap, _ in self.gaps), max(gap for _, gap in self.gaps)


_taken: Any = None  # how many requests have been taken, by all senders


def share_count(taken: Any) -> None:
    """Begin as a sender. Clients are elsewhere: these take only what the server leaves of the cores."""
    global _taken
    _taken = taken
    os.setsid()  # Linux shares cores between sessions, and niceness counts within one, unless it is its own
    os.nice(NICENESS)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def take() -> int:
    """The number of the next request: a sender whose answers take long leaves the others to the rest."""
    with _taken.get_lock():
        _taken.value += 1
        return int(_taken.value) - 1


def send(url: str, key: str, seed: int, count: int, limit_s: float) -> dict[str, int]:
    """Send requests one after another until the time is over; how often each status came."""
    found: Counter[str] = Counter()
    previous = PREVIOUS  # the last stored response: chains of them grow
    requests, deadline = HostileRequests(seed), time.monotonic() + limit_s
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with httpx.Client(base_url=url, headers=headers, timeout=4 * PATIENCE_S, trust_env=False) as client:
        while (number := take()) < count and time.monotonic() < deadline:
            method, path, body = requests.make(number)
            try:
                answer = client.request(method, path, content=body.replace(PREVIOUS, previous))
                status, stored = answer.status_code, re.search(rb'"id": ?"(resp_\w+)"', answer.content)
                previous = stored[1] if stored else previous
                found[str(status) if status in EXPECTED else f"{status} {path} (number {number})"] += 1
            except httpx.HTTPError as error:
                found[f"{type(error).__name__} {path} (number {number})"] += 1
    return dict(found)


def send_all(url: str, key: str, seed: int, count: int, limit_s: float) -> Counter[str]:
    """Send all from processes of their own, so that what is measured here waits for none of it."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(SENDERS, share_count, (context.Value("i", 0),)) as pool:
        asked = [pool.apply_async(send, (url, key, seed, count, limit_s)) for _ in range(SENDERS)]
        return sum((Counter(each.get(limit_s + 5 * PATIENCE_S)) for each in asked), Counter[str]())


def measure(count: int, seed: int, limit_s: float, *model: str) -> dict[str, Any]:
    """Run both parts on one server; all that was found."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = {
            name: add_key(folder / "keys.toml", name, admin=name == "admin")
            for name in ("admin", "plain", "hostile")
        }
        settings = ["--parallel", "8", "--ctx-size", "8192", "--api-keys", str(folder / "keys.toml")]
        settings += ["--target-itl-ms", f"{1000 * TARGET_S:.0f}"]
        with Server(folder / "log", *model, *settings, CLLM_LOG_LEVEL="info") as server:
            server.client.headers["authorization"] = f"Bearer {keys['admin']}"
            server.generate(PROSE, 4)
            before = [server.child(role) for role in ("engine", "tokenizer")]
            watch = Stopwatch(server.process.pid, before[0])
            began = time.monotonic()
            with PlainStreams(server.url, keys["plain"], watch) as streams, HealthWatch(server.url) as health:
                answers = send_all(server.url, keys["hostile"], seed, count, limit_s)
            seconds = time.monotonic() - began
            wait_for(server.idle, message="requests are left")
            with (
                PlainStreams(server.url, keys["plain"], watch) as quiet,
                HealthWatch(server.url) as quiet_health,
            ):
                time.sleep(seconds)
            after = [server.child(role) for role in ("engine", "tokenizer")]
            tracebacks = server.log_text.count("Traceback")
    return {
        "answers": answers,
        "seconds": seconds,
        "died": sum(first != second for first, second in zip(before, after, strict=True)),
        "tracebacks": tracebacks,
        "quiet": quiet.worst,
        "gap": streams.worst,
        "tokens": len(streams.gaps),
        "quiet_health": sorted(quiet_health.took),
        "health": sorted(health.took),
    }


def get_p99(took: Sequence[float]) -> float:
    return took[int(0.99 * (len(took) - 1))]


def make_evidence(found: dict[str, Any], count: int) -> Evidence:
    """The row of the proof."""
    allowed = MAX_RATIO * found["quiet"][0] + TARGET_S
    gap, health = found["gap"][0], get_p99(found["health"])
    faults = {name: number for name, number in found["answers"].items() if not name.isdigit()}
    sent = sum(found["answers"].values())
    return Evidence(
        name="hostile",
        order=65,
        title="Hostile requests beside plain streams",
        about=(
            f"{count:,} requests of one tenant, every field of every route at and beyond its limits, nested, "
            f"repeated, escaped, beside {STREAMS} plain streams of another tenant and a probe of `/health`; "
            "embedded model on one thread, 8 slots, `--target-itl-ms 250`."
        ),
        bars=(
            Bar("requests", f"{count:,}", f"{sent:,}", sent >= count),
            Bar(
                "worst gap of a stream",
                f"≤ {allowed:.2f} s (1.5 × {found['quiet'][0]:.2f} + {TARGET_S})",
                f"{gap:.2f} s",
                gap <= allowed,
            ),
            Bar(
                "/health, p99",
                f"≤ {1000 * MAX_HEALTH_S:.0f} ms",
                f"{1000 * health:.0f} ms",
                health <= MAX_HEALTH_S,
            ),
            Bar("workers that died", "0", str(found["died"]), not found["died"]),
            Bar("answers that are no refusal", "0", ", ".join(list(faults)[:5]) or "0", not faults),
            Bar("tracebacks in the log", "0", str(found["tracebacks"]), not found["tracebacks"]),
        ),
        figures={
            **{
                f"status {name}": number
                for name, number in sorted(found["answers"].items())
                if name.isdigit()
            },
            "tokens of the streams": found["tokens"],
            "worst gap less what waited for a core, s": found["gap"][1],
            "the same without them, s": found["quiet"][1],
            "/health without them, p99, ms": 1000 * get_p99(found["quiet_health"]),
            "/health, longest, ms": 1000 * found["health"][-1],
            "seconds": round(found["seconds"]),
        },
    )


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        count=(COUNT, "hostile requests; fewer are not recorded"),
        seed=(1, "of the requests"),
        limit_s=(LIMIT_S, "seconds with them, at most"),
    )
    options: argparse.Namespace = parser.parse_args(arguments)
    found = measure(options.count, options.seed, options.limit_s)
    evidence = make_evidence(found, options.count)
    if options.count < COUNT:
        for bar in evidence.bars:
            print(f"{bar.what}: {bar.found} ({bar.bar}), {'met' if bar.met else 'MISSED'}")
        print(evidence.figures)
        return int(not all(bar.met for bar in evidence.bars))
    return record(evidence)
