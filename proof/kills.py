"""200 times kill -9 of either child process under load.

Sixteen clients stream greedy answers that are known. A kill must be noticed and the child be there again in
time; every answer must be the known one: nothing lost, nothing twice, and exactly one end.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence

from bench.command import serving
from bench.figures import percentile
from bench.peers import RunningPeer, ServerSettings
from bench.workloads.text import words
from proof.command import make_parser
from proof.evidence import Bar, Evidence, Series, record
from proof.resume import EXACT
from proof.shared.answers import Client
from proof.shared.counters import nothing_left, read_counters
from proof.shared.mixed import Ask, Closed, Reply, connect, exchange
from tests.driver.server import find_workers

CLIENTS, PROMPTS, OUTPUT = 16, 48, 64
ROLES = ("engine", "tokenizer")
NOTICED_S, READY_S = 1.0, 2.0
PATIENCE_S = 60.0
POLL_S = 0.005


class Streams:
    """Clients that stream known answers, one after the other, until they are told to stop."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._asks = [self._make_ask(number) for number in range(PROMPTS)]
        self._known: list[str] = []
        self._stopping = False
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []

    @staticmethod
    def _make_ask(number: int) -> Ask:
        body = {"prompt": words(f"known {number}", 5 + number), "max_tokens": OUTPUT, "stream": True}
        more = {"temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
        return Ask("/v1/completions", {**body, **more}, len)

    async def _ask(self, number: int) -> Reply:
        connection = await connect(self._port)
        try:
            return await asyncio.wait_for(exchange(connection, self._asks[number]), PATIENCE_S)
        finally:
            connection[1].transport.abort()

    async def learn(self) -> None:
        """The undisturbed answers, one at a time and twice: they must be the same."""
        for number in range(PROMPTS):
            first, second = [said(await self._ask(number)) for _ in range(2)]
            assert first == second and first, "the same request was answered otherwise"
            self._known.append(first)

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(CLIENTS)))

    async def _client(self, number: int) -> None:
        source = random.Random(number)
        while not self._stopping:
            place = source.randrange(PROMPTS)
            try:
                found = said(await self._ask(place))
            except (Closed, TimeoutError, OSError) as error:
                self.outcomes["lost"] += 1
                self.faults.append(f"{type(error).__name__} {error}")
                continue
            same = found == self._known[place]
            self.outcomes["as undisturbed" if same else "otherwise"] += 1
            if not same:
                self.faults.append(f"{found[-300:]!r} instead of {self._known[place][-300:]!r}")

    def stop(self) -> None:
        self._stopping = True


def said(reply: Reply) -> str:
    """Status, text, ends and usage of a streamed answer, as one text to compare."""
    events = [line[6:] for line in reply.body.decode().split("\n") if line.startswith("data: ")]
    if reply.status != 200 or not events or events[-1] != "[DONE]":
        return f"status {reply.status}: {reply.body[-200:]!r}"
    choices = [choice for event in events[:-1] for choice in json.loads(event).get("choices", ())]
    text = "".join(choice["text"] for choice in choices)
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return (
        f"{text} {ends} {[json.loads(event).get('usage') for event in events[:-1]][-1]['completion_tokens']}"
    )


async def kill_one(server: RunningPeer, role: str) -> tuple[float, float]:
    """Kill a child: seconds until another one is there, and until the server says that it is ready."""
    (victim,) = find_workers(server.pid, role)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    while True:
        await asyncio.sleep(POLL_S)
        if any(pid != victim for pid in find_workers(server.pid, role)):
            break
        assert time.monotonic() - killed < PATIENCE_S, f"no {role} after {PATIENCE_S} s"
    noticed_s = time.monotonic() - killed
    client = Client(server.address)
    body = {"content": "is it there"} if role == "tokenizer" else None
    while True:
        assert time.monotonic() - killed < PATIENCE_S, f"not ready after {PATIENCE_S} s"
        route = ("POST", "/tokenize") if role == "tokenizer" else ("GET", "/ready")
        with await asyncio.to_thread(client.open, *route, body) as response:
            if response.status == 200:
                return noticed_s, time.monotonic() - killed
        await asyncio.sleep(POLL_S)


async def run_kills(server: RunningPeer, count: int) -> tuple[Streams, list[tuple[str, float, float]]]:
    streams = Streams(server.address.port)
    await streams.learn()
    load = asyncio.create_task(streams.run())
    source, kills = random.Random(3), []
    for number in range(count):
        await asyncio.sleep(source.uniform(0.2, 1.2))
        role = ROLES[number % len(ROLES)]
        kills.append((role, *await kill_one(server, role)))
        if number % 20 == 19:
            print(f"{number + 1} kills: {dict(streams.outcomes)}", file=sys.stderr, flush=True)
    streams.stop()
    await load
    return streams, kills


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, "--tiny", count=(200, "kills"))
    options = parser.parse_args(arguments)
    settings = ServerSettings(options.tiny, CLIENTS, CLIENTS * 512, threads=1)
    began = time.monotonic()
    with serving("kills", settings, flags=EXACT, fails=True) as server:
        load_s = time.monotonic() - began
        streams, kills = asyncio.run(run_kills(server, options.count))
        time.sleep(1.0)
        counters = read_counters(Client(server.address))
    for fault in streams.faults[:5]:
        print(fault, file=sys.stderr)
    noticed, ready = [each[1] for each in kills], [each[2] for each in kills]
    limit_s, longest = load_s + READY_S, max(ready)
    exact, total = streams.outcomes["as undisturbed"], sum(streams.outcomes.values())
    bars = [
        Bar("kills", f"{options.count}", f"{len(kills)}", len(kills) == options.count),
        Bar("noticed, longest", f"≤ {NOTICED_S:g} s", f"{max(noticed):.2f} s", max(noticed) <= NOTICED_S),
        Bar("ready, longest", f"≤ load time + 2 s = {limit_s:.1f} s", f"{longest:.1f} s", longest <= limit_s),
        Bar("answers as undisturbed", f"{total:,}", f"{exact:,}", exact == total),
        nothing_left(counters),
    ]
    return record(
        Evidence(
            name="kills",
            order=30,
            title="Killed children",
            about=f"Engine and tokenizer are killed in turn while {CLIENTS} clients stream known answers.",
            bars=bars,
            figures={
                "noticed, median, s": percentile(noticed, 50),
                "ready, median, s": percentile(ready, 50),
                "engine restarts": int(counters["restarts"]),
                **streams.outcomes,
            },
            series=[Series("from the kill to ready", "kills", ready, "seconds")],
        )
    )
