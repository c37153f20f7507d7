"""`python -m bench.libraries NAME=FOLDER …`: which build of llama.cpp is the fastest here?

Decodes of each library with no server around them, interleaved, medians over the rounds, and the ratios to
the first library within each round.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.decode_bench import DecodeBench, DecodeTime
from bench.peers import embedded_model
from bench.report import Table
from cllm.errors import SetupError


class Work(NamedTuple):
    """A shape of work and how its speed is counted."""

    name: str
    sequences: int
    prompt_tokens: int
    generate: int
    prompts: bool = False  # tokens of prompts per second, else tokens generated per second

    def speed(self, time: DecodeTime) -> float:
        if self.prompts:
            return self.sequences * self.prompt_tokens / time.prompt_s
        return self.sequences * (self.generate - 1) / time.generate_s


WORKS = (
    Work("1 sequence", 1, 16, 65),
    Work("8 sequences", 8, 16, 33),
    Work("8 sequences at 800 tokens", 8, 800, 9),
    Work("prompt of 512", 1, 512, 1, prompts=True),
)


def compare(libraries: dict[str, Path], model: Path, rounds: int, works: Sequence[Work] = WORKS) -> Table:
    """Tokens per second by library and work. A library that dies is reported as such."""
    speeds: dict[str, dict[str, list[float]]] = {}
    dead: set[str] = set()
    for number in range(rounds + 1):  # the first is a warm-up
        for name, folder in libraries.items():
            if name in dead:
                continue
            try:
                with DecodeBench(model, library=folder) as decode:
                    for work in works:
                        time = decode(work.sequences, work.prompt_tokens, work.generate)
                        if number:
                            speeds.setdefault(name, {}).setdefault(work.name, []).append(work.speed(time))
            except SetupError:
                dead.add(name)
        print(f"round {number} of {rounds} done", file=sys.stderr, flush=True)
    rows = [
        (name, *("dies" if name in dead else f"{median(speeds[name][work.name]):.0f}" for work in works))
        for name in libraries
    ]
    alive = [name for name in libraries if name not in dead]
    for name in alive[1:]:
        ratios = (_ratio(speeds[name][work.name], speeds[alive[0]][work.name]) for work in works)
        rows.append((f"{name} / {alive[0]}", *ratios))
    return Table(("library, tokens/s", *(work.name for work in works)), rows)


def _ratio(speeds: list[float], others: list[float]) -> str:
    """The median of the rounds' own ratios, and their range."""
    ratios = [mine / other for mine, other in zip(speeds, others, strict=True)]
    return f"{median(ratios):.3f} ({min(ratios):.2f}–{max(ratios):.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.libraries", description=__doc__)
    parser.add_argument("libraries", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--model", type=Path, help="GGUF file; none: the embedded model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", action="append", choices=[work.name for work in WORKS], help="none: all")
    options = parser.parse_args(arguments)
    libraries = {
        name: Path(folder) for name, _, folder in (item.partition("=") for item in options.libraries)
    }
    with contextlib.suppress(KeyboardInterrupt):
        works = [work for work in WORKS if not options.work or work.name in options.work]
        print(compare(libraries, options.model or embedded_model(), options.rounds, works).markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
