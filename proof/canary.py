"""Marked prompts of two tenants, many at a time, with everything on that shares or moves KV or drafts.

On tiny models of five kinds of memory each turn of a conversation is asked alone with the cache off, then
all at once with prefix sharing, preemption, all cache tiers, checkpoints and drafts: the text must be the
same, since it depends on every token before it. Engines are killed meanwhile, and between the two halves of
all conversations, so that states come back from disk and answers go on in another engine. On the embedded
model each prompt has a secret word and asks for it: no answer may have another's. What was run before is not
run again: `--fresh` forgets it.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event

import msgspec

from bench.peers import RunningPeer, ServerSettings, cllm_peer, log_folder, running
from bench.workloads.text import prose
from cllm.server.keys import add_key
from proof.command import ROOT, make_parser
from proof.conversations import EXACT, SETTLE_S, TURNS, Turn, Writer, replay
from proof.evidence import Bar, Evidence, name_machine, record
from proof.shared.answers import Answer, Client, compare
from proof.shared.kept import Kept
from tests.driver.server import find_workers, wait_for
from tests.tiny_architectures import make_all, make_delta_hybrid, make_head

HEADS = {  # those with MTP heads, which are worth asking on a CPU, too
    "head": partial(make_head, right=0.98, mixed=0.1, wide=20_000),
    "head-delta": partial(make_delta_hybrid, heads=1, right=0.98, mixed=0.1, wide=20_000),
}
KINDS = ("dense", "hybrid", "sliding", *HEADS)
SECRETS = "secrets"
AT_ONCE = 16
HEADS_AT_ONCE = 4  # in more rows a draft costs more than it is worth
CELLS = 2048  # of one conversation
HEADS_CELLS = 1536  # of all: too few for that many
KILL_EVERY_S = (4.0, 12.0)
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
    accepted: int = 0
    kills: int = 0  # of engines
    integrity_failures: int = 0
    machine: str = ""
    minutes: float = 0.0


class Tenancy:
    """A server with two tenants, and an operator who may read its metrics and kills its engine."""

    def __init__(self, server: RunningPeer, keys: Sequence[str], operator: str) -> None:
        self.clients = [Client(server.address, key) for key in keys]
        self._server, self.operator = server, Client(server.address, operator)
        self.kills = 0

    def kill(self) -> None:
        """Kill the engine as soon as it is ready."""
        wait_for(lambda: self.operator.open("GET", "/ready").status == 200)
        with suppress(ProcessLookupError, ValueError):
            os.kill(max(find_workers(self._server.pid, "engine")), signal.SIGKILL)
            self.kills += 1

    @contextmanager
    def killing(self, seed: str) -> Iterator[None]:
        """Engines are killed now and then while the block runs."""
        ended, draw = Event(), random.Random(seed)

        def work() -> None:
            while not ended.wait(draw.uniform(*KILL_EVERY_S)):
                self.kill()

        with ThreadPoolExecutor(1) as pool:
            killing = pool.submit(work)
            try:
                yield
            finally:
                ended.set()
            killing.result()


@contextmanager
def two_tenants(settings: ServerSettings, folder: Path, *flags: str) -> Iterator[Tenancy]:
    file = folder / "keys.toml"
    keys = [add_key(file, name, admin=False) for name in ("one", "other")]
    operator = add_key(file, "operator", admin=True)
    peer = cllm_peer(settings, flags=("--api-keys", str(file), *flags))
    with (
        log_folder(None) as logs,
        running(replace(peer, ready_path="/health"), logs / "canary.log") as server,
    ):
        wait_for(lambda: Client(server.address, operator).open("GET", "/ready").status == 200)
        yield Tenancy(server, keys, operator)


def make_model(kind: str, folder: Path) -> Path:
    """A tiny model of that kind; with a head, one that is often right and whose drafts pay."""
    return HEADS[kind](folder / f"{kind}.gguf") if kind in HEADS else make_all(folder)[kind]


def watch_kind(kind: str, conversations: int, folder: Path) -> Found:
    """Conversations of two tenants on a tiny model."""
    model = make_model(kind, folder)
    # Too few cells for all of them, so that some must wait for others.
    at_once, cells = AT_ONCE, CELLS if kind == "dense" else 2 * CELLS
    if kind in HEADS:
        at_once, cells = HEADS_AT_ONCE, HEADS_CELLS
    settings = ServerSettings(model, at_once, cells, threads=1)
    # A dense model's own drafts come true; a hybrid drafts where its memory can roll back.
    drafts = {"dense": ("--draft-model", str(model)), "head-delta": ("--draft-rollback", "4")}.get(kind, ())
    limit = ("--max-request-tokens", str(min(cells, CELLS)))
    flags = ("--unified-kv", *limit, *EXACT, *drafts, *TIERS, str(folder / f"cache-{kind}"))
    with two_tenants(settings, folder, *flags) as tenancy:
        clients = tenancy.clients
        scripts = [Writer(clients[number % 2]).write(number) for number in range(conversations)]
        order = random.Random(5).sample(range(conversations), conversations)

        def ask(halves: slice) -> dict[int, list[Answer]]:
            """All conversations in a random order, a part of their turns each."""
            with ThreadPoolExecutor(at_once) as pool:
                jobs = {
                    number: pool.submit(replay, clients[number % 2], scripts[number][halves])
                    for number in order
                }
                return {number: job.result() for number, job in jobs.items()}

        with tenancy.killing(kind):
            begun = ask(slice(0, TURNS // 2))
        time.sleep(SETTLE_S)  # idle: states are written behind
        tenancy.kill()
        with tenancy.killing(f"{kind} again"):
            ended = ask(slice(TURNS // 2, None))
        metrics = tenancy.operator.metrics()
    answers = [answer for number in range(conversations) for answer in (*begun[number], *ended[number])]
    return make_found(kind, scripts, answers, metrics, tenancy.kills)


def make_found(
    kind: str,
    scripts: Sequence[Sequence[Turn]],
    answers: Sequence[Answer],
    metrics: dict[str, float],
    kills: int,
) -> Found:
    """Compare the answers with those alone, and count what took part."""

    def total(name: str) -> int:
        return int(sum(value for each, value in metrics.items() if f"{name}_tokens_total{{" in each))

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
        drafted=total("drafted"),
        accepted=total("accepted"),
        kills=kills,
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

    def ask(clients: Sequence[Client], number: int) -> str:
        text = f"{systems[number % 4]}\n\nThe secret word is {secrets[number]}. Say it. The secret word is"
        body = {"prompt": text, "max_tokens": SECRET_TOKENS, "temperature": 0}
        answer = clients[number % 2].call("POST", "/v1/completions", body)
        return str(answer["choices"][0]["text"])

    with two_tenants(settings, folder, *flags) as tenancy, ThreadPoolExecutor(AT_ONCE) as pool:
        for number, text in enumerate(pool.map(lambda each: ask(tenancy.clients, each), range(count))):
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
        count=(2500, "marked prompts on tiny models, in all"),
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
    parts = list(found.values())
    for name, kinds in (("dense", ("dense", "head")), ("a hybrid", ("head-delta",))):
        accepted = sum(found[kind].accepted for kind in kinds)
        read = sum(count for kind in kinds for tier, count in found[kind].cached.items() if "disk" in tier)
        figure = f"{accepted:,} drafts accepted, {read:,} tokens from disk"
        bars.append(Bar(f"{name}: drafts and the disk take part", "both", figure, bool(accepted and read)))
    told, own = len(secrets.faults), f"{secrets.same} of {secrets.prompts}"
    bars.append(Bar("answers with another's secret word", "0", f"{told}", not told))
    proves = 2 * secrets.same > secrets.prompts
    bars.append(Bar("answers with their own, so that it proves something", "most", own, proves))
    figures = {
        kind: (
            f"cached tokens {_listed(one.cached)}; {one.preemptions} preemptions, {one.drafted} drafted, "
            f"{one.accepted} of them accepted, {one.kills} engines killed"
        )
        for kind, one in found.items()
    }
    machines = {f"{one.kind} on": f"{one.machine} in {one.minutes:.0f} minutes" for one in (*parts, secrets)}
    return Evidence(
        name="canary",
        order=50,
        title="Marked prompts",
        about=(
            f"Two tenants, {AT_ONCE} at a time ({HEADS_AT_ONCE} with heads) in too few cells; sharing, "
            "preemption, all tiers, checkpoints and drafts on, and engines killed meanwhile. The figures say "
            "what took part; drafts are those of the model itself (dense), of n-grams or of an MTP head."
        ),
        bars=bars,
        figures=figures | machines,
    )
