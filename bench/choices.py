"""`python -m bench.choices`: eight answers to one long prompt begin about as soon as one does.

The prompt is computed once and copied. Measured is the time to the first token of the last choice to begin,
against that of a single answer, with fresh prompts, in turn.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from bench.command import conclude, make_parser, run_command, serving
from bench.peers import ServerSettings
from bench.report import Spread, Table
from bench.workloads.text import words
from cllm.errors import SetupError

CHOICES = 8
MAX_RATIO = 1.5


class Pair(NamedTuple):
    """One round, in seconds: one answer's first token, and the last first token of several."""

    single_s: float
    last_s: float

    @property
    def ratio(self) -> float:
        return self.last_s / self.single_s


def first_tokens(client: httpx.Client, prompt: str, choices: int) -> dict[int, float]:
    """Choice → seconds until its first text. Raises SetupError where one never came."""
    body = {"model": "any", "prompt": prompt, "n": choices, "max_tokens": 4, "seed": 1, "stream": True}
    began = time.perf_counter()
    first: dict[int, float] = {}
    with client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as response:
        if response.status_code != 200:
            raise SetupError(f"status {response.status_code}: {response.read()[:200]!r}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                    first.setdefault(choice["index"], time.perf_counter() - began)
    if len(first) != choices:
        raise SetupError(f"{len(first)} of {choices} choices began")
    return first


def measure(client: httpx.Client, rounds: int) -> list[Pair]:
    """Interleaved, each prompt new, the order turning; the first round warms up and is not counted."""
    pairs: list[Pair] = []
    for number in range(rounds + 1):
        times: dict[int, float] = {}
        for choices in (1, CHOICES) if number % 2 else (CHOICES, 1):
            prompt = long_prompt(2 * number + (choices > 1))
            times[choices] = max(first_tokens(client, prompt, choices).values())
        if number:
            pairs.append(Pair(times[1], times[CHOICES]))
    return pairs


def long_prompt(number: int, tokens: int = 800) -> str:
    """About so many tokens that no cache holds."""
    return words(f"choices {number}", tokens)


def show(pairs: Sequence[Pair]) -> list[str]:
    """A table, and the verdict."""
    ratio = Spread.of(pair.ratio for pair in pairs)
    rows = [
        ("n = 1, first token, ms", Spread.of(pair.single_s for pair in pairs).show(0, 1000)),
        (f"n = {CHOICES}, last first token, ms", Spread.of(pair.last_s for pair in pairs).show(0, 1000)),
        ("ratio", ratio.show(2)),
    ]
    verdict = "pass" if ratio.median <= MAX_RATIO else "FAIL"
    return [Table(("measured", "median"), rows).markdown(), f"{verdict}: the bar is {MAX_RATIO}"]


def run(model: Path | None, threads: int, rounds: int, out: Path | None) -> int:
    """0 if the bar is met, else 1."""
    settings = ServerSettings(model, CHOICES, 1024 * CHOICES, threads)
    with (
        serving("choices", settings) as server,
        httpx.Client(base_url=server.address.url, trust_env=False, timeout=300.0) as client,
    ):
        pairs = measure(client, rounds)
    lines = show(pairs)
    data = {"pairs": [pair._asdict() for pair in pairs]}
    return conclude("choices", "\n".join(lines), data, out, failed=lines[-1].startswith("FAIL"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("bench.choices", __doc__, "--model", "--threads", "--out", rounds=(7, "how many"))
    return run_command(parser, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
