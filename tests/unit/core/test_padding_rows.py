"""Padding rows: gaps between ids are filled where a row is cheaper than another pass over the weights."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backend.base import Row, count_ubatches
from cllm.core.prefill_budget import choose_padding
from cllm.core.step_cost import StepCost, StepCostModel

EXPENSIVE_PASS = StepCost(ubatch=10e-3, prefill_token=1e-3, row=1e-3, attended=0.0)
CHEAP_PASS = StepCost(ubatch=1e-3, prefill_token=1e-3, row=2e-3, attended=0.0)


def known(cost: StepCost | None) -> StepCostModel:
    return StepCostModel(known=cost, frozen=True)


def rows(lengths: dict[int, int]) -> list[Row]:
    return [Row(i, 0, (65,) * count, 0, None) for i, count in sorted(lengths.items())]


@pytest.mark.parametrize(
    ("lengths", "cost", "padding"),
    [
        ({0: 1, 1: 1, 2: 1}, EXPENSIVE_PASS, ()),
        ({0: 1, 2: 1}, EXPENSIVE_PASS, (1,)),
        ({0: 1, 2: 1}, CHEAP_PASS, ()),
        ({0: 1, 2: 1}, None, ()),  # nothing is measured yet
        ({0: 1, 2: 1, 5: 1}, EXPENSIVE_PASS, (1, 3, 4)),
        ({0: 1, 31: 1}, EXPENSIVE_PASS, ()),  # 30 rows for one pass
        ({3: 1, 5: 1}, EXPENSIVE_PASS, (4,)),  # what is below the lowest is no hole
        ({0: 1, 2: 1, 3: 40}, EXPENSIVE_PASS, (1,)),
        ({0: 40, 2: 40}, EXPENSIVE_PASS, ()),  # two passes without, three with
    ],
)
def test_hand_worked_cases(lengths: dict[int, int], cost: StepCost | None, padding: tuple[int, ...]) -> None:
    empty = set(range(32)) - set(lengths)
    assert choose_padding(rows(lengths), dict.fromkeys(empty, 0), known(cost), 128) == padding


def test_a_slot_that_is_not_empty_is_no_padding() -> None:
    assert choose_padding(rows({0: 1, 2: 1, 4: 1}), {3: 0}, known(EXPENSIVE_PASS), 128) == (3,)


def test_a_slot_that_holds_much_is_no_padding_for_short_rows() -> None:
    cost = known(StepCost(1.0, 0.0, 0.1, 0.001))
    assert choose_padding(rows({0: 1, 2: 1}), {1: 100}, cost, 128) == (1,)
    assert choose_padding(rows({0: 1, 2: 1}), {1: 1000}, cost, 128) == ()


def test_a_full_batch_has_no_room_for_padding() -> None:
    assert choose_padding(rows({0: 1, 2: 127}), {1: 0}, known(EXPENSIVE_PASS), 128) == ()


@given(
    lengths=st.dictionaries(st.integers(0, 12), st.sampled_from([1, 1, 1, 5, 9]), min_size=1),
    busy=st.sets(st.integers(0, 12)),
    ubatch=st.floats(0, 1),
    row=st.floats(0, 1),
)
def test_filling_never_costs_more_than_it_saves(
    lengths: dict[int, int], busy: set[int], ubatch: float, row: float
) -> None:
    cost = StepCost(ubatch, 0.0, row, 0.0)
    empty = set(range(13)) - set(lengths) - busy
    padding = choose_padding(rows(lengths), dict.fromkeys(empty, 0), known(cost), 64)
    assert set(padding) <= empty and list(padding) == sorted(padding)
    assert all(min(lengths) < filler < max(lengths) for filler in padding)
    assert sum(lengths.values()) + len(padding) <= 64 or not padding
    before = count_ubatches(rows(lengths), 64, unified=False)
    after = count_ubatches(rows({**lengths, **dict.fromkeys(padding, 1)}), 64, unified=False)
    assert after * ubatch + len(padding) * row <= before * ubatch + 1e-9
