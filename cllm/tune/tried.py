"""An alternative that was measured, and what it is worth beside the present settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from types import MappingProxyType
from typing import NamedTuple

from cllm.backend.trial import Measurement
from cllm.config import EngineConfig
from cllm.tune.mix import mix_seconds
from cllm.tune.record import Option
from cllm.tune.space import Settings

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
