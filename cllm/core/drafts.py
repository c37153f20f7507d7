"""Drafts: drafters that propose the next tokens of a text, and how often their proposals come true."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Sequence as Tokens
from itertools import accumulate, chain, islice, repeat
from operator import mul

from cllm.backend.base import Drafter


def common_length(one: Tokens[int], other: Tokens[int]) -> int:
    """The length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((length for length, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


class NgramIndex:
    """Where each n-gram of a text stood last: hash chains in flat arrays, some twenty bytes a token.

    A place is the position after an n-gram. `_heads` has the latest place of each hash; from a place,
    `_earlier` leads to the place before it of the same hash. What is found is compared with the text.
    """

    SIZES = (4, 3, 2)
    SHIFT = 17  # a token's own bits, about: the hash is what its factor carries beyond them

    def __init__(self, tokens: int) -> None:
        """Make an index for about `tokens` tokens; more of them make it slower, not wrong."""
        buckets = 1 << tokens.bit_length()
        self._mask = buckets - 1
        # Random, so that no text can be made to fall on one chain; one for each token of the longest n-gram.
        bits = self.SHIFT + buckets.bit_length()
        self._factors = [random.getrandbits(bits) | 1 for _ in range(max(self.SIZES))]
        self._heads = [array("i", bytes(buckets * array("i").itemsize)) for _ in self.SIZES]
        self._earlier = [array("i") for _ in self.SIZES]
        self._append = [earlier.append for earlier in self._earlier]
        self._newest: Tokens[int] = [0] * max(self.SIZES)  # before `indexed`; before the text there are zeros
        self.indexed = 0  # places below this are in the index

    @property
    def crowded(self) -> bool:
        """Its chains have become long: a larger one is due."""
        return self.indexed > 2 * self._mask

    @property
    def memory_bytes(self) -> int:
        return array("i").itemsize * len(self.SIZES) * (self._mask + 1 + self.indexed)

    def add(self, tokens: Tokens[int], max_indexed: int) -> None:
        """Of tokens that are new, the first `max_indexed` come into the index.

        It never has the last place: the newest tokens themselves are no earlier occurrence.
        """
        mask, shift, place = self._mask, self.SHIFT, self.indexed
        first, second, third, fourth = self._factors
        heads4, heads3, heads2 = self._heads
        append4, append3, append2 = self._append
        a, b, c, d = self._newest
        for token in tokens[place : place + max_indexed]:
            total = c * second + d * first
            bucket = total >> shift & mask
            append2(heads2[bucket])
            heads2[bucket] = place
            total += b * third
            bucket = total >> shift & mask
            append3(heads3[bucket])
            heads3[bucket] = place
            total += a * fourth
            bucket = total >> shift & mask
            append4(heads4[bucket])
            heads4[bucket] = place
            a, b, c, d = b, c, d, token
            place += 1
        self.indexed, self._newest = place, (a, b, c, d)

    def find(self, tokens: Tokens[int]) -> int:
        """The latest place of the longest of its newest n-grams that stood in it before; 0: none did."""
        mask, shift = self._mask, self.SHIFT
        first, second, third, fourth = self._factors
        heads4, heads3, heads2 = self._heads
        a, b, c, d = self._newest if self.indexed == len(tokens) else tokens[-len(self._factors) :]
        total = c * second + d * first
        bucket2 = total >> shift & mask
        total += b * third
        bucket3 = total >> shift & mask
        bucket4 = total + a * fourth >> shift & mask
        for number, found in enumerate((heads4[bucket4], heads3[bucket3], heads2[bucket2])):
            if found:
                size, earlier = self.SIZES[number], self._earlier[number]
                newest = tokens[-size:]
                while found:
                    if found >= size and tokens[found - size : found] == newest:
                        return found
                    found = earlier[found]
        return 0


class NgramDrafter:
    """Prompt lookup: proposes what followed when the newest tokens stood in the text before.

    Good at summaries, code edits, tables, quoting; needs no second model. A text that repeats a short cycle
    is proposed to go on repeating it.
    """

    MAX_INDEXED = 4096  # tokens of a long prompt indexed in one step

    _index: NgramIndex | None = None
    _larger: NgramIndex | None = None  # takes its place when it has caught up

    @property
    def memory_bytes(self) -> int:
        """Of the index."""
        return sum(index.memory_bytes for index in (self._index, self._larger) if index is not None)

    def learn(self, tokens: Tokens[int]) -> NgramIndex:
        """Take in what is new, before a proposal is wanted."""
        if self._index is None:
            self._index = NgramIndex(len(tokens))
        self._index.add(tokens, self.MAX_INDEXED)
        return self._index

    def propose(self, tokens: Tokens[int], max_tokens: int) -> list[int]:
        index = self.learn(tokens)
        place = index.find(tokens)
        if self._larger is not None or index.crowded:  # a larger one is brought forward by a slice
            self._larger = self._larger or NgramIndex(2 * len(tokens))
            self._larger.add(tokens, self.MAX_INDEXED)
            if self._larger.indexed == len(tokens):
                self._index, self._larger = self._larger, None
        followed = list(tokens[place : place + max_tokens]) if place else []
        return [followed[number % len(followed)] for number in range(max_tokens)] if followed else []


class PredictionDrafter:
    """Proposes the text that the client expects, from where the answer has got to in it.

    Where the answer has left it, it is found again by the newest n-gram; until then `others` drafts.
    """

    SIZE = NgramIndex.SIZES[1]

    def __init__(self, prediction: Tokens[int], prompt_tokens: int, others: Drafter | None) -> None:
        self._prediction = prediction
        self._others = others
        self._known = prompt_tokens  # of the tokens at the last call
        self._place = 0  # in the prediction, as far as the answer has followed it
        self._follows = True
        self._places: dict[tuple[int, ...], list[int]] = {}  # after each n-gram
        for end in range(self.SIZE, len(prediction)):
            self._places.setdefault(tuple(prediction[end - self.SIZE : end]), []).append(end)

    @property
    def memory_bytes(self) -> int:
        return self._others.memory_bytes if isinstance(self._others, NgramDrafter) else 0

    def propose(self, tokens: Tokens[int], max_tokens: int) -> list[int]:
        new, self._known = tokens[self._known :], len(tokens)
        if self._follows:
            right = common_length(new, self._prediction[self._place : self._place + len(new)])
            self._place += right
            self._follows = right == len(new)
        if not self._follows:
            places = self._places.get(tuple(tokens[-self.SIZE :]), [])
            if (after := bisect_right(places, self._place)) < len(places):
                self._place, self._follows = places[after], True
        if self._follows and (expected := self._prediction[self._place : self._place + max_tokens]):
            return list(expected)
        return self._others.propose(tokens, max_tokens) if self._others is not None else []


class DraftState:
    """One sequence's drafts: the standing proposal, and how often each position of one comes true.

    Every proposal is compared with the tokens that are generated afterwards, whether it was submitted or not.
    So text that does not repeat itself is never slowed down, and one that begins to is noticed.
    """

    MEMORY = 0.8  # weight of the acceptance rate so far, when one more token was judged

    def __init__(self, drafter: Drafter | None, *, acceptance_rate: float, remembers: float = 0) -> None:
        """Without a drafter, proposals are given: by the model's head. `remembers` more tokens than usual."""
        self._weight = 1 / (1 - self.MEMORY)  # tokens that the rate remembers; grows to the limit
        self._max_weight = max(self._weight, remembers)
        self._drafter = drafter
        kinds = {NgramDrafter: "ngram", PredictionDrafter: "prediction", type(None): "mtp"}
        self.drafter = kinds.get(type(drafter), "model")
        self._proposed_at = 0  # how many tokens there were
        self.proposal: list[int] = []
        # Of late, at any position: text begins to repeat itself, and ends.
        self.acceptance_rate = acceptance_rate
        # By position: how many came true where those before did, and how many the rates had promised.
        self._positions: list[tuple[float, float]] = []
        self.skipped = 0  # looks at which the drafter was not asked
        self.drafted = self.accepted = 0

    def propose(self, tokens: Tokens[int], max_tokens: int, given: Tokens[int] = ()) -> list[int]:
        """Draft tokens for the next step, at most `max_tokens`; often none."""
        known = tokens[self._proposed_at : self._proposed_at + len(self.proposal)]
        right = common_length(known, self.proposal)
        for position in range(min(right + 1, len(known))):
            is_right = position < right
            if position == len(self._positions):
                self._positions.append((1 / (1 - self.MEMORY),) * 2)  # as many as the rate remembers
            came_true, promised = self._positions[position]
            self._positions[position] = came_true + is_right, promised + self.acceptance_rate
            self.acceptance_rate += (is_right - self.acceptance_rate) / self._weight
            self._weight = min(self._weight + 1, self._max_weight)
        self.proposal = list(given[:max_tokens])
        if self._drafter is not None:
            self.proposal = self._drafter.propose(tokens, max_tokens) if max_tokens > 0 else []
        self._proposed_at = len(tokens)
        return self.proposal

    def learn(self, tokens: Tokens[int]) -> None:
        """What would otherwise be done when it is asked for drafts."""
        if isinstance(self._drafter, NgramDrafter):
            self._drafter.learn(tokens)

    def expected(self, length: int) -> list[float]:
        """How many draft tokens will be accepted, of 1 up to `length`: p₁ + p₁p₂ + p₁p₂p₃ + …

        The rate of a position is that of late times what is usual there. One that was not judged yet is as
        the one before.
        """
        usual = chain((true / promised for true, promised in self._positions), repeat(None))
        rates, last = [], 1.0
        for each in islice(usual, length):
            last = last if each is None else each
            rates.append(min(1.0, self.acceptance_rate * last))
        return [*accumulate(accumulate(rates, mul))]

    @property
    def memory_bytes(self) -> int:
        """What an n-gram drafter keeps of the text; a draft model's memory is allocated at its start."""
        drafter = self._drafter
        return drafter.memory_bytes if isinstance(drafter, NgramDrafter | PredictionDrafter) else 0

    def reject(self) -> None:
        """The drafts found no room: they must prove themselves again."""
        self.acceptance_rate = 0.0
