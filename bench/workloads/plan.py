"""A definition becomes the exact requests of one round."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from bench.workloads.definition import Definition, Group, Length
from bench.workloads.text import TEXTS, words
from cllm.errors import SetupError


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One generation to ask for: of a known length unless `ignore_eos` is off."""

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = True
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Session:
    """What one user asks, turn by turn. Several turns are a chat: each turn sends the whole history."""

    turns: tuple[BenchRequest, ...]
    at_s: float = 0.0  # open loop: when it begins
    chat: bool = False  # also with one turn

    @property
    def is_chat(self) -> bool:
        return self.chat or len(self.turns) > 1


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """`clients` users take the sessions in order; 0 is the open loop, each session at its own time."""

    name: str
    clients: int
    sessions: tuple[Session, ...]
    after_chunks: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One round of a workload."""

    workload: str
    groups: tuple[GroupPlan, ...]


def make_plan(
    definition: Definition,
    salt: str | int,
    *,
    quick: bool = False,
    clients: int | None = None,
    tokens_per_word: float = 1.0,
) -> Plan:
    """The requests of a round: always the same for the same `salt`, of no use to any other round.

    `clients` replaces the definition's number, with two requests for each and at least four.
    """
    groups = (
        _plan_group(definition, group, salt, quick, clients, tokens_per_word) for group in definition.groups
    )
    return Plan(definition.name, tuple(groups))


def make_fill(definition: Definition, tokens_per_word: float = 1.0) -> Plan:
    """The prompts that fill caches before the first round, one after another."""
    group = definition.groups[0]
    requests = [
        BenchRequest(
            TEXTS[definition.text](
                f"fill {definition.name} {number}",
                _scaled(_draw(group.prompt_tokens, number), tokens_per_word),
            ),
            _draw(group.output_tokens, number),
        )
        for number in range(definition.fill)
    ]
    return single_requests(definition.name, requests)


def single_requests(workload: str, requests: Sequence[BenchRequest], clients: int = 1) -> Plan:
    """A closed loop over requests that have nothing to do with each other."""
    sessions = tuple(Session((request,)) for request in requests)
    return Plan(workload, (GroupPlan("requests", clients, sessions),))


def _plan_group(
    definition: Definition,
    group: Group,
    salt: str | int,
    quick: bool,
    clients: int | None,
    tokens_per_word: float,
) -> GroupPlan:
    count = (quick and group.quick_count) or group.count
    if clients is not None:
        count = max(4, 2 * clients)
    seed = f"{definition.name} {salt} {group.name}"
    random_numbers = random.Random(seed)
    prompts = _prompts(definition, group, seed, random_numbers, tokens_per_word)
    sessions, at_s = [], 0.0
    for _ in range(count):
        turns = tuple(islice(prompts, group.turns))
        sessions.append(Session(turns, at_s, group.chat))
        if group.rate is not None:
            at_s += random_numbers.expovariate(group.rate)
    looping = 0 if group.rate is not None else clients or group.clients
    return GroupPlan(group.name, looping, tuple(sessions), group.after_chunks)


def _prompts(
    definition: Definition, group: Group, seed: str, random_numbers: random.Random, tokens_per_word: float
) -> Iterator[BenchRequest]:
    """Without end. The shared prefix and its own begin the first turn of each conversation."""
    make_text = TEXTS[definition.text]

    def prefix(name: str, tokens: int) -> str:
        return make_text(f"{seed} {name}", _scaled(tokens, tokens_per_word)) + "\n\n" if tokens else ""

    shared = prefix("prefix", group.shared_prefix_tokens)
    own = cycle(_read_prompts(Path(definition.folder) / group.prompts_file)) if group.prompts_file else None
    number = 0
    while True:
        begin = ""
        if number % group.turns == 0:
            begin = shared + prefix(f"prefix {number}", group.prefix_tokens)
        output = _draw(group.output_tokens, number, random_numbers.random())
        if own is None:
            length = _scaled(_draw(group.prompt_tokens, number, random_numbers.random()), tokens_per_word)
            text = make_text(f"{seed} {number}", length)
        else:
            text, asked = next(own)
            output = asked or output
            text = f"{words(f'{seed} {number}', 3)}: {text}" if group.salt else text
        yield BenchRequest(begin + text, output, group.temperature)
        number += 1


def _draw(length: Length, number: int, share: float = 0.0) -> int:
    """The length of this number; of bounds, `share` in [0, 1) of the way between them, ends included."""
    if isinstance(length, int):
        return length
    if len(length) != 2:
        return length[number % len(length)]
    low, high = length
    return low + int(share * (high - low + 1))


def _scaled(tokens: int, tokens_per_word: float) -> int:
    return max(1, round(tokens / tokens_per_word))


def _read_prompts(path: Path) -> list[tuple[str, int | None]]:
    """Prompts and, where the file says so, the lengths of their answers. Raises SetupError."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        if path.suffix != ".jsonl":
            found: list[tuple[str, int | None]] = [(line, None) for line in lines]
        else:
            entries = [json.loads(line) for line in lines]
            found = [(str(entry["prompt"]), entry.get("max_tokens")) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SetupError(f"{path}: not readable as prompts: {error!r}") from None
    if not found:
        raise SetupError(f"{path}: no prompts in it")
    return found
