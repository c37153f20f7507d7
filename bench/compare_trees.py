"""`python -m bench.compare_trees OLD NEW`: is one checkout as fast as another, with the same work?

Three comparisons, each interleaved (old new, new old, …):
- steps: the scheduler on the fake runner, one workload without drafts. Tokens, steps and ubatches must be
  equal, the Python CPU a step at most 1.05 times the old one.
- work: both servers without drafts, one request after another. What each request decoded must be equal.
- speed: both servers as they are, short forms of the workloads, one server at a time. The
  median of the paired ratios of tokens/s must be at least 0.95 on each workload.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.client import generate
from bench.command import conclude, make_parser, run_command
from bench.load import run_load
from bench.peers import RunningPeer, ServerSettings, cllm_peer, log_folder, running
from bench.report import Spread, Table
from bench.run import measure_tokens_per_word
from bench.wire import OpenAIApi
from bench.workloads import BenchRequest, Definition, find, make_plan, single_requests
from bench.workloads.definition import ORDER, clients_of
from bench.workloads.plan import make_fill
from bench.workloads.text import words
from cllm.errors import SetupError

MAX_CPU, MIN_SPEED = 1.05, 0.95
WORKLOADS = tuple(name for name in ORDER if name != "contended")  # its neighbour takes a core from both
WORK = ("prompt_tokens", "decoded_tokens", "steps", "ubatches", "cells")
PROMPT_WORDS = (4, 40, 200, 350, 40)  # below a batch: the cut of longer prompts depends on measured times


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout, and how programs are run in it."""

    name: str
    path: Path

    @property
    def environment(self) -> dict[str, str]:
        """With the safe path set, the folder that a process is started in does not shadow the checkout.

        Older checkouts have a tuner, whose choice would be compared with the defaults.
        """
        return {"PYTHONPATH": str(self.path), "PYTHONSAFEPATH": "1", "CLLM_TUNE": "0"}

    def run(self, *arguments: str) -> str:
        """What Python prints in this checkout. Raises SetupError."""
        environment = {**os.environ, **self.environment}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise SetupError(f"{self.path}: {done.stderr[-500:]}")
        return done.stdout.strip()

    def check(self) -> None:
        """Raises SetupError unless this checkout's own cllm is what its processes import."""
        imported = self.run("-c", "import cllm; print(cllm.__file__)")
        if Path(imported).parents[1] != self.path:
            raise SetupError(f"{self.path} is no checkout of cllm: {imported} is imported instead")

    def measure_steps(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run(str(Path(__file__).with_name("step_driver.py"))))
        return found

    @contextmanager
    def serving(self, settings: ServerSettings, *flags: str) -> Iterator[RunningPeer]:
        command = (sys.executable, "-m", "cllm")
        peer = cllm_peer(settings, command, OpenAIApi(), flags)
        peer = replace(peer, environment=(*peer.environment, *self.environment.items()))
        with log_folder(None) as folder, running(peer, folder / f"{self.name}.log") as server:
            yield server


@dataclass(slots=True)
class Rows:
    """The table, and whether every bar holds."""

    rows: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    failed: bool = False

    def add(self, what: str, sides: Iterable[object], ratio: str, bar: str, kept: bool) -> None:
        old, new = map(str, sides)
        self.rows.append((what, old, new, ratio, f"{bar}{'' if kept else ', MISSED'}"))
        self.failed |= not kept
        print(f"{what}: {old} → {new} {ratio}{'' if kept else ' MISSED'}", file=sys.stderr, flush=True)


def in_turn(trees: tuple[Tree, Tree], number: int) -> tuple[Tree, ...]:
    return trees if number % 2 == 0 else trees[::-1]


def compare_steps(trees: tuple[Tree, Tree], rounds: int, rows: Rows) -> object:
    """The schedulers on the fake runner."""
    found: dict[str, list[dict[str, Any]]] = {tree.name: [] for tree in trees}
    for number in range(rounds):
        for tree in in_turn(trees, number):
            found[tree.name].append(tree.measure_steps())
    old, new = found["old"], found["new"]
    for name in old[0]["work"]:
        values = [sorted({each["work"][name] for each in side}) for side in (old, new)]
        shown = [", ".join(map(str, side)) for side in values]
        rows.add(f"fake runner, {name}", shown, "", "equal", values[0] == values[1] and len(values[0]) == 1)
    costs = [Spread.of(each["cpu_s"] for each in side) for side in (old, new)]
    pairs = zip(old, new, strict=True)
    ratio = Spread.of(theirs["cpu_s"] / ours["cpu_s"] for ours, theirs in pairs)
    shown = [cost.show(1, 1e6) for cost in costs]
    rows.add("fake runner, µs CPU a step", shown, ratio.show(3), f"≤ {MAX_CPU}", ratio.median <= MAX_CPU)
    return found


def compare_work(trees: tuple[Tree, Tree], settings: ServerSettings, rows: Rows) -> object:
    """What sequential requests cost without drafts, by the server's own counters."""
    found: dict[str, list[list[int]]] = {}
    for tree in trees:
        with tree.serving(settings, "--draft-tokens", "0") as server:
            usages = [
                generate(server.address, words(f"work {number}", count), 24)
                for number, count in enumerate(PROMPT_WORDS)
            ]
        found[tree.name] = [[usage[name] for name in WORK] for usage in usages]
    for index, name in enumerate(WORK):
        old, new = (sum(usage[index] for usage in found[tree.name]) for tree in trees)
        equal = all(ours[index] == theirs[index] for ours, theirs in zip(*found.values(), strict=True))
        rows.add(f"server, {name} of {len(PROMPT_WORDS)} requests", (old, new), "", "equal", equal)
    return found


def measure_speed(
    tree: Tree, definition: Definition, settings: ServerSettings, number: int, tokens_per_word: float
) -> float:
    """Tokens per second of one short round on a fresh server."""
    with tree.serving(settings, *definition.cllm_flags) as server:
        warm_up = [BenchRequest(words(f"warm-up {index}", 32), 8) for index in range(settings.parallel)]
        run_load(server.address, server.peer.api, single_requests("warm-up", warm_up, settings.parallel))
        if definition.fill:
            run_load(server.address, server.peer.api, make_fill(definition, tokens_per_word))
        clients = clients_of(definition.conditions(quick=True)[-1])
        plan = make_plan(definition, number, quick=True, clients=clients, tokens_per_word=tokens_per_word)
        load = run_load(server.address, server.peer.api, plan)
    if load.errors:
        raise SetupError(f"{tree.path}, {definition.name}: {load.errors[0]}")
    return load.tokens_per_second


def compare_speed(
    trees: tuple[Tree, Tree], definition: Definition, base: ServerSettings, rounds: int, rows: Rows
) -> object:
    """Both servers on one workload, one at a time."""
    settings = replace(base, parallel=definition.parallel, ctx_size=definition.ctx_size)
    with trees[0].serving(settings) as server:
        tokens_per_word = measure_tokens_per_word(server, definition.text)
    rates: dict[str, list[float]] = {tree.name: [] for tree in trees}
    for number in range(rounds):
        for tree in in_turn(trees, number):
            rates[tree.name].append(measure_speed(tree, definition, settings, number, tokens_per_word))
    ratio = Spread.of(new / old for old, new in zip(rates["old"], rates["new"], strict=True))
    shown = [Spread.of(rates[tree.name]).show() for tree in trees]
    what = f"{definition.name}, tokens/s"
    rows.add(what, shown, ratio.show(3), f"≥ {MIN_SPEED}", ratio.median >= MIN_SPEED)
    return rates


def run(
    old: Path,
    new: Path,
    model: Path | None,
    threads: int,
    rounds: int,
    workload: Sequence[str] | None,
    only: str,
    out: Path | None,
) -> int:
    """0 if all bars hold, else 1. Raises SetupError for a checkout that cannot be run."""
    trees = (Tree("old", old.resolve()), Tree("new", new.resolve()))
    for tree in trees:
        tree.check()
    base = ServerSettings(model=model, threads=threads)
    rows, data = Rows(), dict[str, object]()
    if only in ("", "steps"):
        data["steps"] = compare_steps(trees, rounds, rows)
    if only in ("", "work"):
        data["work"] = compare_work(trees, base, rows)
    if only in ("", "speed"):
        for definition in find(list(workload or WORKLOADS)):
            data[definition.name] = compare_speed(trees, definition, base, rounds, rows)
    table = Table(("", "old", "new", "new / old", "bar"), rows.rows)
    notes = f"{rounds} paired rounds, medians (lowest–highest); load average {os.getloadavg()[0]:.1f}"
    return conclude("compare_trees", f"{table.markdown()}\n\n{notes}", data, out, failed=rows.failed)


def main(arguments: Sequence[str] | None = None) -> int:
    shared = ("--model", "--threads", "--out")
    parser = make_parser("bench.compare_trees", __doc__, *shared, rounds=(9, "paired rounds"))
    parser.add_argument("old", type=Path, help="checkout to compare with")
    parser.add_argument("new", type=Path, help="checkout that must not be slower")
    parser.add_argument(
        "--workload", action="append", help=f"again for more (default: {', '.join(WORKLOADS)})"
    )
    parser.add_argument("--only", choices=("steps", "work", "speed"), default="", help="one comparison")
    return run_command(parser, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
