"""100,000 requests of all kinds, half as many again as the server can compute.

Every one must end in exactly one way: answered in full, or refused because the queue is full. The client's
ledger and the server's counters must say the same, nothing may hang, and no slot or cell may be left.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from statistics import median

from bench.command import serving
from bench.peers import ServerSettings
from proof.command import make_parser
from proof.evidence import Bar, Evidence, Series, record
from proof.shared.answers import Client
from proof.shared.counters import nothing_left, read_counters
from proof.shared.mixed import REFUSALS, Ask, Closed, Connection, MixedRequests, connect, exchange

STREAMS = 64
FACTOR = 1.5  # arrivals, by what the server can compute
HANG_S = 120.0
WARM_UP = 1000
MAX_OPEN = 4000
WINDOWS = 60
MENDED = (
    "The server answered 72 requests a second in the second minute and 43 in the tenth: for each slot that "
    "was evicted, all states in RAM that began alike were looked at, thousands of a tiny model. Now it is "
    "those on the path of its tokens "
    "(`test_of_thousands_that_begin_alike_only_some_are_looked_at`).",
)


class Ledger:
    """What became of each request, by the client."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.answered = 0  # sequences, as the server counts them
        self.faults: list[str] = []
        self.times: list[tuple[float, float]] = []  # when it was sent, and how long an answer took

    def fault(self, what: str, ask: Ask, detail: str = "") -> None:
        self.outcomes[what] += 1
        self.faults.append(f"{what}: {ask.route} {detail}"[:300])


class LoadGenerator:
    """Sends mixed requests to a server: a number at a time, or at a rate."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self._port = port
        self._requests = MixedRequests(seed)
        self._idle: list[Connection] = []
        self.ledger = Ledger()
        self._began = time.monotonic()

    async def ask(self, ask: Ask | None = None) -> None:
        """One request, to its end; a mixed one unless it is given."""
        ask, ledger, sent = ask or self._requests.draw(), self.ledger, time.monotonic()
        connection = self._take() or await connect(self._port)
        try:
            reply = await asyncio.wait_for(exchange(connection, ask), HANG_S)
        except TimeoutError:
            ledger.fault("hung", ask)
        except (Closed, OSError) as error:
            ledger.fault("broken", ask, f"{type(error).__name__} {error}")
        else:
            self._idle.append(connection)
            if reply.status in REFUSALS:
                ledger.outcomes["refused"] += 1
            elif reply.status != 200 or ask.ends(reply.body) != 1:
                ledger.fault("wrong", ask, f"{reply.status} {reply.body[-200:]!r}")
            else:
                ledger.outcomes["answered"] += 1
                ledger.answered += ask.sequences
                ledger.times.append((sent - self._began, reply.total_s))
            return
        connection[1].close()

    def _take(self) -> Connection | None:
        """An idle connection that the server has not closed meanwhile, as its `keep_alive_s` says."""
        while self._idle:
            connection = self._idle.pop()
            if not connection[0].at_eof():
                return connection
            connection[1].close()
        return None

    async def closed_loop(self, count: int, clients: int) -> float:
        """So many at a time; requests a second."""
        left = iter(range(count))

        async def client() -> None:
            for _ in left:
                await self.ask()

        began = time.monotonic()
        await asyncio.gather(*(client() for _ in range(clients)))
        return count / (time.monotonic() - began)

    async def open_loop(self, count: int, rate: float) -> None:
        """At a rate, whatever becomes of them. Connections are bounded: beyond that the clients wait."""
        open_requests: set[asyncio.Task[None]] = set()
        began = time.monotonic()
        for number in range(count):
            if (left_s := began + number / rate - time.monotonic()) > 0:
                await asyncio.sleep(left_s)
            while len(open_requests) >= MAX_OPEN:
                await asyncio.wait(open_requests, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.create_task(self.ask())
            open_requests.add(task)
            task.add_done_callback(open_requests.discard)
            if number % 5000 == 4999:
                print(f"{number + 1}: {dict(self.ledger.outcomes)}", file=sys.stderr, flush=True)
        while open_requests:
            await asyncio.wait(open_requests)

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def run_load(port: int, count: int) -> tuple[Ledger, float]:
    """The ledger, and the rate of the arrivals."""
    generator = LoadGenerator(port, seed=19)
    await generator.closed_loop(WARM_UP // 4, STREAMS)
    capacity = await generator.closed_loop(WARM_UP - WARM_UP // 4, STREAMS)
    rate = FACTOR * capacity
    await generator.open_loop(count - WARM_UP, rate)
    await generator.close()
    return generator.ledger, rate


def medians(times: list[tuple[float, float]]) -> Series:
    """The median time of an answer, over the run."""
    last = max(sent for sent, _ in times)
    windows: dict[int, list[float]] = {}
    for sent, took in times:
        windows.setdefault(int(WINDOWS * sent / (last + 1e-9)), []).append(took)
    x = [number * last / WINDOWS for number in sorted(windows)]
    y = [median(windows[number]) for number in sorted(windows)]
    return Series("median time of an answer", "seconds", y, "seconds since the start", x)


def no_slowing(times: list[tuple[float, float]]) -> Bar:
    """Under overload the server computes as many requests in the last quarter as in the second."""
    last = max(sent + took for sent, took in times)
    quarters = Counter(int(4 * (sent + took) / (last + 1e-9)) for sent, took in times)
    second, fourth = (quarters[number] / (last / 4) for number in (1, 3))
    shown = f"{fourth:.1f}; {second:.1f} in the second"
    return Bar("answers a second, last quarter", "0.9 of the second", shown, fourth >= 0.9 * second)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(__name__, __doc__, "--tiny", count=(100_000, "requests"))
    options = parser.parse_args(arguments)
    settings = ServerSettings(options.tiny, STREAMS, STREAMS * 512)
    began = time.monotonic()
    with serving("load", settings) as server:
        ledger, rate = asyncio.run(run_load(server.address.port, options.count))
        time.sleep(1.0)
        counters = read_counters(Client(server.address))
    outcomes, asked = ledger.outcomes, sum(ledger.outcomes.values())
    ends = outcomes["answered"] + outcomes["refused"]
    same = counters["accepted"] == counters["finished"] and counters["answered"] == ledger.answered
    bars = [
        Bar(
            "requests that ended in exactly one way",
            f"{asked:,}",
            f"{ends:,}",
            ends == asked == options.count,
        ),
        Bar("hung", "0", f"{outcomes['hung']}", not outcomes["hung"]),
        Bar(
            "client's ledger and server's counters",
            "equal",
            f"{ledger.answered:,} sequences by the client; by the server {counters['accepted']:,.0f} "
            f"accepted, {counters['finished']:,.0f} ended: {counters['answered']:,.0f} answered, "
            f"{counters['cancelled']:,.0f} cancelled, since another one of their `n` was refused",
            same,
        ),
        nothing_left(counters),
        no_slowing(ledger.times),
    ]
    for fault in ledger.faults[:10]:
        print(fault, file=sys.stderr)
    return record(
        Evidence(
            name="load",
            order=10,
            title="Load",
            about=(
                f"{asked:,} requests on a tiny model, {STREAMS} slots, arrivals at {FACTOR} times what the "
                "server computes: all routes, streamed or not, grammars, `n`, stop strings, embeddings, "
                "shared prefixes."
            ),
            bars=bars,
            figures={
                **outcomes,
                "arrivals a second": rate,
                "minutes": (time.monotonic() - began) / 60,
                "engine restarts": int(counters["restarts"]),
            },
            series=[medians(ledger.times)],
            mended=MENDED,
        )
    )
