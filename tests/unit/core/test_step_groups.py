"""Groups with work share the time of steps; one that was idle has saved up nothing."""

from __future__ import annotations

from typing import Any, cast

from cllm.core.prefill_budget import PrefillBudget
from cllm.core.step_cost import StepCostModel
from cllm.core.step_groups import GroupTurns, StepGroup


class Group:
    def __init__(self, step_s: float, *, streams: bool = True) -> None:
        self.step_s = step_s
        self.streams = streams
        self.live, self.has_work, self.spent_s = {"request": None}, False, 0.0
        self.budget = PrefillBudget(64, 0.25, StepCostModel(split=False))


def run(turns: GroupTurns, steps: int) -> list[Any]:
    taken = []
    for _ in range(steps):
        group = cast(Any, turns.next(contended=False))
        group.spent_s += group.step_s
        taken.append(group)
    return taken


def make(*steps_s: float) -> tuple[GroupTurns, list[Any]]:
    groups: list[Any] = [Group(step_s) for step_s in steps_s]
    return GroupTurns(cast(list[StepGroup[Any]], groups)), groups


def test_without_work_the_first_group_is_asked() -> None:
    turns, groups = make(1, 1)
    assert run(turns, 2) == [groups[0]] * 2


def test_turns_are_shared_by_time_not_by_steps() -> None:
    turns, groups = make(0.05, 0.2)
    for group in groups:
        group.has_work = True
    taken = run(turns, 50)
    assert taken.count(groups[0]) == 40 and taken.count(groups[1]) == 10
    assert all(group.budget.alternates for group in groups)


def test_a_stream_waits_for_one_step_of_others_at_most() -> None:
    turns, groups = make(0.2, 0.05)
    groups[1].streams = False
    for group in groups:
        group.has_work = True
    assert run(turns, 6) == [groups[0], groups[1]] * 3
    groups[0].has_work = False
    assert run(turns, 2) == [groups[1]] * 2


def test_time_is_not_saved_up() -> None:
    turns, groups = make(1, 1)
    groups[0].has_work = True
    run(turns, 100)
    assert not groups[0].budget.alternates
    groups[1].has_work = True
    assert run(turns, 20).count(groups[1]) == 10
