"""`python -m tests.soak.features`: greedy text with every feature on is the text with all of them off.

The same prompts twice: from many clients at once with prefix cache, speculation and padding,
then one at a time with none of them. Where the tokens part, the two likeliest of that step must be as good as
even when computed alone; any other difference fails.

How much a logit moves with the size of a batch depends on the model and the kernels, not on any feature: with
`--control` the prompts are asked once more by as many clients with everything off, and compared alike.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.client import BadAnswer
from bench.command import conclude, make_parser, run_command, serving
from bench.peers import ServerSettings
from bench.report import Table

TIE = 0.05  # logits closer than this, alone, may be ordered either way in another batch
CLIENTS = 8  # by default
MAX_TOKENS = 48
# Far more than by default: drafts are as long as pays.
ON = ("--draft-tokens", "64")
OFF = ("--cache-ram-mb", "0", "--draft-tokens", "0")
DECLINED: dict[str, Any] = {"cache_prompt": False, "speculate": False}
USED = ("drafted_tokens", "prefix_hits")  # above 0 with everything on, 0 with everything off
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
class GreedyAnswer:
    """A greedy answer: its tokens as text, how far the two likeliest were apart at each, and how it ended."""

    tokens: tuple[str, ...]
    margins: tuple[float, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an answer compares: `place` is the token where it parts from the one alone, or None."""

    place: int | None = None
    margin: float = 0.0

    def allowed(self, tie: float = TIE) -> bool:
        return self.place is None or self.margin < tie


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


def compare(loaded: GreedyAnswer, alone: GreedyAnswer) -> int | None:
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

    def ask(self, prompt: str, max_tokens: int, **fields: Any) -> GreedyAnswer:
        """Raises BadAnswer unless the answer is complete."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2, **fields}
        try:
            answer = self._http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise BadAnswer(f"no answer: {error!r}") from error
        if answer.status_code != 200:
            raise BadAnswer(f"status {answer.status_code}: {answer.text[:200]}")
        (choice,) = answer.json()["choices"]
        logprobs = choice["logprobs"]
        return GreedyAnswer(
            tuple(logprobs["tokens"]), tuple(map(_margin, logprobs["top_logprobs"])), choice["finish_reason"]
        )

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


def evaluate(asker: Asker, prompt: str, loaded: GreedyAnswer, alone: GreedyAnswer) -> Verdict:
    """Compare an answer with that of the server that computes alone, `asker`."""
    place = compare(loaded, alone)
    if place is None:
        return Verdict()
    if place < len(alone.margins):
        return Verdict(place, alone.margins[place])
    # Alone it ended here; how near another token came shows when the end is not allowed.
    further = asker.ask(prompt, place + 1, ignore_eos=True, cache_prompt=False)
    return Verdict(place, further.margins[place])


def run_features(
    model: Path | None,
    count: int,
    out: Path | None = None,
    command: Sequence[str] | None = None,
    logs: Path | None = None,
    *,
    tie: float = TIE,
    clients: int = CLIENTS,
    control: bool = False,
) -> int:
    """Ask everything twice, print the table; 0 if every difference is a tie, else 1.

    Raises SetupError if a server does not start.
    """
    prompts = make_prompts(count)
    on, off = f"features on, {clients} clients", f"all off, {clients} clients"
    with _server("on", model, ON, command, logs, clients) as asker:
        loaded = _crowd(asker, prompts, clients)
        counters = asker.counters()
    with _server("off", model, OFF, command, logs, clients) as asker:
        alone = {}
        for prompt in dict.fromkeys(prompts):  # greedy, one at a time: the same again would say the same
            alone[prompt] = asker.ask(prompt, MAX_TOKENS, **DECLINED)
        plain = asker.counters()
        others = _crowd(asker, prompts, clients, **DECLINED) if control else []

        def evaluated(answers: Sequence[GreedyAnswer]) -> list[Verdict]:
            pairs = zip(prompts, answers, strict=True)
            return [evaluate(asker, prompt, answer, alone[prompt]) for prompt, answer in pairs]

        columns = {on: evaluated(loaded)}
        if control:
            columns[off] = evaluated(others)
    table = _table(prompts, columns, {on: counters, "all off, alone": plain}, tie)
    faults = find_faults(prompts, columns[on], counters, plain, tie)
    text = "\n".join([table.markdown(), "", *(faults or ["pass: every difference begins at a tie"])])
    data = {"verdicts": columns, "on": counters, "off": plain}
    return conclude("features", text, data, out, failed=bool(faults))


def _crowd(asker: Asker, prompts: Sequence[str], clients: int, **fields: Any) -> list[GreedyAnswer]:
    started = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda prompt: asker.ask(prompt, MAX_TOKENS, **fields), prompts))
    print(f"{len(prompts)} prompts: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return answers


def _table(
    prompts: Sequence[str],
    verdicts: Mapping[str, Sequence[Verdict]],
    counters: Mapping[str, Mapping[str, float]],
    tie: float,
) -> Table:
    columns = list(dict.fromkeys((*verdicts, *counters)))

    def line(what: str, values: Mapping[str, object]) -> tuple[str, ...]:
        return (what, *(str(values.get(column, "")) for column in columns))

    def counted(what: Callable[[Verdict], bool]) -> dict[str, object]:
        return {column: sum(map(what, some)) for column, some in verdicts.items()}

    return Table(
        (f"{len(prompts)} prompts, {len(set(prompts))} of them different", *columns),
        [
            *(line(name, {each: f"{counters[each][name]:.0f}" for each in counters}) for name in COUNTERS),
            line("the same token for token", counted(lambda verdict: verdict.place is None)),
            line(f"parted at a tie (below {tie})", counted(lambda v: v.place is not None and v.allowed(tie))),
            line("parted elsewhere", counted(lambda verdict: not verdict.allowed(tie))),
            line(
                "largest margin where they part",
                {column: f"{max(each.margin for each in some):.3f}" for column, some in verdicts.items()},
            ),
        ],
    )


def find_faults(
    prompts: Sequence[str],
    verdicts: Sequence[Verdict],
    on: Mapping[str, float],
    off: Mapping[str, float],
    tie: float,
) -> list[str]:
    """What must not be: a difference that is no tie, a feature that was not used, or used though off."""
    faults = [
        f"FAIL: prompt {index}, {prompts[index][-40:]!r}: parts at token {verdict.place}, where the two "
        f"likeliest are {verdict.margin:.3f} apart"
        for index, verdict in enumerate(verdicts)
        if not verdict.allowed(tie)
    ]
    if idle := [name for name in USED if not on[name]]:
        faults.append(f"FAIL: a feature was never used: {', '.join(idle)}")
    if busy := [name for name in USED if off[name]]:
        faults.append(f"FAIL: a feature was used that is off: {', '.join(busy)}")
    return faults


@contextmanager
def _server(
    name: str,
    model: Path | None,
    flags: Sequence[str],
    command: Sequence[str] | None,
    logs: Path | None,
    clients: int,
) -> Iterator[Asker]:
    settings = ServerSettings(model=model, parallel=clients, ctx_size=2048 * clients)
    with serving(name, settings, command, logs, flags) as server:
        asker = Asker(server.address.url)
        try:
            yield asker
        finally:
            asker.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "tests.soak.features",
        __doc__,
        *("--model", "--out", "--logs", "--command"),
        count=(500, "how many prompts"),
        tie=(TIE, "what counts as even"),
        clients=(CLIENTS, "at once"),
    )
    parser.add_argument("--control", action="store_true", help="also as many clients with everything off")
    return run_command(parser, arguments, run_features)


if __name__ == "__main__":
    sys.exit(main())
