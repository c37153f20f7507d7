"""Guessing what comes next, so that one step can settle several tokens. The runner verifies every guess.

A guess that is wrong costs time, never text: each token is chosen as it would be without guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING, NamedTuple

from cllm.backend.base import Batch, Drafter
from cllm.core.step_cost import GuessClock, GuessPrice
from cllm.types import Request


class NgramDrafter:
    """Guesses that the text repeats itself: what followed when its newest tokens stood there before.

    Good at summaries, code edits, tables, quoting; needs no second model. A text that goes round in a circle
    is guessed to go round again, however short the circle is.
    """

    LENGTHS = (4, 3, 2)  # of the repeated beginning, the longest first
    INDEXED_AT_ONCE = 4096  # of a long prompt in one step: nobody is to wait for it

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], int] = {}  # tokens -> the position after their latest occurrence
        self._indexed = 0  # positions up to here have been looked at

    def propose(self, tokens: Tokens[int], most: int) -> list[int]:
        self._index(tokens)
        for length in self.LENGTHS:
            place = self._seen.get(tuple(tokens[-length:]))
            if place is not None:
                followed = list(tokens[place : place + most])
                return [followed[number % len(followed)] for number in range(most)] if followed else []
        return []

    def _index(self, tokens: Tokens[int]) -> None:
        # Up to the last token but one: the newest tokens themselves are no earlier occurrence.
        end = min(len(tokens), self._indexed + self.INDEXED_AT_ONCE)
        for place in range(max(1, self._indexed), end):
            for length in self.LENGTHS:
                if place >= length:
                    self._seen[tuple(tokens[place - length : place])] = place
        self._indexed = end


class Proven:
    """A drafter that keeps its guesses to itself until they come true.

    A guess by looking things up costs nothing, a wrong one in a step does. So it is first compared with what
    is said anyway: text that does not repeat itself is never slowed down.
    """

    NEEDED = 3  # tokens foreseen in a row

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._guess: list[int] = []
        self._guessed_at = 0  # how many tokens there were
        self._foreseen = 0  # in a row

    def propose(self, tokens: Tokens[int], most: int) -> list[int]:
        said = tokens[self._guessed_at :]
        for guessed, token in zip(self._guess, said, strict=False):
            self._foreseen = self._foreseen + 1 if guessed == token else 0
            if not self._foreseen:
                break
        self._guess = self._drafter.propose(tokens, most)
        self._guessed_at = len(tokens)
        if not self._guess:
            self._foreseen = 0
        return self._guess if self._foreseen >= self.NEEDED else []

    def held_back(self, tokens: Tokens[int]) -> list[int]:
        """The guess of what follows `tokens`, proven or not."""
        return self._guess if len(tokens) == self._guessed_at else []


class DraftState:
    """How far one sequence guesses ahead, by how its guesses fared.

    All right: twice as far next time. None right: half as far, and a pause that doubles with every failure
    in a row. How far it pays, by its record, is the SpecDecodePolicy's to say.
    """

    FIRST = 4
    LONGEST_PAUSE = 64  # steps
    USUAL = 0.9  # of guesses are right, until it is known better; with less, dear ones would never be tried
    MEMORY = 0.8  # what counts of the guesses before when new ones were judged
    HOPE = 0.05  # by how much a poor record gets better with each guess that was not worth trying

    def __init__(self, drafter: Drafter, longest: int) -> None:
        self._drafter = drafter
        self._longest = longest
        self._length = min(self.FIRST, longest)
        self._failures = 0  # in a row
        self._pause = 0  # steps left without a guess
        self._odds = self.USUAL  # that the next guessed token is right
        self._judged = 2.0  # on how many of them that is based
        self._filling = False  # the guesses under way were not made on purpose
        self.drafted = 0
        self.accepted = 0

    def propose(self, tokens: Tokens[int], most: int) -> list[int]:
        """Guesses for the next step, at most `most`; often none."""
        if self._pause > 0:
            self._pause -= 1
            return []
        return self._drafter.propose(tokens, min(most, self._length)) if most > 0 else []

    def expected(self, guesses: int) -> float:
        """How many of so many guesses will be right: p + p² + … + pⁿ, where p is how often one was right."""
        odds = self._odds
        return float(guesses) if odds >= 1 else odds * (1 - odds**guesses) / (1 - odds)

    def not_worth_it(self) -> None:
        """A guess was not made because too little is expected of it: the record is forgotten bit by bit."""
        self._odds += self.HOPE * (self.USUAL - self._odds)

    def fill(self, tokens: Tokens[int], count: int) -> list[int]:
        """So many tokens that go along with the guesses of others: a guess held back, or anything.

        What becomes of them says nothing of the guesses that were made on purpose.
        """
        self._filling = True
        held = self._drafter.held_back(tokens) if isinstance(self._drafter, Proven) else []
        return [*held[:count], *[tokens[-1]] * (count - len(held))]

    def observe(self, drafted: int, accepted: int) -> None:
        """What became of guesses."""
        self.drafted += drafted
        self.accepted += accepted
        if self._filling:
            self._filling = False
            return
        known = self.MEMORY * self._judged
        self._judged = known + accepted + (accepted < drafted)  # behind a wrong one none was judged
        self._odds = (self._odds * known + accepted) / self._judged
        if accepted == drafted:
            self._length = min(2 * self._length, self._longest)
        elif 2 * accepted < drafted:
            self._length = max(1, self._length // 2)
        if accepted:
            self._failures = 0
        else:
            self._failures += 1
            self._pause = min(2**self._failures, self.LONGEST_PAUSE)


if TYPE_CHECKING:
    from cllm.core.sequence import Sequence

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # looked at; the best is flat


def allowance(longest: int, generating: int) -> int:
    """Guesses a sequence may make in a step in which so many generate, where their price is not known.

    Alone, the machine waits for memory and guesses are nearly free; with others, every token of a step
    costs them time.
    """
    return longest // generating if generating and longest // generating > 1 else 0


class Proposal(NamedTuple):
    """What a sequence would guess."""

    guess: list[int]
    speculation: DraftState


class DraftPlan(NamedTuple):
    """All guess equally far. `filled`: who cannot gets other tokens, so that all rows are equally long."""

    length: int
    filled: bool = False


class SpecDecodePolicy:
    """Who may guess, and what is guessed in the next step."""

    FAR = 8  # tokens, where several generate: longer guesses do not pay there, and are not looked for
    MIN_GAIN = 1.02  # less is not worth the trouble
    WAIT = 1.5  # plain steps at most, where somebody does not guess and waits for those who do
    NEARLY = 0.93  # as much is enough for a shorter guess: it risks less, and its tokens come sooner

    def __init__(
        self, longest: int, new_drafter: Callable[[], Drafter] = NgramDrafter, *, dear: bool = False
    ) -> None:
        """`dear`: making a guess takes time itself, which no price contains."""
        self._longest = longest
        self._new_drafter = new_drafter
        self._dear = dear

    def for_request(self, request: Request) -> DraftState | None:
        """None where guesses are not wanted, or where a grammar would have to be asked about each."""
        if not self._longest or not request.speculate or request.constraint is not None:
            return None
        return DraftState(self._new_drafter(), self._longest)

    def withdraw(self, batch: Batch, running: Mapping[int, Sequence]) -> bool:
        """There was no room for a batch: True if it held guesses, which then pause for a while."""
        guessing = [row for row in batch.rows if row.outputs > 1]
        for row in guessing:
            speculation = running[row.seq_id].speculation
            assert speculation is not None
            speculation.observe(row.outputs - 1, 0)
        return bool(guessing)

    def draft(self, sequences: Collection[Sequence], clock: GuessClock | None = None) -> dict[int, list[int]]:
        """What each of the sequences that generate in the next step guesses, by sequence id: all equally far.

        llama.cpp computes rows of unequal length apart, which would cost more than the longer guesses win.
        """
        if not self._longest or any(sequence.pending > 1 for sequence in sequences):
            return {}
        careful = allowance(self._longest, len(sequences))
        far = careful if self._dear or len(sequences) == 1 else max(careful, min(self.FAR, self._longest))
        offers = self._offers(sequences, far)
        if not offers:
            return {}
        price = clock.price(len(sequences)) if clock is not None else None
        if clock is None or price is None:
            choice = _most_saved(offers, careful)
        else:
            choice = self._best(offers, price, sequences)
            if not choice.length:
                clock.refused(len(sequences))
        guesses = {
            key: offer.guess[: choice.length]
            for key, offer in offers.items()
            if 0 < choice.length <= len(offer.guess)
        }
        if choice.filled:
            for sequence in sequences:
                if sequence.seq_id not in guesses and sequence.speculation is not None:
                    filling = sequence.speculation.fill(sequence.tokens, choice.length)
                    guesses[sequence.seq_id] = filling
        return guesses

    def _offers(self, sequences: Collection[Sequence], most: int) -> dict[int, Proposal]:
        offers: dict[int, Proposal] = {}
        for sequence in sequences:
            if (speculation := sequence.speculation) is not None:
                room = sequence.token_limit - len(sequence.tokens) - 1
                if guess := speculation.propose(sequence.tokens, min(most, room)):
                    offers[sequence.seq_id] = Proposal(guess, speculation)
        return offers

    def _best(
        self, offers: Mapping[int, Proposal], price: GuessPrice, sequences: Collection[Sequence]
    ) -> DraftPlan:
        """What yields the most tokens for its time."""
        everybody = [sequence.seq_id for sequence in sequences]
        room_to_fill = _room_to_fill(sequences)
        found: list[tuple[float, DraftPlan]] = []  # tokens for a plain step's time, the shortest first
        longest = max(len(offer.guess) for offer in offers.values())
        least = price.rows * self.MIN_GAIN
        for length in LENGTHS:
            if length > longest:
                break
            able = [key for key, offer in offers.items() if len(offer.guess) >= length]
            tokens = price.rows + sum(offers[key].speculation.expected(length) for key in able)
            most = self.WAIT if len(able) < price.rows else price.most
            for filled in (False, True) if len(able) < price.rows and length <= room_to_fill else (False,):
                parts = price.parts(everybody if filled else able, length)
                if parts is not None and parts <= most and tokens > least * parts:
                    found.append((tokens / parts, DraftPlan(length, filled)))
        if found:
            enough = self.NEARLY * max(found)[0]
            return next(choice for rate, choice in found if rate >= enough)
        for offer in offers.values():
            offer.speculation.not_worth_it()
        return DraftPlan(0)


def _most_saved(offers: Mapping[int, Proposal], most: int) -> DraftPlan:
    """What saves the most tokens, if all are right and none costs anything."""
    lengths = {min(most, len(offer.guess)) for offer in offers.values()}
    saved = {
        length: length * sum(len(offer.guess) >= length for offer in offers.values()) for length in lengths
    }
    return DraftPlan(max(lengths, key=lambda length: saved[length]))


def _room_to_fill(sequences: Collection[Sequence]) -> int:
    """How far every row may be filled; 0 if one of them must not."""
    if any(sequence.speculation is None for sequence in sequences):
        return 0
    return min(sequence.token_limit - len(sequence.tokens) - 1 for sequence in sequences)
