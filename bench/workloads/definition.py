"""The file format of a workload. `bench/README.md` explains it to its users."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from bench.figures import DEFAULT_FIGURES, FIGURES
from cllm.errors import SetupError

ORDER = (
    *("real", "agents", "chat", "burst", "arrivals", "stall", "shared", "agent"),
    *("long", "distinct", "single", "stale", "contended", "sweep"),
)
"""Built-in workloads in the order of the report: as users are, then what is greedy on random words."""

Count = Annotated[int, Meta(ge=1)]
Length = int | tuple[int, ...]  # no Meta here: msgspec 0.22 crashes on a bounded int beside a tuple
"""A number of tokens; two are the bounds of an even distribution, more are taken in turn."""


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Users of one kind. The groups of a workload run at the same time."""

    name: str = "requests"
    count: Count = 32  # conversations; with one turn each, requests
    quick_count: Count | None = None  # of a quick run; None: as many
    prompt_tokens: Length = 64  # of each turn, without the shared prefix and the history
    output_tokens: Length = 64
    shared_prefix_tokens: Annotated[int, Meta(ge=0)] = 0  # the same for all in a round, new in every round
    prefix_tokens: Annotated[int, Meta(ge=0)] = 0  # a conversation's own, before its first turn
    turns: Count = 1
    chat: bool = False  # one turn goes to the chat route, too
    prompts_file: str = ""  # instead of synthetic prompts: a line each, or JSON lines; beside the TOML file
    salt: bool = True  # a few words in front of prompts from a file, new in every round
    temperature: Annotated[float, Meta(ge=0)] = 0.0
    clients: Count = 8  # closed loop: each sends its next when its last is answered
    rate: Annotated[float, Meta(gt=0)] | None = None  # open loop instead: conversations begun per second
    after_chunks: Annotated[int, Meta(ge=0)] = 0  # begins when all the others have received so many pieces

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            lengths = value if isinstance(value, tuple) else (value,)
            ascending = [1, *(lengths if len(lengths) == 2 else sorted(lengths))]
            if not lengths or ascending != sorted(ascending):
                raise ValueError(
                    f"{name}: {value} is not a length, a lowest and a highest, or a list of more"
                )


class BarLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What cllm's figure must reach, as a ratio to something measured in the same run."""

    figure: str
    against: Literal["peer", "quiet", "limit", "llama-bench", "plain-build"] = "peer"
    at_least: float | None = None
    at_most: float | None = None
    condition: str = ""  # which of several, where there are several

    def __post_init__(self) -> None:
        _known_figures([self.figure])
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"a bar on {self.figure} needs either at_least or at_most")


class Definition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One workload: the users, the size of the server, the figures that come out, their bars."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    about: str
    groups: Annotated[tuple[Group, ...], Meta(min_length=1)]
    parallel: Count = 8
    ctx_size: Count = 8192
    figures: tuple[str, ...] = DEFAULT_FIGURES
    bars: tuple[BarLine, ...] = ()
    both_layouts: bool = True  # llama-server with split and with unified KV
    alone: bool = False  # cllm against itself: peers would take too long
    text: Literal["words", "prose"] = "words"  # what prompts are made of
    prompt_cache: bool = False  # llama-server's cache in RAM: on where prompts come again
    cllm_flags: tuple[str, ...] = ()  # more flags of `cllm serve`
    fill: Annotated[int, Meta(ge=0)] = 0  # prompts like the first group's, one by one before the first round
    busy_neighbour: bool = False  # each round also with another process busy on a core
    concurrency: tuple[Count, ...] = ()  # each round with so many clients, two requests for each
    quick_concurrency: tuple[Count, ...] = ()
    max_rounds: Count = 1000
    max_quick_rounds: Count = 2
    folder: str = ""  # where prompt files are looked for; set by `read_file`

    def __post_init__(self) -> None:
        _known_figures(self.figures)
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise ValueError("two groups have the same name")
        if all(group.after_chunks for group in self.groups):
            raise ValueError("after_chunks: one group must begin by itself")

    def at_temperature(self, temperature: float) -> Definition:
        """The same workload, sampled at this temperature."""
        groups = tuple(msgspec.structs.replace(group, temperature=temperature) for group in self.groups)
        return msgspec.structs.replace(self, groups=groups)

    def conditions(self, quick: bool = False) -> tuple[str, ...]:
        """Under what each server is measured in a round; one nameless condition if there is no choice."""
        if self.busy_neighbour:
            return QUIET, BUSY
        chosen = (quick and self.quick_concurrency) or self.concurrency
        return tuple(clients_label(clients) for clients in chosen) or ("",)


QUIET, BUSY = "quiet", "busy"


def clients_label(clients: int) -> str:
    return f"{clients} client{'s' * (clients > 1)}"


def clients_of(condition: str) -> int | None:
    """The number of clients that a condition asks for, if it does."""
    number, _, unit = condition.partition(" ")
    return int(number) if unit.startswith("client") else None


def read_file(path: Path) -> Definition:
    """Raises SetupError with the file's name and what is wrong in it."""
    try:
        definition = msgspec.convert(tomllib.loads(path.read_text()), Definition)
    except (OSError, ValueError) as error:  # msgspec's and tomllib's errors are ValueErrors
        raise SetupError(f"{path}: {error}") from None
    definition = msgspec.structs.replace(definition, folder=str(path.parent))
    for group in definition.groups:
        if group.prompts_file and not (path.parent / group.prompts_file).is_file():
            raise SetupError(f"{path}: no prompts file {group.prompts_file}")
    return definition


def built_in() -> dict[str, Definition]:
    """By name, in the order of the report."""
    folder = Path(__file__).parent
    return {name: read_file(folder / f"{name}.toml") for name in ORDER}


def find(names: list[str]) -> list[Definition]:
    """Built-in workloads by name, others by the path of their TOML file; all built-in ones for no name."""
    known = built_in()
    found = []
    for name in names or known:
        if name in known:
            found.append(known[name])
        elif name.endswith(".toml"):
            found.append(read_file(Path(name)))
        else:
            raise SetupError(f"no workload {name!r}: there are {', '.join(known)}, or name a .toml file")
    doubled = {each.name for each in found if [other.name for other in found].count(each.name) > 1}
    if doubled:
        raise SetupError(f"two workloads are called {sorted(doubled)[0]!r}")
    return found


def _known_figures(names: tuple[str, ...] | list[str]) -> None:
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise ValueError(f"no figure {unknown[0]!r}: there are {', '.join(FIGURES)}")
