"""What a trial is asked and what it answers: one setting, measured in a process that may die of it.

One JSON line each way. `tune` asks, a backend's own trial program answers (`cllm.tune.trial_worker`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from cllm.config import EngineConfig
from cllm.tune.record import Option
from cllm.tune.space import Settings

ALONE = 3  # a step of one stream is short, so there are more of them


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured. `long` of 0: short contexts alone; `perplexity_tokens`: that instead.

    `prompt`: how many tokens at the end of the longest context are timed as a prompt (0: none); what lies
    before them is computed once and restored from then on. `steps` of 0: nobody generates.
    """

    streams: int
    short: int = 32
    long: int = 800
    prompt: int = 64
    steps: int = 4
    perplexity_tokens: int = 0

    @property
    def room(self) -> int:
        """Cells that steps fill behind a long context: alone, ragged, and all together."""
        return (ALONE * self.steps + 1) + 2 * (self.steps + 1)


class TrialTask(msgspec.Struct, frozen=True, kw_only=True):
    """Measure this setting; `text` is what is computed (a mixture of experts is not indifferent to it)."""

    config: EngineConfig
    plan: Plan
    text: str


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What a setting took, or the `problem` that kept it from being measured.

    `seconds`: by case; of a prefill for each token, of all others for each step (the median).
    """

    seconds: dict[str, float] = {}
    perplexity: float | None = None
    load_s: float = 0.0  # loading the model, where this setting asked for it
    took_s: float = 0.0  # all the rest
    others: float | None = None  # cores that other programs used meanwhile
    problem: str = ""
    timed_out: bool = False  # the problem is that it takes too long


MOST_PERPLEXITY_CHANGE = 0.001


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
    return item.perplexity_change is not None and abs(item.perplexity_change) < MOST_PERPLEXITY_CHANGE


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


class Case(NamedTuple):
    """A thing that is timed. `weight`: how many tokens (of a prefill) or steps the mix has of it."""

    name: str
    title: str
    weight: int


CASES = (
    Case("prefill", "prefill", 2000),
    Case("one_short", "1 short", 60),
    Case("one_long", "1 long", 40),
    Case("all_short", "all short", 60),
    Case("ragged", "ragged", 60),
    Case("all_long", "all long", 40),
)


def mix_seconds(seconds: Mapping[str, float]) -> float:
    """Seconds for the mix, from seconds for a token (prefill) or a step (the rest)."""
    return sum(case.weight * seconds[case.name] for case in CASES if case.name in seconds)
