"""Who guesses in the next step, and how far: what brings the most tokens for the time it takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from cllm.backend.base import Batch, Drafter
from cllm.engine.guess_clock import GuessClock, GuessPrice
from cllm.engine.speculation import PromptLookup, Speculation
from cllm.types import Request

if TYPE_CHECKING:
    from cllm.engine.sequence import Sequence

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # looked at; the best is flat


def allowance(longest: int, generating: int) -> int:
    """Guesses a sequence may make in a step in which so many generate, where their price is not known.

    Alone, the machine waits for memory and guesses are nearly free; with others, every token of a step
    costs them time.
    """
    return longest // generating if generating and longest // generating > 1 else 0


class Offer(NamedTuple):
    """What a sequence would guess."""

    guess: list[int]
    speculation: Speculation


class Choice(NamedTuple):
    """All guess equally far. `filled`: who cannot gets other tokens, so that all rows are equally long."""

    length: int
    filled: bool = False


class Speculator:
    """Who may guess, and what is guessed in the next step."""

    FAR = 8  # tokens, where several generate: longer guesses do not pay there, and are not looked for
    LEAST_GAIN = 1.02  # less is not worth the trouble
    WAIT = 1.5  # plain steps at most, where somebody does not guess and waits for those who do
    NEARLY = 0.93  # as much is enough for a shorter guess: it risks less, and its tokens come sooner

    def __init__(
        self, longest: int, new_drafter: Callable[[], Drafter] = PromptLookup, *, dear: bool = False
    ) -> None:
        """`dear`: making a guess takes time itself, which no price contains."""
        self._longest = longest
        self._new_drafter = new_drafter
        self._dear = dear

    def for_request(self, request: Request) -> Speculation | None:
        """None where guesses are not wanted, or where a grammar would have to be asked about each."""
        if not self._longest or not request.speculate or request.constraint is not None:
            return None
        return Speculation(self._new_drafter(), self._longest)

    def withdraw(self, batch: Batch, running: Mapping[int, Sequence]) -> bool:
        """There was no room for a batch: True if it held guesses, which then pause for a while."""
        guessing = [row for row in batch.rows if row.outputs > 1]
        for row in guessing:
            speculation = running[row.sequence_id].speculation
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
                if sequence.sequence_id not in guesses and sequence.speculation is not None:
                    filling = sequence.speculation.fill(sequence.tokens, choice.length)
                    guesses[sequence.sequence_id] = filling
        return guesses

    def _offers(self, sequences: Collection[Sequence], most: int) -> dict[int, Offer]:
        offers: dict[int, Offer] = {}
        for sequence in sequences:
            if (speculation := sequence.speculation) is not None:
                room = sequence.token_limit - len(sequence.tokens) - 1
                if guess := speculation.propose(sequence.tokens, min(most, room)):
                    offers[sequence.sequence_id] = Offer(guess, speculation)
        return offers

    def _best(
        self, offers: Mapping[int, Offer], price: GuessPrice, sequences: Collection[Sequence]
    ) -> Choice:
        """What yields the most tokens for its time."""
        everybody = [sequence.sequence_id for sequence in sequences]
        room_to_fill = _room_to_fill(sequences)
        found: list[tuple[float, Choice]] = []  # tokens for a plain step's time, the shortest first
        longest = max(len(offer.guess) for offer in offers.values())
        least = price.rows * self.LEAST_GAIN
        for length in LENGTHS:
            if length > longest:
                break
            able = [key for key, offer in offers.items() if len(offer.guess) >= length]
            tokens = price.rows + sum(offers[key].speculation.expected(length) for key in able)
            most = self.WAIT if len(able) < price.rows else price.most
            for filled in (False, True) if len(able) < price.rows and length <= room_to_fill else (False,):
                parts = price.parts(everybody if filled else able, length)
                if parts is not None and parts <= most and tokens > least * parts:
                    found.append((tokens / parts, Choice(length, filled)))
        if found:
            enough = self.NEARLY * max(found)[0]
            return next(choice for rate, choice in found if rate >= enough)
        for offer in offers.values():
            offer.speculation.not_worth_it()
        return Choice(0)


def _most_saved(offers: Mapping[int, Offer], most: int) -> Choice:
    """What saves the most tokens, if all are right and none costs anything."""
    lengths = {min(most, len(offer.guess)) for offer in offers.values()}
    saved = {
        length: length * sum(len(offer.guess) >= length for offer in offers.values()) for length in lengths
    }
    return Choice(max(lengths, key=lambda length: saved[length]))


def _room_to_fill(sequences: Collection[Sequence]) -> int:
    """How far every row may be filled; 0 if one of them must not."""
    if any(sequence.speculation is None for sequence in sequences):
        return 0
    return min(sequence.token_limit - len(sequence.tokens) - 1 for sequence in sequences)
