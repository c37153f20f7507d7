"""Text for clients, against a plain-text oracle: nothing of a stop string leaks, no character is split."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cllm.text.assembler import TextAssembler


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first (the longest, if several end together)."""
    ends = sorted((text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text)
    return (text[: ends[0][1]], ends[0][2]) if ends else (text, None)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(place % (len(data) + 1) for place in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(places)]


TEXTS = st.text(alphabet="abX é€😀\n", max_size=40)
STOPS = st.lists(st.text(alphabet="abX é€", min_size=1, max_size=4), max_size=4)


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 200), max_size=30))
def test_however_the_bytes_are_cut_the_text_is_the_oracles(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    assembler = TextAssembler(stops)
    expected, stopped_by = oracle(text, stops)
    got = ""
    for piece in cut(text.encode(), cuts):
        got += assembler.push(piece)
        assert expected.startswith(got), "text was shown that has to be taken back"
        if assembler.stopped_by is not None:
            break
    if assembler.stopped_by is None:
        got += assembler.finish()
    assert (got, assembler.stopped_by) == (expected, stopped_by)


def test_an_unfinished_character_is_dropped_not_replaced() -> None:
    assembler = TextAssembler()
    assert assembler.push("a€".encode()[:-1]) == "a"
    assert assembler.finish() == ""


def test_bytes_that_are_no_utf8_become_the_replacement_character() -> None:
    assert TextAssembler().push(b"a\xffb") == "a\ufffdb"


def test_a_tail_that_could_be_a_stop_is_held_back_and_given_at_the_end() -> None:
    assembler = TextAssembler(["STOP"])
    assert assembler.push(b"go ST") == "go "
    assert assembler.push(b"A") == "STA"
    assert assembler.push(b"ST") == ""
    assert assembler.finish() == "ST"
