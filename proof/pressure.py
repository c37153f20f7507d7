"""Far too little KV, and every request is answered.

One pool of cells for a quarter of what the requests need that run together, so that they preempt each
other all the time. First every prompt is asked alone, then all of them at once. Greedy text under load is the
text alone, and leaves it only at a step whose two likeliest tokens (alone) are nearly as good.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.command import run_command, serving
from bench.peers import ServerSettings
from proof.command import make_parser
from proof.shared.answers import Client, compare

PARALLEL = 8
PROMPT_TOKENS = 80
OUTPUT_TOKENS = 160
NEED = 256  # cells of one request, rounded up as llama.cpp does
CELLS = PARALLEL * NEED // 4
CLIENTS = 4 * PARALLEL
COUNTERS = ("cllm_preemptions_total", "cllm_swap_ins_total")


def run_pressure(
    tiny: Path, requests: int = 500, command: Sequence[str] | None = None, logs: Path | None = None
) -> int:
    """Ask, compare, print; 0 if every request was answered with the right text and some were preempted."""
    settings = ServerSettings(model=tiny, parallel=PARALLEL, ctx_size=CELLS)
    flags = ("--unified-kv", "--max-request-tokens", str(NEED), "--cache-ram-mb", "0")
    with serving("pressure", settings, command, logs, flags) as server:
        client = Client(server.address)
        prompts = _prompts(client, requests)
        alone = [client.complete(prompt, OUTPUT_TOKENS) for prompt in prompts]
        before = _counters(client)
        with ThreadPoolExecutor(CLIENTS) as pool:
            crowded = list(pool.map(lambda prompt: client.complete(prompt, OUTPUT_TOKENS), prompts))
        preemptions, swap_ins = (
            after - there for after, there in zip(_counters(client), before, strict=True)
        )
    verdict = compare(alone, crowded)
    print(
        f"{requests} requests on {CELLS} cells, {PARALLEL} at a time that need {PARALLEL * NEED}: "
        f"{preemptions:.0f} preempted, {swap_ins:.0f} swapped in; {verdict.same} same texts, {verdict.ties} "
        f"met a tie, {verdict.parted} of them went the other way, {len(verdict.faults)} wrong; "
        f"{verdict.compared} tokens compared"
    )
    faults = list(verdict.faults) + ([] if preemptions else ["nothing was preempted: this proves nothing"])
    for fault in faults[:10]:
        print(f"FAIL: {fault}")
    return 1 if faults else 0


def _prompts(client: Client, count: int) -> list[list[int]]:
    info = client.call("GET", "/model/info")
    size = int(info.get("data", info)["vocabulary_size"])
    drawn = random.Random(1)
    return [[drawn.randrange(size // 4, size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def _counters(client: Client) -> list[float]:
    found = client.metrics()
    return [found[name] for name in COUNTERS]


def main(arguments: Sequence[str]) -> int:
    shared = ("--tiny", "--logs", "--command")
    parser = make_parser(__name__, __doc__, *shared, requests=(500, "how many"))
    return run_command(parser, arguments, run_pressure)
