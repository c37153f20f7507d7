"""Text with the KV cache on is the text with it off.

Random conversations, half of them through the chat route and half as bare tokens. Their histories are
continued, regenerated, edited (a branch), cut at their beginning, or lose the first part of an answer, as
thoughts are stripped. Some requests are left in mid-answer. All are first asked alone, with the cache off.
Then the same prompts are asked again, many at once, with the cache on; with `--control` also with it off.

Where the tokens part, the two likeliest of that step must be as good as even when computed alone. Any other
difference fails, or with `--control` any more than the control has. Flags after `--` go to the server and
force a tier: `-- --cache-ram-mb 0`. With `--restart` the server is stopped and started before the pass that
counts, so that prefixes come from disk. `--need ram` fails unless that tier was used.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.command import conclude, run_command, serving
from bench.peers import ServerSettings
from bench.report import Table
from bench.workloads.text import prose
from proof.command import make_parser
from proof.shared.answers import TIE, Answer, Client, Verdict, compare
from tests.tiny_architectures import make_all

EXACT = ("--no-flash-attention", "--cache-type-k", "f32", "--cache-type-v", "f32")
"""With these a tiny F32 model is exact: differences are ties."""
TURNS = 4
OUTPUT_TOKENS = 24
LEFT_AFTER_TOKENS = 64  # asked for by a request that is left at its first
CELLS = 2048  # of one conversation
SYSTEMS, OPENINGS = 8, 3  # so many conversations begin alike
SYSTEM_WORDS, MESSAGE_WORDS = (10, 120), (4, 30)
CHANGES = ("continued", "continued", "regenerated", "edited", "cut", "stripped", "left")
OFF: dict[str, Any] = {"cache_prompt": False}
DISK = ("--cache-disk-mb", "1024", "--cache-dir")
SETTLE_S = 3.0  # idle, before a restart: states are written behind

Content = str | tuple[int, ...]


class Part(NamedTuple):
    """A message: its text, or as bare tokens."""

    role: str
    content: Content


History = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """What is asked, how its history came from that of the turn before, and the answer alone."""

    history: History
    change: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class Pass:
    """All conversations asked once, many at a time."""

    name: str
    answers: list[Answer]
    verdict: Verdict
    seconds: float

    @property
    def cached_from(self) -> Counter[str]:
        """Cached tokens by source."""
        found: Counter[str] = Counter()
        for answer in self.answers:
            found[answer.cached_from or "unknown"] += answer.cached_tokens
        return +found


@dataclass(slots=True)
class Writer:
    """Makes conversations, each from its number alone; the answers in them are those of the server."""

    client: Client
    turns: int = TURNS
    _tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def write(self, number: int) -> list[Turn]:
        draw = random.Random(f"conversation {number}")
        opening = draw.randrange(SYSTEMS)

        def say(role: str, name: str, bounds: tuple[int, int]) -> Part:
            words = random.Random(name).randint(*bounds)
            text = prose(name, words)
            return Part(role, text if number % 2 else self._tokenize(f"{role}: {text}\n"))

        system = say("system", f"system {opening}", SYSTEM_WORDS)
        first = say("user", f"first {opening} {draw.randrange(OPENINGS)}", MESSAGE_WORDS)
        written: list[Turn] = []
        history: History = (system, first)
        change = "new"
        while True:
            written.append(Turn(history, change, ask(self.client, history, **OFF, speculate=False)))
            if len(written) == self.turns:
                return written
            change = draw.choice(CHANGES)
            new = say("user", f"message {number} {len(written)}", MESSAGE_WORDS)
            history = change_history(written, change, new, draw)

    def _tokenize(self, text: str) -> tuple[int, ...]:
        if text not in self._tokens:
            self._tokens[text] = self.client.tokenize(text)
        return self._tokens[text]


def change_history(written: Sequence[Turn], change: str, new: Part, draw: random.Random) -> History:
    """The next history of a conversation."""
    last = written[-1]
    tokens = isinstance(new.content, tuple)
    said: Content = tuple(last.answer.tokens) if tokens else last.answer.text  # type: ignore[arg-type]
    if change == "regenerated":
        return last.history
    if change == "edited":
        return (*draw.choice(written).history[:-1], new)
    if change == "stripped":
        said = said[draw.randint(1, max(1, len(said) // 2)) :]
    before = last.history
    if change == "cut":  # the oldest question and its answer, or the system prompt
        before = (before[0], *before[3:]) if len(before) > 3 else before[1:]
    return (*before, Part("assistant", said or new.content[:1]), new)


def _join(history: History) -> list[int]:
    return [token for part in history for token in part.content if isinstance(token, int)]


def _messages(history: History) -> list[dict[str, str]]:
    return [{"role": part.role, "content": str(part.content)} for part in history]


def ask(client: Client, history: History, max_tokens: int = OUTPUT_TOKENS, **fields: Any) -> Answer:
    if isinstance(history[0].content, tuple):
        return client.complete(_join(history), max_tokens, **fields)
    return client.chat(_messages(history), max_tokens, **fields)


def leave(client: Client, history: History) -> None:
    """Ask, and disconnect at the first token."""
    body: dict[str, Any] = {"max_tokens": LEFT_AFTER_TOKENS, "stream": True, "temperature": 0}
    if isinstance(history[0].content, tuple):
        path, body["prompt"] = "/completion", _join(history)
    else:
        path, body["messages"] = "/v1/chat/completions", _messages(history)
    with client.open("POST", path, body) as response:
        while (line := response.readline()) and (b'"content":"' not in line or b'"content":""' in line):
            pass  # what precedes the first token


def replay(client: Client, turns: Sequence[Turn], **fields: Any) -> list[Answer]:
    """The turns of one conversation, one after another."""
    answers = []
    for turn in turns:
        if turn.change == "left":
            leave(client, turn.history)
        answers.append(ask(client, turn.history, **fields))
    return answers


def run_conversations(
    model: Path | None,
    kind: str = "",
    count: int = 500,
    at_once: int = 16,
    tie: float = TIE,
    control: bool = False,
    restart: bool = False,
    need: str = "",
    flags: Sequence[str] = (),
    out: Path | None = None,
    command: Sequence[str] | None = None,
    logs: Path | None = None,
) -> int:
    """Write the conversations, ask them again, print a table; 0 if the rule holds. Raises SetupError."""
    with tempfile.TemporaryDirectory() as folder:
        if kind or model is None:
            model, flags = make_all(Path(folder))[kind or "dense"], (*EXACT, *flags)
        settings = ServerSettings(model=model, parallel=at_once, ctx_size=CELLS * at_once)
        disk = (*DISK, folder) if restart else ()
        start = partial(serving, "conversations", settings, command, logs, (*disk, *flags))
        load = partial(_ask_all, at_once=at_once, tie=tie)
        on = f"cache on, {at_once} at once"
        with start() as server:
            client = Client(server.address)
            scripts = [Writer(client).write(number) for number in range(count)]
            passes = [load(client, scripts, on)]
            if control:
                passes.append(load(client, scripts, f"cache off, {at_once} at once", **OFF))
            failures = _count_failures(client)
            time.sleep(SETTLE_S if restart else 0)
        if restart:
            with start() as server:
                client = Client(server.address)
                passes[0] = load(client, scripts, f"{on}, after a restart")
                failures += _count_failures(client)
    faults = find_faults(scripts, passes, need) + (["FAIL: an integrity check failed"] if failures else [])
    text = "\n".join([_table(scripts, passes).markdown(), "", *(faults or ["pass"])])
    data = {each.name: {**each.verdict._asdict(), "cached_from": each.cached_from} for each in passes}
    return conclude("conversations", text, data, out, failed=bool(faults))


def _count_failures(client: Client) -> int:
    return int(client.call("GET", "/debug/kv")["counters"]["integrity_failures"])


def _ask_all(
    client: Client, scripts: Sequence[Sequence[Turn]], name: str, at_once: int, tie: float, **fields: Any
) -> Pass:
    started = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda turns: replay(client, turns, **fields), scripts))
    seconds = time.monotonic() - started
    answers = [answer for each in found for answer in each]
    alone = [turn.answer for turns in scripts for turn in turns]
    return Pass(name, answers, compare(alone, answers, tie), seconds)


def find_faults(scripts: Sequence[Sequence[Turn]], passes: Sequence[Pass], need: str = "") -> list[str]:
    """What must not be: a difference that is no tie (more than in the control), a cache that was not used."""
    cached, *control = passes
    allowed = len(control[0].verdict.faults) if control else 0
    turns = [turn for turns in scripts for turn in turns]
    found = cached.verdict.faults
    faults = []
    if len(found) > allowed:
        faults = [f"FAIL: {len(found)} differences that are no ties, {allowed} allowed"]
        for number, fault in list(zip(cached.verdict.wrong, found, strict=True))[:10]:
            answer = cached.answers[number]
            faults.append(
                f"FAIL: {fault}; {turns[number].change}, "
                f"{answer.cached_tokens} of {answer.prompt_tokens} cached {answer.cached_from}"
            )
    if not sum(answer.cached_tokens for answer in cached.answers):
        faults.append("FAIL: nothing was cached: this proves nothing")
    if need and not any(need in source for source in cached.cached_from):
        faults.append(f"FAIL: nothing came from {need}")
    off = [turn.answer for turn in turns] + [answer for each in control for answer in each.answers]
    if any(answer.cached_tokens for answer in off):
        faults.append("FAIL: something was cached though the cache was off")
    return faults


def _table(scripts: Sequence[Sequence[Turn]], passes: Sequence[Pass]) -> Table:
    def equal(one: Pass) -> str:
        wrong = {number // len(scripts[0]) for number in one.verdict.wrong}
        return f"{len(scripts) - len(wrong)} of {len(scripts)}"

    def cached(one: Pass) -> str:
        prompts = sum(answer.prompt_tokens for answer in one.answers)
        return f"{sum(answer.cached_tokens for answer in one.answers)} of {prompts}"

    def sources(one: Pass) -> str:
        return ", ".join(f"{name} {count}" for name, count in sorted(one.cached_from.items())) or "–"

    rows = [
        ("conversations without a difference", *map(equal, passes)),
        ("turns the same token for token", *(f"{each.verdict.same}" for each in passes)),
        ("turns parted at a tie", *(f"{each.verdict.parted}" for each in passes)),
        ("turns parted elsewhere", *(f"{len(each.verdict.faults)}" for each in passes)),
        ("turns that met a tie alone", *(f"{each.verdict.ties}" for each in passes)),
        ("tokens compared", *(f"{each.verdict.compared}" for each in passes)),
        ("prompt tokens cached", *map(cached, passes)),
        ("cached from", *map(sources, passes)),
        ("seconds", *(f"{each.seconds:.0f}" for each in passes)),
    ]
    return Table((f"{len(scripts)} conversations", *(each.name for each in passes)), rows)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        *("--model", "--out", "--logs", "--command"),
        count=(500, "how many conversations"),
        at_once=(16, "how many at once, and slots"),
        tie=(TIE, "what counts as even"),
        kind=("", "a tiny model of the tests, exact: sliding …; dense where no --model is given"),
        control=(False, "also with the cache off, under the same load"),
        restart=(False, "restart before the pass that counts: from disk"),
        need=("", "fail unless this tier was used: device, ram, disk …"),
    )
    parser.add_argument("flags", nargs="*", help="more flags of the server, after --")
    return run_command(parser, arguments, run_conversations)
