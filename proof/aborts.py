"""10,000 clients leave at random moments; how long until their slots are free.

They leave at once, in the queue, in prefill, between two tokens, at the last token, and swapped out: there
are more clients than slots, and fewer cells than the slots could use. The log says when a request was
cancelled and its slot released. It is found there by the length of its prompt, which no other request has at
that time.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from bench.command import serving
from bench.figures import percentile
from bench.peers import ServerSettings
from proof.command import make_parser
from proof.evidence import Bar, Evidence, Series, record
from proof.shared.answers import Client
from proof.shared.counters import nothing_left, read_counters
from proof.shared.mixed import Ask, Closed, connect, read_chunk, read_head, send

SLOTS, CLIENTS, CELLS = 16, 32, 4096
SHORTEST, LENGTHS = 8, 690  # tokens of a prompt, and as many different ones
VOCABULARY = 200
OUTPUT = 60
MAX_RELEASE_S = 0.25
LOG_RESOLUTION_S = 0.002
MOMENTS = ("at once", "soon", "later", "first token", "some tokens", "last token")
_ENDED = re.compile(r"^(\S+ \S+) .* request ([\w-]+): (\w+), (\d+) prompt tokens")
_RELEASED = re.compile(r"^(\S+ \S+) .* released seq \d+ of request ([\w-]+)")


class Left(NamedTuple):
    """A client that has left."""

    tokens: int  # of its prompt
    asked: float
    at: float
    moment: str


class Leavers:
    """Clients that ask and leave."""

    def __init__(self, port: int, count: int, seed: int) -> None:
        self._port, self._count = port, count
        self._random = random.Random(seed)
        self._lengths = deque(self._random.sample(range(SHORTEST, SHORTEST + LENGTHS), LENGTHS))
        self.left: list[Left] = []
        self.ended: Counter[str] = Counter()
        self.faults: list[str] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))

    async def _client(self) -> None:
        while len(self.left) < self._count and not self.faults:
            tokens = self._lengths.popleft()
            moment, asked = self._random.choice(MOMENTS), time.time()
            try:
                if await asyncio.wait_for(self._leave(tokens, moment), 120):
                    self.left.append(Left(tokens, asked, time.time(), moment))
                else:
                    self.ended["answered before it left"] += 1
            except (TimeoutError, Closed, ConnectionError) as error:
                self.faults.append(f"{moment}, {tokens} tokens: {type(error).__name__} {error}")
            self._lengths.append(tokens)

    async def _leave(self, tokens: int, moment: str) -> bool:
        """Ask and close the connection; False if the answer was there before."""
        prompt = [self._random.randrange(1, VOCABULARY) for _ in range(tokens)]
        output = 2 if moment == "last token" else OUTPUT
        body = {"prompt": prompt, "max_tokens": output, "stream": True, "ignore_eos": True}
        body["speculate"] = False  # a token an event
        reader, writer = connection = await connect(self._port)
        try:
            await send(connection, Ask("/v1/completions", body, len))
            if moment == "at once":
                return True
            if moment in ("soon", "later"):
                await asyncio.sleep(self._random.uniform(0, 0.03 if moment == "soon" else 0.6))
                return True
            if (status := (await read_head(connection))[0]) != 200:
                raise Closed(f"status {status}")
            wanted = self._random.randint(2, OUTPUT // 2) if moment == "some tokens" else 1
            seen = 0
            while seen < wanted:
                if not (chunk := await read_chunk(reader)):
                    return False
                seen += chunk.count(b'"text"')
            return True
        finally:
            writer.transport.abort()


def read_releases(lines: Iterable[str]) -> dict[int, list[tuple[float, str]]]:
    """By prompt length: when requests had ended and their slots were free, and how they ended."""
    released: dict[str, float] = {}
    found: dict[int, list[tuple[float, str]]] = {}
    for line in lines:
        if match := _RELEASED.match(line):
            released[match[2]] = _seconds(match[1])
        elif match := _ENDED.match(line):
            at = max(_seconds(match[1]), released.get(match[2], 0.0))
            found.setdefault(int(match[4]), []).append((at, match[3]))
    return found


def _seconds(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()


def match_releases(left: list[Left], ends: dict[int, list[tuple[float, str]]]) -> tuple[list[float], int]:
    """Seconds from leaving to the end, and how many have no end: those that left before they were read.

    An end is that of the last one who asked before it with a prompt of its length.
    """
    seconds, unknown = [], 0
    next_asked: dict[int, float] = {}
    for one in sorted(left, key=lambda one: one.asked, reverse=True):
        until = next_asked.get(one.tokens, math.inf)
        next_asked[one.tokens] = one.asked - LOG_RESOLUTION_S
        own = [at for at, _ in ends.get(one.tokens, ()) if one.asked - LOG_RESOLUTION_S <= at < until]
        if own:
            seconds.append(max(0.0, own[0] - one.at))
        else:
            unknown += 1
    return seconds, unknown


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, "--tiny", count=(10_000, "clients"))
    options = parser.parse_args(arguments)
    settings = ServerSettings(options.tiny, SLOTS, CELLS, log_level="debug")
    flags = ("--unified-kv", "--max-request-tokens", str(SHORTEST + LENGTHS + OUTPUT))
    with tempfile.TemporaryDirectory() as folder:
        with serving("aborts", settings, logs=Path(folder), flags=flags) as server:
            leavers = Leavers(server.address.port, options.count, seed=7)
            asyncio.run(leavers.run())
            time.sleep(2.0)
            client = Client(server.address)
            counters, metrics = read_counters(client), client.metrics()
        with Path(folder, "aborts.log").open(errors="replace") as lines:
            ends = read_releases(lines)
    for fault in leavers.faults:
        print(fault, file=sys.stderr)
    seconds, unknown = match_releases(leavers.left, ends)
    late = [one for one in seconds if one > MAX_RELEASE_S]
    p99 = percentile(seconds, 99)
    moments = Counter(one.moment for one in leavers.left)
    limit, all_left = f"≤ {1e3 * MAX_RELEASE_S:.0f} ms", len(leavers.left) >= options.count
    accepted, finished = counters["accepted"], counters["finished"]
    bars = [
        Bar("clients that left", f"{options.count:,}", f"{len(leavers.left):,}", all_left),
        Bar("from leaving to free, p99", limit, f"{1e3 * p99:.0f} ms", p99 <= MAX_RELEASE_S),
        Bar("accepted requests that ended", f"{accepted:,.0f}", f"{finished:,.0f}", finished == accepted),
        nothing_left(counters),
    ]
    return record(
        Evidence(
            name="aborts",
            order=20,
            title="Aborts",
            about=(
                f"{CLIENTS} clients on {SLOTS} slots with too few cells ask and close the connection: "
                f"{', '.join(f'{name} {count:,}' for name, count in moments.items())}."
            ),
            bars=bars,
            figures={
                "median, ms": 1e3 * percentile(seconds, 50),
                "longest, ms": 1e3 * max(seconds),
                f"beyond {1e3 * MAX_RELEASE_S:.0f} ms": len(late),
                "gone before they were read": unknown,
                "swapped out meanwhile": int(metrics["cllm_preemptions_total"]),
                **leavers.ended,
            },
            series=[Series("from leaving to free", "clients", [1e3 * one for one in seconds], "ms")],
        )
    )
