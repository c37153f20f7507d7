"""A prompt maps items to positions, is cut between its spans, and has a key of its own per adapter."""

from __future__ import annotations

import msgspec

from cllm.types import Prompt, Span, make_pseudo_ids

PICTURE = Span(3, 7, 2, "a")  # four rows at two positions
PROMPT = Prompt((1, 2, 3, -5, -6, -7, -8, 9, 10), (PICTURE,))


def test_of_text_a_length_is_a_position() -> None:
    text = Prompt((4, 5, 6))
    assert [text.position(length) for length in range(6)] == list(range(6)) and len(text) == 3
    assert not Prompt() and text.floor(2) == 2


def test_rows_of_a_picture_share_positions() -> None:
    assert PROMPT.position(3) == 3
    assert PROMPT.position(7) == 5 and PROMPT.position(9) == 7
    assert PROMPT.position(12) == 10, "an answer goes on as text"


def test_no_cut_lies_inside_a_span() -> None:
    assert [PROMPT.floor(length) for length in range(10)] == [0, 1, 2, 3, 3, 3, 3, 7, 8, 9]


GRID = Prompt((1, 2, -5, -6, -7, -8, -9, -10, 9), (Span(2, 8, 3, "a", columns=3),))


def test_rows_of_a_grid_are_at_its_first_position() -> None:
    assert [GRID.position(length) for length in range(10)] == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert [GRID.next_position(length) for length in range(10)] == [0, 1, 2, 3, 3, 3, 3, 3, 3, 6]
    assert [PROMPT.next_position(length) for length in (3, 7, 9)] == [3, 5, 7]


def test_a_prefix_has_the_same_media() -> None:
    other = Span(3, 7, 2, "b")
    assert [PROMPT.floor(9, (PICTURE,)), PROMPT.floor(9, (other,)), PROMPT.floor(9, ())] == [9, 3, 3]
    assert PROMPT.floor(2, ()) == 2 and PROMPT.text == (1, 2, 3, 9, 10)


def test_pseudo_ids_are_of_one_picture() -> None:
    ids = make_pseudo_ids("a", 1000)
    assert min(ids) >= -(2**31) and max(ids) < 0 and len(set(ids)) > 990
    assert ids[:10] == make_pseudo_ids("a", 10) and not set(ids) & set(make_pseudo_ids("b", 1000))


def test_an_adapter_keeps_its_prefixes_apart() -> None:
    keys = {Prompt((1,)).key(""), Prompt((1,)).key("ann"), Prompt((1,), adapter="x").key("ann")}
    assert len(keys) == 3


def test_it_crosses_processes() -> None:
    frame = msgspec.msgpack.encode(PROMPT)
    assert msgspec.msgpack.decode(frame, type=Prompt) == PROMPT
