"""Drafters and draft states: what prompt lookup proposes, and how proposals are judged."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence as Tokens
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.core.drafts import DraftState, NgramDrafter, NgramIndex, PredictionDrafter
from cllm.core.spec_decode import DecodeStep, SpecDecodePolicy
from cllm.core.step_cost import StepCostModel
from tests.driver.engine import StepDriver
from tests.driver.fake_runner import FakeRunner, expected_text

# Few different tokens, so that texts repeat themselves.
TEXTS = st.lists(st.integers(0, 3), max_size=60)


def searched(tokens: Tokens[int], max_tokens: int, indexed: int | None = None) -> list[int]:
    """What prompt lookup must propose, by a search of every place; `indexed` is how far it has read."""
    end = len(tokens) if indexed is None else indexed
    for length in NgramIndex.SIZES:
        newest = list(tokens[-length:])
        for place in reversed(range(length, end)):
            if len(newest) == length and list(tokens[place - length : place]) == newest:
                followed = list(tokens[place:])
                while len(followed) < max_tokens:
                    followed += tokens[place:]
                return followed[:max_tokens]
    return []


@given(prompt=TEXTS, grown=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=12))
def test_prompt_lookup_keeps_up_with_a_growing_text(prompt: list[int], grown: list[list[int]]) -> None:
    lookup, tokens = NgramDrafter(), list(prompt)
    for more in ([], *grown):
        tokens += more
        assert lookup.propose(tokens, 8) == searched(tokens, 8)


@given(prompt=st.lists(st.integers(0, 3), min_size=20, max_size=60), at_once=st.integers(1, 30))
def test_a_long_prompt_is_read_in_slices(prompt: list[int], at_once: int) -> None:
    lookup = NgramDrafter()
    lookup.MAX_INDEXED = at_once
    tokens, read = list(prompt), 0
    for step in range(80):
        read = min(len(tokens), read + at_once)
        assert lookup.propose(tokens, 8) == searched(tokens, 8, read)
        tokens.append(step % 3)


def test_an_index_takes_a_few_bytes_a_token_and_says_so() -> None:
    """A dictionary of tuples took 440 bytes a token."""
    tokens = [(place * 7919) % 49_157 for place in range(8000)]
    drafter = NgramDrafter()
    tracemalloc.start()
    try:
        while drafter._index is None or drafter._index.indexed < len(tokens):
            drafter.propose(tokens, 8)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken == pytest.approx(drafter.memory_bytes, rel=0.2)
    assert drafter.memory_bytes <= 40 * len(tokens)


@settings(max_examples=10, deadline=None)
@given(text=st.lists(st.integers(0, 5), min_size=300, max_size=400))
def test_an_index_that_has_become_too_small_is_replaced_unnoticed(text: list[int]) -> None:
    drafter = NgramDrafter()
    for length in range(2, len(text), 3):
        assert drafter.propose(text[:length], 5) == searched(text[:length], 5)
    assert drafter._index is not None and drafter._index.indexed > 250
    assert not drafter._index.crowded


def test_the_engine_reports_its_indexes_and_frees_them() -> None:
    driver = StepDriver(FakeRunner(sequences=2, cells=4096), draft_tokens=8)
    driver.add(bytes(range(200)), 50, ignore_eos=True)
    driver.add(bytes(range(100)), 5, ignore_eos=True, speculate=False)
    driver.finish()
    reported = [stats.draft_bytes for stats in driver.stats]
    assert 200 * 12 <= max(reported) <= 250 * 40 and reported[-1] == 0


class Parrot:
    """Proposes as much as it is allowed to, and writes down how much that was."""

    def __init__(self, length: int = 1000) -> None:
        self.length = length
        self.asked: list[int] = []

    def propose(self, tokens: Tokens[int], max_tokens: int) -> list[int]:
        self.asked.append(max_tokens)
        return [1] * min(max_tokens, self.length)


def make_state(rate: float = 0.5) -> DraftState:
    return DraftState(Parrot(), acceptance_rate=rate)


def pays(state: DraftState) -> bool:
    """Whether a lone sequence would submit a draft of some length."""
    cost = StepCostModel()
    lengths = enumerate(state.expected(8), 1)
    return any(
        1 + more > DecodeStep.MIN_GAIN * cost.decode_step_s(1, 50, [0], length) for length, more in lengths
    )


def first_paying_place(text: Tokens[int]) -> int | None:
    """After how many tokens of a text drafts by prompt lookup pay."""
    state = DraftState(NgramDrafter(), acceptance_rate=SpecDecodePolicy.NGRAM_ACCEPTANCE)
    for length in range(1, len(text)):
        if state.propose(text[:length], 4) and pays(state):
            return length
    return None


def test_text_that_does_not_repeat_itself_is_never_drafted() -> None:
    new = [token % 7 if token % 3 else 50 + token for token in range(200)]
    assert first_paying_place(new) is None


def test_a_repeat_is_drafted_once_two_of_its_tokens_were_proposed_in_silence() -> None:
    # two tokens to notice the repeat, two that came true
    assert first_paying_place([*range(20), *range(20)]) == 20 + 2 + 2


def test_every_proposal_is_judged_submitted_or_not() -> None:
    state = make_state()
    state.propose([7], 3)
    rates = [state.acceptance_rate]
    for tokens in ([7, 1], [7, 1, 1, 1], [7, 1, 1, 1, 1, 9]):  # one right, two right, one right and one wrong
        state.propose(tokens, 3)
        rates.append(state.acceptance_rate)
    assert rates[0] < rates[1] < rates[2] > rates[3]


def test_a_proposal_is_judged_once_and_no_further_than_its_first_miss() -> None:
    state = make_state(1.0)
    state.propose([7], 4)
    state.propose([7, 1, 9, 1, 1], 0)  # right, wrong; what follows was never proposed after a 9
    rate = state.acceptance_rate
    assert rate == DraftState.MEMORY
    for _ in range(3):
        state.propose([7, 1, 9, 1, 1, 1], 0)
    assert state.acceptance_rate == rate


def test_each_position_has_a_rate_of_its_own() -> None:
    """As of a drafter whose later tokens are worse: 1, 0.5 and 0, given those before."""
    state, tokens, found = make_state(0.5), [7], []
    for number in range(400):
        state.propose(tokens, 3)
        tokens = [*tokens, 1, 1 if number % 2 else 9, 9]
        found.append(state.expected(4))
    first, second, third, fourth = (sum(each) / 200 for each in zip(*found[200:], strict=True))
    assert first == pytest.approx(1.0, abs=0.15) and second - first == pytest.approx(0.5, abs=0.15)
    assert third - second < 0.05 and fourth - third < 0.05, "a position not judged is as the one before"
    assert make_state(0.5).expected(3) == [0.5, 0.75, 0.875]


@given(outcomes=st.lists(st.booleans(), max_size=60), start=st.floats(0, 1), length=st.integers(1, 4))
def test_acceptance_rates_stay_rates(outcomes: list[bool], start: float, length: int) -> None:
    state, tokens = make_state(start), [7]
    for right in outcomes:
        state.propose(tokens, length)
        tokens = [*tokens, 1 if right else 9]
    assert 0 <= state.acceptance_rate <= 1
    expected = [0.0, *state.expected(9)]
    assert expected == sorted(expected)
    assert all(after - before <= 1 for before, after in pairwise(expected))


def test_rejected_drafts_must_prove_themselves_again() -> None:
    state = make_state(0.99)
    state.reject()
    assert not pays(state)
    tokens = [7]
    for _ in range(12):
        state.propose(tokens, 4)
        tokens = [*tokens, 1]
    assert pays(state)


# Predictions --------------------------------------------------------------------------------------------


def test_a_prediction_is_proposed_from_its_beginning() -> None:
    drafter = PredictionDrafter(tuple(range(20)), 3, None)
    assert drafter.propose([7, 7, 7], 4) == [0, 1, 2, 3]
    assert drafter.propose([7, 7, 7, 0, 1], 4) == [2, 3, 4, 5]
    assert drafter.propose([7, 7, 7, *range(18)], 4) == [18, 19]
    assert drafter.propose([7, 7, 7, *range(20)], 4) == []


def test_an_answer_that_leaves_its_prediction_is_found_again() -> None:
    others = Parrot(2)
    drafter = PredictionDrafter(tuple(range(20)), 1, others)
    assert drafter.propose([7, 0, 1], 4) == [2, 3, 4, 5]
    assert drafter.propose([7, 0, 1, 90], 4) == [1, 1], "others draft meanwhile"
    assert drafter.propose([7, 0, 1, 90, 10, 11, 12], 4) == [13, 14, 15, 16], "what was between is left out"
    assert drafter.propose([7, 0, 1, 90, 10, 11, 12, 13, 5, 6, 7], 4) == [1, 1], "it does not go back"


def test_a_repeated_part_is_found_at_its_next_place() -> None:
    drafter = PredictionDrafter((1, 2, 3, 4, 9, 1, 2, 3, 5), 0, None)
    assert drafter.propose([1, 2, 3, 4, 8], 2) == []
    assert drafter.propose([1, 2, 3, 4, 8, 1, 2, 3], 2) == [5]


@given(written=TEXTS, prediction=TEXTS, sizes=st.lists(st.integers(1, 5), min_size=1))
def test_any_prediction_is_proposed_as_it_stands(
    written: list[int], prediction: list[int], sizes: list[int]
) -> None:
    drafter, length = PredictionDrafter(tuple(prediction), 0, None), 0
    for size in sizes:
        found = drafter.propose(written[:length], 4)
        assert any(found == prediction[begin : begin + len(found)] for begin in range(len(prediction) + 1))
        length += size


def test_a_prediction_that_comes_true_takes_fewer_steps() -> None:
    prompt = tuple(b"a prompt of its own")
    text = expected_text(prompt, 40, ends=False).encode()
    usages = {}
    for name, prediction in (("none", b""), ("right", text), ("wrong", b"?" * 40)):
        driver = StepDriver(FakeRunner(), draft_tokens=8)
        driver.add(prompt, 40, prediction=tuple(prediction), ignore_eos=True)
        driver.finish()
        assert driver.text("r0").encode() == text
        usages[name] = driver.usage("r0")
    assert usages["right"].steps < usages["none"].steps / 2
    assert usages["right"].accepted_tokens == usages["right"].drafted_tokens > 25
    assert usages["wrong"].accepted_tokens == 0 and usages["wrong"].drafted_tokens < 25
