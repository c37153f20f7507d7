"""Interpreters that end while a model loads or computes, in small: none ends by a signal."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from proof.exits import MAX_DELAY_S, Outcome, run_one

ENDINGS = (("threads", "exit"), ("stream", "interrupt"))  # `proof/exits.py` has them all


def test_an_interpreter_with_an_open_model_ends_cleanly(tiny_model: Path) -> None:
    def run(ending: tuple[str, str]) -> Outcome:
        return run_one(str(tiny_model), *ending, random.uniform(0, MAX_DELAY_S))

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(run, ENDINGS))
    assert all(outcome.good for outcome in outcomes), outcomes
