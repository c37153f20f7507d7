"""Each answer of a LoRA adapter under mixed load is the one alone.

A tiny F32 model with three random adapters and an aLoRA; each prompt is asked of the base or of one of them.
All are first asked alone, with the cache off. Then all are asked many at once, in too few cells, with RAM and
disk behind them, while the engine is killed again and again; and once more after a restart, from disk.

`--part loads` loads and unloads an adapter again and again beside streams: memory stays flat, and no gap is
longer than the inter-token target. `--part alora` asks five aLoRAs about a prefix, which is computed once.
`--part crowd` is the rest, and without it there are all three.

Where the tokens part, the two likeliest of that step must be as good as even when computed alone. It fails
where nothing was preempted, no engine was killed, or RAM or disk was not used: then it proves nothing.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.command import conclude, run_command
from bench.footprint import measure
from bench.report import Table
from bench.wire import Address
from bench.workloads.text import prose
from cllm.errors import ConfigError
from proof.command import make_parser
from proof.shared.answers import TIE, Answer, Client, Verdict, compare
from tests.driver.server import Server
from tests.tiny_models import make_adapter, make_dense

EXACT = ("--no-flash-attention", "--cache-type-k", "f32", "--cache-type-v", "f32")
NAMES = ("red", "green", "blue")
INVOCATION = (60, 60, 62)  # "<<>"
OUTPUT_TOKENS = 24
SYSTEMS, SYSTEM_WORDS, MESSAGE_WORDS = 6, (30, 90), (4, 20)
CELLS = 1024  # of one request, and of all together where they are crowded
KILLS = 6
STREAMS = 4  # beside loads
TARGET_S = 0.25  # between two tokens
WIDE = 512  # rank of what is loaded again and again
MAX_GROWTH = 0.1  # of what half of the loads take
PREFIX_TOKENS = 2000  # before the invocation of aLoRAs
SETTLE_S = 3.0  # idle, before a restart: states are written behind
FAILURES = "the engine died|ended by signal|crash"  # that a kill leaves in the log


class Ask(NamedTuple):
    """A prompt, and the name of what computes it."""

    model: str
    prompt: tuple[int, ...]


class Pass(NamedTuple):
    """All of them asked once."""

    name: str
    answers: list[Answer]
    verdict: Verdict
    kills: int
    preemptions: int

    @property
    def cached_from(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for answer in self.answers:
            found[answer.cached_from.partition("+")[0]] += answer.cached_tokens
        return +found


def make_asks(client: Client, count: int) -> list[Ask]:
    """Prompts that begin alike, each for the base or an adapter."""
    systems = []
    for number in range(SYSTEMS):
        words = random.Random(f"system {number}").randint(*SYSTEM_WORDS)
        systems.append(client.tokenize(prose(f"system {number}", words)))
    asks = []
    for number in range(count):
        draw = random.Random(f"ask {number}")
        model = draw.choice(("base", *(f"base:{name}" for name in (*NAMES, "alora"))))
        message = client.tokenize(prose(f"message {draw.randrange(count)}", draw.randint(*MESSAGE_WORDS)))
        opening = INVOCATION if model.endswith("alora") and draw.random() < 0.8 else ()
        asks.append(Ask(model, (*draw.choice(systems), *opening, *message)))
    return asks


class Killer:
    """Kills workers in turn, several times while so many answers come; never with 0."""

    def __init__(self, server: Server, answers: int, roles: Sequence[str] = ("engine",)) -> None:
        self._server, self._every, self._roles = server, answers // (KILLS + 1), roles
        self._lock = threading.Lock()
        self._answers = 0
        self.kills = 0

    def count(self) -> None:
        with self._lock:
            self._answers += 1
            if self._every and self._answers % self._every == 0:
                self._server.kill_worker(self._roles[self.kills % len(self._roles)])
                self.kills += 1


def ask_all(
    server: Server, asks: Sequence[Ask], alone: Sequence[Answer], name: str, at_once: int, kills: bool
) -> Pass:
    client = Client(Address("127.0.0.1", server.port))

    killer = Killer(server, len(asks) if kills else 0)

    def ask(one: Ask) -> Answer:
        answer = client.complete(one.prompt, OUTPUT_TOKENS, model=one.model)
        killer.count()
        return answer

    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(ask, asks))
    preemptions = int(server.metrics()["cllm_preemptions_total"])
    return Pass(name, answers, compare(alone, answers, TIE), killer.kills, preemptions)


def measure_gaps(server: Server, model: str, stop: threading.Event) -> list[float]:
    """Stream until it is to stop: the gaps between two packets."""
    gaps: list[float] = []
    while not stop.is_set():
        with server.open_stream("gaps", 1000, model=model, ignore_eos=True) as events:
            last = 0.0
            for _ in events:
                now = time.perf_counter()
                gaps += [now - last] if last else []
                last = now
                if stop.is_set():
                    break
    return gaps


def check_loads(count: int, at_once: int) -> tuple[Table, list[str]]:
    """Load and unload an adapter beside streams of the base and of another one."""
    gaps, memory = {}, []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(STREAMS) as pool:
        folder = Path(name)
        kept, late = (make_adapter(folder / f"{rank}.gguf", rank=rank) for rank in (4, WIDE))
        leaked = late.stat().st_size * count / 2  # if nothing were freed
        # What streams leave in RAM is not what is measured.
        flags = (
            "--adapter",
            f"red={kept}",
            "--model-dir",
            name,
            "--parallel",
            str(STREAMS),
            "--cache-ram-mb",
            "0",
        )
        with Server(folder / "log", str(make_dense(folder / "base.gguf")), *flags) as server:
            client = Client(Address("127.0.0.1", server.port))
            for phase in ("before", "meanwhile"):
                stop = threading.Event()
                streams = [
                    pool.submit(measure_gaps, server, ("base", "base:red")[number % 2], stop)
                    for number in range(STREAMS)
                ]
                time.sleep(SETTLE_S)
                for _ in range(count if phase == "meanwhile" else 0):
                    client.call("POST", "/admin/adapters", {"name": "late", "file": late.name})
                    client.call("DELETE", "/admin/adapters/late")
                    memory.append(measure(server.child("engine")).memory_bytes)
                stop.set()
                gaps[phase] = [gap for stream in streams for gap in stream.result()]
    grown = median(memory[-len(memory) // 4 :]) - median(memory[len(memory) // 4 : len(memory) // 2])
    faults = [f"FAIL: memory grew by {grown / 2**20:.1f} MiB"] if grown > MAX_GROWTH * leaked else []
    if (worst := max(gaps["meanwhile"])) > max(TARGET_S, 2 * max(gaps["before"])):
        faults.append(f"FAIL: a stream waited {1e3 * worst:.0f} ms")
    rows = [
        (f"{what} gap, ms", *(f"{1e3 * of(found):.0f}" for found in gaps.values()))
        for what, of in (("worst", max), ("median", median))
    ]
    rows.append(("memory grew by, MiB", "", f"{grown / 2**20:.1f}"))
    return Table((f"{count} loads beside {STREAMS} streams", *gaps), rows), faults


def check_aloras(count: int, at_once: int) -> tuple[Table, list[str]]:
    """Ask five aLoRAs about one prefix: the first alone, then the others at once."""
    with tempfile.TemporaryDirectory() as name:
        folder, names = Path(name), [f"alora{number}" for number in range(5)]
        flags = ["--parallel", "5", "--ctx-size", str(5 * 4096)]
        for seed, each in enumerate(names):
            path = make_adapter(folder / f"{each}.gguf", seed=seed, invocation=INVOCATION)
            flags += ["--adapter", f"{each}={path}"]
        with Server(folder / "log", str(make_dense(folder / "base.gguf")), *EXACT, *flags) as server:
            client = Client(Address("127.0.0.1", server.port))
            prefix = client.tokenize(prose("prefix", 2 * PREFIX_TOKENS))[:PREFIX_TOKENS]

            def ask(each: str, **fields: bool) -> Answer:
                prompt = (*prefix, *INVOCATION, 65, 66)
                return client.complete(prompt, OUTPUT_TOKENS, model=f"base:{each}", **fields)

            alone = [ask(each, cache_prompt=False) for each in names]
            with ThreadPoolExecutor(4) as pool:
                answers = [ask(names[0]), *pool.map(ask, names[1:])]
    verdict = compare(alone, answers, TIE)
    computed = [answer.prompt_tokens - answer.cached_tokens for answer in answers]
    faults = [f"FAIL: {fault}" for fault in verdict.faults]
    if len({answer.tokens for answer in alone}) < len(names):
        faults.append("FAIL: two adapters say the same: this proves nothing")
    if computed[0] < PREFIX_TOKENS or max(computed[1:]) > len(INVOCATION) + 2:
        faults.append("FAIL: the prefix was not computed once")
    rows = [(each, f"{tokens}") for each, tokens in zip(names, computed, strict=True)]
    return Table((f"a prefix of {PREFIX_TOKENS} tokens", "prompt tokens computed"), rows), faults


def run_adapters(
    count: int = 500, at_once: int = 16, loads: int = 200, part: str = "", out: Path | None = None
) -> int:
    """Run the parts; print their tables; 0 if the rules hold."""
    texts, faults, data = [], [], {}
    for name, check in {"crowd": check_crowd, "loads": check_loads, "alora": check_aloras}.items():
        if part in ("", name):
            table, found = check(loads if name == "loads" else count, at_once)
            texts.append(table.markdown())
            faults += found
            data[name] = table
    if not texts:
        raise ConfigError(f"there is no part {part!r}: choose crowd, loads or alora")
    return conclude("adapters", "\n\n".join((*texts, *(faults or ["pass"]))), data, out, failed=bool(faults))


def check_crowd(count: int, at_once: int) -> tuple[Table, list[str]]:
    """Ask alone, crowded and after a restart."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_dense(folder / "base.gguf")
        adapters = [make_adapter(folder / f"{each}.gguf", seed=at) for at, each in enumerate(NAMES)]
        adapters.append(make_adapter(folder / "alora.gguf", seed=9, invocation=INVOCATION))
        flags = [word for path in adapters for word in ("--adapter", f"{path.stem}={path}")]
        tight = ("--unified-kv", "--ctx-size", str(CELLS), "--max-request-tokens", str(CELLS))
        disk = ("--cache-disk-mb", "256", "--cache-dir", str(folder / "cache"), "--cache-ram-mb", "64")
        common = (str(model), *EXACT, *flags, "--parallel", str(at_once))
        with Server(folder / "alone.log", *common, "--ctx-size", str(CELLS * at_once)) as server:
            client = Client(Address("127.0.0.1", server.port))
            asks = make_asks(client, count)
            off = {"cache_prompt": False, "speculate": False}
            alone = [client.complete(each.prompt, OUTPUT_TOKENS, model=each.model, **off) for each in asks]
        with Server(folder / "crowded.log", *common, *tight, *disk) as server:
            server.expect_failure(FAILURES)
            passes = [ask_all(server, asks, alone, f"{at_once} at once, with kills", at_once, True)]
            passes.append(ask_all(server, asks, alone, f"{at_once} at once", at_once, False))
            time.sleep(SETTLE_S)
        with Server(folder / "restarted.log", *common, *tight, *disk) as server:
            passes.append(ask_all(server, asks, alone, "after a restart", at_once, False))
    table = make_table(f"{count} requests, base and four adapters", len(asks), passes)
    return table, find_faults(alone, passes)


def find_faults(alone: Sequence[Answer], passes: Sequence[Pass]) -> list[str]:
    """What must not be: a difference that is no tie, or a mechanism that took no part."""
    faults = [f"FAIL: {one.name}: {fault}" for one in passes for fault in one.verdict.faults[:10]]
    tiers = {tier for one in passes for tier in one.cached_from}
    missing = {"device", "ram", "disk"} - tiers
    faults += [f"FAIL: nothing came from {tier}: this proves nothing" for tier in sorted(missing)]
    if not sum(one.kills for one in passes):
        faults.append("FAIL: no engine was killed: ask more")
    if not sum(one.preemptions for one in passes):
        faults.append("FAIL: nothing was preempted: ask more at once")
    if any(answer.cached_tokens for answer in alone):
        faults.append("FAIL: something was cached though the cache was off")
    return faults


def make_table(title: str, count: int, passes: Sequence[Pass]) -> Table:
    def sources(one: Pass) -> str:
        return ", ".join(f"{name} {tokens}" for name, tokens in sorted(one.cached_from.items())) or "–"

    rows = [
        ("the same token for token", *(f"{each.verdict.same} of {count}" for each in passes)),
        ("parted at a tie", *(f"{each.verdict.parted}" for each in passes)),
        ("parted elsewhere", *(f"{len(each.verdict.faults)}" for each in passes)),
        ("tokens compared", *(f"{each.verdict.compared}" for each in passes)),
        ("prompt tokens cached from", *map(sources, passes)),
        ("workers killed", *(f"{each.kills}" for each in passes)),
        ("preempted, in all", *(f"{each.preemptions}" for each in passes)),
    ]
    return Table((title, *(each.name for each in passes)), rows)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        "--out",
        count=(500, "how many requests"),
        at_once=(16, "how many at once, and slots"),
        loads=(200, "how many loads and unloads"),
        part=("", "crowd, loads or alora: only this"),
    )
    return run_command(parser, arguments, run_adapters)
