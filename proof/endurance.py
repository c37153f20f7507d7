"""Forty minutes of mixed load with a fault a minute, models loaded and unloaded.

Memory may not grow with requests (Theil and Sen's slope of anonymous memory after the warm-up), nor may
descriptors and threads. The median time of a request may not drift: it is divided by what a fixed piece of
arithmetic takes of a core, since the machine's own speed changes. A bare decode beside it would wait for the
cores that the server keeps busy. The client's ledger must be the server's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.command import serving
from bench.footprint import Footprint, measure
from bench.peers import RunningPeer, ServerSettings
from proof.command import make_parser
from proof.evidence import Bar, Evidence, Series, record, theil_sen
from proof.load import Ledger, LoadGenerator
from proof.shared.answers import Client
from proof.shared.counters import nothing_left, read_counters
from proof.shared.mixed import Ask, MixedRequests, connect, exchange, send
from tests.driver.server import find_workers
from tests.tiny_architectures import make_all

CLIENTS, SLOTS = 8, 8
SECOND_EVERY = 40  # one request in so many is for the second model
SAMPLE_S = 5.0
PROBE = 1 << 16  # numbers that are sorted
WARM_UP = 0.15  # of the run
MAX_SLOPE = 1024.0  # bytes a request
MAX_DRIFT = 1.05
MAX_OTHERS = 8  # descriptors or threads more at the end: connections come and go


@dataclass
class Sample:
    """The tree of server processes at a moment."""

    at_s: float
    requests: int
    used: Footprint
    probe_s: float


@dataclass
class Endurance:
    """The load, the faults and the samples."""

    server: RunningPeer
    first: str  # the names of the models
    second: str
    seconds: float
    generator: LoadGenerator
    samples: list[Sample] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)

    @property
    def ledger(self) -> Ledger:
        return self.generator.ledger

    @property
    def over(self) -> bool:
        return time.monotonic() - self.began >= self.seconds

    async def run(self) -> None:
        clients = [self._client(number) for number in range(CLIENTS)]
        await asyncio.gather(*clients, self._sample(), self._break())

    async def _client(self, number: int) -> None:
        requests = MixedRequests(100 + number, max_tokens=12, prompt_words=20, model=self.first)
        count = 0
        while not self.over:
            ask = requests.draw()
            count += 1
            if count % SECOND_EVERY == 0:
                ask = replace(ask, body={**ask.body, "model": self.second})
            await self.generator.ask(ask)

    async def _sample(self) -> None:
        values = np.random.default_rng(1).random(PROBE)
        while not self.over:
            await asyncio.sleep(SAMPLE_S)
            started = time.thread_time()
            np.sort(values)  # on one thread: a product of matrices takes several, which wait for each other
            probe_s = time.thread_time() - started
            at_s, requests = time.monotonic() - self.began, sum(self.ledger.outcomes.values())
            self.samples.append(Sample(at_s, requests, measure(self.server.pid), probe_s))

    # Faults ----------------------------------------------------------------------------------------

    async def _break(self) -> None:
        """One of them every minute, or a fortieth of the run. Engines are killed at its beginning and end."""
        calm: tuple[Callable[[], object], ...] = (
            self._leavers,
            self._stop_engine,
            self._bad_input,
            self._unload,
            self._kill_tokenizer,
            self._clear_cache,
        )
        steps = 40
        for number in range(steps - 1):
            await asyncio.sleep(max(0.0, self.began + (number + 1) * self.seconds / steps - time.monotonic()))
            edge = number < steps * WARM_UP - 1 or number > steps - 3
            fault = self._kill_engine if edge and number % 2 else calm[number % len(calm)]
            self.faults[fault.__name__.strip("_").replace("_", " ")] += 1
            found = fault()
            if asyncio.iscoroutine(found):
                await found

    async def _leavers(self) -> None:
        for number in range(16):
            connection = await connect(self.server.address.port)
            body = {"prompt": f"leaver {number}", "max_tokens": 200, "stream": True}
            await send(connection, Ask("/v1/completions", body, len))
            await asyncio.sleep(0.02 * (number % 4))
            connection[1].transport.abort()

    async def _bad_input(self) -> None:
        for body in ({"prompt": 7}, {"prompt": "a", "max_tokens": -3}, {"prompt": "a", "regex": "("}):
            connection = await connect(self.server.address.port)
            reply = await exchange(connection, Ask("/v1/completions", body, len))
            assert 400 <= reply.status < 500, reply
            connection[1].close()

    def _workers(self, role: str) -> list[int]:
        return find_workers(self.server.pid, role)

    def _kill_engine(self) -> None:
        os.kill(self._workers("engine")[0], signal.SIGKILL)

    def _kill_tokenizer(self) -> None:
        os.kill(self._workers("tokenizer")[0], signal.SIGKILL)

    async def _stop_engine(self) -> None:
        victim = self._workers("engine")[0]
        os.kill(victim, signal.SIGSTOP)
        await asyncio.sleep(1.5)
        os.kill(victim, signal.SIGCONT)

    async def _unload(self) -> None:
        client = Client(self.server.address)
        await asyncio.to_thread(_closed, client, "POST", "/admin/models/unload", {"model": self.second})

    async def _clear_cache(self) -> None:
        client = Client(self.server.address)
        await asyncio.to_thread(_closed, client, "POST", "/admin/cache/clear", {})


def _closed(client: Client, method: str, path: str, body: object) -> None:
    with client.open(method, path, body) as response:
        response.read()


def find_drift(run: Endurance) -> tuple[float, float]:
    """The last quarter by the first after the warm-up: the median time of a request, and of the probe."""
    spans = ((WARM_UP, WARM_UP + 0.25), (0.7, 0.95))  # without the kills at the end
    times = run.ledger.times
    probes = [(each.at_s, each.probe_s) for each in run.samples]
    first, last = (
        [
            statistics.median(took for at_s, took in found if begin <= at_s / run.seconds < end)
            for found in (times, probes)
        ]
        for begin, end in spans
    )
    return last[0] / first[0], last[1] / first[1]


def judge(run: Endurance, counters: dict[str, float]) -> list[Bar]:
    calm = [each for each in run.samples if WARM_UP <= each.at_s / run.seconds < 0.95]
    slope = theil_sen([(each.requests, each.used.memory_bytes) for each in calm])
    first, last = calm[: len(calm) // 4], calm[-len(calm) // 4 :]
    growth = {
        name: statistics.median(getattr(each.used, name) for each in last)
        - statistics.median(getattr(each.used, name) for each in first)
        for name in ("descriptors", "threads")
    }
    requests, probes = find_drift(run)
    drift, shown = requests / probes, f"{requests / probes:.3f} ({requests:.3f} by {probes:.3f})"
    wrong = sum(run.ledger.outcomes[what] for what in ("hung", "broken", "wrong"))
    accepted, finished = counters["accepted"], counters["finished"]
    return [
        Bar("memory, slope", "≤ 1,024 bytes a request", f"{slope:,.0f}", slope <= MAX_SLOPE),
        Bar("descriptors and threads", "flat", f"{growth}", max(growth.values()) <= MAX_OTHERS),
        Bar("median time of a request, last by first", f"≤ {MAX_DRIFT}", shown, drift <= MAX_DRIFT),
        Bar("requests lost or answered wrongly", "0", f"{wrong}", not wrong),
        Bar("accepted requests that ended", f"{accepted:,.0f}", f"{finished:,.0f}", accepted == finished),
        nothing_left(counters),
    ]


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, minutes=(40.0, "of load"))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        models = make_all(Path(name))
        settings = ServerSettings(models["dense"], SLOTS, SLOTS * 512, threads=1)
        disk = ("--cache-ram-mb", "8", "--cache-disk-mb", "32", "--cache-dir", str(Path(name, "cache")))
        flags = (str(models["hybrid"]), *disk)
        with serving("endurance", settings, flags=flags, fails=True) as server:
            generator = LoadGenerator(server.address.port)
            run = Endurance(server, "dense", "hybrid", 60 * options.minutes, generator)
            asyncio.run(run.run())
            time.sleep(3.0)
            counters = read_counters(Client(server.address))
    for fault in run.ledger.faults[:5]:
        print(fault, file=sys.stderr)
    at = [each.at_s / 60 for each in run.samples]
    memory = [each.used.memory_bytes / 2**20 for each in run.samples]
    times = sorted(run.ledger.times)
    windows = [times[place : place + 200] for place in range(0, len(times), 200)]
    return record(
        Evidence(
            name="endurance",
            order=15,
            title="Endurance",
            about=(
                f"{options.minutes:g} minutes of mixed requests from {CLIENTS} clients for two models, and "
                f"{sum(run.faults.values())} faults: {', '.join(f'{n} {c}' for n, c in run.faults.items())}."
            ),
            bars=judge(run, counters),
            figures={**run.ledger.outcomes, "engine restarts": int(counters["restarts"])},
            series=[
                Series("anonymous memory", "MiB", memory, "minutes", at),
                Series(
                    "median time of a request",
                    "seconds",
                    [statistics.median(took for _, took in each) for each in windows],
                    "minutes",
                    [each[0][0] / 60 for each in windows],
                ),
            ],
        )
    )
