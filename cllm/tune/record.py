"""Tune record: the result of a search, kept as one JSON file per machine, library, model and load."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cllm.build.build import write_record
from cllm.config import EngineConfig
from cllm.tune.space import TUNABLE, Value, with_settings

log = logging.getLogger(__name__)
VERSION = 2  # 1 judged by long contexts that were short
MAX_PERPLEXITY_CHANGE = 0.001
# Parts of a fingerprint that a similar record shares.
_SAME_MACHINE = ("cpu", "cores", "devices", "library", "model")


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A value of a dimension and its cost, relative to the chosen value of the dimension (1.0).

    `ratio` is of the whole mix, `cases` of each part of it; both are empty where there is a `problem`.
    `perplexity_change` is a fraction, relative to the cache types the search began with.
    """

    dimension: str
    label: str
    settings: dict[str, Value] = {}
    chosen: bool = False
    ratio: float | None = None
    cases: dict[str, float] = {}
    problem: str = ""
    perplexity_change: float | None = None

    @property
    def harmless(self) -> bool:
        return self.perplexity_change is not None and abs(self.perplexity_change) < MAX_PERPLEXITY_CHANGE

    def relative_to(self, chosen: Option) -> Option:
        """The same with its cost relative to the chosen one, which is marked."""
        ratio = self.ratio / chosen.ratio if self.ratio and chosen.ratio else None
        cases = {case: value / chosen.cases[case] for case, value in self.cases.items()}
        return msgspec.structs.replace(self, chosen=self is chosen, ratio=ratio, cases=cases)


class TuneRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search. `settings` are those that it changed."""

    fingerprint: dict[str, str] = msgspec.field(name="identity")  # its name in the file
    settings: dict[str, Value]
    options: tuple[Option, ...]
    seconds: dict[str, float]  # by case, of the chosen settings
    speedup: float  # of the chosen settings over those it began with, in the mix
    noise: float  # difference between measurements of the same setting
    requests: int = msgspec.field(name="streams")
    short: int
    long: int
    kv_types: bool = False  # cache types were varied, too
    perplexity_tokens: int = 0  # of our text, where cache types were judged
    left_out: tuple[str, ...] = ()
    provisional: str = ""  # the reason to measure again
    took_s: float = 0.0
    created: str = ""
    version: int = VERSION


class TuneMemory:
    """The records in a folder. An unreadable or foreign file counts as absent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, fingerprint: Mapping[str, str]) -> TuneRecord | None:
        """The record of exactly this fingerprint."""
        record = self._read(self._path(fingerprint))
        return record if record is not None and record.fingerprint == dict(fingerprint) else None

    def find_similar(self, fingerprint: Mapping[str, str]) -> TuneRecord | None:
        """The newest record of the same machine, library and model, whatever the load."""
        found = [
            record
            for file in self._folder.glob("*.json")
            if (record := self._read(file)) is not None
            and all(record.fingerprint.get(name) == fingerprint.get(name) for name in _SAME_MACHINE)
        ]
        return max(found, key=lambda record: record.created, default=None)

    def save(self, record: TuneRecord) -> Path:
        """Write it whole or not at all. Raises OSError."""
        path = self._path(record.fingerprint)
        write_record(path, msgspec.json.format(msgspec.json.encode(record), indent=2))
        return path

    def _path(self, fingerprint: Mapping[str, str]) -> Path:
        text = "\n".join(f"{name}={value}" for name, value in sorted(fingerprint.items()))
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def _read(self, path: Path) -> TuneRecord | None:
        try:
            record = msgspec.json.decode(path.read_bytes(), type=TuneRecord)
            if record.version != VERSION or not record.settings.keys() <= TUNABLE:
                return None
            with_settings(EngineConfig(), record.settings)  # raises for values out of bounds
            return record
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.info("an unreadable tune record is ignored: %s", error)
            return None
