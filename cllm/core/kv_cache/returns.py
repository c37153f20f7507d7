"""How likely a cached prefix is to be used again, learned from those that were."""

from __future__ import annotations

import math
from collections import defaultdict


class Returns:
    """The chance that a cached prefix returns, by its age: how many others were cached since its last use.

    Prefixes of different length are different traffic: that single questions never return says nothing of
    conversations. So each length has chances of its own. Ages and lengths differ by powers of two. Of the
    prefixes that reached an age, some returned at it; the rest went on, or were evicted. Before anything was
    seen, half as many return at twice the age.
    """

    MAX_AGE = 16  # powers of two
    MAX_SEEN = 2 * MAX_AGE  # what was seen long ago counts less
    PRIOR = 2  # prefixes that the first estimate stands for: it never vanishes, so nothing is given up

    def __init__(self) -> None:
        self.clock = 0  # prefixes cached so far
        self._seen: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * self.MAX_AGE)  # by length
        self._returned: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * self.MAX_AGE)
        self._chances: dict[int, list[float]] = {}  # that are known; by age

    def tick(self) -> int:
        """Another prefix is cached; returns the time of its first use."""
        self.clock += 1
        return self.clock

    def observe(self, used: int, tokens: int, *, returned: bool) -> None:
        """A prefix of this many tokens, last used at this time, is used again or is lost."""
        last, length = self._age(used), tokens.bit_length()
        seen, found = self._seen[length], self._returned[length]
        for age in range(last + 1):
            if seen[age] >= self.MAX_SEEN:
                seen[age] /= 2
                found[age] /= 2
            seen[age] += 1
        found[last] += returned
        self._chances.pop(length, None)

    def chance(self, used: int, tokens: int) -> float:
        """The chance that a prefix of this many tokens, last used at this time, is used again."""
        length = tokens.bit_length()
        if (known := self._chances.get(length)) is None:
            ages = [1.0 - self._at(age, length) for age in range(self.MAX_AGE)]
            known = self._chances[length] = [1.0 - math.prod(ages[age:]) for age in range(self.MAX_AGE)]
        return known[self._age(used)]

    def _age(self, used: int) -> int:
        return min(max(0, self.clock - used).bit_length(), self.MAX_AGE - 1)

    def _at(self, age: int, length: int) -> float:
        """Of the prefixes of a length that reach this age, the share that returns before the next."""
        first = self.PRIOR * 2.0 ** -(age + 2)
        return (self._returned[length][age] + first) / (self._seen[length][age] + self.PRIOR)
