"""Several models in one server, with memory for some of them.

`swap`: four tiny models, memory for two, random requests of eight clients. All are answered whole, memory
stays below the limit (predicted and measured), evictions are those of a simulated LRU, and with all models
unloaded the HTTP process is small. `prefixes`: the same conversations with memory for one of two models and
for both: prefixes come back after a swap. `turns`: two models at once on the same cores, against each alone.
"""

from __future__ import annotations

import itertools
import random
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.figures import Completion, LoadResult, cached_share
from bench.load import run_load
from bench.wire import Address, OpenAIApi
from bench.workloads import BenchRequest, single_requests
from cllm.models.store import embedded_model
from proof.command import make_parser
from tests.driver.server import PATIENCE_S, Server, cpu_s, find_workers, get_children, wait_for
from tests.tiny_models import make_dense

NAMES = ("ant", "bee", "cat", "dog")
PAIR = ("left", "right")
PREFIX_WORDS = 300  # about 1,000 tokens
FLAGS = (
    *("--parallel", "4", "--ctx-size", "8192"),
    *("--cache-ram-mb", "64", "--swap-space-mb", "16"),
)
SMALL = (*FLAGS, "--cache-ram-mb", "16", "--swap-space-mb", "16")  # memory is that of the weights and the KV
START_S = 600.0
MAX_IDLE_RSS = 120_000_000  # bytes of the HTTP process with all models unloaded
MAX_LOST_HITS = 0.05
MIN_TOTAL = 0.9
TARGET_S = 0.25  # the inter-token target on a CPU
_EVENT = re.compile(
    r"model (?P<used>\S+) is used, \d+ users"
    r"|model (?P<released>\S+) is released, (?P<left>\d+) users"
    r"|model (?P<unloaded>\S+) is unloaded: least recently used, for \S+"
    r"|model (?P<loaded>\S+) is loaded"
)


@contextmanager
def serve_models(folder: Path, *flags: str, log: str = "server.log") -> Iterator[Server]:
    server = Server(folder / log, *flags)
    try:
        wait_for(server._announced, START_S)  # files that are new here are probed
    except BaseException:
        server.kill()
        raise
    with server:
        yield server


def ask(server: Server, model: str, prompt: str, max_tokens: int) -> Completion:
    """One streamed request. Raises where it is refused or cut."""
    plan = single_requests("models", [BenchRequest(prompt, max_tokens)])
    (answer,) = run_load(Address("127.0.0.1", server.port), OpenAIApi(model), plan).completions
    assert answer.error is None, answer.error
    return answer


def make_prompts(seed: int, count: int = 6, length: int = 40) -> dict[str, list[str]]:
    """Texts of so many words for each model."""
    drawn = random.Random(seed)
    words = [f"{''.join(drawn.choices('abcdefghij', k=5))} " for _ in range(200)]
    return {name: ["".join(drawn.choices(words, k=length)) for _ in range(count)] for name in NAMES}


# Swapping --------------------------------------------------------------------------------------------------


class MemoryWatch(threading.Thread):
    """Looks at predicted and measured memory until it is stopped."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server, self._ended = server, threading.Event()
        self.predicted = self.measured = self.looks = 0

    def run(self) -> None:
        with httpx.Client(base_url=self._server.url, timeout=PATIENCE_S, trust_env=False) as client:
            while not self._ended.wait(0.1):
                predicted = client.get("/admin/models").json()["memory_bytes"].get("host", 0)
                workers = [
                    pid for pid, line in get_children(self._server.process.pid).items() if "worker" in line
                ]
                self.measured = max(self.measured, sum(map(read_pss, workers)))
                self.predicted = max(self.predicted, predicted)
                self.looks += 1

    def end(self) -> None:
        self._ended.set()
        self.join(PATIENCE_S)


def read_pss(pid: int) -> int:
    """Bytes of a process; pages that it shares count in part."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return int(text.partition("\nPss:")[2].split()[0]) * 1024


def check_evictions(log: str) -> tuple[int, list[str]]:
    """Replay the log: every model that was unloaded had no user, and no other such was used earlier."""
    users: dict[str, int] = {}
    order: list[str] = []
    present: set[str] = set()
    evictions, problems = 0, []
    for event in _EVENT.finditer(log):
        name = event["used"] or event["released"] or event["loaded"] or event["unloaded"]
        if event["unloaded"]:
            evictions += 1
            quiet = [each for each in order if each in present and not users.get(each)]
            if users.get(name) or quiet[:1] != [name]:
                problems.append(f"{name} was unloaded, not the first of {quiet}; users {users}")
            present.discard(name)
            continue
        if event["loaded"]:
            present.add(name)
        else:
            users[name] = int(event["left"]) if event["released"] else users.get(name, 0) + 1
        order = [*(each for each in order if each != name), name]
    return evictions, problems


def measure_size(folder: Path, models: list[str], flags: tuple[str, ...]) -> int:
    """The predicted bytes of one of the models."""
    with serve_models(folder, *models, *flags, log="size.log") as server:
        return int(server.get("/admin/models")["models"][0]["memory_bytes"]["host"])


def run_swap(folder: Path, models: list[str], requests: int, clients: int) -> list[str]:
    size = measure_size(folder, models, SMALL)
    limit_mb = int(2.5 * size) >> 20
    prompts, drawn, problems = make_prompts(1), random.Random(2), []
    work = [
        (name, drawn.choice(prompts[name]), drawn.randint(4, 48)) for name in drawn.choices(NAMES, k=requests)
    ]
    cache = ("--cache-disk-mb", "256", "--cache-dir", str(folder / "swap-cache"))
    with serve_models(folder, *models, *SMALL, *cache, "--models-memory-mb", str(limit_mb)) as server:
        watch, started = MemoryWatch(server), time.perf_counter()
        watch.start()
        failures: list[str] = []
        answered = itertools.count(1)

        def answer(item: tuple[str, str, int]) -> None:
            try:
                ask(server, *item)
                if (count := next(answered)) % 50 == 0:
                    print(f"swap: {count} answered, {time.perf_counter() - started:.0f} s", flush=True)
            except Exception as error:
                failures.append(f"{item[0]}: {type(error).__name__}: {error}"[:200])

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(answer, work))
        seconds = time.perf_counter() - started
        watch.end()
        evictions, wrong = check_evictions(server.log_text)
        for model in NAMES:
            assert server.post("/admin/models/unload", {"model": model}).status_code == 200
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        idle = int(status.partition("VmRSS:")[2].split()[0]) * 1024
    limit = limit_mb << 20
    print(
        f"swap: {requests} requests, {clients} clients, {seconds:.0f} s: {len(failures)} failed or cut; "
        f"{evictions} evictions, {len(wrong)} not those of an LRU; memory of {watch.looks} looks at most "
        f"{watch.predicted >> 20} MiB predicted, {watch.measured >> 20} MiB measured, limit {limit_mb} MiB; "
        f"HTTP process with all unloaded {idle / 1e6:.0f} MB"
    )
    problems += failures[:5] + wrong[:5]
    problems += ["nothing was evicted: this proves nothing"] * (not evictions)
    problems += [f"memory was above the limit of {limit_mb} MiB"] * (
        max(watch.predicted, watch.measured) > limit
    )
    problems += [f"the HTTP process has {idle} bytes"] * (idle > MAX_IDLE_RSS)
    return problems


def run_prefixes(folder: Path, rounds: int) -> list[str]:
    """Conversations with two models that grow, with memory for one of them and for both.

    With real weights: a prefix of a tiny model is computed sooner than it is read. And with RAM for a
    state of each: what is written to disk goes through RAM, so a state larger than its budget is not.
    """
    models = copy_embedded(folder)
    size = measure_size(folder, models, FLAGS)
    rates = []
    for label, room in (("swapped", 1.5), ("never swapped", 3.0)):
        prompts = {
            name: make_prompts(3, 1, PREFIX_WORDS)[tiny] for name, tiny in zip(PAIR, NAMES, strict=False)
        }
        limit = ("--models-memory-mb", str(int(room * size) >> 20))
        cache = ("--cache-disk-mb", "512", "--cache-dir", str(folder / f"cache-{room}"))
        answers: list[Completion] = []
        with serve_models(folder, *models, *FLAGS, *cache, *limit, log=f"prefixes-{room}.log") as server:
            for turn in range(rounds):
                for name in PAIR:
                    for number, prompt in enumerate(prompts[name]):
                        answers.append(ask(server, name, prompt, 4))
                        prompts[name][number] = f"{prompt} and then {turn} {name} said so. "
            evictions, _ = check_evictions(server.log_text)
        rates.append(cached_share([LoadResult("prefixes", 0.0, 0.0, tuple(answers))]))
        print(f"prefixes: {label}: {rates[-1]:.3f} of the prompt tokens cached, {evictions} evictions")
        if label == "swapped" and not evictions:
            return ["no model was unloaded: nothing is shown"]
    lost = 1 - rates[0] / rates[1]
    return [f"{lost:.1%} of the hits are lost by swapping"] if lost > MAX_LOST_HITS else []


def copy_embedded(folder: Path) -> list[str]:
    return [str(shutil.copy(embedded_model(), folder / f"{name}.gguf")) for name in PAIR]


# Turns -----------------------------------------------------------------------------------------------------


def run_turns(folder: Path, rounds: int, tokens: int = 96, streams: int = 2) -> list[str]:
    """Two models at once on the same cores, against each alone in turn."""
    paths = copy_embedded(folder)
    flags = ("--parallel", "4", "--ctx-size", "8192", "--no-prefix-cache")
    ratios, worst = [], 0.0
    with serve_models(folder, *paths, *flags, log="turns.log") as server:
        for name in PAIR:
            ask(server, name, "warm up", 16)

        engines = find_workers(server.process.pid, "engine")

        def load(*names: str) -> tuple[float, float, float, float]:
            """Tokens, seconds, the longest gap, and CPU seconds of the engines."""
            jobs = [name for name in names for _ in range(streams)]
            started, used = time.perf_counter(), sum(map(cpu_s, engines))
            with ThreadPoolExecutor(len(jobs)) as pool:
                done = list(pool.map(lambda name: ask(server, name, "Once upon a time " * 20, tokens), jobs))
            gap = max(gap for answer in done for gap in answer.gaps_s)
            seconds, used = time.perf_counter() - started, sum(map(cpu_s, engines)) - used
            return sum(answer.generated_tokens for answer in done), seconds, gap, used

        for _ in range(rounds):
            left, right = load("left"), load("right")
            both = load("left", "right")
            alone = (left[0] + right[0]) / (left[1] + right[1])
            ratios.append(both[0] / both[1] / alone)
            worst = max(worst, both[2])
            print(
                f"turns: alone {left[0] / left[1]:.1f} and {right[0] / right[1]:.1f} tokens/s, together "
                f"{both[0] / both[1]:.1f}: {ratios[-1]:.2f}; longest gap {both[2] * 1000:.0f} ms (alone "
                f"{max(left[2], right[2]) * 1000:.0f}); CPU {1000 * both[3] / both[0]:.1f} ms a token (alone "
                f"{1000 * (left[3] + right[3]) / (left[0] + right[0]):.1f})"
            )
    print(f"turns: {median(ratios):.2f} of each alone in turn; longest gap {worst * 1000:.0f} ms")
    problems = [f"together only {median(ratios):.2f} of alone"] if median(ratios) < MIN_TOTAL else []
    return problems + ([f"a gap of {worst:.2f} s"] if worst > 2 * TARGET_S else [])


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        requests=(1000, "of the swap"),
        clients=(8, "at once"),
        rounds=(5, "of the other parts"),
    )
    parser.add_argument("--only", choices=("swap", "prefixes", "turns"), help="one part")
    options = parser.parse_args(arguments)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [str(make_dense(folder / f"{model}.gguf", seed=seed)) for seed, model in enumerate(NAMES)]
        parts: dict[str, Callable[[], list[Any]]] = {
            "swap": lambda: run_swap(folder, models, options.requests, options.clients),
            "prefixes": lambda: run_prefixes(folder, options.rounds),
            "turns": lambda: run_turns(folder, options.rounds),
        }
        for part, check in parts.items():
            if options.only in (None, part):
                problems += check()
    for problem in problems:
        print(f"FAIL: {problem}")
    return 1 if problems else 0
