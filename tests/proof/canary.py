"""`make canary`: marked prompts of two tenants, 16 at a time, with everything on that shares or moves KV.

On tiny models of three kinds of memory each turn of a conversation is asked alone with the cache off, then
all at once with prefix sharing, preemption, all cache tiers, checkpoints and drafts: the text must be the
same, since it depends on every token before it. On the embedded model each prompt has a secret word and asks
for it: no answer may have another's.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bench.peers import RunningPeer, ServerSettings, cllm_peer, log_folder, running
from bench.workloads.text import prose
from tests.driver.server import wait_for
from tests.proof.evidence import Bar, Evidence, record
from tests.soak.answers import Client, compare
from tests.soak.conversations import EXACT, TURNS, Writer, replay
from tests.tiny_architectures import make_all

KINDS = ("dense", "hybrid", "sliding")
AT_ONCE = 16
CELLS = 2048  # of one conversation
KEYS = ("sk-canary-one", "sk-canary-other")
TIERS = ("--cache-ram-mb", "2", "--cache-disk-mb", "64", "--swap-space-mb", "64", "--cache-dir")
SECRET = re.compile(r"[bdfgklmnprstvz][aeiou][bdfgklmnprstvz][aeiou][bdfgklmnprstvz][aeiou]\d\d")
SECRET_TOKENS = 12


class Found(NamedTuple):
    """What became of the prompts of one kind."""

    prompts: int
    same: int
    ties: int
    faults: tuple[str, ...]
    cached: Counter[str]
    preemptions: int
    drafted: int
    integrity_failures: int


@contextmanager
def two_tenants(settings: ServerSettings, *flags: str) -> Iterator[RunningPeer]:
    """A server with two keys."""
    peer = cllm_peer(settings, flags=("--api-key", ",".join(KEYS), *flags))
    with (
        log_folder(None) as folder,
        running(replace(peer, ready_path="/health"), folder / "canary.log") as server,
    ):
        wait_for(lambda: Client(server.address, KEYS[0]).open("GET", "/ready").status == 200)
        yield server


def watch_kind(kind: str, conversations: int, folder: Path) -> Found:
    """Conversations of two tenants on a tiny model."""
    model = make_all(folder)[kind]
    settings = ServerSettings(model, AT_ONCE, CELLS * AT_ONCE // 3, threads=1)
    unified: tuple[str, ...] = ()
    if kind == "dense":  # few cells for all, and drafts that come true
        settings = replace(settings, ctx_size=CELLS)
        unified = ("--unified-kv", "--draft-model", str(model))
    flags = ("--no-tune", "--max-request-tokens", str(CELLS), *EXACT, *unified)
    with two_tenants(settings, *flags, *TIERS, str(folder / f"cache-{kind}")) as server:
        clients = [Client(server.address, key) for key in KEYS]
        scripts = [Writer(clients[number % 2]).write(number) for number in range(conversations)]

        order = random.Random(5).sample(range(conversations), conversations)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            jobs = {number: pool.submit(replay, clients[number % 2], scripts[number]) for number in order}
            answers = [answer for number in range(conversations) for answer in jobs[number].result()]
        metrics = clients[0].metrics()
    verdict = compare([turn.answer for turns in scripts for turn in turns], answers)
    cached: Counter[str] = Counter()
    for answer in answers:
        cached[answer.cached_from or "unknown"] += answer.cached_tokens
    return Found(
        len(answers),
        verdict.same,
        verdict.parted,
        verdict.faults,
        +cached,
        int(metrics["cllm_preemptions_total"]),
        int(metrics["cllm_drafted_tokens_total"]),
        int(metrics["cllm_integrity_failures"]),
    )


def make_secret(number: int) -> str:
    draw = random.Random(f"secret {number}")
    syllables = (draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3))
    return "".join(syllables) + f"{number % 90 + 10}"


def watch_secrets(count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Secrets of prompts on the embedded model: how many were told to their own, and to others."""
    settings = ServerSettings(None, AT_ONCE, AT_ONCE * 512)
    flags = ("--no-tune", *TIERS, str(folder / "cache-secrets"))
    systems = [prose(f"canary {number}", 60) for number in range(4)]
    secrets = [make_secret(number) for number in range(count)]
    owners = {secret: number for number, secret in enumerate(secrets)}
    outcomes: Counter[str] = Counter()
    faults = []

    def ask(server: RunningPeer, number: int) -> str:
        text = f"{systems[number % 4]}\n\nThe secret word is {secrets[number]}. Say it. The secret word is"
        body = {"prompt": text, "max_tokens": SECRET_TOKENS, "temperature": 0}
        answer = Client(server.address, KEYS[number % 2]).call("POST", "/v1/completions", body)
        return str(answer["choices"][0]["text"])

    with two_tenants(settings, *flags) as server, ThreadPoolExecutor(AT_ONCE) as pool:
        for number, text in enumerate(pool.map(lambda each: ask(server, each), range(count))):
            outcomes["told its own"] += secrets[number] in text
            others = [word for word in SECRET.findall(text) if owners.get(word, number) != number]
            outcomes["told another's"] += bool(others)
            faults += [f"prompt {number} was told {others}"] if others else []
    return outcomes, faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.canary", description=__doc__)
    parser.add_argument("--count", type=int, default=5000, help="marked prompts on tiny models, in all")
    parser.add_argument("--secrets", type=int, default=500, help="prompts on the embedded model")
    options = parser.parse_args()
    began = time.monotonic()
    conversations = -(-options.count // (len(KINDS) * TURNS))
    with tempfile.TemporaryDirectory() as name:
        found = {kind: watch_kind(kind, conversations, Path(name)) for kind in KINDS}
        outcomes, told = watch_secrets(options.secrets, Path(name))
    for fault in [each for one in found.values() for each in one.faults][:5] + told[:5]:
        print(fault, file=sys.stderr)
    bars = [
        Bar(
            f"{kind}: {one.prompts:,} prompts, the text as alone",
            "all, but at ties",
            f"{one.same:,} the same, {one.ties} parted at a tie, {len(one.faults)} elsewhere",
            not one.faults and one.same + one.ties == one.prompts and not one.integrity_failures,
        )
        for kind, one in found.items()
    ]
    own, other = outcomes["told its own"], outcomes["told another's"]
    bars.append(Bar("answers with another's secret word", "0", f"{other}", not other))
    bars.append(
        Bar(
            "answers with their own, so that it proves something", "most", f"{own}", 2 * own > options.secrets
        )
    )
    figures = {
        f"{kind}": f"cached from {dict(one.cached)}, {one.preemptions} preemptions, {one.drafted} drafted"
        for kind, one in found.items()
    }
    return record(
        Evidence(
            name="canary",
            order=50,
            title="Marked prompts",
            command="make canary",
            about=f"Two tenants, {AT_ONCE} at a time; sharing, preemption, all tiers, checkpoints, drafts.",
            bars=bars,
            figures={**figures, "minutes": (time.monotonic() - began) / 60},
        )
    )


if __name__ == "__main__":
    sys.exit(main())
