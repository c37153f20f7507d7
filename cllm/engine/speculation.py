"""Guessing what comes next, so that one step can settle several tokens. The backend verifies every guess.

A guess that is wrong costs time, never text: each token is chosen as it would be without guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

from cllm.backend.base import Batch, Drafter
from cllm.types import Request

if TYPE_CHECKING:
    from cllm.engine.sequence import Sequence


class PromptLookup:
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


class Speculation:
    """How far one sequence guesses ahead, by how its guesses fared.

    All right: twice as far next time. None right: half as far, and a pause that doubles with every failure
    in a row. And never so far that what it costs is more than what can be expected of it.
    """

    FIRST = 4
    LONGEST_PAUSE = 64  # steps
    USUAL = 0.9  # of guesses are right, until it is known better; with less, dear ones would never be tried
    MEMORY = 0.8  # what counts of the guesses before when new ones were judged
    DETOUR = 0.75  # of a plain step: on a CPU, several tokens of a row take another way than a single one
    HOPE = 0.05  # by how much a poor record gets better with each guess that was not worth trying

    def __init__(self, drafter: Drafter, longest: int) -> None:
        self._drafter = drafter
        self._longest = longest
        self._length = min(self.FIRST, longest)
        self._failures = 0  # in a row
        self._pause = 0  # steps left without a guess
        self._odds = self.USUAL  # that the next guessed token is right
        self._judged = 2.0  # on how many of them that is based
        self.drafted = 0
        self.accepted = 0

    def propose(self, tokens: Tokens[int], most: int) -> list[int]:
        """Guesses for the next step, at most `most`; often none."""
        if self._pause > 0:
            self._pause -= 1
            return []
        return self._drafter.propose(tokens, min(most, self._length)) if most > 0 else []

    def worth(self, guesses: int, price: float) -> int:
        """How many of these guesses to make, if each adds `price` of a plain step to it; 0: free.

        A step with n guesses yields 1 + p + p² + … + pⁿ tokens, where p is how often one was right.
        """
        best, most_tokens_per_time = 0, 1.0
        tokens = likely = 1.0
        for count in range(1, guesses + 1):
            likely *= self._odds
            tokens += likely
            tokens_per_time = tokens / (1 + price * count + (self.DETOUR if price else 0.0))
            if tokens_per_time > most_tokens_per_time:
                best, most_tokens_per_time = count, tokens_per_time
        if best == 0:
            self._odds += self.HOPE * (self.USUAL - self._odds)
        return best

    def observe(self, drafted: int, accepted: int) -> None:
        """What became of guesses."""
        self.drafted += drafted
        self.accepted += accepted
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


def allowance(longest: int, generating: int) -> int:
    """Guesses a sequence may make in a step in which so many generate.

    Alone, the machine waits for memory and guesses are nearly free; with others, every token of a step
    costs them time.
    """
    return longest // generating if generating and longest // generating > 1 else 0


class Speculator:
    """Who may guess, and what is guessed in the next step."""

    def __init__(self, longest: int, new_drafter: Callable[[], Drafter] = PromptLookup) -> None:
        self._longest = longest
        self._new_drafter = new_drafter

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

    def draft(
        self, sequences: Collection[Sequence], price: Callable[[int], float] = lambda rows: 0.0
    ) -> dict[int, list[int]]:
        """What each of the sequences that generate in the next step guesses, by sequence id: all equally far.

        llama.cpp computes rows of unequal length apart, which would cost more than the longer guesses win: so
        the length is the one that saves the most tokens, and who cannot guess that far does not guess.
        `price` tells how much longer a guess for each of so many rows makes a step, as a part of a plain one.
        """
        most = allowance(self._longest, len(sequences))
        if not most or any(sequence.pending > 1 for sequence in sequences):
            return {}
        proposals = {
            sequence.sequence_id: sequence.speculation.propose(
                sequence.tokens, min(most, sequence.token_limit - len(sequence.tokens) - 1)
            )
            for sequence in sequences
            if sequence.speculation is not None
        }
        if not any(proposals.values()):
            return {}
        part_of_a_step = price(len(sequences))
        for sequence in sequences:
            if (guess := proposals.get(sequence.sequence_id)) and sequence.speculation is not None:
                count = sequence.speculation.worth(len(guess), part_of_a_step)
                proposals[sequence.sequence_id] = guess[:count]
        lengths = {len(proposal) for proposal in proposals.values()} - {0}
        if not lengths:
            return {}
        saved = {
            length: length * sum(len(each) >= length for each in proposals.values()) for length in lengths
        }
        best = max(lengths, key=lambda length: saved[length])
        return {key: proposal[:best] for key, proposal in proposals.items() if len(proposal) >= best}
