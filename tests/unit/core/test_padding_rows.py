"""Padding: gaps between ids and unequal prompts are filled where that is cheaper than another pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backend.base import Row, count_ubatches
from cllm.core.prefill_budget import PrefillBudget, choose_padding
from cllm.core.sequence import Sequence
from cllm.core.slot_pool import SlotLease
from cllm.core.step_cost import StepCost, StepCostModel
from cllm.types import Prompt, Request

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


# Prompts of unequal length ------------------------------------------------------------------------------


def schedule(lengths: list[int], cost: StepCost, *, cells: int = 4096, batch: int = 512) -> dict[int, int]:
    """Tokens by slot, with padding, of the first step of prompts of these lengths: one in each slot."""
    budget = PrefillBudget(batch, 0.25, known(cost))
    budget.padded_cells = cells
    prompts = [
        Sequence(Request(id=str(n), prompt=Prompt((1,) * count), max_tokens=1), 4096, n)
        for n, count in enumerate(lengths)
    ]
    for number, prompt in enumerate(prompts):
        prompt.lease = SlotLease(number, prompt.id)
    shares = budget.schedule_tokens(prompts, lambda prompt: prompt.pending)
    assert all(shares.get(str(n), 0) <= count for n, count in enumerate(lengths)), "padding is no token"
    shares = {n: shares[n] for n in sorted(shares)}
    return {int(n): count + budget.padding.get(int(n), 0) for n, count in shares.items()}


@pytest.mark.parametrize(
    ("lengths", "computed"),
    [
        ([20, 15, 18], [20, 20, 20]),
        ([20, 9, 18], [20, 9, 20]),  # eleven tokens cost more than a pass
        ([20, 16, 16, 18], [20, 20, 20, 20]),
        ([20, 14, 14, 18], [20, 14, 14, 20]),  # so do six tokens twice
        ([300, 20, 18], [300, 20, 20]),
        ([20, 1, 15], [20, 1, 15]),  # a gap lies between
        ([20], [20]),
    ],
)
def test_prompts_side_by_side_are_made_equally_long_where_a_pass_costs_more(
    lengths: list[int], computed: list[int]
) -> None:
    assert [*schedule(lengths, EXPENSIVE_PASS).values()] == computed
    assert [*schedule(lengths, EXPENSIVE_PASS, cells=0).values()] == lengths
    assert [*schedule(lengths, CHEAP_PASS._replace(ubatch=0.0)).values()] == lengths


def test_padding_does_not_go_beyond_the_cells_of_a_slot() -> None:
    assert schedule([20, 15], EXPENSIVE_PASS, cells=19) == {0: 20, 1: 15}


def test_padding_to_the_length_of_a_prompt_that_is_not_in_the_step_is_none() -> None:
    assert schedule([15, 12, 20], EXPENSIVE_PASS, batch=45) == {0: 15, 1: 15}


@given(
    lengths=st.lists(st.integers(2, 90), min_size=1, max_size=12),
    ubatch=st.floats(0, 1),
    token=st.floats(1e-3, 1),
)
def test_padded_prompts_take_no_pass_more_and_less_than_one_for_each_length(
    lengths: list[int], ubatch: float, token: float
) -> None:
    cost = StepCost(ubatch, token, 0.0, 0.0)
    computed = schedule(lengths, cost, batch=256)
    own = {number: min(count, lengths[number]) for number, count in computed.items()}
    assert sum(computed.values()) <= 256 and max(computed.values()) <= max(lengths)
    before, after = (count_ubatches(rows(each), 256, unified=False) for each in (own, computed))
    added = sum(computed.values()) - sum(own.values())
    assert after <= before and added * token <= (len({*own.values()}) - 1) * ubatch + 1e-6
