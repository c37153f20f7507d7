"""Users with one system prompt, each in a slot of its own.

All ask at once, then all ask again. A second turn computes only its own new tokens: the question, and the
last token of the answer, which was sampled but never computed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.command import conclude, run_command, serving
from bench.peers import ServerSettings
from bench.report import Table
from bench.workloads.text import prose
from proof.command import make_parser
from proof.shared.answers import Answer, Client

OUTPUT_TOKENS = 32
QUESTION_TOKENS = (20, 60)
MAX_AGAIN = 1  # the last token of an answer
CELLS = 1024  # of one user


@dataclass(frozen=True, slots=True)
class Talks:
    """Both turns of every user, and how many tokens a second turn computed beyond its new ones."""

    first: list[Answer]
    second: list[Answer]
    again: list[int]

    @property
    def faults(self) -> list[str]:
        late = sum(count > MAX_AGAIN for count in self.again)
        return (
            [f"FAIL: {late} of {len(self.again)} second turns computed more than their own"] if late else []
        )


def talk(client: Client, users: int, system_tokens: int) -> Talks:
    """All first turns at once, then all second turns."""
    system = _tokens(client, "system", system_tokens)
    first = [system + _question(client, f"first {user}") for user in range(users)]
    answers = _ask_all(client, first)
    said = [tuple(token for token in each.tokens if isinstance(token, int)) for each in answers]
    new = [_question(client, f"second {user}") for user in range(users)]
    second = _ask_all(client, [sum(parts, ()) for parts in zip(first, said, new, strict=True)])
    again = [answer.computed_tokens - len(more) for answer, more in zip(second, new, strict=True)]
    return Talks(answers, second, again)


def run_second_turns(
    model: Path | None,
    users: int = 16,
    system_tokens: int = 500,
    flags: Sequence[str] = (),
    out: Path | None = None,
    command: Sequence[str] | None = None,
    logs: Path | None = None,
) -> int:
    """Ask both turns, print a table; 0 if no second turn computed anything again. Raises SetupError."""
    settings = ServerSettings(model=model, parallel=users, ctx_size=CELLS * users)
    with serving("second_turns", settings, command, logs, flags) as server:
        talks = talk(Client(server.address), users, system_tokens)
    text = "\n".join([_table(talks).markdown(), "", *(talks.faults or ["pass"])])
    return conclude("second_turns", text, {"again": talks.again}, out, failed=bool(talks.faults))


def _tokens(client: Client, name: str, count: int) -> tuple[int, ...]:
    """Exactly so many tokens of prose: a word has one at least."""
    return client.tokenize(prose(name, count))[:count]


def _question(client: Client, name: str) -> tuple[int, ...]:
    return _tokens(client, name, random.Random(name).randint(*QUESTION_TOKENS))


def _ask_all(client: Client, prompts: Sequence[tuple[int, ...]]) -> list[Answer]:
    """All at once, in an order of their own; the answers in the order of the prompts."""
    order = list(range(len(prompts)))
    random.Random(len(prompts[0])).shuffle(order)
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = {user: pool.submit(client.complete, prompts[user], OUTPUT_TOKENS) for user in order}
    return [asked[user].result() for user in range(len(prompts))]


def _table(talks: Talks) -> Table:
    first, second, again = talks.first, talks.second, talks.again

    def line(what: str, counts: Sequence[int]) -> tuple[str, ...]:
        return (what, *(f"{each:g}" for each in (sum(counts), min(counts), median(counts), max(counts))))

    sources = sorted({answer.cached_from or "unknown" for answer in second if answer.cached_tokens})
    rows = [
        line("first turns: prompt tokens", [answer.prompt_tokens for answer in first]),
        line("first turns: computed", [answer.computed_tokens for answer in first]),
        line("second turns: prompt tokens", [answer.prompt_tokens for answer in second]),
        line("second turns: computed", [answer.computed_tokens for answer in second]),
        line("second turns: beyond the new ones", again),
        ("second turns: cached from", ", ".join(sources) or "–", "", "", ""),
    ]
    return Table((f"{len(first)} users", "all", "least", "median", "most"), rows)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser(
        __name__,
        __doc__,
        *("--model", "--out", "--logs", "--command"),
        users=(16, "users, and slots"),
        system_tokens=(500, "tokens of the system prompt"),
    )
    parser.add_argument("flags", nargs="*", help="more flags of the server, after --")
    return run_command(parser, arguments, run_second_turns)
