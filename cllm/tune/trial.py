"""What a trial is asked and what it answers: one setting, measured in a process that may die of it.

One JSON line each way. `tune` asks, a runner's own trial program answers (`cllm.tune.trial_worker`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from cllm.config import EngineConfig

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
