"""What was found out, and where it is remembered: a JSON file for each machine, library, model and load."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from cllm.config import EngineConfig
from cllm.tune.space import TUNABLE, Settings, with_settings
from cllm.tune.trial import Measurement, mix_seconds

log = logging.getLogger(__name__)
VERSION = 2  # 1 judged by long contexts that were short
WHO = ("cpu", "cores", "library", "model")  # what of an identity must agree for a result to be of interest


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A value of a dimension and what it costs, relative to the value that was chosen there (1.0).

    `ratio` is of the whole mix, `cases` of each part of it; both are empty where there is a `problem`.
    `perplexity_change` is a fraction, relative to the types the search began with.
    """

    dimension: str
    label: str
    chosen: bool = False
    ratio: float | None = None
    cases: dict[str, float] = {}
    problem: str = ""
    perplexity_change: float | None = None


class TuneRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search. `settings` are those that differ from what it began with."""

    identity: dict[str, str]
    settings: dict[str, int | bool | str]
    options: tuple[Option, ...]
    seconds: dict[str, float]  # by case, of the chosen settings
    speedup: float  # of the chosen settings over those it began with, in the mix
    noise: float  # by how much the same setting differed from itself
    streams: int
    short: int
    long: int
    kv_types: bool = False  # types of K and V were asked for
    perplexity_tokens: int = 0  # of our text, where types of K and V were judged
    left_out: tuple[str, ...] = ()
    provisional: str = ""  # the reason why it should be measured again
    took_s: float = 0.0
    created: str = ""
    version: int = VERSION

    def applied_to(self, config: EngineConfig, given: frozenset[str] = frozenset()) -> EngineConfig:
        """The configuration with what was found; what was given explicitly stays."""
        return with_settings(
            config, {name: value for name, value in self.settings.items() if name not in given}
        )


class TuneMemory:
    """The remembered results in a folder. What cannot be read or is about something else is not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, identity: Mapping[str, str]) -> TuneRecord | None:
        """The result for exactly this identity."""
        record = self._read(self._path(identity))
        return record if record is not None and record.identity == dict(identity) else None

    def find_similar(self, identity: Mapping[str, str]) -> TuneRecord | None:
        """The newest result for the same machine, library and model, whatever the load."""
        found = [
            record
            for file in self._folder.glob("*.json")
            if (record := self._read(file)) is not None
            and all(record.identity.get(name) == identity[name] for name in WHO)
        ]
        return max(found, key=lambda record: record.created, default=None)

    def save(self, record: TuneRecord) -> Path:
        """Write it whole or not at all. Raises OSError."""
        path = self._path(record.identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = msgspec.json.format(msgspec.json.encode(record), indent=2)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return path

    def _path(self, identity: Mapping[str, str]) -> Path:
        text = "\n".join(f"{name}={value}" for name, value in sorted(identity.items()))
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def _read(self, path: Path) -> TuneRecord | None:
        try:
            record = msgspec.json.decode(path.read_bytes(), type=TuneRecord)
            if record.version != VERSION or not record.settings.keys() <= TUNABLE:
                return None
            with_settings(EngineConfig(), record.settings)  # values that no configuration may have
            return record
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.info("a remembered tuning is not readable and is left aside: %s", error)
            return None


MAX_PERPLEXITY_CHANGE = 0.001


class Tried(NamedTuple):
    """An alternative and how it fared against the present settings: ratios, or a `problem`."""

    settings: Settings
    config: EngineConfig
    label: str
    ratio: float | None = None
    cases: Mapping[str, float] = MappingProxyType({})
    problem: str = ""
    perplexity_change: float | None = None


def compare(
    measured: Measurement, baselines: Sequence[Measurement], rest: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """The ratio of the mix, and of each case, to the mean of the present settings before and after.

    Cases of the mix that were not measured take what they take in `rest`, on both sides.
    """

    def mix(one: Measurement) -> float:
        return mix_seconds({**rest, **one.seconds})

    cases = {
        case: seconds / mean(baseline.seconds[case] for baseline in baselines)
        for case, seconds in measured.seconds.items()
    }
    return mix(measured) / mean(map(mix, baselines)), cases


def is_harmless(item: Tried) -> bool:
    return item.perplexity_change is not None and abs(item.perplexity_change) < MAX_PERPLEXITY_CHANGE


def options_of(dimension: str, present: str, tried: Sequence[Tried], winner: Tried | None) -> list[Option]:
    """All values of a dimension, relative to the one that was chosen."""
    unit: float = 1.0
    units: Mapping[str, float] = {}
    if winner is not None:
        assert winner.ratio is not None
        unit, units = winner.ratio, winner.cases
    cases = tried[0].cases if winner is None else winner.cases
    rows = [
        Option(
            dimension=dimension,
            label=present,
            chosen=winner is None,
            ratio=1 / unit,
            cases={case: 1 / units.get(case, 1.0) for case in cases},
        )
    ]
    for item in tried:
        chosen = winner is not None and item.settings == winner.settings
        rows.append(
            Option(
                dimension=dimension,
                label=item.label,
                chosen=chosen,
                ratio=1.0 if chosen else None if item.ratio is None else item.ratio / unit,
                cases={
                    case: 1.0 if chosen else ratio / units.get(case, 1.0)
                    for case, ratio in item.cases.items()
                },
                problem=item.problem,
                perplexity_change=item.perplexity_change,
            )
        )
    return rows
