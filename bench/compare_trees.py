"""`python -m bench.compare_trees OLD NEW`: is one checkout as fast as another, with the same work?

Four comparisons, each interleaved (old new, new old, …); each figure is printed as it comes:
- steps: the scheduler on the fake runner, one workload without drafts. Tokens, steps and ubatches must be
  equal, the Python CPU a step at most 1.05 times the old one.
- work: both servers without drafts, one request after another. What each request decoded must be equal.
- speed: both servers as they are, started in each pair, in turn on short forms of all workloads. The
  median of the paired ratios of tokens/s must be at least 0.97 on each workload.
- first: a script with `LLM()`, from its start to its first token: at most 1.5 s later, median of the pairs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replace_fields

from bench.client import generate
from bench.command import make_parser, run_command
from bench.load import run_load
from bench.peers import RunningPeer, ServerSettings, cllm_peer, log_folder, running
from bench.report import Spread, Table
from bench.run import measure_tokens_per_word, warm_up
from bench.wire import OpenAIApi
from bench.workloads import Definition, find, make_plan
from bench.workloads.definition import clients_of
from bench.workloads.text import words
from cllm.errors import SetupError

MAX_CPU, MIN_SPEED, MAX_LATER_S = 1.05, 0.97, 1.5
WORKLOADS = ("single", "distinct", "chat", "shared", "stall", "agents")
# Fields of short forms, 5 to 15 s each where a prompt token takes 6 ms and a step of eight rows 60 ms. The
# other workloads take that long in their quick form.
SHORT: dict[str, dict[str, int]] = {
    "single": {"quick_count": 5},
    "distinct": {"quick_count": 12},
    "chat": {"quick_count": 10, "clients": 10, "turns": 2, "output_tokens": 20},
    "shared": {"quick_count": 12},
    "stall": {"output_tokens": 64},
    "agents": {"quick_count": 9, "clients": 9, "turns": 2, "prefix_tokens": 200, "prompt_tokens": 30}
    | {"output_tokens": 16},
}
WORK = ("prompt_tokens", "decoded_tokens", "steps", "ubatches", "cells")
PROMPT_WORDS = (4, 40, 200, 350, 40)  # below a batch: the cut of longer prompts depends on measured times
FIRST_TOKEN = """
import sys
from cllm import LLM
with LLM(sys.argv[1], threads=int(sys.argv[2])) as llm:
    llm.generate("Once upon a time", max_tokens=1)
    print("here", flush=True)
"""
START_S = 300.0  # a program may take this long


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout, and how programs are run in it."""

    name: str
    path: Path

    @property
    def environment(self) -> dict[str, str]:
        """With the safe path set, the folder that a process is started in does not shadow the checkout.

        Older checkouts have a tuner, whose choice would be compared with the defaults. Bytecode is kept.
        """
        paths = {"PYTHONPATH": str(self.path), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": ""}
        return {**paths, "CLLM_TUNE": "0"}

    def run(self, *arguments: str) -> str:
        """What Python prints in this checkout. Raises SetupError."""
        environment = {**os.environ, **self.environment}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S)
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

    def measure_first(self, settings: ServerSettings) -> float:
        """Seconds from the start of a script to its first token. Raises SetupError."""
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "script.py")
            script.write_text(FIRST_TOKEN)
            command = [sys.executable, str(script), str(settings.model or ""), str(settings.threads)]
            started = time.perf_counter()
            with subprocess.Popen(
                command,
                env={**os.environ, **self.environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as process:
                assert process.stdout is not None
                line, took_s = process.stdout.readline(), time.perf_counter() - started
                _, errors = process.communicate(timeout=START_S)
        if line.strip() != "here" or process.returncode:
            raise SetupError(f"{self.path}: no first token: {errors[-500:]}")
        return took_s

    @contextmanager
    def serving(self, settings: ServerSettings, *flags: str) -> Iterator[RunningPeer]:
        command = (sys.executable, "-m", "cllm")
        peer = cllm_peer(settings, command, OpenAIApi(), flags)
        peer = replace(peer, environment=(*peer.environment, *self.environment.items()))
        with log_folder(None) as folder, running(peer, folder / f"{self.name}.log") as server:
            yield server


Trees = tuple[Tree, Tree]


@dataclass(slots=True)
class Rows:
    """The table, and whether every bar holds. What is found is added to `out` at once, a line each."""

    out: Path | None = None
    rows: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    failed: bool = False

    def note(self, text: str, **fields: object) -> None:
        print(text, file=sys.stderr, flush=True)
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with self.out.open("a") as file:
                file.write(json.dumps(fields) + "\n")

    def add(self, what: str, sides: Iterable[object], ratio: str, bar: str, kept: bool) -> None:
        old, new = map(str, sides)
        self.rows.append((what, old, new, ratio, f"{bar}{'' if kept else ', MISSED'}"))
        self.failed |= not kept
        text = f"{what}: {old} → {new} {ratio}{'' if kept else ' MISSED'}"
        self.note(text, what=what, old=old, new=new, ratio=ratio, bar=bar, kept=kept)

    def pair(self, what: str, number: int, found: Sequence[float], against: Spread) -> None:
        """One pair of figures, and what all pairs so far come to."""
        old, new = found
        shown = f"pair {number + 1}, {what}: {old:.2f} → {new:.2f}; so far {against.show(3)}"
        self.note(shown, what=what, pair=number + 1, old=old, new=new, median=against.median)


def in_turn(trees: Trees, number: int) -> tuple[Tree, ...]:
    return trees if number % 2 == 0 else trees[::-1]


def compare_steps(trees: Trees, rounds: int, rows: Rows) -> None:
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


def compare_work(trees: Trees, settings: ServerSettings, rows: Rows) -> None:
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


def shorten(definition: Definition) -> Definition:
    """The same workload in its short form."""
    fields: dict[str, Any] = SHORT.get(definition.name, {})
    return replace_fields(
        definition, groups=tuple(replace_fields(each, **fields) for each in definition.groups)
    )


@dataclass(slots=True)
class SpeedComparison:
    """Both servers on some workloads: one server for all of them, as large as the largest needs."""

    definitions: Sequence[Definition]
    settings: ServerSettings
    tokens_per_word: dict[str, float] = field(default_factory=dict)  # by kind of text
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # by workload and tree

    @classmethod
    def of(cls, names: Sequence[str], base: ServerSettings) -> SpeedComparison:
        found = [shorten(each) for each in find(list(names))]
        parallel, cells = max(each.parallel for each in found), max(each.ctx_size for each in found)
        return cls(found, replace(base, parallel=parallel, ctx_size=cells))

    def run(self, trees: Trees, rounds: int, rows: Rows) -> None:
        self.rates = {each.name: {tree.name: [] for tree in trees} for each in self.definitions}
        for number in range(rounds):
            self._measure(trees, number, rows)
            for name, rates in self.rates.items():
                rows.pair(name, number, (rates["old"][-1], rates["new"][-1]), self._ratios(name))
        for name, rates in self.rates.items():
            ratio = self._ratios(name)
            shown = [Spread.of(rates[tree.name]).show() for tree in trees]
            rows.add(f"{name}, tokens/s", shown, ratio.show(3), f"≥ {MIN_SPEED}", ratio.median >= MIN_SPEED)

    def _ratios(self, name: str) -> Spread:
        rates = self.rates[name]
        return Spread.of(new / old for old, new in zip(rates["old"], rates["new"], strict=True))

    def _measure(self, trees: Trees, number: int, rows: Rows) -> None:
        """Tokens per second of each workload, on fresh servers; one computes at a time."""
        flags = [flag for each in self.definitions for flag in each.cllm_flags]
        with ExitStack() as stack:
            servers = {tree: stack.enter_context(tree.serving(self.settings, *flags)) for tree in trees}
            for turn, definition in enumerate(self.definitions, number):
                for tree in in_turn(trees, turn):
                    self._measure_one(definition, tree, servers[tree], number, rows)

    def _measure_one(
        self, definition: Definition, tree: Tree, server: RunningPeer, number: int, rows: Rows
    ) -> None:
        kind = definition.text
        if kind not in self.tokens_per_word:
            self.tokens_per_word[kind] = measure_tokens_per_word(server, kind)
        scale = self.tokens_per_word[kind]
        warm_up(server, definition, scale)
        clients = clients_of(definition.conditions(quick=True)[-1])
        plan = make_plan(definition, number, quick=True, clients=clients, tokens_per_word=scale)
        load = run_load(server.address, server.peer.api, plan)
        if load.errors:
            raise SetupError(f"{tree.path}, {definition.name}: {load.errors[0]}")
        rate = load.tokens_per_second
        self.rates[definition.name][tree.name].append(rate)
        text = f"  {tree.name}, {definition.name}: {rate:.2f} tokens/s in {load.wall_s:.1f} s"
        rows.note(text, what=definition.name, tree=tree.name, pair=number + 1, rate=rate)


def compare_first(trees: Trees, settings: ServerSettings, rounds: int, rows: Rows) -> None:
    """Scripts with `LLM()`; the first of each side compiles its modules and counts for nothing."""
    times: dict[str, list[float]] = {tree.name: [] for tree in trees}
    for number in range(-1, rounds):
        found = {tree.name: tree.measure_first(settings) for tree in in_turn(trees, number)}
        if number >= 0:
            for name, seconds in found.items():
                times[name].append(seconds)
            later = Spread.of(new - old for old, new in zip(times["old"], times["new"], strict=True))
            rows.pair("first token, s", number, (found["old"], found["new"]), later)
    shown = [Spread.of(times[tree.name]).show(2) for tree in trees]
    kept = later.median <= MAX_LATER_S
    rows.add("LLM(), s to the first token", shown, f"{later.show(2)} s later", f"≤ {MAX_LATER_S} s", kept)


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
    rows = Rows(out)
    if only in ("", "steps"):
        compare_steps(trees, rounds, rows)
    if only in ("", "work"):
        compare_work(trees, base, rows)
    if only in ("", "speed"):
        SpeedComparison.of(workload or WORKLOADS, base).run(trees, rounds, rows)
    if only in ("", "first"):
        compare_first(trees, base, rounds, rows)
    print(Table(("", "old", "new", "new / old", "bar"), rows.rows).markdown())
    print(f"\n{rounds} pairs, medians (lowest–highest); load average {os.getloadavg()[0]:.1f}")
    return 1 if rows.failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    shared = ("--model", "--threads")
    parser = make_parser("bench.compare_trees", __doc__, *shared, rounds=(9, "pairs"))
    parser.add_argument("old", type=Path, help="checkout to compare with")
    parser.add_argument("new", type=Path, help="checkout that must not be slower")
    named = f"of `speed` (default: {' '.join(WORKLOADS)})"
    parser.add_argument("--workload", action="extend", nargs="+", metavar="NAME", help=named)
    modes = ("steps", "work", "speed", "first")
    parser.add_argument("--only", choices=modes, default="", help="one comparison")
    parser.add_argument("--out", type=Path, help="file to add a line of JSON to for all that is found")
    return run_command(parser, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
