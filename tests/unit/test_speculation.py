"""Guessing ahead: what prompt lookup finds, how far a sequence guesses, and who may guess in a step."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backend.base import Batch, Drafter
from cllm.engine.pool import SequenceLease, SequencePool
from cllm.engine.sequence import Sequence
from cllm.engine.speculation import PromptLookup, Proven, Speculation, Speculator, allowance
from cllm.types import ConstraintKind, ConstraintSpec, Request

# Few different tokens, so that texts repeat themselves.
TEXTS = st.lists(st.integers(0, 3), max_size=60)


def searched(tokens: Tokens[int], most: int, indexed: int | None = None) -> list[int]:
    """What prompt lookup must find, by looking at every place; `indexed` is how far it has read."""
    end = len(tokens) if indexed is None else indexed
    for length in PromptLookup.LENGTHS:
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
    assert PromptLookup().propose(tokens, most) == searched(tokens, most)


@given(prompt=TEXTS, grown=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=12))
def test_prompt_lookup_keeps_up_with_a_growing_text(prompt: list[int], grown: list[list[int]]) -> None:
    lookup, tokens = PromptLookup(), list(prompt)
    for more in ([], *grown):
        tokens += more
        assert lookup.propose(tokens, 8) == searched(tokens, 8)


@given(prompt=st.lists(st.integers(0, 3), min_size=20, max_size=60), at_once=st.integers(1, 30))
def test_a_long_prompt_is_read_in_slices(prompt: list[int], at_once: int) -> None:
    lookup = PromptLookup()
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

    lookup, tokens = PromptLookup(), Counted(range(20_000))
    lookup.propose(tokens, 8)
    assert Counted.read <= (PromptLookup.INDEXED_AT_ONCE + 1) * len(PromptLookup.LENGTHS)
    for _ in range(4):
        lookup.propose(tokens, 8)
    tokens += [0, 1, 2, 3]
    assert lookup.propose(tokens, 8) == [4, 5, 6, 7, 8, 9, 10, 11]


def drafts_while_saying(text: Tokens[int], said: int = 1) -> list[list[int]]:
    """What a proven drafter proposes before each of the tokens after the first `said`."""
    drafter = Proven(PromptLookup())
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
    drafter, length, taken = Proven(PromptLookup()), 1, []
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


def lengths_of(speculation: Speculation, accepted: Tokens[float], most: int = 100) -> list[int]:
    """How far it guesses step by step, when these parts of its guesses turn out right."""
    lengths = []
    for part in accepted:
        drafted = len(speculation.propose([1, 2, 3], most))
        lengths.append(drafted)
        if drafted:
            speculation.observe(drafted, int(part * drafted))
    return lengths


def test_right_guesses_double_the_length_up_to_the_longest() -> None:
    assert lengths_of(Speculation(Parrot(), 20), [1, 1, 1, 1]) == [4, 8, 16, 20]
    assert lengths_of(Speculation(Parrot(), 2), [1, 1]) == [2, 2]


def test_few_right_guesses_halve_it_and_half_of_them_leave_it() -> None:
    assert lengths_of(Speculation(Parrot(), 16), [1, 1, 0.25, 0.5, 0.5, 1, 1]) == [4, 8, 16, 8, 8, 8, 16]


def test_wrong_guesses_pause_longer_and_longer() -> None:
    lengths = lengths_of(Speculation(Parrot(), 8), [0] * 400)
    places = [place for place, length in enumerate(lengths) if length]
    pauses = [after - before - 1 for before, after in pairwise(places)]
    assert pauses[:7] == [2, 4, 8, 16, 32, 64, 64]
    assert [lengths[place] for place in places[:4]] == [4, 2, 1, 1]


def test_one_right_guess_ends_the_row_of_failures() -> None:
    lengths = lengths_of(Speculation(Parrot(), 8), [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0])
    assert lengths == [4, 0, 0, 2, 0, 0, 0, 0, 1, 2, 0, 0, 1]


def test_what_was_guessed_and_what_was_right_is_counted() -> None:
    speculation = Speculation(Parrot(), 8)
    lengths_of(speculation, [1, 0.5, 0])
    assert (speculation.drafted, speculation.accepted) == (4 + 8 + 8, 4 + 4)


def test_no_room_for_a_guess_is_no_guess() -> None:
    parrot = Parrot()
    assert Speculation(parrot, 8).propose([1, 2], 0) == []
    assert Speculation(parrot, 8).propose([1, 2], -1) == []
    assert parrot.asked == []


def judged(*outcomes: tuple[int, int]) -> Speculation:
    """One whose guesses fared like this: drafted and accepted, step after step."""
    speculation = Speculation(Parrot(), 16)
    for drafted, accepted in outcomes:
        speculation.observe(drafted, accepted)
    return speculation


def test_the_dearer_a_guess_and_the_poorer_the_record_the_fewer_are_worth_it() -> None:
    good, fair, poor = judged(*[(8, 8)] * 9), judged(*[(4, 2)] * 9), judged(*[(4, 0)] * 9)
    assert good.worth(16, 0.15) == 16
    assert 1 <= fair.worth(16, 0.15) <= 4
    assert poor.worth(16, 0.15) == 0
    for speculation in (good, fair):
        counts = [speculation.worth(16, price) for price in (0.0, 0.05, 0.2, 0.5, 2.0)]
        assert counts == sorted(counts, reverse=True) and counts[-1] == 0


def test_what_costs_nothing_is_always_tried() -> None:
    assert judged(*[(4, 1)] * 5).worth(5, 0.0) == 5


def test_a_poor_record_is_not_for_ever() -> None:
    poor = judged(*[(4, 0)] * 9)
    waited = next(step for step in range(200) if poor.worth(4, 0.15))
    assert 3 < waited < 50


def test_guesses_that_are_too_dear_are_not_made() -> None:
    sequences = [a_sequence(0, Parrot()), a_sequence(1, Parrot())]
    asked: list[int] = []

    def price(rows: int) -> float:
        asked.append(rows)
        return 3.0

    assert Speculator(16).draft(sequences, price) == {}
    assert asked == [2]
    assert Speculator(16).draft([a_sequence(0, None)], price) == {}
    assert asked == [2], "nobody guesses: nobody asks"


@pytest.mark.parametrize(("generating", "each"), [(0, 0), (1, 8), (2, 4), (3, 2), (4, 2), (5, 0), (64, 0)])
def test_guesses_are_shared_by_all_who_generate(generating: int, each: int) -> None:
    assert allowance(8, generating) == each
    assert allowance(0, generating) == 0


def a_sequence(
    number: int, drafter: Drafter | None, *, tokens: int = 10, pending: int = 1, max_tokens: int = 100
) -> Sequence:
    request = Request(id=f"r{number}", prompt=tuple(range(tokens)), max_tokens=max_tokens)
    sequence = Sequence(request, capacity=1000)
    sequence.lease = SequenceLease(SequencePool(64, lambda _: 0), number, request.id)
    sequence.computed = tokens - pending
    sequence.speculation = Speculation(drafter, 64) if drafter is not None else None
    return sequence


def drafted(*sequences: Sequence, longest: int = 16) -> dict[int, int]:
    return {key: len(guess) for key, guess in Speculator(longest).draft(sequences).items()}


def test_all_who_guess_guess_equally_far() -> None:
    assert drafted(a_sequence(0, Parrot()), a_sequence(1, Parrot())) == {0: 4, 1: 4}
    # Twice 3 tokens are more than once 4; once 4 are more than three times 1.
    assert drafted(a_sequence(0, Parrot()), a_sequence(1, Parrot(3))) == {0: 3, 1: 3}
    assert drafted(a_sequence(0, Parrot()), a_sequence(1, Parrot(1)), a_sequence(2, Parrot(1))) == {0: 4}


def test_who_has_nothing_to_guess_is_left_out() -> None:
    assert drafted(a_sequence(0, Parrot(0)), a_sequence(1, None), a_sequence(2, Parrot())) == {2: 4}
    assert drafted(a_sequence(0, Parrot(0)), a_sequence(1, None)) == {}
    assert drafted() == {}


@pytest.mark.parametrize(("left", "guesses"), [(1, 0), (2, 1), (3, 2), (5, 4), (6, 4)])
def test_nobody_guesses_beyond_its_end(left: int, guesses: int) -> None:
    """A step yields one token more than guesses are right."""
    assert drafted(a_sequence(0, Parrot(), max_tokens=left)) == ({0: guesses} if guesses else {})
    full = a_sequence(0, Parrot(), tokens=1000 - left)
    assert drafted(full) == ({0: guesses} if guesses else {})


def test_a_prompt_in_the_step_ends_all_guessing() -> None:
    parrot = Parrot()
    assert drafted(a_sequence(0, parrot), a_sequence(1, None, pending=2)) == {}
    assert parrot.asked == [], "and no pause is used up meanwhile"


def test_under_load_nobody_guesses() -> None:
    parrots = [Parrot() for _ in range(9)]
    assert drafted(*(a_sequence(n, parrot) for n, parrot in enumerate(parrots)), longest=16) == {}
    assert len(drafted(*(a_sequence(n, parrot) for n, parrot in enumerate(parrots[:8])), longest=16)) == 8


def test_guesses_that_found_no_room_are_withdrawn_and_pause() -> None:
    speculator = Speculator(8)
    guessing, other = a_sequence(0, Parrot()), a_sequence(1, None)
    running = {0: guessing, 1: other}
    drafts = speculator.draft(running.values())
    batch = Batch((guessing.row(1, drafts[0]), other.row(1)))
    assert speculator.withdraw(batch, running)
    assert speculator.draft(running.values()) == {}
    # Without guesses there is nothing to withdraw: then somebody has to go.
    assert not speculator.withdraw(Batch((guessing.row(1), other.row(1))), running)


def test_who_may_guess_at_all() -> None:
    plain = Request(id="a", prompt=(1,), max_tokens=4)
    assert Speculator(8).for_request(plain) is not None
    assert Speculator(0).for_request(plain) is None
    assert Speculator(8).for_request(Request(id="b", prompt=(1,), max_tokens=4, speculate=False)) is None
    grammar = ConstraintSpec(ConstraintKind.REGEX, "a+")
    assert Speculator(8).for_request(Request(id="c", prompt=(1,), max_tokens=4, constraint=grammar)) is None
