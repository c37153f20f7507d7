"""The overload bench: each bar can be missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.figures import Completion, LoadResult
from bench.overload import GENERATED, REFUSAL, Overload

ANSWER = Completion(0, 0.0, chunks_s=(0.5,), generated_tokens=GENERATED)
REFUSED = Completion(0, 0.0, total_s=0.004, error=REFUSAL + "{}")


def load(*completions: Completion, wall_s: float = 1.0) -> LoadResult:
    return LoadResult("overload", wall_s, 0.0, completions)


GOOD = Overload(load(*[ANSWER] * 10), load(*[ANSWER] * 10, *[REFUSED] * 20), parallel=8)


def test_a_good_run_has_no_faults() -> None:
    assert GOOD.faults() == []
    assert "10, 20, 0" in GOOD.table().markdown()


@pytest.mark.parametrize(
    ("beyond", "words"),
    [
        (load(*[ANSWER] * 10, REFUSED, wall_s=1.2), "goodput is 0.83"),
        (load(*[ANSWER] * 10, replace(REFUSED, total_s=0.06)), "took 0.060 s"),
        (load(*[ANSWER] * 10), "no overload"),
        (load(*[replace(ANSWER, chunks_s=(60.0,))] * 10, REFUSED), "first-token p99"),
        (load(*[ANSWER] * 10, REFUSED, replace(REFUSED, error="reset")), "went wrong: request 0: reset"),
        (load(*[ANSWER] * 10, REFUSED, replace(REFUSED, error="status 503: ")), "went wrong"),
    ],
)
def test_each_bar_can_be_missed(beyond: LoadResult, words: str) -> None:
    (fault,) = replace(GOOD, beyond=beyond).faults()
    assert words in fault
