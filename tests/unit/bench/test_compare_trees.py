"""The comparison of two checkouts: the driver runs this one, and each bar can be missed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.compare_trees import Rows, Tree, compare_steps
from cllm.errors import SetupError

ROOT = Path(__file__).parents[3]
TREES = (Tree("old", ROOT), Tree("new", ROOT))


def measured(steps: int, cpu_s: float) -> dict[str, Any]:
    return {"work": {"tokens": 100, "steps": steps}, "cpu_s": cpu_s}


def test_the_scheduler_of_this_checkout_can_be_driven() -> None:
    TREES[0].check()
    found = json.loads(TREES[0].run(str(ROOT / "bench" / "step_driver.py"), "8"))
    outputs = 3 * sum(64 - number for number in range(8))
    assert found["work"]["decoded_tokens"] == found["work"]["tokens"] == 3 * 8 * 96 + outputs - 3 * 8
    assert found["cpu_s"] > 0


def test_a_folder_without_cllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError):
        Tree("old", tmp_path).check()


@pytest.mark.parametrize(
    ("old", "new", "missed"),
    [
        ([(10, 1.0)] * 3, [(10, 1.04), (10, 1.01), (10, 9.0)], []),
        ([(10, 1.0)] * 3, [(10, 1.06)] * 3, ["µs CPU a step"]),
        ([(10, 1.0)] * 3, [(11, 1.0)] * 3, ["steps"]),
        ([(10, 1.0)] * 3, [(10, 1.0), (10, 1.0), (11, 1.0)], ["steps"]),
    ],
)
def test_each_bar_can_be_missed(
    monkeypatch: pytest.MonkeyPatch, old: list[Any], new: list[Any], missed: list[str]
) -> None:
    results: dict[str, Iterator[Any]] = {"old": iter(old), "new": iter(new)}
    monkeypatch.setattr(Tree, "measure_steps", lambda tree: measured(*next(results[tree.name])))
    rows = Rows()
    compare_steps(TREES, 3, rows)
    assert rows.failed is bool(missed)
    assert [row[0] for row in rows.rows if "MISSED" in row[-1]] == [f"fake runner, {name}" for name in missed]
