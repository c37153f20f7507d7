"""Marked prompts of two tenants, 16 at a time, with everything on that shares or moves KV.

On tiny models of three kinds of memory each turn of a conversation is asked alone with the cache off, then
all at once with prefix sharing, preemption, all cache tiers, checkpoints and drafts: the text must be the
same, since it depends on every token before it. On the embedded model each prompt has a secret word and asks
for it: no answer may have another's. What was run before is not run again: `--fresh` forgets it.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from bench.peers import RunningPeer, ServerSettings, cllm_peer, log_folder, running
from bench.workloads.text import prose
from proof.command import ROOT, make_parser
from proof.conversations import EXACT, TURNS, Writer, replay
from proof.evidence import Bar, Evidence, name_machine, record
from proof.shared.answers import Client, compare
from proof.shared.kept import Kept
from tests.driver.server import wait_for
from tests.tiny_architectures import make_all

KINDS = ("dense", "hybrid", "sliding")
SECRETS = "secrets"
AT_ONCE = 16
CELLS = 2048  # of one conversation
KEYS = ("sk-canary-one", "sk-canary-other")
TIERS = ("--cache-ram-mb", "2", "--cache-disk-mb", "64", "--swap-space-mb", "64", "--cache-dir")
SECRET = re.compile(r"[bdfgklmnprstvz][aeiou][bdfgklmnprstvz][aeiou][bdfgklmnprstvz][aeiou]\d\d")
SECRET_TOKENS = 12


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the prompts of one kind, or of those with secrets."""

    kind: str
    prompts: int
    same: int  # the text as alone; or with their own secret
    ties: int = 0
    faults: tuple[str, ...] = ()
    cached: dict[str, int] = {}
    preemptions: int = 0
    drafted: int = 0
    integrity_failures: int = 0
    machine: str = ""
    minutes: float = 0.0


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
    # Too few cells for all of them, so that some must wait for others.
    settings = ServerSettings(model, AT_ONCE, CELLS if kind == "dense" else 2 * CELLS, threads=1)
    drafts = ("--draft-model", str(model)) if kind == "dense" else ()  # that come true
    flags = ("--unified-kv", "--max-request-tokens", str(CELLS), *EXACT, *drafts)
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
        kind=kind,
        prompts=len(answers),
        same=verdict.same,
        ties=verdict.parted,
        faults=verdict.faults,
        cached=+cached,
        preemptions=int(metrics["cllm_preemptions_total"]),
        drafted=int(sum(metrics[each] for each in metrics if "drafted_tokens_total{" in each)),
        integrity_failures=int(metrics["cllm_integrity_failures"]),
    )


def make_secret(number: int) -> str:
    draw = random.Random(f"secret {number}")
    syllables = (draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3))
    return "".join(syllables) + f"{number % 90 + 10}"


def watch_secrets(kind: str, count: int, folder: Path) -> Found:
    """Secrets of prompts on the embedded model: how many were told to their own, and to others."""
    settings = ServerSettings(None, AT_ONCE, AT_ONCE * 512)
    flags = (*TIERS, str(folder / "cache-secrets"))
    systems = [prose(f"canary {number}", 60) for number in range(4)]
    secrets = [make_secret(number) for number in range(count)]
    owners = {secret: number for number, secret in enumerate(secrets)}
    own = 0
    faults = []

    def ask(server: RunningPeer, number: int) -> str:
        text = f"{systems[number % 4]}\n\nThe secret word is {secrets[number]}. Say it. The secret word is"
        body = {"prompt": text, "max_tokens": SECRET_TOKENS, "temperature": 0}
        answer = Client(server.address, KEYS[number % 2]).call("POST", "/v1/completions", body)
        return str(answer["choices"][0]["text"])

    with two_tenants(settings, *flags) as server, ThreadPoolExecutor(AT_ONCE) as pool:
        for number, text in enumerate(pool.map(lambda each: ask(server, each), range(count))):
            own += secrets[number] in text
            others = [word for word in SECRET.findall(text) if owners.get(word, number) != number]
            faults += [f"prompt {number} was told {others}"] if others else []
    return Found(kind=kind, prompts=count, same=own, faults=tuple(faults))


def watch(kind: str, count: int) -> Found:
    """One kind, or the secrets."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        found = (watch_kind if kind in KINDS else watch_secrets)(kind, count, Path(name))
    minutes = (time.monotonic() - began) / 60
    print(f"{kind}: {found.same} of {found.prompts} in {minutes:.1f} minutes", flush=True)
    return msgspec.structs.replace(found, machine=name_machine(), minutes=minutes)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        count=(5000, "marked prompts on tiny models, in all"),
        secrets=(500, "prompts on the embedded model"),
        at_once=(1, "kinds at a time"),
        only=([], "one kind, or `secrets`; nothing is recorded"),
        fresh=(False, "forget all earlier results"),
    )
    options = parser.parse_args(arguments)
    kept = Kept(ROOT / "build" / "canary.jsonl", Found, fresh=options.fresh)
    counts = dict.fromkeys(KINDS, -(-options.count // (len(KINDS) * TURNS))) | {SECRETS: options.secrets}
    known = kept.found
    left = [kind for kind in options.only or counts if kind not in known]
    with ProcessPoolExecutor(options.at_once) as pool:
        for one in pool.map(watch, left, [counts[kind] for kind in left]):
            kept.add(one.kind, one)
    for fault in [each for one in known.values() for each in one.faults[:5]]:
        print(fault, file=sys.stderr)
    if options.only:
        return int(any(one.faults for one in known.values()))
    return record(make_evidence({kind: known[kind] for kind in KINDS}, known[SECRETS]))


def _listed(cached: dict[str, int]) -> str:
    return ", ".join(f"{tokens:,} from {tier}" for tier, tokens in sorted(cached.items()))


def make_evidence(found: dict[str, Found], secrets: Found) -> Evidence:
    """The row of the proof."""
    bars = [
        Bar(
            f"{kind}: {one.prompts:,} prompts, the text as alone",
            "all, but at ties",
            f"{one.same:,} the same, {one.ties} parted at a tie, {len(one.faults)} elsewhere",
            not one.faults and one.same + one.ties == one.prompts and not one.integrity_failures,
        )
        for kind, one in found.items()
    ]
    told, own = len(secrets.faults), f"{secrets.same} of {secrets.prompts}"
    bars.append(Bar("answers with another's secret word", "0", f"{told}", not told))
    proves = 2 * secrets.same > secrets.prompts
    bars.append(Bar("answers with their own, so that it proves something", "most", own, proves))
    figures = {
        kind: f"cached tokens {_listed(one.cached)}; {one.preemptions} preemptions, {one.drafted} drafted"
        for kind, one in found.items()
    }
    parts = [*found.values(), secrets]
    machines = {f"{one.kind} on": f"{one.machine} in {one.minutes:.0f} minutes" for one in parts}
    return Evidence(
        name="canary",
        order=50,
        title="Marked prompts",
        about=(
            f"Two tenants, {AT_ONCE} at a time in too few cells; sharing, preemption, all tiers, checkpoints "
            "and drafts on. The figures say which of them took part; what comes back from disk is compared "
            'by `make proof ARGS="conversations --restart"`.'
        ),
        bars=bars,
        figures=figures | machines,
    )
