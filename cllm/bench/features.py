"""`python -m cllm.bench.features`: greedy text with every feature on is the text with all of them off.

The same prompts twice: from 8 clients at once with prefix cache, speculation, fillers and tuned settings,
then one at a time with none of them. Where the tokens part, the two likeliest of that step must be as good as
even when computed alone; any other difference fails.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from cllm.bench.client import BadAnswer
from cllm.bench.peers import ServerSettings, cllm_peer, log_folder, running
from cllm.bench.report import Table, write_report
from cllm.errors import SetupError

TIE = 0.05  # logits closer than this, alone, may be ordered either way in another batch
CLIENTS = 8
MOST_TOKENS = 48
# As many guesses as make 8 for each of 8 clients; by default guessing ends where four generate.
ON = ("--draft-tokens", "64")
OFF = ("--cache-ram-mb", "0", "--draft-tokens", "0", "--no-tune")
COUNTERS = ("drafted_tokens", "accepted_tokens", "prefix_hits", "prefix_tokens", "steps", "decoded_tokens")

_DOCUMENTS = (
    "The lighthouse at Cape Morrow was built in 1871 from grey stone that was shipped across the bay. "
    "Its lamp burned oil until 1926, when a cable was laid. The keeper wrote the weather into a book "
    "every morning and every evening. On clear nights the light can be seen from forty kilometres away. ",
    "To bake the bread, mix flour, water, salt and yeast, and knead the dough for ten minutes. Let it "
    "rest for an hour under a cloth. Shape two loaves, let them rise again, and bake them half an hour at "
    "230 degrees. The bread is done when it sounds hollow. Let it cool before you cut it. ",
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"
    "    return area(width, height) * depth\n\ndef surface(width, height, depth):\n"
    "    return 2 * (area(width, height) + area(width, depth) + area(height, depth))\n\n",
)
_QUESTIONS = (
    "Repeat the text above word for word.\n",
    "Question: What is this text about?\nAnswer:",
    "A summary in one sentence:",
    "List the three most important facts:\n1.",
    "Question: Which number is named first?\nAnswer:",
)
_SHORT = (
    "The capital of France is",
    "1, 2, 3, 4, 5,",
    "Once upon a time",
    "Water boils at",
    "The opposite of hot is",
)


@dataclass(frozen=True, slots=True)
class Said:
    """A greedy answer: its tokens as text, how far the two likeliest were apart at each, and how it ended."""

    tokens: tuple[str, ...]
    margins: tuple[float, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an answer compares: `place` is the token where it parts from the one alone, or None."""

    place: int | None = None
    margin: float = 0.0

    @property
    def allowed(self) -> bool:
        return self.place is None or self.margin < TIE


def make_prompts(count: int) -> list[str]:
    """Prompts of mixed length: short ones, questions about common texts, tables, and repeats of them all."""
    source = random.Random("features")
    prompts: list[str] = []
    for number in range(count):
        if prompts and number % 5 == 4:
            prompts.append(source.choice(prompts))
        elif number % 5 == 3:
            rows = "".join(
                f"item {n}; colour {source.choice(('red', 'blue'))}; price {n * 3}\n" for n in range(1, 9)
            )
            prompts.append(f"Table {number}\n{rows}Table {number} again\n")
        elif number % 5 == 2:
            prompts.append(f"{number}. {source.choice(_SHORT)}")
        else:
            text = source.choice(_DOCUMENTS) * source.randint(1, 4)
            prompts.append(f"{text}{source.choice(_QUESTIONS)}{' ' * (number % 2)}")
    return prompts


def compare(loaded: Said, alone: Said) -> int | None:
    """The first token that differs; None if both say the same and end alike."""
    for place, (one, other) in enumerate(zip(loaded.tokens, alone.tokens, strict=False)):
        if one != other:
            return place
    if len(loaded.tokens) == len(alone.tokens) and loaded.finish_reason == alone.finish_reason:
        return None
    return min(len(loaded.tokens), len(alone.tokens))


class Asker:
    """Greedy completions of a server, with probabilities. May be used from several threads. Close it."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=600.0)

    def close(self) -> None:
        self._http.close()

    def ask(self, prompt: str, max_tokens: int, **fields: Any) -> Said:
        """Raises BadAnswer unless the answer is complete."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2, **fields}
        try:
            answer = self._http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise BadAnswer(f"no answer: {error!r}") from error
        if answer.status_code != 200:
            raise BadAnswer(f"status {answer.status_code}: {answer.text[:200]}")
        (choice,) = answer.json()["choices"]
        told = choice["logprobs"]
        return Said(tuple(told["tokens"]), tuple(map(_margin, told["top_logprobs"])), choice["finish_reason"])

    def counters(self) -> dict[str, float]:
        """What the server counted, by the names in `COUNTERS`."""
        lines = self._http.get("/metrics").text.splitlines()
        return {
            name: sum(float(line.split()[-1]) for line in lines if line.startswith(f"cllm_{name}_total"))
            for name in COUNTERS
        }


def _margin(top: dict[str, float]) -> float:
    """How far the two likeliest are apart; two parts of characters look alike as text, and count as even."""
    values = sorted(top.values(), reverse=True)
    return values[0] - values[1] if len(values) > 1 else 0.0


def judge(asker: Asker, prompt: str, loaded: Said, alone: Said) -> Verdict:
    """Compare an answer with that of the server that computes alone, `asker`."""
    place = compare(loaded, alone)
    if place is None:
        return Verdict()
    if place < len(alone.margins):
        return Verdict(place, alone.margins[place])
    # Alone it ended here; how near another token came is told when the end is not chosen.
    further = asker.ask(prompt, place + 1, ignore_eos=True, cache_prompt=False)
    return Verdict(place, further.margins[place])


def run_features(
    model: Path | None,
    count: int,
    out: Path | None = None,
    command: Sequence[str] | None = None,
    logs: Path | None = None,
) -> int:
    """Ask everything twice, print the table; 0 if every difference is a tie, else 1.

    Raises SetupError if a server does not start.
    """
    prompts = make_prompts(count)
    started = time.monotonic()
    with log_folder(logs) as folder:
        with _server(model, ON, folder / "on.log", command) as asker, ThreadPoolExecutor(CLIENTS) as pool:
            loaded = list(pool.map(lambda prompt: asker.ask(prompt, MOST_TOKENS), prompts))
            counters = asker.counters()
        between = time.monotonic()
        print(f"{count} prompts with everything on: {between - started:.0f} s", file=sys.stderr, flush=True)
        with _server(model, OFF, folder / "off.log", command) as asker:
            alone: dict[str, Said] = {}
            verdicts = []
            for prompt, said in zip(prompts, loaded, strict=True):
                if prompt not in alone:  # greedy, one at a time: the same again would say the same
                    alone[prompt] = asker.ask(prompt, MOST_TOKENS, cache_prompt=False, speculate=False)
                verdicts.append(judge(asker, prompt, said, alone[prompt]))
            plain = asker.counters()
    print(f"and with everything off: {time.monotonic() - between:.0f} s", file=sys.stderr, flush=True)
    return _report(prompts, loaded, verdicts, counters, plain, out)


def _report(
    prompts: Sequence[str],
    loaded: Sequence[Said],
    verdicts: Sequence[Verdict],
    counters: dict[str, float],
    plain: dict[str, float],
    out: Path | None,
) -> int:
    same = sum(verdict.place is None for verdict in verdicts)
    ties = sum(verdict.place is not None and verdict.allowed for verdict in verdicts)
    wrong = [index for index, verdict in enumerate(verdicts) if not verdict.allowed]
    table = Table(
        ("what", "features on, 8 clients", "all off, one at a time"),
        [
            ("prompts (of them different)", str(len(prompts)), str(len(set(prompts)))),
            ("tokens generated", str(sum(len(said.tokens) for said in loaded)), ""),
            *((name, f"{counters[name]:.0f}", f"{plain[name]:.0f}") for name in COUNTERS),
            ("the same token for token", str(same), ""),
            (f"parted at a tie (below {TIE})", str(ties), ""),
            ("parted elsewhere", str(len(wrong)), ""),
        ],
    )
    faults = [
        f"FAIL: prompt {index}, {prompts[index][-40:]!r}: parts at token {verdicts[index].place}, where the "
        f"two likeliest are {verdicts[index].margin:.3f} apart"
        for index in wrong
    ]
    idle = [name for name in ("drafted_tokens", "prefix_hits") if not counters[name]]
    if idle:
        faults.append(f"FAIL: a feature was never used: {', '.join(idle)}")
    if plain["drafted_tokens"] or plain["prefix_hits"]:
        faults.append("FAIL: a feature was used that is off")
    text = "\n".join([table.markdown(), "", *(faults or ["pass: every difference begins at a tie"])])
    print(text)
    if out is not None:
        write_report(out, "features", text, {"verdicts": verdicts, "on": counters, "off": plain})
    return 1 if faults else 0


@contextmanager
def _server(
    model: Path | None, options: Sequence[str], log: Path, command: Sequence[str] | None
) -> Iterator[Asker]:
    peer = cllm_peer(ServerSettings(model=model, parallel=CLIENTS, ctx_size=1024 * CLIENTS), command)
    with running(replace(peer, command=(*peer.command, *options)), log) as server:
        asker = Asker(server.address.url)
        try:
            yield asker
        finally:
            asker.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cllm.bench.features", description=__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file (default: the embedded model)")
    parser.add_argument("--count", type=int, default=500, help="how many prompts (default 500)")
    parser.add_argument("--out", type=Path, help="folder to write features.md and features.json into")
    parser.add_argument("--logs", type=Path, help="folder to keep the servers' logs in")
    parser.add_argument("--command", help="what to start instead of the installed cllm")
    options = parser.parse_args(arguments)
    command = shlex.split(options.command) if options.command else None
    try:
        return run_features(options.model, options.count, options.out, command, options.logs)
    except (SetupError, BadAnswer) as error:
        print(f"features: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
