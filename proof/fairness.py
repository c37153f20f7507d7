"""What one tenant keeps of its throughput beside another that sends the costliest it may.

`streams`: more streams than slots. `queue`: more short requests than the queue holds. `loads`: two models in
turn, with memory for one. Each alone and beside a hostile tenant: costly samplers, grammars, scored and long
prompts at the highest priority; a full queue; answers on the one model and requests for the other. The plain
tenant keeps at least 0.45 of its tokens a second. Paired rounds, medians. On a busy machine its tokens for
each CPU second of the server say more.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any, NamedTuple

import httpx

from bench.command import conclude, run_command
from bench.report import Table
from cllm.server.keys import add_key
from proof.command import make_parser
from proof.models import PAIR, copy_embedded, serve_models
from proof.neighbours import CLIENT, PROSE, kinds
from tests.driver.server import Server, cpu_s, get_children

MIN_SHARE = 0.45
SLOTS, QUEUE = 4, 16
FLAGS = ("--parallel", str(SLOTS), "--ctx-size", str(4096 * SLOTS), "--queue-size", str(QUEUE))
CACHE = ("--cache-ram-mb", "64")  # of each model: by default one would take what is there
AGAIN_S = 0.5  # after a refusal
FIRST = {"priority": 100}
SCORED = {"prompt": PROSE * 60, "prompt_logprobs": 20, "max_tokens": 1, "stream": False}
Body = Mapping[str, Any]
Bodies = Sequence[Sequence[Body]]  # of each client


class TenantLoad:
    """Clients of one tenant; each sends its next request when the last one has ended. Counts tokens."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}
        self._ended = Event()
        self.tokens = self.refused = 0

    def send(self, body: Body) -> None:
        """One request; one that is refused is sent again in a moment, as its client would."""
        try:
            self._send(body)
        except httpx.TimeoutException:
            self.refused += 1

    def _send(self, body: Body) -> None:
        route = "/v1/embeddings" if "input" in body else "/v1/completions"
        fields = {"prompt": PROSE, "stream": True, **body}
        with CLIENT.stream("POST", self._url + route, json=fields, headers=self._headers) as response:
            if response.status_code != 200:
                self.refused += 1
                self._ended.wait(AGAIN_S)
                return
            for line in response.iter_lines():
                if self._ended.is_set():
                    return
                self.tokens += line.startswith("data: {")

    @contextmanager
    def sending(self, clients: Bodies) -> Iterator[None]:
        """Each client sends its bodies in turn while the block runs."""

        def work(bodies: Sequence[Body]) -> None:
            for body in itertools.cycle(bodies):
                if self._ended.is_set():
                    return
                self.send(body)

        with ThreadPoolExecutor(len(clients)) as pool:
            working = [pool.submit(work, bodies) for bodies in clients]
            try:
                yield
            finally:
                self._ended.set()
        for each in working:
            each.result()


def greedy(tokens: int, **fields: Any) -> dict[str, Any]:
    return {"temperature": 0, "ignore_eos": True, "max_tokens": tokens, **fields}


def make_loads(part: str, number: int) -> tuple[Bodies, Bodies]:
    """The clients of the plain and of the hostile tenant."""
    left, right = PAIR
    if part == "queue":
        return [[greedy(8)]] * 3 * SLOTS, [[greedy(8, **FIRST)]] * 2 * QUEUE
    if part == "loads":
        plain: list[Body] = [greedy(32, model=left), greedy(32, model=right)]
        return [plain] * 2 * SLOTS, [[greedy(64, model=name, **FIRST)] for name in PAIR for _ in range(SLOTS)]
    costly: list[Body] = [{"max_tokens": 64, **fields, **FIRST} for fields in kinds(number).values()]
    costly = [costly[0], {**SCORED, **FIRST}, *costly[1:]]
    turns = [costly[place:] + costly[:place] for place in range(len(costly))]
    return [[greedy(64)]] * 2 * SLOTS, turns


class Speed(NamedTuple):
    """Tokens of the plain tenant, by the clock and by what the server computed meanwhile."""

    per_s: float
    per_cpu_s: float


def measure(server: Server, keys: Sequence[str], part: str, number: int, seconds: float) -> list[Speed]:
    """The plain tenant alone and beside the other, each after a fifth of the time."""
    bodies = make_loads(part, number)
    speeds = []
    for beside in (False, True):
        plain, hostile = (TenantLoad(server.url, key) for key in keys)
        with hostile.sending(bodies[1]) if beside else nullcontext(), plain.sending(bodies[0]):
            time.sleep(seconds / 5)
            before = plain.tokens, hostile.tokens, read_cpu_s(server.process.pid)
            time.sleep(seconds)
            used_s = read_cpu_s(server.process.pid) - before[2]
            tokens, others = plain.tokens - before[0], hostile.tokens - before[1]
        speeds.append(Speed(tokens / seconds, tokens / used_s))
        refused = f"refused {plain.refused} and {hostile.refused}"
        print(
            f"{part}: {speeds[-1].per_s:.1f} tokens/s, {speeds[-1].per_cpu_s:.1f} a CPU second, "
            f"beside {others / seconds:.1f}; {refused}",
            flush=True,
        )
    return speeds


def read_cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children, those that have ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ended_s = (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    return ended_s + sum(map(cpu_s, (pid, *get_children(pid))))


def read_memory(server: Server, key: str) -> int:
    """Bytes that the loaded models take, as predicted."""
    headers = {"Authorization": f"Bearer {key}"}
    return int(CLIENT.get(f"{server.url}/admin/models", headers=headers).json()["memory_bytes"]["host"])


def run_fairness(rounds: int = 3, seconds: float = 60.0, only: str = "", out: Path | None = None) -> int:
    shares: dict[str, list[Speed]] = {}  # of the throughput alone
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths, file = copy_embedded(folder), folder / "keys.toml"
        keys = [add_key(file, tenant, admin=False) for tenant in ("plain", "hostile")]
        boss = add_key(file, "boss", admin=True)
        flags, limit_mb = (*FLAGS, *CACHE, "--api-keys", str(file)), 0
        for parts in (("streams", "queue"), ("loads",)):
            limit = ("--models-memory-mb", str(limit_mb)) if limit_mb else ()
            with serve_models(folder, *paths, *flags, *limit, log=f"{parts[0]}.log") as server:
                limit_mb = limit_mb or int(1.5 * read_memory(server, boss)) >> 20
                for part, number in itertools.product(parts, range(rounds)):
                    if only in ("", part):
                        alone, beside = measure(server, keys, part, number, seconds)
                        share = (after / before for after, before in zip(beside, alone, strict=True))
                        shares.setdefault(part, []).append(Speed(*share))
    rows, failed = [], False
    for part, found in shares.items():
        share, computed = (median(each) for each in zip(*found, strict=True))
        failed |= share < MIN_SHARE
        met = "met" if share >= MIN_SHARE else "missed"
        rows.append((part, f"{share:.2f}", f"{computed:.2f}", met))
    columns = ("part", f"of its throughput alone (≥ {MIN_SHARE})", "by CPU seconds", "bar")
    text = f"{Table(columns, rows).markdown()}\n\n{rounds} rounds of {seconds:g} s, medians"
    return conclude("fairness", text, {"shares": shares}, out, failed=failed)


def main(arguments: Sequence[str]) -> int:
    own = {
        "rounds": (3, "rounds"),
        "seconds": (60.0, "how long each measurement takes"),
        "only": ("", "one part: streams, queue or loads"),
    }
    return run_command(make_parser(__name__, __doc__, "--out", **own), arguments, run_fairness)
