"""Where checkpoints are made, and which of them are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cllm.core.kv_cache.prefix_index import MAX_CHECKPOINTS, SPACING, plan_stops, thin
from cllm.core.step_cost import TILE

TURN = 1000


def stops(tokens: list[int], begin: int = 0) -> list[int]:
    return plan_stops(tokens, begin, lambda token: token == TURN)


def chat(*lengths: int) -> list[int]:
    """Messages of so many tokens, each opened by a control token; the last is the answer's opening."""
    return [token for length in lengths for token in (TURN, *range(length - 1))]


def test_a_chat_stops_where_messages_begin() -> None:
    assert stops(chat(200, 150, 3)) == [200, 350]
    assert stops(chat(200, 150, 3), begin=200) == [350], "what is there already needs no checkpoint"


def test_messages_close_to_each_other_share_a_checkpoint() -> None:
    assert stops(chat(200, 10, 10, 10, 100, 3)) == [230, 330]


def test_a_plain_prompt_stops_before_its_last_token_and_every_so_often() -> None:
    assert stops(list(range(100))) == [99]
    long = stops(list(range(3 * SPACING)))
    assert long[-1] == 3 * SPACING - 1 and len(long) == 3
    assert stops(list(range(100)), begin=99) == []


@given(
    lengths=st.lists(st.integers(2, 3000), min_size=1, max_size=40),
    share=st.floats(0, 1),
)
def test_stops_ascend_within_the_prompt_and_are_few(lengths: list[int], share: float) -> None:
    tokens = chat(*lengths)
    begin = int(share * (len(tokens) - 1))
    found = stops(tokens, begin)
    assert found == sorted(set(found)) and len(found) <= MAX_CHECKPOINTS
    assert all(begin < stop < len(tokens) for stop in found)
    if lengths[-1] < TILE and begin < len(tokens) - lengths[-1]:
        assert found[-1] == len(tokens) - lengths[-1], "the answer's opening"


@given(st.sets(st.integers(1, 10_000), min_size=1, max_size=60))
def test_thinning_keeps_the_last_and_more_of_the_end_than_of_the_beginning(lengths: set[int]) -> None:
    ordered = sorted(lengths)
    kept = thin(ordered, ordered[-1] + 1)
    assert kept[-1] == ordered[-1] and len(kept) == min(len(ordered), MAX_CHECKPOINTS)
    assert set(kept) <= lengths and kept == sorted(kept)
