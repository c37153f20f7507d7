"""`python -m tests.soak.pressure --tiny MODEL`: far too little KV, and every request is answered.

One pool of cells for a quarter of what the requests need that run together, so that they preempt each
other all the time. First every prompt is asked alone, then all of them at once. Greedy text under load is the
text alone, and leaves it only at a step whose two likeliest tokens (alone) are nearly as good.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from bench.command import make_parser, run_command, serving
from bench.peers import RunningPeer, ServerSettings
from cllm.errors import SetupError

PARALLEL = 8
PROMPT_TOKENS = 80
OUTPUT_TOKENS = 160
NEED = 256  # cells of one request, rounded up as llama.cpp does
CELLS = PARALLEL * NEED // 4
CLIENTS = 4 * PARALLEL
TIE = 0.05  # logits closer than this (alone) may be sampled either way under load
PATIENCE_S = 600.0
COUNTERS = ("cllm_preemptions_total", "cllm_swap_ins_total")


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy text, token by token, with the gap between the two likeliest at each."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    finish: str


class Verdict(NamedTuple):
    """What became of all requests. `parted` met a tie and went the other way there."""

    same: int
    parted: int
    ties: int  # answers that met one
    compared: int  # tokens
    faults: tuple[str, ...]


def compare(alone: Sequence[Answer], crowded: Sequence[Answer]) -> Verdict:
    """The same-text rule over all answers; stricter: they may part at a tie only, not anywhere after one."""
    same = parted = ties = compared = 0
    faults = []
    for number, (one, other) in enumerate(zip(alone, crowded, strict=True)):
        ties += min(one.gaps, default=1.0) < TIE
        pairs = zip_longest(one.tokens, other.tokens)
        first = next((step for step, (here, there) in enumerate(pairs) if here != there), None)
        compared += len(one.tokens) if first is None else first
        if first is None and one.finish == other.finish:
            same += 1
        elif first is not None and first < len(one.gaps) and one.gaps[first] < TIE:
            parted += 1
        else:
            faults.append(f"request {number}: another text from token {first} on, which is no tie")
    return Verdict(same, parted, ties, compared, tuple(faults))


def run_pressure(
    tiny: Path, requests: int = 500, command: Sequence[str] | None = None, logs: Path | None = None
) -> int:
    """Ask, compare, print; 0 if every request was answered with the right text and some were preempted."""
    settings = ServerSettings(model=tiny, parallel=PARALLEL, ctx_size=CELLS)
    flags = ("--unified-kv", "--max-request-tokens", str(NEED), "--cache-ram-mb", "0", "--no-tune")
    with serving("pressure", settings, command, logs, flags) as server:
        prompts = _prompts(server, requests)
        alone = [_ask(server, prompt) for prompt in prompts]
        before = _counters(server)
        with ThreadPoolExecutor(CLIENTS) as pool:
            crowded = list(pool.map(lambda prompt: _ask(server, prompt), prompts))
        preemptions, swap_ins = (
            after - there for after, there in zip(_counters(server), before, strict=True)
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


def _prompts(server: RunningPeer, count: int) -> list[list[int]]:
    info = _call(server, "GET", "/model/info")
    size = int(info.get("data", info)["vocabulary_size"])
    drawn = random.Random(1)
    return [[drawn.randrange(size // 4, size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def _ask(server: RunningPeer, prompt: list[int]) -> Answer:
    body = {
        "prompt": prompt,
        "n_predict": OUTPUT_TOKENS,
        "temperature": 0,
        "n_probs": 2,
        "ignore_eos": True,
    }
    # Token ids: texts of different tokens can be alike.
    answer = _call(server, "POST", "/completion", body)
    steps = answer["completion_probabilities"]
    gaps = []
    for step in steps:
        best, second = sorted((found["logprob"] for found in step["top_logprobs"]), reverse=True)
        gaps.append(best - second)
    return Answer(tuple(step["id"] for step in steps), tuple(gaps), answer["stop_type"])


def _counters(server: RunningPeer) -> list[float]:
    found = {}
    for line in _fetch(server, "GET", "/metrics").decode().splitlines():
        name, _, value = line.rpartition(" ")
        found[name] = value
    return [float(found[name]) for name in COUNTERS]


def _call(server: RunningPeer, method: str, path: str, body: Any = None) -> Any:
    return json.loads(_fetch(server, method, path, body))


def _fetch(server: RunningPeer, method: str, path: str, body: Any = None) -> bytes:
    """Raises SetupError for anything but 200: no request may fail here."""
    connection = http.client.HTTPConnection(server.address.host, server.address.port, timeout=PATIENCE_S)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json"} if data else {})
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise SetupError(f"{path} was answered {response.status}: {answer[:300]!r}")
    return answer


def main(arguments: Sequence[str] | None = None) -> int:
    shared = ("--tiny", "--logs", "--command")
    parser = make_parser("tests.soak.pressure", __doc__, *shared, requests=(500, "how many"))
    return run_command(parser, arguments, run_pressure)


if __name__ == "__main__":
    sys.exit(main())
