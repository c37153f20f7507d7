"""`python -m bench.overload`: three times as many requests as the server can do.

First a closed loop finds what it can do; then requests come at three times that rate, whether or not the
earlier ones are answered. What is refused must be refused at once, and the rest must not suffer for it.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.command import conclude, make_parser, run_command, serving
from bench.figures import percentile
from bench.load import run_load
from bench.peers import RunningPeer, ServerSettings
from bench.report import Table
from bench.wire import Address, Api, Post, Response, post
from bench.workloads.plan import BenchRequest, single_requests
from bench.workloads.text import words

OVERLOAD = 3.0
MIN_GOODPUT = 0.9
REFUSED_WITHIN_S = 0.05
QUEUE_SIZE = 16
PROMPT_WORDS, GENERATED = 31, 32


@dataclass(frozen=True, slots=True)
class Answer:
    first_token_s: float
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    seconds: float
    retry_after: bool


@dataclass(frozen=True, slots=True)
class Overload:
    """What was found. Rates are of requests answered in full; times in seconds."""

    capacity_per_s: float
    capacity_tokens_per_s: float
    sent: int
    wall_s: float
    answered: tuple[Answer, ...]
    refusals: tuple[Refusal, ...]
    errors: tuple[str, ...]
    parallel: int

    @property
    def goodput(self) -> float:
        """Tokens of answered requests a second, as a part of what it is at capacity."""
        tokens = sum(each.generated_tokens for each in self.answered)
        return tokens / self.wall_s / self.capacity_tokens_per_s

    @property
    def first_token_p99_s(self) -> float:
        return percentile([each.first_token_s for each in self.answered], 99)

    @property
    def first_token_bound_s(self) -> float:
        """Half as long again as it takes to answer all running and all waiting requests."""
        return 1.5 * (QUEUE_SIZE + 2 * self.parallel) / self.capacity_per_s

    def faults(self) -> list[str]:
        found = [f"FAIL: {len(self.errors)} requests went wrong: {self.errors[0]}"] if self.errors else []
        if self.goodput < MIN_GOODPUT:
            found.append(f"FAIL: goodput is {self.goodput:.2f} of that at capacity, the bar is {MIN_GOODPUT}")
        wrong = [each for each in self.refusals if each.status != 429 or not each.retry_after]
        if wrong:
            found.append(
                f"FAIL: {len(wrong)} refusals without 429 and Retry-After, the first {wrong[0].status}"
            )
        if not self.refusals:
            found.append("FAIL: nothing was refused: this is no overload")
        elif (slowest := max(each.seconds for each in self.refusals)) > REFUSED_WITHIN_S:
            late = sum(each.seconds > REFUSED_WITHIN_S for each in self.refusals)
            found.append(
                f"FAIL: {late} of {len(self.refusals)} refusals took over {1000 * REFUSED_WITHIN_S:.0f} ms, "
                f"up to {slowest:.3f} s"
            )
        p99, bound = self.first_token_p99_s, self.first_token_bound_s
        if not p99 <= bound:
            found.append(f"FAIL: first-token p99 of the admitted is {p99:.1f} s, the bound {bound:.1f} s")
        return found


def requests(count: int, start: int) -> list[BenchRequest]:
    return [
        BenchRequest(words(f"overload {start + index}", PROMPT_WORDS), GENERATED) for index in range(count)
    ]


def run_overload(server: RunningPeer, seconds: float, parallel: int) -> Overload:
    """Measure one running server. Never raises for what it does."""
    api = server.peer.api
    clients = parallel + QUEUE_SIZE // 2
    warm_up = single_requests("warm-up", requests(2 * parallel, 0), parallel)
    rate = _rate(run_load(server.address, api, warm_up).wall_s, 2 * parallel)
    count = max(4 * clients, int(rate * seconds))
    load = run_load(server.address, api, single_requests("capacity", requests(count, 1000), clients))
    good = [each for each in load.completions if each.error is None]
    capacity = _rate(load.wall_s, len(good))
    sent = requests(max(8, int(OVERLOAD * capacity * seconds)), 100_000)
    started = time.perf_counter()
    outcomes = asyncio.run(_open_loop(server.address, api, sent, OVERLOAD * capacity))
    wall_s = time.perf_counter() - started
    return Overload(
        capacity_per_s=capacity,
        capacity_tokens_per_s=load.tokens_per_second,
        sent=len(sent),
        wall_s=wall_s,
        answered=tuple(each for each in outcomes if isinstance(each, Answer)),
        refusals=tuple(each for each in outcomes if isinstance(each, Refusal)),
        errors=(*load.errors, *(each for each in outcomes if isinstance(each, str))),
        parallel=parallel,
    )


def _rate(wall_s: float, count: int) -> float:
    return max(count, 1) / wall_s


async def _open_loop(
    address: Address, api: Api, asked: Sequence[BenchRequest], rate: float
) -> list[Answer | Refusal | str]:
    """Send at `rate` with random (exponential) gaps without waiting for answers; then wait for all."""
    gaps = random.Random("overload")
    posts = [api.post(request) for request in asked]

    async def one(message: Post) -> Response | str:
        try:
            return await post(address, message.path, message.body, 300.0)
        except OSError as error:
            return str(error) or type(error).__name__

    tasks = []
    due = time.perf_counter()
    for message in posts:
        due += gaps.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(one(message)))
    return [read(response, api) for response in await asyncio.gather(*tasks)]


def read(response: Response | str, api: Api) -> Answer | Refusal | str:
    """What became of one request; text says what went wrong."""
    if isinstance(response, str):
        return response
    status = response.head.status
    if status in (429, 503):
        head = b"".join(packet.data for packet in response.packets).partition(b"\r\n\r\n")[0].lower()
        return Refusal(status, response.ended_at - response.sent_at, b"\r\nretry-after:" in head)
    if status != 200:
        return f"status {status}: {response.body()[:200].decode(errors='replace')}"
    first: float | None = None
    generated = 0
    for event in response.events():
        piece = api.read(event.payload)
        if piece.error is not None:
            return piece.error
        if piece.text and first is None:
            first = event.at - response.sent_at
        generated = piece.generated_tokens or generated
    if first is None or generated != GENERATED:
        return f"{generated} tokens instead of {GENERATED}"
    return Answer(first, generated)


def table(found: Overload) -> Table:
    slowest = [each.seconds for each in found.refusals]
    rows = [
        ("requests/s at capacity", f"{found.capacity_per_s:.2f}", ""),
        ("requests/s sent", f"{found.sent / found.wall_s:.2f}", f"{OVERLOAD:g} × until the last is sent"),
        (
            "answered, refused, failed",
            f"{len(found.answered)}, {len(found.refusals)}, {len(found.errors)}",
            "",
        ),
        ("goodput, of that at capacity", f"{found.goodput:.3f}", f"≥ {MIN_GOODPUT}"),
        ("refusal, p50", f"{1000 * percentile(slowest, 50):.1f} ms", ""),
        (
            "refusal, slowest",
            f"{1000 * percentile(slowest, 100):.1f} ms",
            f"≤ {1000 * REFUSED_WITHIN_S:.0f} ms",
        ),
        (
            "first token of the admitted, p99",
            f"{found.first_token_p99_s:.2f} s",
            f"≤ {found.first_token_bound_s:.2f} s",
        ),
    ]
    return Table(("overload", "measured", "bar"), rows)


def run(
    model: Path | None,
    threads: int,
    parallel: int,
    seconds: float,
    out: Path | None,
    logs: Path | None,
    command: Sequence[str] | None,
) -> int:
    """0 if all is well, else 1."""
    settings = ServerSettings(model=model, parallel=parallel, threads=threads)
    flags = ("--queue-size", str(QUEUE_SIZE))
    with serving("overload", settings, command, logs, flags) as server:
        found = run_overload(server, seconds, parallel)
    faults = found.faults()
    text = "\n".join([table(found).markdown(), "", *(faults or ["pass"])])
    data = {"found": found, "faults": faults}
    return conclude("overload", text, data, out, failed=bool(faults))


def main(arguments: Sequence[str] | None = None) -> int:
    shared = ("--model", "--threads", "--parallel", "--out", "--logs", "--command")
    parser = make_parser("bench.overload", __doc__, *shared, seconds=(60.0, "how long each part takes"))
    return run_command(parser, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
