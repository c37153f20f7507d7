"""`python -m bench.overload`: three times as many requests as the server can do.

First a closed loop finds what it can do; then requests come at three times that rate, whether or not the
earlier ones are answered. What is refused must be refused at once, and the rest must not suffer for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command import conclude, make_parser, run_command, serving
from bench.figures import Completion, LoadResult, first_tokens, percentile
from bench.load import run_load
from bench.peers import RunningPeer, ServerSettings
from bench.report import Table
from bench.workloads import Definition, Group, Plan, make_plan

OVERLOAD = 3.0
MIN_GOODPUT = 0.9
REFUSED_WITHIN_S = 0.05
REFUSAL = "status 429: "
QUEUE_SIZE = 16
PROMPT_WORDS, GENERATED = 31, 32


@dataclass(frozen=True, slots=True)
class Overload:
    """What was found: the load at capacity, and the one beyond it."""

    capacity: LoadResult
    beyond: LoadResult
    parallel: int

    @property
    def capacity_per_s(self) -> float:
        return max(1, len(self.capacity.answered)) / self.capacity.wall_s

    @property
    def goodput(self) -> float:
        """Tokens of answered requests a second, as a part of what it is at capacity."""
        return self.beyond.tokens_per_second / self.capacity.tokens_per_second

    @property
    def refusals(self) -> list[Completion]:
        return [each for each in self.beyond.completions if (each.error or "").startswith(REFUSAL)]

    @property
    def errors(self) -> list[str]:
        return [error for error in (*self.capacity.errors, *self.beyond.errors) if REFUSAL not in error]

    @property
    def slowest_refusal_s(self) -> float:
        return max((each.total_s for each in self.refusals), default=0.0)

    @property
    def first_token_p99_s(self) -> float:
        return percentile(first_tokens([self.beyond]), 99)

    @property
    def first_token_bound_s(self) -> float:
        """Half as long again as it takes to answer all running and all waiting requests."""
        return 1.5 * (QUEUE_SIZE + 2 * self.parallel) / self.capacity_per_s

    def faults(self) -> list[str]:
        found = [f"FAIL: {len(self.errors)} requests went wrong: {self.errors[0]}"] if self.errors else []
        if self.goodput < MIN_GOODPUT:
            found.append(f"FAIL: goodput is {self.goodput:.2f} of that at capacity, the bar is {MIN_GOODPUT}")
        if not self.refusals:
            found.append("FAIL: nothing was refused: this is no overload")
        if self.slowest_refusal_s > REFUSED_WITHIN_S:
            found.append(
                f"FAIL: a refusal took {self.slowest_refusal_s:.3f} s, the bar is {REFUSED_WITHIN_S}"
            )
        p99, bound = self.first_token_p99_s, self.first_token_bound_s
        if not p99 <= bound:
            found.append(f"FAIL: first-token p99 of the admitted is {p99:.1f} s, the bound {bound:.1f} s")
        return found

    def table(self) -> Table:
        counts = (len(self.beyond.answered), len(self.refusals), len(self.errors))
        sent_per_s = len(self.beyond.completions) / self.beyond.wall_s
        refused_p50_s = percentile([each.total_s for each in self.refusals], 50)
        slowest, limit = (f"{1000 * each:.1f} ms" for each in (self.slowest_refusal_s, REFUSED_WITHIN_S))
        rows = [
            ("requests/s at capacity", f"{self.capacity_per_s:.2f}", ""),
            ("requests/s sent", f"{sent_per_s:.2f}", f"{OVERLOAD:g} × until the last is sent"),
            ("answered, refused, failed", ", ".join(map(str, counts)), ""),
            ("goodput, of that at capacity", f"{self.goodput:.3f}", f"≥ {MIN_GOODPUT}"),
            ("refusal, p50", f"{1000 * refused_p50_s:.1f} ms", ""),
            ("refusal, slowest", slowest, f"≤ {limit}"),
            ("first token, p99", f"{self.first_token_p99_s:.2f} s", f"≤ {self.first_token_bound_s:.2f} s"),
        ]
        return Table(("overload", "measured", "bar"), rows)


def make_requests(name: str, count: int, **arrivals: Any) -> Plan:
    group = Group(count=count, prompt_tokens=PROMPT_WORDS, output_tokens=GENERATED, **arrivals)
    return make_plan(Definition(name="overload", about="", groups=(group,)), name)


def run_overload(server: RunningPeer, seconds: float, parallel: int) -> Overload:
    """Measure one running server. Never raises for what it does."""

    def load(name: str, count: int, **arrivals: Any) -> LoadResult:
        return run_load(server.address, server.peer.api, make_requests(name, count, **arrivals))

    clients = parallel + QUEUE_SIZE // 2
    warm_up = load("warm-up", 2 * parallel, clients=parallel)
    count = max(4 * clients, int(2 * parallel / warm_up.wall_s * seconds))
    capacity = load("capacity", count, clients=clients)
    rate = OVERLOAD * max(1, len(capacity.answered)) / capacity.wall_s
    return Overload(capacity, load("overload", max(8, int(rate * seconds)), rate=rate), parallel)


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
    text = "\n".join([found.table().markdown(), "", *(faults or ["pass"])])
    return conclude("overload", text, {"found": found, "faults": faults}, out, failed=bool(faults))


def main(arguments: Sequence[str] | None = None) -> int:
    shared = ("--model", "--threads", "--parallel", "--out", "--logs", "--command")
    parser = make_parser("bench.overload", __doc__, *shared, seconds=(60.0, "how long each part takes"))
    return run_command(parser, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
