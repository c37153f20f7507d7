"""Prefill is sized so that those who are generating do not wait longer than the target."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.budget import StepBudget


def test_an_idle_engine_prefills_as_fast_as_it_can() -> None:
    assert StepBudget(512, 0.25).prefill_tokens(0) == 512


def test_the_chunk_follows_the_measured_cost() -> None:
    budget = StepBudget(512, 0.25)
    for _ in range(30):
        budget.observe(100, 0.1)  # a millisecond a token
    assert 230 <= budget.prefill_tokens(8) <= 250
    for _ in range(30):
        budget.observe(100, 1.0)
    assert budget.prefill_tokens(8) == StepBudget.SMALLEST_CHUNK


def test_small_steps_teach_nothing() -> None:
    budget = StepBudget(512, 0.25)
    budget.observe(8, 100.0)
    assert budget.prefill_tokens(1) == StepBudget.FIRST_GUESS_TOKENS


@given(
    batch=st.integers(32, 4096),
    generating=st.integers(0, 32),
    seen=st.lists(st.tuples(st.integers(1, 512), st.floats(0, 10)), max_size=20),
)
def test_no_step_is_ever_over_the_batch(batch: int, generating: int, seen: list[tuple[int, float]]) -> None:
    budget = StepBudget(batch, 0.25)
    for tokens, seconds in seen:
        budget.observe(tokens, seconds)
    assert 0 <= budget.prefill_tokens(generating) <= batch - generating
