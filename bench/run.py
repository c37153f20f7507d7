"""`python -m bench`: servers side by side, in interleaved rounds, held against the bars."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import cllm
from bench import footprint
from bench.client import BadAnswer, PlainClient, StepTime
from bench.comparison import Comparison, ReferenceRound, Round
from bench.decode_bench import Reference, find_references
from bench.footprint import name_processor
from bench.load import run_load
from bench.peers import CLLM, Peer, RunningPeer, ServerSettings, cllm_peer, log_folder, parse_peer, running
from bench.plots import draw
from bench.report import write_json
from bench.summary import make_report, record
from bench.wire import OpenAIApi
from bench.workloads import BenchRequest, Definition, Plan, make_plan, single_requests
from bench.workloads.definition import BUSY, clients_of
from bench.workloads.plan import make_fill
from bench.workloads.text import TEXTS, words
from cllm.errors import SetupError

# It ends with its parent: a bench that is killed leaves nothing spinning.
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_neighbour(busy: bool = True) -> Iterator[int]:
    """A process that never waits, for as long as the block lasts; yields its id, 0 if none is wanted."""
    if not busy:
        yield 0
        return
    process = subprocess.Popen([sys.executable, "-S", "-c", _SPIN])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


NO_PEER = "no peer to compare with, so cllm is measured alone; `cllm build --with-server` builds llama-server"
QUICK_ROUNDS = 2
SETTLE_S = 0.5  # compute threads go on polling for some 200 ms after the last token


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run. `peers` are spelled as for `parse_peer`."""

    model: Path | None = None  # None: the embedded one
    peers: tuple[str, ...] = ()
    rounds: int = 5
    quick: bool = False  # fewer requests, two rounds, one KV layout: mechanics, not figures
    out: Path | None = None  # folder for REPORT.md, report.json and plots/
    threads: int = 0  # of every server; 0: one per core
    cllm_flags: tuple[str, ...] = ()  # more flags of `cllm serve`
    llama_bench: Path | None = None
    plain_library: Path | None = None
    logs: Path | None = None

    @property
    def round_count(self) -> int:
        return min(QUICK_ROUNDS, self.rounds) if self.quick else self.rounds

    def settings(self, definition: Definition) -> ServerSettings:
        return ServerSettings(
            model=self.model,
            parallel=definition.parallel,
            ctx_size=definition.ctx_size,
            threads=self.threads,
            prompt_cache=definition.prompt_cache,
        )

    def servers(self, definition: Definition) -> list[Peer]:
        """cllm, then the peers. Raises SetupError."""
        settings = self.settings(definition)
        ours = cllm_peer(settings, None, OpenAIApi(), (*definition.cllm_flags, *self.cllm_flags))
        if definition.alone:
            return [ours]
        both = definition.both_layouts and not self.quick
        others = [peer for text in self.peers for peer in parse_peer(text, settings, both)]
        names = [peer.name for peer in (ours, *others)]
        if len(set(names)) < len(names):
            raise SetupError(f"two peers have the same name: {', '.join(names)}; write NAME=URL")
        return [ours, *others]


@dataclass(slots=True)
class BenchRun:
    """A run under way: collects what it measures."""

    options: Options
    started: float = field(default_factory=time.monotonic)
    rounds: list[Round] = field(default_factory=list)
    references: list[ReferenceRound] = field(default_factory=list)
    libraries: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    tokens_per_word: dict[str, float] = field(default_factory=dict)  # by kind of text

    def show(self, line: str) -> None:
        """Progress on stderr, so that stdout holds the report alone."""
        print(f"[{time.monotonic() - self.started:6.1f} s] {line}", file=sys.stderr, flush=True)

    def run(self, definition: Definition) -> None:
        """All rounds of one workload, on servers of its own."""
        options = self.options
        settings = options.settings(definition)
        references = find_references(definition, settings, options.llama_bench, options.plain_library)
        self.show(f"{definition.name}: {definition.about}")
        with _all_running(options.servers(definition), options.logs, definition.name) as servers:
            self._warm_up(definition, servers)
            rounds = min(options.round_count, definition.max_rounds)
            rounds = min(rounds, definition.max_quick_rounds) if options.quick else rounds
            for number in range(1, rounds + 1):
                for condition in definition.conditions(options.quick):
                    for server in _rotated(servers, number):
                        self._round(definition, condition, number, rounds, server, servers)
                for reference in references:
                    self._reference(definition, reference, number)

    def _warm_up(self, definition: Definition, servers: Sequence[RunningPeer]) -> None:
        """A small load on each, then what the workload wants in their caches."""
        if definition.text not in self.tokens_per_word:
            self.tokens_per_word[definition.text] = measure_tokens_per_word(servers[0], definition.text)
        for server in servers:
            if server.pid:
                digest = footprint.library_digest(server.pid, "libggml-cpu")
                self.libraries[server.peer.name] = digest or "not a shared library"
            warm_up(server, definition, self.tokens_per_word[definition.text])

    def _round(
        self,
        definition: Definition,
        condition: str,
        number: int,
        rounds: int,
        server: RunningPeer,
        servers: Sequence[RunningPeer],
    ) -> None:
        plan = make_plan(
            definition,
            f"{number} {condition}",  # a condition must not find the other's prompts in a cache
            quick=self.options.quick,
            clients=clients_of(condition),
            tokens_per_word=self.tokens_per_word[definition.text],
        )
        time.sleep(SETTLE_S)
        with busy_neighbour(condition == BUSY):
            measured = measure_round(server, servers, plan, condition, number)
        self.rounds.append(measured)
        where = f"{definition.name} {condition}".strip()
        figure = f"{measured.load.tokens_per_second:.1f} tokens/s in {measured.load.wall_s:.1f} s"
        self.show(f"  {where}, round {number} of {rounds}, {server.peer.name}: {figure}")
        for error in measured.load.errors[:3]:
            self.show(f"    {error}")

    def _reference(self, definition: Definition, reference: Reference, number: int) -> None:
        time.sleep(SETTLE_S)
        try:
            found = reference.measure()
        except SetupError as error:  # a build that cannot run here is a finding, not the end
            self.notes[reference.name] = "does not run here"
            self.show(f"  {definition.name}, {reference.name}: {error}")
            return
        self.references.append(ReferenceRound(definition.name, reference.name, number, found))
        self.show(f"  {definition.name}, {reference.name}: {found}")


def run_bench(options: Options, definitions: Sequence[Definition]) -> int:
    """Measure and report; 0 if every bar that was measured holds (quick: if all is answered), else 1.

    Raises SetupError for peers that cannot be used; a workload whose servers do not
    start is reported as missing, and the others are run.
    """
    bench = BenchRun(options)
    if not options.peers:
        bench.show(NO_PEER)
    for definition in definitions:
        options.servers(definition)  # a wrong peer is refused before the first minutes have passed
    load_average = os.getloadavg()[0]
    for definition in definitions:
        try:
            bench.run(definition)
        except SetupError as error:
            bench.failures.append(f"{definition.name}: {error}")
            bench.show(f"{definition.name} cannot be measured: {error}")
    comparison = Comparison(
        definitions=tuple(definitions),
        rounds=tuple(bench.rounds),
        references=tuple(bench.references),
        libraries=bench.libraries,
        info={**_info(options, load_average, time.monotonic() - bench.started), **bench.notes},
        failures=tuple(bench.failures),
        quick=options.quick,
    )
    print(make_report(comparison))
    if options.out is not None:
        write(comparison, options.out, bench)
    return 0 if comparison.passed else 1


def write(comparison: Comparison, folder: Path, bench: BenchRun) -> None:
    """REPORT.md, report.json and, if matplotlib is there, plots/*.png."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", record(comparison))
    try:
        pictures = draw(comparison, folder)
    except SetupError as error:
        bench.show(str(error))
        pictures = []
    (folder / "REPORT.md").write_text(make_report(comparison, pictures))
    bench.show(f"written to {folder}: REPORT.md, report.json, {len(pictures)} plots")


def measure_round(
    server: RunningPeer, servers: Sequence[RunningPeer], plan: Plan, condition: str, number: int
) -> Round:
    """One load on one server, and what it and the waiting ones used meanwhile."""
    waiting = [other.pid for other in servers if other is not server and other.pid]
    idle_before = sum(footprint.measure(pid).cpu_s for pid in waiting)
    cpu_before = _cpu_s(server)
    steps_before = _step_time(server)
    load = run_load(server.address, server.peer.api, plan)
    steps_after = _step_time(server)
    steps = steps_after.since(steps_before) if steps_before and steps_after else None
    if steps is not None:
        load = replace(load, python_share=steps.python_share)
    return Round(
        peer=server.peer.name,
        family=server.peer.family,
        condition=condition,
        number=number,
        load=load,
        steps=steps,
        server_cpu_s=_cpu_s(server) - cpu_before,
        waiting_cpu_s=sum(footprint.measure(pid).cpu_s for pid in waiting) - idle_before,
    )


def measure_tokens_per_word(server: RunningPeer, text: str = "words") -> float:
    """How many tokens of this model a word of ours takes; 1 if the server does not count prompts."""
    short, long, samples = 16, 80, 4
    requests = [
        BenchRequest(TEXTS[text](f"calibration {number}", count), 1)
        for count in (short, long)
        for number in range(samples)
    ]
    load = run_load(server.address, server.peer.api, single_requests("calibration", requests))
    counts = [each.prompt_tokens for each in load.answered if each.prompt_tokens is not None]
    if load.errors:
        raise SetupError(f"{server.peer.name} does not answer: {load.errors[0]}")
    if len(counts) < len(requests):
        return 1.0
    return max(0.25, (sum(counts[samples:]) - sum(counts[:samples])) / (samples * (long - short)))


def warm_up(server: RunningPeer, definition: Definition, tokens_per_word: float) -> None:
    """A small load, then what the workload wants in the caches."""
    requests = [BenchRequest(words(f"warm-up {number}", 32), 8) for number in range(definition.parallel)]
    run_load(server.address, server.peer.api, single_requests("warm-up", requests, definition.parallel))
    if definition.fill:
        run_load(server.address, server.peer.api, make_fill(definition, tokens_per_word))


@contextmanager
def _all_running(peers: Sequence[Peer], logs: Path | None, workload: str) -> Iterator[list[RunningPeer]]:
    with ExitStack() as stack:
        folder = stack.enter_context(log_folder(logs))
        yield [
            stack.enter_context(running(peer, folder / f"{workload}-{peer.name.replace(' ', '-')}.log"))
            for peer in peers
        ]


def _rotated(servers: Sequence[RunningPeer], number: int) -> list[RunningPeer]:
    """Each round begins with another, so that no one always follows the same neighbour."""
    begin = (number - 1) % len(servers)
    return [*servers[begin:], *servers[:begin]]


def _info(options: Options, load_average: float, took_s: float) -> dict[str, str]:
    settings = ServerSettings(threads=options.threads)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cllm": cllm.__version__,
        "model": options.model.name if options.model else "embedded SmolLM2-135M",
        "machine": f"{name_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "threads of each server": str(settings.thread_count),
        **({"more flags of cllm": " ".join(options.cllm_flags)} if options.cllm_flags else {}),
        "rounds": f"{options.round_count}, interleaved",
        "load average at the start": f"{load_average:.2f}",
        "the whole run took": f"{took_s / 60:.1f} minutes",
    }


def _cpu_s(server: RunningPeer) -> float:
    return footprint.measure(server.pid).cpu_s if server.pid else 0.0


def _step_time(server: RunningPeer) -> StepTime | None:
    """cllm's own step counters; None for a server that has none."""
    if server.peer.name != CLLM:
        return None
    try:
        return StepTime.read(PlainClient(server.address).fetch("GET", "/metrics").decode())
    except BadAnswer:
        return None
