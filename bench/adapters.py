"""`python -m bench.adapters`: LoRA adapters on cllm beside llama-server with the same files.

Both servers run side by side and take turns. Eight users are on four adapters, on one, or on the base. Then
two users ask as much on one adapter, or on the base. Sets of adapters take turns in both servers, so that a
step of four adapters with two users each has two rows, too. What it lacks to the rate of two users is the
price of turns. The adapters' own products are what one adapter loses against the base. Drafts are off.

llama-server computes what its first busy slot needs and lets other sets wait, so it switches seldom. The
part of its time that switches take is what its rate on four adapters lacks to that of two users on one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.command import conclude, make_parser, run_command
from bench.figures import LoadResult, first_tokens, gaps
from bench.load import run_load
from bench.peers import (
    CLLM,
    LLAMA_SERVER,
    RunningPeer,
    ServerSettings,
    cllm_peer,
    embedded_model,
    llama_server_peer,
    log_folder,
    running,
)
from bench.report import Spread, Table
from bench.wire import OpenAIApi, Post
from bench.workloads import BenchRequest, GroupPlan, Plan, Session
from bench.workloads.text import words
from cllm.adapters import Adapter, join_key
from cllm.backend.base import Batch
from cllm.backend.llama.runner import LlamaRunner
from cllm.build.build import find_built
from cllm.config import EngineConfig
from cllm.errors import SetupError
from tests.driver.runner import row
from tests.tiny_models import make_adapter

ADAPTERS, USERS, CELLS = 4, 8, 1024
PROMPT_WORDS = 48
BASE = "base"
ON_FOUR, ON_ONE, ON_BASE, TWO_ON_ONE, TWO_ON_BASE = SCENARIOS = (
    "8 users on 4 adapters", "8 users on 1 adapter", "8 users on the base",
    "2 users on 1 adapter", "2 users on the base",
)  # fmt: skip
GROUPS = {  # what each group of users asks for, and how many they are
    ON_FOUR: [(str(number), USERS // ADAPTERS) for number in range(ADAPTERS)],
    ON_ONE: [("0", USERS)],
    ON_BASE: [(BASE, USERS)],
    TWO_ON_ONE: [("0", USERS // ADAPTERS)],
    TWO_ON_BASE: [(BASE, USERS // ADAPTERS)],
}
SHARE_BAR, OWN_BAR, TURNS_BAR = 0.8, 0.9, 0.9
GPU_BAR = 2.0


class AdapterApi:
    """Completions by the adapter that a prompt begins with: `0:` to `3:`, or `base:`."""

    exact = True

    def __init__(self) -> None:
        ids = {BASE: [], **{str(each): [{"id": each, "scale": 1.0}] for each in range(ADAPTERS)}}
        self._apis = {name: OpenAIApi(lora=lora, speculate=False) for name, lora in ids.items()}
        self.read = self._apis[BASE].read

    def post(self, request: BenchRequest, history: Sequence[str] | None = None) -> Post:
        name, _, prompt = request.prompt.partition(":")
        return self._apis[name].post(replace(request, prompt=prompt), history)


def make_scenario(name: str, salt: int, requests: int, output: int) -> Plan:
    """As many requests in each scenario: of each of eight users, or of two for them."""
    groups = []
    for group, users in GROUPS[name]:
        count = USERS * requests // len(GROUPS[name])
        texts = (words(f"{salt} {name} {group} {number}", PROMPT_WORDS) for number in range(count))
        # No two users that begin together end together.
        lengths = (output * (3 + number % 3) // 4 for number in range(count))
        asked = zip(texts, lengths, strict=True)
        sessions = tuple(Session((BenchRequest(f"{group}:{text}", length),)) for text, length in asked)
        groups.append(GroupPlan(group, users, sessions))
    return Plan(name, tuple(groups))


class Measured(NamedTuple):
    """Loads by server and scenario, a round each."""

    loads: dict[str, dict[str, list[LoadResult]]]

    def rates(self, server: str, scenario: str) -> list[float]:
        return [load.tokens_per_second for load in self.loads[server][scenario]]

    def ratio(self, one: tuple[str, str], other: tuple[str, str]) -> Spread:
        """Of the rates of two servers and scenarios, round by round."""
        pairs = zip(self.rates(*one), self.rates(*other), strict=True)
        return Spread.of(first / second for first, second in pairs)

    def show(self, *, gpu: bool) -> tuple[str, bool]:
        """The report, and whether a bar is missed."""
        rows = []
        for scenario in SCENARIOS:
            found = [self.loads[server][scenario] for server in self.loads]
            rates = (Spread.of(load.tokens_per_second for load in loads).show() for loads in found)
            worst = [f"{1e3 * max(gaps(loads), default=0.0):.0f}" for loads in found]
            worst += [f"{max(first_tokens(loads), default=0.0):.1f}" for loads in found]
            rows.append((scenario, *rates, *worst))
        kinds = ("tokens/s", "worst gap, ms", "worst first token, s")
        names = [f"{kind}: {server}" for kind in kinds for server in self.loads]
        bars = []
        if LLAMA_SERVER in self.loads:
            kept = self.ratio((LLAMA_SERVER, ON_FOUR), (LLAMA_SERVER, TWO_ON_ONE))
            share = max(0.0, 1 - kept.median)
            bar = GPU_BAR if gpu else 1 + SHARE_BAR * share
            beside = self.ratio((CLLM, ON_FOUR), (LLAMA_SERVER, ON_FOUR))
            bars.append(
                (f"4 adapters, of llama-server's ({share:.0%} of whose time is switches)", beside, bar)
            )
        bars.append(("1 adapter, of the base", self.ratio((CLLM, ON_ONE), (CLLM, ON_BASE)), OWN_BAR))
        turns = self.ratio((CLLM, ON_FOUR), (CLLM, TWO_ON_BASE))
        bars.append(("4 adapters, of 4 groups of 2 of the base", turns, TURNS_BAR))
        apart = self.ratio((CLLM, ON_FOUR), (CLLM, TWO_ON_ONE))
        bars.append(("the same of groups on 1 adapter: turns alone", apart, 0.0))
        lines = [
            (what, spread.show(2), f"≥ {bar:.2f}" if bar else "–", "FAIL" if spread.median < bar else "")
            for what, spread, bar in bars
        ]
        tables = (Table(("", *names), rows), Table(("cllm", "ratio", "bar", ""), lines))
        failed = any(spread.median < bar for _, spread, bar in bars)
        return "\n\n".join(table.markdown() for table in tables), failed


def measure(servers: Sequence[RunningPeer], rounds: int, requests: int, output: int) -> Measured:
    """Raises SetupError if a request is not answered in full."""
    loads: dict[str, dict[str, list[LoadResult]]] = {
        server.peer.family: {name: [] for name in SCENARIOS} for server in servers
    }
    for number in range(-1, rounds):  # the first one warms up
        asked = (1, 8) if number < 0 else (requests, output)
        for place, name in enumerate(SCENARIOS):
            for server in servers[:: -1 if (number + place) % 2 else 1]:
                load = run_load(server.address, server.peer.api, make_scenario(name, number, *asked))
                if load.errors:
                    raise SetupError(f"{server.peer.family}, {name}: {load.errors[0]}")
                if number >= 0:
                    loads[server.peer.family][name].append(load)
    return Measured(loads)


def show_switches(model: Path, files: Sequence[Path], threads: int) -> str:
    """Milliseconds of the first two steps of turns: with llama.cpp's graphs kept, and planned anew."""
    config = EngineConfig(model=str(model), parallel=USERS, ctx_size=USERS * CELLS, threads=threads)
    runner, lines = LlamaRunner(config), []
    try:
        adapters = [runner.check_adapter(Adapter(name=file.stem, file=str(file))) for file in files[:2]]
        for adapter in adapters:
            runner.load_adapter(adapter)
        keys = [join_key([(each.digest, 1.0)]) for each in adapters]
        for label, anew in (("kept", False), ("planned anew", True)) * 3:
            steps: tuple[list[float], list[float]] = ([], [])
            for turn in range(12):
                runner._adapters._grown = anew
                for times in steps:
                    rows = (row(runner, seq_id, [turn], 1) for seq_id in range(2))
                    result = runner.run(Batch(tuple(rows), adapter=keys[turn % 2]))
                    times.append(1e3 * result.compute_s)
            first, second = map(median, steps)
            lines.append(f"graphs {label}: first step of a turn {first:.1f} ms, second {second:.1f} ms")
    finally:
        runner.close()
    return "\n".join(lines)


def run(
    model: Path | None = None,
    threads: int = 0,
    out: Path | None = None,
    logs: Path | None = None,
    llama_server: Path | str | None = None,
    rounds: int = 5,
    requests: int = 2,
    output: int = 64,
    rank: int = 16,
    switches: bool = False,
) -> int:
    """0 if the bars hold, else 1."""
    settings = ServerSettings(model or embedded_model(), USERS, USERS * CELLS, threads)
    built = find_built()
    peer = Path(llama_server) if llama_server else built and built / "bin" / LLAMA_SERVER
    api = AdapterApi()
    with ExitStack() as stack, log_folder(logs) as folder:
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cllm-adapters-")))
        made = [
            make_adapter(files / f"{seed}.gguf", seed=seed, rank=rank, gain=0.1, model=settings.model)
            for seed in range(ADAPTERS)
        ]
        flags = [word for path in made for word in ("--adapter", f"a{path.stem}={path}")]
        if switches:
            print(show_switches(settings.model or embedded_model(), made, threads))
            return 0
        peers = [cllm_peer(settings, None, api, flags)]
        if peer and peer.is_file():
            more = ("--lora", ",".join(map(str, made)))
            peers.append(replace(llama_server_peer(settings, peer, more=more), api=api))
        servers = [stack.enter_context(running(each, folder / f"{each.family}.log")) for each in peers]
        measured = measure(servers, rounds, requests, output)
    table, failed = measured.show(gpu="GGML_BACKEND_PATH" in os.environ)
    note = f"{rounds} rounds, rank {rank}, medians (lowest–highest); load average {os.getloadavg()[0]:.1f}"
    return conclude("adapters", f"{table}\n\n{note}", measured.loads, out, failed=failed)


def main(arguments: Sequence[str] | None = None) -> int:
    shared = ("--model", "--threads", "--out", "--logs")
    parser = make_parser(
        "bench.adapters",
        __doc__,
        *shared,
        llama_server=("", "executable; without it, the one built beside the library"),
        rounds=(5, "interleaved rounds"),
        requests=(2, "of each of eight users in a round"),
        output=(64, "tokens of an answer, a quarter more or less"),
        rank=(16, "of the random adapters"),
        switches=(False, "only what a change of adapters costs, without servers"),
    )
    return run_command(parser, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
