"""Guessing ahead: what prompt lookup finds, and how far a sequence guesses."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cllm.core.spec_decode import DraftState, NgramDrafter, Proven

# Few different tokens, so that texts repeat themselves.
TEXTS = st.lists(st.integers(0, 3), max_size=60)


def searched(tokens: Tokens[int], most: int, indexed: int | None = None) -> list[int]:
    """What prompt lookup must find, by looking at every place; `indexed` is how far it has read."""
    end = len(tokens) if indexed is None else indexed
    for length in NgramDrafter.LENGTHS:
        newest = list(tokens[-length:])
        for place in reversed(range(length, end)):
            if len(newest) == length and list(tokens[place - length : place]) == newest:
                followed = list(tokens[place:])
                while len(followed) < most:
                    followed += tokens[place:]
                return followed[:most]
    return []


@given(tokens=TEXTS, most=st.integers(1, 9))
def test_prompt_lookup_finds_what_a_search_finds(tokens: list[int], most: int) -> None:
    assert NgramDrafter().propose(tokens, most) == searched(tokens, most)


@given(prompt=TEXTS, grown=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=12))
def test_prompt_lookup_keeps_up_with_a_growing_text(prompt: list[int], grown: list[list[int]]) -> None:
    lookup, tokens = NgramDrafter(), list(prompt)
    for more in ([], *grown):
        tokens += more
        assert lookup.propose(tokens, 8) == searched(tokens, 8)


@given(prompt=st.lists(st.integers(0, 3), min_size=20, max_size=60), at_once=st.integers(1, 30))
def test_a_long_prompt_is_read_in_slices(prompt: list[int], at_once: int) -> None:
    lookup = NgramDrafter()
    lookup.INDEXED_AT_ONCE = at_once
    tokens, read = list(prompt), 0
    for step in range(80):
        read = min(len(tokens), read + at_once)
        assert lookup.propose(tokens, 8) == searched(tokens, 8, read)
        tokens.append(step % 3)


def test_a_step_reads_a_slice_and_no_more() -> None:
    class Counted(list[int]):
        read = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            Counted.read += 1
            return super().__getitem__(key)

    lookup, tokens = NgramDrafter(), Counted(range(20_000))
    lookup.propose(tokens, 8)
    assert Counted.read <= (NgramDrafter.INDEXED_AT_ONCE + 1) * len(NgramDrafter.LENGTHS)
    for _ in range(4):
        lookup.propose(tokens, 8)
    tokens += [0, 1, 2, 3]
    assert lookup.propose(tokens, 8) == [4, 5, 6, 7, 8, 9, 10, 11]


def drafts_while_saying(text: Tokens[int], said: int = 1) -> list[list[int]]:
    """What a proven drafter proposes before each of the tokens after the first `said`."""
    drafter = Proven(NgramDrafter())
    return [drafter.propose(text[:length], 4) for length in range(said, len(text))]


def test_text_that_does_not_repeat_itself_is_never_guessed_at() -> None:
    new = [token % 7 if token % 3 else 50 + token for token in range(200)]
    assert not any(drafts_while_saying(new))


def test_a_repeat_is_guessed_once_three_of_its_tokens_were_foreseen() -> None:
    text = [*range(20), *range(20)]
    drafts = drafts_while_saying(text)
    first = next(place for place, draft in enumerate(drafts) if draft)
    # two tokens to notice the repeat, three that were foreseen in silence
    assert len(text[: first + 1]) == 20 + 2 + Proven.NEEDED
    assert drafts[first] == text[first + 1 : first + 5]
    assert all(drafts[first:])


def test_one_wrong_guess_and_it_must_prove_itself_again() -> None:
    text = [*range(20), *range(10), 99, *range(20)]
    drafts = drafts_while_saying(text)
    wrong = 20 + 10  # the place of 99
    assert drafts[wrong - 1]
    assert not any(drafts[wrong : wrong + 2 + Proven.NEEDED])
    assert drafts[wrong + 2 + Proven.NEEDED]


def test_steps_that_take_several_tokens_prove_it_too() -> None:
    text = list(range(20)) * 3
    drafter, length, taken = Proven(NgramDrafter()), 1, []
    while length < len(text):
        draft = drafter.propose(text[:length], 4)
        assert draft == text[length : length + len(draft)]
        length += len(draft) + 1
        taken.append(len(draft))
    assert taken[-5:] == [4] * 5


class Parrot:
    """Guesses as far as it is allowed to, and writes down how far that was."""

    def __init__(self, length: int = 1000) -> None:
        self.length = length
        self.asked: list[int] = []

    def propose(self, tokens: Tokens[int], most: int) -> list[int]:
        self.asked.append(most)
        return [1] * min(most, self.length)


def lengths_of(speculation: DraftState, accepted: Tokens[float], most: int = 100) -> list[int]:
    """How far it guesses step by step, when these parts of its guesses turn out right."""
    lengths = []
    for part in accepted:
        drafted = len(speculation.propose([1, 2, 3], most))
        lengths.append(drafted)
        if drafted:
            speculation.observe(drafted, int(part * drafted))
    return lengths


def test_right_guesses_double_the_length_up_to_the_longest() -> None:
    assert lengths_of(DraftState(Parrot(), 20), [1, 1, 1, 1]) == [4, 8, 16, 20]
    assert lengths_of(DraftState(Parrot(), 2), [1, 1]) == [2, 2]


def test_few_right_guesses_halve_it_and_half_of_them_leave_it() -> None:
    assert lengths_of(DraftState(Parrot(), 16), [1, 1, 0.25, 0.5, 0.5, 1, 1]) == [4, 8, 16, 8, 8, 8, 16]


def test_wrong_guesses_pause_longer_and_longer() -> None:
    lengths = lengths_of(DraftState(Parrot(), 8), [0] * 400)
    places = [place for place, length in enumerate(lengths) if length]
    pauses = [after - before - 1 for before, after in pairwise(places)]
    assert pauses[:7] == [2, 4, 8, 16, 32, 64, 64]
    assert [lengths[place] for place in places[:4]] == [4, 2, 1, 1]


def test_one_right_guess_ends_the_row_of_failures() -> None:
    lengths = lengths_of(DraftState(Parrot(), 8), [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0])
    assert lengths == [4, 0, 0, 2, 0, 0, 0, 0, 1, 2, 0, 0, 1]


def test_what_was_guessed_and_what_was_right_is_counted() -> None:
    speculation = DraftState(Parrot(), 8)
    lengths_of(speculation, [1, 0.5, 0])
    assert (speculation.drafted, speculation.accepted) == (4 + 8 + 8, 4 + 4)


def test_no_room_for_a_guess_is_no_guess() -> None:
    parrot = Parrot()
    assert DraftState(parrot, 8).propose([1, 2], 0) == []
    assert DraftState(parrot, 8).propose([1, 2], -1) == []
    assert parrot.asked == []


def judged(*outcomes: tuple[int, int]) -> DraftState:
    """One whose guesses fared like this: drafted and accepted, step after step."""
    speculation = DraftState(Parrot(), 16)
    for drafted, accepted in outcomes:
        speculation.observe(drafted, accepted)
    return speculation


def test_what_is_expected_of_guesses_follows_how_they_fared() -> None:
    good, fair, poor = judged(*[(8, 8)] * 9), judged(*[(4, 2)] * 9), judged(*[(4, 0)] * 9)
    assert 7.5 < good.expected(8) <= 8
    assert 1 < fair.expected(8) < 3
    assert poor.expected(8) < 0.2
    for speculation in (good, fair, poor):
        expected = [speculation.expected(count) for count in range(9)]
        assert expected[0] == 0 and expected == sorted(expected)
        assert all(after - before <= 1 for before, after in pairwise(expected))


def test_what_is_certain_is_expected_whole() -> None:
    certain = judged((16, 16))
    certain._odds = 1.0
    assert certain.expected(5) == 5


def test_a_poor_record_is_not_for_ever() -> None:
    poor = judged(*[(4, 0)] * 9)
    waited = 0
    while poor.expected(4) < 2:
        poor.not_worth_it()
        waited += 1
        assert waited < 50
    assert waited > 3


def test_tokens_that_fill_a_row_count_but_prove_nothing() -> None:
    filled, untouched = judged((8, 8)), judged((8, 8))
    for _ in range(5):
        assert filled.fill([7, 8, 9], 3) == [9, 9, 9]
        filled.observe(3, 0)
    assert filled.drafted == untouched.drafted + 15 and filled.accepted == untouched.accepted
    assert filled.expected(8) == untouched.expected(8)
    assert filled.propose([1, 2, 3], 100) == untouched.propose([1, 2, 3], 100)


def test_a_row_is_filled_with_the_guess_that_was_held_back() -> None:
    speculation = DraftState(Proven(NgramDrafter()), 16)
    text = [1, 2, 3, 4, 5, 1, 2, 3]
    assert speculation.propose(text, 4) == [], "not proven yet"
    assert speculation.fill(text, 2) == [4, 5]
    assert speculation.fill(text, 6) == [4, 5, 1, 2, 3, 3]
    assert speculation.fill([*text, 9], 2) == [9, 9], "that guess was about another text"
