"""The comparison of two checkouts: the driver runs this one, and each bar can be missed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench.compare_trees import WORKLOADS, Rows, SpeedComparison, Tree, compare_first, compare_steps
from bench.peers import ServerSettings
from bench.workloads import Definition, make_plan
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


def test_short_workloads_share_one_server_and_fit_their_time() -> None:
    """Where a prompt token takes 6 ms, a row of eight 7.5 ms and a row alone 12 ms, about 5 to 15 s each."""
    speed = SpeedComparison.of(WORKLOADS, ServerSettings())
    assert (speed.settings.parallel, speed.settings.ctx_size) == (8, 16384)
    for definition in speed.definitions:
        seconds = 0.0
        for group in make_plan(definition, 1, quick=True).groups:
            row_s = 0.012 if definition.name == "single" else 0.0075
            turns = [turn for session in group.sessions for turn in session.turns]
            seconds += sum(0.006 * len(turn.prompt.split()) + row_s * turn.max_tokens for turn in turns)
        seconds -= 0.006 * 800 * 11 if definition.name == "shared" else 0.0  # read once
        assert 4 < seconds < 18, definition.name


def test_pairs_take_turns_and_are_written_as_they_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    def measure(
        self: SpeedComparison, definition: Definition, tree: Tree, server: object, number: int, rows: Rows
    ) -> None:
        order.append(f"{tree.name} {definition.name}")
        slower = tree.name == "new" and definition.name == "chat"
        self.rates[definition.name][tree.name].append(96.0 if slower else 100.0)

    monkeypatch.setattr(Tree, "serving", lambda *_: nullcontext())
    monkeypatch.setattr(SpeedComparison, "_measure_one", measure)
    rows = Rows(tmp_path / "out.jsonl")
    SpeedComparison.of(("single", "chat"), ServerSettings()).run(TREES, 3, rows)
    assert order[:4] == ["old single", "new single", "new chat", "old chat"]
    assert order[4:8] == ["new single", "old single", "old chat", "new chat"]
    assert [row[0] for row in rows.rows if "MISSED" in row[-1]] == ["chat, tokens/s"]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["pair"] for line in lines if "pair" in line] == [1, 1, 2, 2, 3, 3]
    assert "pair 3, chat: 100.00 → 96.00; so far 0.960" in capsys.readouterr().err


@pytest.mark.parametrize(("later_s", "failed"), [(1.4, False), (1.6, True)])
def test_a_first_token_may_come_a_little_later(
    monkeypatch: pytest.MonkeyPatch, later_s: float, failed: bool
) -> None:
    times = {"old": 2.0, "new": 2.0 + later_s}
    monkeypatch.setattr(Tree, "measure_first", lambda tree, settings: times[tree.name])
    rows = Rows()
    compare_first(TREES, ServerSettings(), 3, rows)
    assert rows.failed is failed
