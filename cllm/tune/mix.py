"""The serving mix: what a setting is judged by, as one figure of seconds.

It stands for some users who share a server: 2,000 tokens of prompts, and answers in which

* everybody generates after a short context (60 steps), after a long one (40 steps), and after contexts of
  unequal length, one long among short ones (60 steps);
* one user is alone, after a short context (60 steps) and a long one (40 steps).

A case that was not measured (there are no others where `parallel` is 1) counts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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
