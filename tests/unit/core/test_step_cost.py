"""The cost model: drafts and transfers. What prefill steps cost is tested with the prefill budget."""

from __future__ import annotations

import math

import pytest

from cllm.backend.base import Batch, DraftCost, Row, RowResult, StepResult, StepStatus
from cllm.core.step_cost import (
    BATCH1_DRAFT_COST,
    DEFAULT_DRAFT_COST,
    DEFAULT_TRANSFER_S,
    EXTRA_UBATCH_COST,
    REMEMBERED,
    StepCost,
    StepCostModel,
)


def make_step(rows: int, drafts: int = 0, *, drafting: int | None = None, position: int = 50) -> Batch:
    drafting = rows if drafting is None else drafting
    lengths = [1 + drafts * (number < drafting) for number in range(rows)]
    return Batch(
        tuple(Row(number, position, [1] * length, length, None) for number, length in enumerate(lengths))
    )


def observe(model: StepCostModel, batch: Batch, seconds: float) -> None:
    model.observe(batch, StepResult(StepStatus.DONE, ubatches=1, compute_s=seconds))


def taught(rows: int, *, draft_s: float, plain_s: float = 0.02, split: bool = True) -> StepCostModel:
    model = StepCostModel(split=split)
    for number in range(40):
        observe(model, make_step(rows), plain_s)
        length = 1 + number % 4
        observe(model, make_step(rows, length), plain_s + length * draft_s)
    return model


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("draft_s", [0.002, 0.01, 0.05])
def test_the_cost_of_drafts_is_that_of_the_steps(rows: int, draft_s: float) -> None:
    model = taught(rows, draft_s=draft_s)
    assert model.draft_step(rows, range(rows), 2) == pytest.approx(1 + 2 * draft_s / 0.02)


def test_on_a_gpu_drafts_cost_the_plain_steps_after_them_too() -> None:
    model, known = StepCostModel(records=True), StepCostModel()
    for number in range(60):
        late_s = 0.005 if number % 5 in (2, 3, 4) else 0.0  # the three steps after one with drafts
        for each in (model, known):
            observe(each, make_step(8, 2 if number % 5 == 1 else 0), 0.02 + late_s)
    assert model.plain_step_s(8) == pytest.approx(0.02)
    assert model.draft_step(8, range(8), 2) == pytest.approx(1 + 3 * 0.005 / 0.02)
    assert known.draft_step(8, range(8), 2) == pytest.approx(1)


@pytest.mark.parametrize(
    ("accepted", "late_s", "gains"), [(0, 0.0, False), (2, 0.0, True), (2, 0.02, False), (4, 0.02, True)]
)
def test_on_a_gpu_drafts_gain_by_what_they_brought_in_all_the_steps_that_they_slowed(
    accepted: int, late_s: float, gains: bool
) -> None:
    """Also where only some rows draft: half of 8 here, two passes a step."""
    model, on_a_cpu = StepCostModel(records=True), StepCostModel()
    assert model.drafts_gain(8)
    for number in range(100):
        drafting, after = number >= 20 and number % 5 == 0, number >= 20 and number % 5 in (1, 2, 3)
        batch = make_step(8, 4, drafting=4) if drafting else make_step(8)
        brought = [1 + accepted * (row.outputs > 1) for row in batch.rows]
        rows = tuple(RowResult(tuple(range(count))) for count in brought)
        seconds = 0.02 + 0.01 * drafting + late_s / 3 * after
        for each in (model, on_a_cpu):
            each.observe(batch, StepResult(StepStatus.DONE, rows, ubatches=1, compute_s=seconds))
    assert model.drafts_gain(8) is gains
    assert model.plain_step_s(8) == pytest.approx(0.02)
    assert model.drafts_gain(16), "of so many rows nothing is known"
    assert on_a_cpu.drafts_gain(8)


def test_the_time_between_two_results_is_the_cost_of_a_step() -> None:
    model = StepCostModel()
    for number in range(40):
        drafts = number % 2
        found = StepResult(StepStatus.DONE, ubatches=1, compute_s=0.02, period_s=0.025 if drafts else 0.0)
        model.observe(make_step(8, drafts), found)
    assert model.draft_step(8, range(8), 1) == pytest.approx(1.25)


def test_nothing_is_known_of_steps_never_seen() -> None:
    model = taught(8, draft_s=0.01)
    assert model.draft_step(7, range(7), 1) == 1 + DEFAULT_DRAFT_COST
    assert model.plain_step_s(7) == math.inf
    assert model.plain_step_s(8) == pytest.approx(0.02)


def test_a_single_observation_does_not_decide() -> None:
    model = StepCostModel()
    observe(model, make_step(8), 0.02)
    observe(model, make_step(8, 1), 9.0)
    assert model.draft_step(8, range(8), 1) == 1 + DEFAULT_DRAFT_COST


def test_a_busy_moment_changes_nothing() -> None:
    model = taught(8, draft_s=0.01)
    for _ in range(4):
        observe(model, make_step(8, 2), 1.0)
        observe(model, make_step(8), 0.5)
    assert model.draft_step(8, range(8), 2) == pytest.approx(2.0)


def test_a_lasting_change_is_learned() -> None:
    model = taught(8, draft_s=0.01)
    for _ in range(REMEMBERED):
        observe(model, make_step(8, 2), 0.02 + 2 * 0.03)
    assert model.draft_step(8, range(8), 2) == pytest.approx(1 + 2 * 1.5)


def test_each_length_has_its_own_cost_and_the_nearest_stands_for_others() -> None:
    model = StepCostModel()
    for _ in range(9):
        observe(model, make_step(8), 0.02)
        observe(model, make_step(8, 4), 0.02 * (1 + 4 * 0.8))
    assert model.draft_step(8, range(8), 4) == pytest.approx(1 + 4 * 0.8)
    assert model.draft_step(8, range(8), 1) == pytest.approx(1.8)
    for _ in range(9):
        observe(model, make_step(8, 1), 0.02 * 1.9)
    assert model.draft_step(8, range(8), 1) == pytest.approx(1.9)


def test_drafts_that_seemed_too_expensive_are_tried_again_some_time() -> None:
    model = taught(8, draft_s=0.1)
    assert model.draft_step(8, range(8), 2) == pytest.approx(1 + 2 * 5)
    for _ in range(StepCostModel.DOUBT_AFTER * REMEMBERED):
        model.doubt_drafts(8)
    assert model.draft_step(8, range(8), 2) == pytest.approx(1 + 2 * DEFAULT_DRAFT_COST)


def test_steps_that_say_nothing_of_drafts_are_left_out() -> None:
    model = taught(8, draft_s=0.01)
    before = model.draft_step(8, range(8), 3), model.plain_step_s(8)
    prompt = Row(7, 0, [1] * 30, 1, None)
    for _ in range(20):
        observe(model, make_step(8, 3, drafting=5), 3.0)
        observe(model, Batch((*make_step(7).rows, prompt)), 3.0)
        observe(model, Batch((*make_step(7).rows, Row(7, 0, [1] * 30, 0, None))), 3.0)
        observe(model, make_step(8)._replace(padding=(9,)), 3.0)
        observe(model, make_step(8), 0.0)
    assert (model.draft_step(8, range(8), 3), model.plain_step_s(8)) == before


def test_with_unified_kv_some_rows_that_draft_teach_as_much_as_all() -> None:
    model = StepCostModel(split=False)
    for _ in range(9):
        observe(model, make_step(8), 0.02)
        observe(model, make_step(8, 4, drafting=2), 0.02 + 0.01)
    assert model.draft_step(8, range(8), 1) == pytest.approx(1.5)


def test_rows_of_another_length_cost_a_ubatch_for_each_run_of_ids() -> None:
    model = taught(8, draft_s=0.01)
    assert model.draft_step(8, [0, 1, 2, 3], 2) == pytest.approx(1 + 0.5 + EXTRA_UBATCH_COST)
    assert model.draft_step(8, [0, 1, 6, 7], 2) == pytest.approx(1 + 0.5 + 2 * EXTRA_UBATCH_COST)
    assert taught(8, draft_s=0.01, split=False).draft_step(8, [0, 1, 6, 7], 2) == pytest.approx(1.5)


def test_the_cost_of_a_lone_row_does_not_depend_on_measurements() -> None:
    expected = pytest.approx(1 + BATCH1_DRAFT_COST.verify + 4 * BATCH1_DRAFT_COST.token)
    assert StepCostModel().draft_step(1, [3], 4) == expected
    assert taught(1, draft_s=0.5).draft_step(1, [3], 4) == expected


def test_the_cost_of_a_lone_row_is_what_the_runner_measured_at_load() -> None:
    model = StepCostModel(batch1=DraftCost(verify=0.1, token=0.8))
    assert model.draft_step(1, [3], 4) == pytest.approx(1 + 0.1 + 4 * 0.8)


def test_transfers_cost_what_was_measured() -> None:
    model = StepCostModel()
    assert model.save_s(1 << 20) == model.restore_s(1 << 20) == DEFAULT_TRANSFER_S * (1 << 20)
    for _ in range(9):
        model.observe_transfer(1 << 20, 0.5, restore=False)
    assert model.save_s(1 << 20) == pytest.approx(0.5)
    assert model.restore_s(1 << 20) == DEFAULT_TRANSFER_S * (1 << 20)


def test_one_slow_transfer_is_no_verdict_and_many_are_doubted_again() -> None:
    model = StepCostModel()
    model.observe_transfer(1, 100.0, restore=True)
    assert model.restore_s(1) == DEFAULT_TRANSFER_S
    for _ in range(9):
        model.observe_transfer(1, 100.0, restore=True)
    assert model.restore_s(1) == 100.0
    for _ in range(REMEMBERED):
        model.doubt_transfers()
    assert model.restore_s(1) == DEFAULT_TRANSFER_S


def test_a_frozen_model_learns_nothing() -> None:
    known = StepCost(1.0, 2.0, 3.0, 4.0)
    model = StepCostModel(known=known, frozen=True)
    for _ in range(50):
        observe(model, make_step(4), 0.5)
        observe(model, make_step(4, 2), 5.0)
        model.observe_transfer(1, 5.0, restore=True)
    assert model.step == known and model.largest_prefill == 0
    assert model.draft_step(4, range(4), 2) == 1 + 2 * DEFAULT_DRAFT_COST
    assert model.restore_s(1) == DEFAULT_TRANSFER_S


def test_what_a_lone_row_drafts_in_a_long_context_is_measured_once_and_fixed() -> None:
    model = StepCostModel(batch1=DraftCost(verify=0.1, token=0.2))

    def draft(context: int, cost: float) -> None:
        for _ in range(2):
            observe(model, make_step(1, position=context), 0.1)
        observe(model, make_step(1, 3, position=context + 1), 0.1 * (1 + 3 * cost))

    for _ in range(REMEMBERED - 1):
        draft(5000, 0.9)
    assert model.draft_step(1, [0], 3, 5000) == pytest.approx(1 + 0.1 + 0.2 * 3), "not yet"
    draft(5000, 0.9)
    assert model.draft_step(1, [0], 3, 5000) == pytest.approx(1 + 0.9 * 3)
    assert model.draft_step(1, [0], 3, 100_000) == pytest.approx(1 + 0.9 * 3), "until it is measured there"
    assert model.draft_step(1, [0], 3, 2000) == model.draft_step(1, [0], 3) == pytest.approx(1.7)
    for _ in range(REMEMBERED):
        draft(5000, 0.1)  # the same request takes the same steps from now on
        draft(1000, 0.9)  # a short context: as measured at load
    assert model.draft_step(1, [0], 3, 5000) == pytest.approx(1 + 0.9 * 3)
    assert model.draft_step(1, [0], 3, 1000) == pytest.approx(1.7)


def test_a_step_far_from_a_plain_one_says_nothing_of_drafts() -> None:
    model = StepCostModel(batch1=DraftCost(verify=0.1, token=0.2))
    for number in range(2 * REMEMBERED):
        observe(model, make_step(1, position=2000 + 400 * number), 0.1)  # after a step with drafts: not plain
        observe(model, make_step(1, 3, position=2300 + 400 * number), 0.5)
    assert model.draft_step(1, [0], 3, 9000) == pytest.approx(1.7)
