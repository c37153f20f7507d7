"""Text for clients, against a plain-text oracle: nothing of a stop string leaks, no character is split."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cllm.text.detokenizer import IncrementalDetokenizer


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first (the longest, if several end together)."""
    ends = sorted((text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text)
    return (text[: ends[0][1]], ends[0][2]) if ends else (text, None)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(place % (len(data) + 1) for place in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(places)]


TEXTS = st.text(alphabet="abX é€😀\n", max_size=40)
STOPS = st.lists(st.text(alphabet="abX é€", min_size=1, max_size=4), max_size=4)


@st.composite
def woven(draw: st.DrawFn) -> tuple[str, list[str], list[int]]:
    """Stops, and a text made of them, of their beginnings and ends, and of anything: so that they nearly
    match, overlap, and begin inside what is held back for another."""
    stops = draw(st.lists(st.text(alphabet="abX é€", min_size=2, max_size=5), min_size=1, max_size=3))
    parts = [stop[:length] for stop in stops for length in range(1, len(stop) + 1)]
    parts += [stop[begin:] for stop in stops for begin in range(1, len(stop))]
    pieces = draw(st.lists(st.one_of(st.sampled_from(parts), st.sampled_from("abX é😀")), max_size=12))
    return "".join(pieces), stops, draw(st.lists(st.integers(0, 200), max_size=40))


def check(text: str, stops: list[str], pieces: list[bytes]) -> None:
    """Push the pieces: what is shown is the oracle's, and never more than that on the way."""
    detokenizer = IncrementalDetokenizer(stops)
    expected, stopped_by = oracle(text, stops)
    got = ""
    for piece in pieces:
        got += detokenizer.push(piece)
        assert expected.startswith(got), "text was shown that has to be taken back"
        if detokenizer.stopped_by is not None:
            break
    if detokenizer.stopped_by is None:
        got += detokenizer.finish()
    assert (got, detokenizer.stopped_by) == (expected, stopped_by)


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 200), max_size=30))
def test_however_the_bytes_are_cut_the_text_is_the_oracles(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    check(text, stops, cut(text.encode(), cuts))


@given(woven())
def test_texts_woven_from_stops_are_the_oracles_too(case: tuple[str, list[str], list[int]]) -> None:
    text, stops, cuts = case
    check(text, stops, cut(text.encode(), cuts))
    check(text, stops, [bytes([byte]) for byte in text.encode()])


def test_an_unfinished_character_is_dropped_not_replaced() -> None:
    detokenizer = IncrementalDetokenizer()
    assert detokenizer.push("a€".encode()[:-1]) == "a"
    assert detokenizer.finish() == ""


def test_bytes_that_are_no_utf8_become_the_replacement_character() -> None:
    assert IncrementalDetokenizer().push(b"a\xffb") == "a\ufffdb"


def test_a_tail_that_could_be_a_stop_is_held_back_and_given_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(["STOP"])
    assert detokenizer.push(b"go ST") == "go "
    assert detokenizer.push(b"A") == "STA"
    assert detokenizer.push(b"ST") == ""
    assert detokenizer.finish() == "ST"
