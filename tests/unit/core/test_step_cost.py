"""The cost model: drafts and transfers. What prefill steps cost is tested with the prefill budget."""

from __future__ import annotations

import pytest

from cllm.backend.base import Batch, DraftCost, Row, StepResult, StepStatus
from cllm.core.step_cost import (
    DEFAULT_TRANSFER_S,
    REMEMBERED,
    StepCost,
    StepCostModel,
    StepShape,
)


def make_step(rows: int, drafts: int = 0, *, drafting: int | None = None, position: int = 50) -> Batch:
    drafting = rows if drafting is None else drafting
    lengths = [1 + drafts * (number < drafting) for number in range(rows)]
    return Batch(
        tuple(Row(number, position, [1] * length, length, None) for number, length in enumerate(lengths))
    )


def observe(model: StepCostModel, batch: Batch, seconds: float) -> None:
    model.observe(batch, StepResult(StepStatus.DONE, ubatches=1, compute_s=seconds))


def taught(
    rows: int, *, draft_s: float, plain_s: float = 0.02, batch1: DraftCost | None = None
) -> StepCostModel:
    model = StepCostModel(batch1=batch1)
    for number in range(40):
        observe(model, make_step(rows), plain_s)
        length = 1 + number % 4
        observe(model, make_step(rows, length), plain_s + length * draft_s)
    return model


def relative(model: StepCostModel, rows: int, length: int, drafting: int | None = None) -> float:
    """A step with drafts that is a run of its own, in plain ones."""
    ids = range(rows if drafting is None else drafting)
    seconds = model.decode_step_s(rows, 50 * rows, ids, length, begins=1.0)
    return seconds / model.decode_step_s(rows, 50 * rows)


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("draft_s", [0.002, 0.01, 0.05])
def test_the_cost_of_drafts_is_that_of_the_steps(rows: int, draft_s: float) -> None:
    model = taught(rows, draft_s=draft_s)
    assert model.decode_step_s(rows, 50 * rows) == pytest.approx(0.02, rel=0.05)
    for length in (1, 2, 4):
        assert relative(model, rows, length) == pytest.approx(1 + length * draft_s / 0.02, rel=0.1)


@pytest.mark.parametrize(("records", "cost"), [(True, 1 + 3 * 0.01 / 0.02), (False, 1.0)])
def test_on_a_gpu_drafts_cost_the_plain_steps_after_them_too(records: bool, cost: float) -> None:
    model = StepCostModel(records=records)
    for number in range(60):
        late_s = 0.01 if number % 5 in (2, 3, 4) else 0.0  # the three steps after one with drafts
        observe(model, make_step(8, 2 if number % 5 == 1 else 0), 0.02 + late_s)
    if records:
        assert model.decode_step_s(8, 400) == pytest.approx(0.02, rel=0.05)
        assert relative(model, 8, 2) == pytest.approx(cost, rel=0.1)
    else:
        assert relative(model, 8, 2) <= 1.05


def test_on_a_gpu_a_prompt_is_no_beginning_of_drafts() -> None:
    """Nor are the slow steps after one what drafts cost: prompts come all the time."""
    model = StepCostModel(records=True)
    for number in range(60):
        prompt = Batch((*make_step(7).rows, Row(7, 0, [1] * 64, 1, None)))
        observe(model, make_step(8) if number % 6 else prompt, 0.02 if number % 6 > 3 else 0.05)
    assert model.beginning.value == 0.0
    assert model.decode_step_s(8, 400) > 0.02, "plain steps are learned, those after it, too"


def test_the_time_between_two_results_is_the_cost_of_a_step() -> None:
    model = StepCostModel()
    for number in range(40):
        drafts = number % 2
        found = StepResult(StepStatus.DONE, ubatches=1, compute_s=0.02, period_s=0.025 if drafts else 0.0)
        model.observe(make_step(8, drafts), found)
    assert relative(model, 8, 1) == pytest.approx(1.25, rel=0.02)


def test_before_any_step_drafts_cost_what_was_measured_at_load() -> None:
    """A ubatch and a row together are the step of a lone row."""
    model = StepCostModel(batch1=DraftCost(verify=0.1, token=0.2))
    assert relative(model, 8, 1) == pytest.approx((0.8 + 16 * 0.2) / (0.8 + 8 * 0.2))


def test_a_single_observation_does_not_decide() -> None:
    model = taught(8, draft_s=0.01)
    before = relative(model, 8, 8)
    observe(model, make_step(8, 8), 9.0)
    assert relative(model, 8, 8) == pytest.approx(before, rel=0.2)


def test_a_busy_moment_changes_nothing() -> None:
    model = taught(8, draft_s=0.01)
    for _ in range(4):
        observe(model, make_step(8, 2), 1.0)
        observe(model, make_step(8), 0.5)
    assert relative(model, 8, 2) == pytest.approx(2.0, rel=0.2)


def test_a_lasting_change_is_learned() -> None:
    model = taught(8, draft_s=0.01)
    for _ in range(REMEMBERED):
        observe(model, make_step(8), 0.02)
        observe(model, make_step(8, 2), 0.02 + 2 * 0.03)
    assert relative(model, 8, 2) == pytest.approx(1 + 2 * 1.5, rel=0.1)


def test_a_step_with_a_prompt_says_nothing_of_decode_steps() -> None:
    model = taught(8, draft_s=0.01)
    kinds = {kind: [*seen] for kind, seen in model._decoded.items()}
    for outputs in (0, 1):
        observe(model, Batch((*make_step(7).rows, Row(7, 0, [1] * 30, outputs, None))), 3.0)
    assert {kind: [*seen] for kind, seen in model._decoded.items()} == kinds


def test_rows_of_another_length_cost_a_ubatch_for_each_run_of_ids() -> None:
    cost = StepCost(ubatch=0.01, prefill_token=0.0, row=0.001, attended=0.0)
    for split, ubatches in ((True, 3), (False, 1)):
        model = StepCostModel(split=split, known=cost, frozen=True)
        assert model.decode_step_s(8, 0, [0, 1, 6, 7], 2) == pytest.approx(ubatches * 0.01 + 16 * 0.001)
        assert model.decode_step_s(8, 0, range(8), 2) == pytest.approx(0.01 + 24 * 0.001)


def test_long_contexts_make_drafts_expensive_by_their_cells() -> None:
    model = StepCostModel(known=StepCost(0.01, 0.0, 0.001, 1e-6), frozen=True)
    short, long = (
        model.decode_step_s(8, cells, range(8), 4) / model.decode_step_s(8, cells) for cells in (80, 800_000)
    )
    assert short < 3 and long == pytest.approx(5, rel=0.1)


def test_the_cost_of_a_lone_row_is_what_the_runner_measured_at_load() -> None:
    for model in (
        StepCostModel(batch1=DraftCost(0.1, 0.8)),
        taught(1, draft_s=0.5, batch1=DraftCost(0.1, 0.8)),
    ):
        assert model.decode_step_s(1, 50, [3], 4) == pytest.approx(1 + 0.1 + 4 * 0.8)
        assert model.decode_step_s(1, 50) == 1


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


def test_a_transfer_of_a_few_bytes_says_nothing_of_a_byte() -> None:
    model = StepCostModel()
    model.observe_transfer(1 << 20, 1e-3, restore=False)
    for _ in range(9):
        model.observe_transfer(44, 1e-4, restore=True)  # the state of a sequence without tokens
    assert model.restore_s(1 << 20) == DEFAULT_TRANSFER_S * (1 << 20)


def test_a_frozen_model_learns_nothing() -> None:
    known = StepCost(1.0, 2.0, 3.0, 4.0)
    model = StepCostModel(known=known, frozen=True)
    for _ in range(50):
        observe(model, make_step(4), 0.5)
        observe(model, make_step(4, 2), 5.0)
        model.observe_transfer(1, 5.0, restore=True)
    assert model.step == known and model.largest_prefill == 0
    assert not model._decoded
    assert model.restore_s(1) == DEFAULT_TRANSFER_S


def test_attention_to_a_long_context_counts_for_a_lone_row_and_is_fixed() -> None:
    model = StepCostModel(batch1=DraftCost(verify=0.1, token=0.2))

    def decode(context: int, cell_s: float) -> None:
        for position in (100, context) * (2 * model.REFIT_AFTER):
            observe(model, make_step(1, position=position), 0.01 + cell_s * position)
        assert model.step is not None

    loaded = pytest.approx(1 + 0.1 + 3 * 0.2)
    decode(5000, 4e-6)  # three lone steps
    assert model.decode_step_s(1, 5000, [0], 3) == pytest.approx((1.7 + 2 * 4) / (1 + 2), rel=0.1)
    assert model.decode_step_s(1, 20_000, [0], 3) == pytest.approx((1.7 + 8 * 4) / (1 + 8), rel=0.1)
    assert model.decode_step_s(1, 100, [0], 3) == loaded, "a short context: as measured at load"
    before = model.decode_step_s(1, 5000, [0], 3)
    decode(5000, 1e-6)  # the same request takes the same steps from now on
    assert model.decode_step_s(1, 5000, [0], 3) == before


H200_WARM_UP = (  # steps of a 0.6B model: ubatches, tokens of prompts, rows, pairs, milliseconds
    (1, 49, 0, 1200, 25.5), (2, 48, 1, 1202, 10.9), (3, 193, 2, 4756, 16.8), (2, 192, 15, 4904, 15.8),
    (4, 673, 10, 16672, 31.6), (3, 683, 35, 17848, 24.3), (5, 353, 57, 11784, 30.3),
    (1, 0, 64, 3295, 7.7), (1, 0, 64, 3423, 6.5), (1, 0, 64, 3551, 6.2), (1, 0, 64, 3679, 6.3),
    (1, 0, 63, 3742, 8.1), (1, 0, 59, 3549, 7.7), (1, 0, 44, 2517, 7.0), (1, 0, 28, 454, 6.3),
    (5, 345, 1, 8556, 25.6),
)  # fmt: skip


def test_many_steps_alike_do_not_wash_out_what_a_row_costs() -> None:
    model = StepCostModel(records=True)
    for *shape, milliseconds in H200_WARM_UP:
        model.observe_shape(StepShape(*map(int, shape)), milliseconds / 1e3)
    for position in range(50, 560):
        model.observe_shape(StepShape(1, 0, 8, 8.0 * position), 2.3e-3 + position * 4e-7)
    model.observe_shape(StepShape(1, 0, 7, 3918), 4e-3)
    assert model.step is not None
    assert model.step.row == pytest.approx(80e-6, rel=0.25)
