"""Whether the time to the first token tells one tenant what another has cached.

Tenant A has a prompt of some 400 tokens in the prefix cache. Tenant B sends that very prompt, and a random
one of the same length, in random order, 1,000 of each: Welch's t-test must not tell the two apart. As a
control A does the same: there the difference must be plain, or the test would prove nothing. So that B's own
prompts are not cached, it sends them with `cache_prompt` off in one series, and in another, with the cache
on, each prompt of A once only.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from proof.command import make_parser
from proof.evidence import Bar, Evidence, Series, record
from tests.driver.server import Server, cllm, make_client
from tests.tiny_models import make_dense

TRIES = 1000
CONTROL_TRIES = 200
PROMPT_BYTES = 400  # capital letters: a token each
ALPHA, PLAIN = 0.001, 1e-6
WARM_UP = 20
SETTINGS = (
    *("--parallel", "2", "--ctx-size", "16384", "--slots", "12"),
    *("--threads", "1", "--draft-tokens", "0"),
)


class Sample(NamedTuple):
    """Seconds to the first token: of the prompt that A has cached, and of random ones."""

    known: list[float]
    random: list[float]

    @property
    def p_value(self) -> float:
        return welch(self.known, self.random)

    @property
    def gap_ms(self) -> float:
        """By how much the random ones take longer, as a median."""
        return 1000 * (statistics.median(self.random) - statistics.median(self.known))


def welch(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sided p-value of Welch's t-test. With hundreds of values t is as good as normal."""
    variance = statistics.variance(first) / len(first) + statistics.variance(second) / len(second)
    t = (statistics.fmean(first) - statistics.fmean(second)) / math.sqrt(variance)
    return math.erfc(abs(t) / math.sqrt(2))


class Tenant:
    """A client with a key of its own."""

    def __init__(self, server: Server, key: str) -> None:
        self._client: httpx.Client = make_client(
            base_url=server.url, headers={"authorization": f"Bearer {key}"}
        )

    def first_token_s(self, prompt: str, *, cache: bool) -> float:
        """Seconds from sending a prompt to the first event of its answer."""
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_prompt": cache}
        began = time.perf_counter()
        with self._client.stream("POST", "/generate_stream", json=body) as response:
            assert response.status_code == 200, response.read()
            taken = [
                time.perf_counter() - began for line in response.iter_lines() if line.startswith("data: ")
            ]
        return taken[0]

    def close(self) -> None:
        self._client.close()


def make_prompt(draw: random.Random) -> str:
    """Prompts share nothing, not even their first letters."""
    return "".join(draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=PROMPT_BYTES))


def interleave(
    draw: random.Random, tries: int, known: Callable[[], float], other: Callable[[], float]
) -> Sample:
    """So many tries of each, in random order."""
    order = [True] * (tries + WARM_UP) + [False] * (tries + WARM_UP)
    draw.shuffle(order)
    sample = Sample([], [])
    for of_known in order:
        (sample.known if of_known else sample.random).append(known() if of_known else other())
    return Sample(sample.known[WARM_UP:], sample.random[WARM_UP:])


def measure(server: Server, keys: Sequence[str], tries: int, seed: int) -> dict[str, Sample]:
    """The three series: A itself, B without its own cache, B with it."""
    draw = random.Random(seed)
    ann, bob = (Tenant(server, key) for key in keys)
    secret = make_prompt(draw)
    ann.first_token_s(secret, cache=True)
    samples = {}

    def ask_fresh() -> float:
        """A caches a prompt, then B sends it for the first time."""
        prompt = make_prompt(draw)
        ann.first_token_s(prompt, cache=True)
        return bob.first_token_s(prompt, cache=True)

    def ask_other() -> float:
        """The same work before it, but B sends another prompt."""
        ann.first_token_s(make_prompt(draw), cache=True)
        return bob.first_token_s(make_prompt(draw), cache=True)

    samples["A, its own prompt"] = interleave(
        draw,
        min(tries, CONTROL_TRIES),
        lambda: ann.first_token_s(secret, cache=True),
        lambda: ann.first_token_s(make_prompt(draw), cache=False),
    )
    samples["B, the prompt of A"] = interleave(
        draw,
        tries,
        lambda: bob.first_token_s(secret, cache=False),
        lambda: bob.first_token_s(make_prompt(draw), cache=False),
    )
    cached = ann.first_token_s(secret, cache=True)
    samples["B, each prompt of A once, cache on"] = interleave(draw, tries, ask_fresh, ask_other)
    print(f"A's own prompt still takes {1000 * cached:.2f} ms")
    for tenant in (ann, bob):
        tenant.close()
    return samples


def make_evidence(samples: dict[str, Sample], seed: int) -> Evidence:
    """The row of the proof."""
    control, *others = samples.items()
    bars = [
        Bar(
            f"control: {control[0]}",
            f"p < {PLAIN:g}",
            f"p = {control[1].p_value:.3g}, {control[1].gap_ms:.2f} ms apart",
            control[1].p_value < PLAIN and control[1].gap_ms > 0,
        )
    ]
    for title, sample in others:
        found = f"p = {sample.p_value:.3g}, {sample.gap_ms:+.3f} ms, {len(sample.known):,} tries of each"
        bars.append(Bar(title, f"p > {ALPHA:g}", found, sample.p_value > ALPHA))
        tries = len(sample.known)
        bars.append(Bar(f"tries: {title}", f"{TRIES:,}", f"{tries:,}", tries >= TRIES))
    plotted = samples["B, the prompt of A"]
    return Evidence(
        name="timing",
        order=70,
        title="What the time of a cache hit tells",
        about=(
            f"Two tenants of a real server with a tiny model. A has a prompt of {PROMPT_BYTES} tokens in the "
            "prefix cache. B sends it, and random ones of the same length, interleaved in random order: "
            f"Welch's t-test over the times to the first token. Seed {seed}."
        ),
        bars=bars,
        series=[
            Series("B: the prompt that A has cached", "tries", [1000 * each for each in plotted.known], "ms"),
            Series("B: random prompts", "tries", [1000 * each for each in plotted.random], "ms"),
            Series("A: its own cached prompt", "tries", [1000 * each for each in control[1].known], "ms"),
        ],
    )


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__, __doc__, "--tiny", tries=(TRIES, "of each kind"), seed=(1, "of their order")
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.tiny or make_dense(folder / "tiny.gguf")
        file = folder / "keys.toml"
        keys = [cllm("keys", "new", tenant, "--file", str(file)).stdout.strip() for tenant in ("ann", "bob")]
        with Server(
            folder / "log", str(model), *SETTINGS, "--api-keys", str(file), CLLM_LOG_LEVEL="warning"
        ) as server:
            samples = measure(server, keys, options.tries, options.seed)
    for title, sample in samples.items():
        print(f"{title}: p = {sample.p_value:.3g}, {sample.gap_ms:+.3f} ms", flush=True)
    if options.tries < TRIES:
        return 0
    return record(make_evidence(samples, options.seed))
