"""Who guesses in a step, and how far: equally far, and only where it brings more than it costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backend.base import Batch, Drafter
from cllm.core.sequence import Sequence, SlotLease, SlotPool
from cllm.core.spec_decode import DraftState, SpecDecodePolicy, allowance
from cllm.core.step_cost import GuessClock, GuessPrice
from cllm.types import ConstraintKind, ConstraintSpec, Request
from tests.unit.core.test_spec_decode import Parrot


@pytest.mark.parametrize(("generating", "each"), [(0, 0), (1, 8), (2, 4), (3, 2), (4, 2), (5, 0), (64, 0)])
def test_guesses_are_shared_by_all_who_generate(generating: int, each: int) -> None:
    assert allowance(8, generating) == each
    assert allowance(0, generating) == 0


def a_sequence(
    number: int, drafter: Drafter | None, *, tokens: int = 10, pending: int = 1, max_tokens: int = 100
) -> Sequence:
    request = Request(id=f"r{number}", prompt=tuple(range(tokens)), max_tokens=max_tokens)
    sequence = Sequence(request, capacity=1000)
    sequence.lease = SlotLease(SlotPool(64, lambda _: 0), number, request.id)
    sequence.num_computed = tokens - pending
    sequence.speculation = DraftState(drafter, 64) if drafter is not None else None
    return sequence


def drafted(*sequences: Sequence, longest: int = 16) -> dict[int, int]:
    return {key: len(guess) for key, guess in SpecDecodePolicy(longest).draft(sequences).items()}


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
    speculator = SpecDecodePolicy(8)
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
    assert SpecDecodePolicy(8).for_request(plain) is not None
    assert SpecDecodePolicy(0).for_request(plain) is None
    assert (
        SpecDecodePolicy(8).for_request(Request(id="b", prompt=(1,), max_tokens=4, speculate=False)) is None
    )
    grammar = ConstraintSpec(ConstraintKind.REGEX, "a+")
    assert (
        SpecDecodePolicy(8).for_request(Request(id="c", prompt=(1,), max_tokens=4, constraint=grammar))
        is None
    )


class Priced(GuessClock):
    """A clock that has seen what a guess for everybody costs, as a part of a plain step of 10 ms."""

    def __init__(
        self, guess: float, *, split: bool = True, batch_tokens: int = 512, longest_s: float = 10
    ) -> None:
        super().__init__(batch_tokens, longest_s, split=split)
        self.guess = guess
        self.refusals = 0

    def price(self, rows: int) -> GuessPrice | None:
        known = super().price(rows) or GuessPrice(rows, {}, 1000.0, self._batch_tokens - rows, self._split)
        return known._replace(guesses={1: self.guess}, most=max(2, self._longest_s / 0.01))

    def refused(self, rows: int) -> None:
        self.refusals += 1


def priced(clock: Priced, *sequences: Sequence) -> dict[int, int]:
    return {key: len(guess) for key, guess in SpecDecodePolicy(64).draft(sequences, clock).items()}


def eight(*guessers: int, able: int = 1000) -> list[Sequence]:
    """Eight sequences that may guess; these do."""
    return [a_sequence(number, Parrot(able if number in guessers else 0)) for number in range(8)]


def trusted(sequences: list[Sequence]) -> list[Sequence]:
    for sequence in sequences:
        assert sequence.speculation is not None
        for _ in range(4):
            sequence.speculation.observe(8, 8)
    return sequences


def test_the_dearer_a_guess_the_shorter_it_is() -> None:
    lengths = [
        max(priced(Priced(guess), *trusted(eight(*range(8)))).values(), default=0)
        for guess in (0.01, 0.1, 0.4, 0.8, 1.5)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == SpecDecodePolicy.FAR and lengths[-1] == 0


def test_all_eight_guess_where_that_pays() -> None:
    assert set(priced(Priced(0.5), *trusted(eight(*range(8))))) == set(range(8))


def test_guesses_that_are_too_dear_are_not_made_and_that_is_remembered() -> None:
    clock = Priced(3.0)
    assert priced(clock, *eight(*range(8))) == {}
    assert clock.refusals == 1
    assert priced(clock, *eight()) == {}
    assert clock.refusals == 1, "nobody guesses: nothing was refused"


def test_who_cannot_guess_is_filled_up_if_most_can() -> None:
    """Rows of unequal length would be computed apart."""
    found = priced(Priced(0.4), *trusted(eight(0, 1, 2, 4, 5, 6, 7)))
    assert set(found) == set(range(8)) and len(set(found.values())) == 1


def test_one_who_guesses_does_not_make_seven_others_wait() -> None:
    assert priced(Priced(0.4), *trusted(eight(3))) == {}


@pytest.mark.parametrize("guess", [0.02, 0.1, 0.3, 0.45])
@pytest.mark.parametrize("guessing", [1, 4, 7])
@pytest.mark.parametrize("split", [True, False])
def test_who_does_not_guess_waits_half_a_step_more_at_most(guess: float, guessing: int, split: bool) -> None:
    found = priced(Priced(guess, split=split), *trusted(eight(*range(guessing))))
    assert 1 + guess * sum(found.values()) / 8 <= SpecDecodePolicy.WAIT


def test_in_one_pool_nobody_needs_to_be_filled_up() -> None:
    found = priced(Priced(0.4, split=False), *trusted(eight(0, 2, 5)))
    assert set(found) == {0, 2, 5} and len(set(found.values())) == 1


def test_who_declined_is_not_filled_up() -> None:
    sequences = trusted(eight(*range(7)))
    sequences[7].speculation = None
    assert 7 not in priced(Priced(0.05), *sequences)


def test_nobody_is_filled_up_beyond_its_end() -> None:
    sequences = trusted(eight(*range(7)))
    sequences[7].token_limit = len(sequences[7].tokens) + 1
    assert 7 not in priced(Priced(0.05), *sequences)
    sequences[7].token_limit = len(sequences[7].tokens) + 2
    assert priced(Priced(0.4), *sequences).get(7, 0) <= 1


def test_no_guesses_beyond_the_batch_or_the_target() -> None:
    assert max(priced(Priced(0.01, batch_tokens=8 * 4), *trusted(eight(*range(8)))).values()) <= 3
    assert max(priced(Priced(0.2, longest_s=0.02), *trusted(eight(*range(8)))).values()) <= 5


@given(
    guess=st.floats(0.01, 3),
    able=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    split=st.booleans(),
    room=st.integers(0, 200),
)
def test_whatever_is_chosen_all_guess_equally_far_and_fit(
    guess: float, able: list[int], split: bool, room: int
) -> None:
    sequences = [a_sequence(number, Parrot(length)) for number, length in enumerate(able)]
    found = priced(Priced(guess, split=split, batch_tokens=len(able) + room), *trusted(sequences))
    assert len(set(found.values())) <= 1
    assert sum(found.values()) <= room


def test_a_dear_drafter_is_not_asked_under_load() -> None:
    parrots = [Parrot() for _ in range(8)]
    sequences = trusted([a_sequence(number, parrot) for number, parrot in enumerate(parrots)])
    assert SpecDecodePolicy(8, dear=True).draft(sequences, Priced(0.01)) == {}
    assert not any(parrot.asked for parrot in parrots)
