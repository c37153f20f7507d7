"""The chance that a cached prefix returns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.core.kv_cache.prefix_index import Returns


def test_before_anything_was_seen_the_older_returns_less_often() -> None:
    returns = Returns()
    returns.clock = 1000
    chances = [returns.chance(1000 - age, 64) for age in (0, 1, 10, 100, 1000)]
    assert chances == sorted(chances, reverse=True) and 0 < chances[-1] < chances[0] < 0.6


@pytest.mark.parametrize(("returned", "low", "high"), [(True, 0.9, 1.0), (False, 0.0, 0.05)])
def test_what_was_seen_decides(returned: bool, low: float, high: float) -> None:
    returns = Returns()
    for _ in range(100):
        returns.observe(returns.tick() - 50, 64, returned=returned)  # fifty others came since
    assert low <= returns.chance(returns.clock, 64) <= high


def test_questions_that_never_return_say_nothing_of_conversations() -> None:
    returns = Returns()
    before = returns.chance(0, 3000)
    for _ in range(64):
        returns.observe(returns.tick() - 50, 39, returned=False)
    assert returns.chance(returns.clock, 3000) == before > 4 * returns.chance(returns.clock, 39)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9999), st.booleans()), max_size=99))
def test_a_chance_is_one_and_never_vanishes(events: list[tuple[int, int, bool]]) -> None:
    returns = Returns()
    for age, tokens, returned in events:
        returns.observe(returns.tick() - age, tokens, returned=returned)
        assert 0 < returns.chance(returns.clock - age, tokens) <= 1
