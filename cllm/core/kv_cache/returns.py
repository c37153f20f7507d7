"""How likely a cached prefix is to be used again, learned from those that were."""

from __future__ import annotations

import math


class Returns:
    """The chance that a cached prefix returns, by its age: how many others were cached since its last use.

    Ages differ by powers of two. Of the prefixes that reached an age, some returned at it; the rest
    went on, or were evicted. Before anything was seen, half as many return at twice the age.
    """

    MAX_AGE = 16  # powers of two
    MAX_SEEN = 2 * MAX_AGE  # what was seen long ago counts less
    PRIOR = 2  # prefixes that the first estimate stands for: it never vanishes, so nothing is given up

    def __init__(self) -> None:
        self.clock = 0  # prefixes cached so far
        self._seen = [0.0] * self.MAX_AGE
        self._returned = [0.0] * self.MAX_AGE

    def tick(self) -> int:
        """Another prefix is cached; returns the time of its first use."""
        self.clock += 1
        return self.clock

    def observe(self, used: int, *, returned: bool) -> None:
        """A prefix last used then is used again, or is lost."""
        last = self._age(used)
        for age in range(last + 1):
            if self._seen[age] >= self.MAX_SEEN:
                self._seen[age] /= 2
                self._returned[age] /= 2
            self._seen[age] += 1
        self._returned[last] += returned

    def chance(self, used: int) -> float:
        """The chance that a prefix last used then is used again."""
        return 1.0 - math.prod(1.0 - self._at(age) for age in range(self._age(used), self.MAX_AGE))

    def _age(self, used: int) -> int:
        return min(max(0, self.clock - used).bit_length(), self.MAX_AGE - 1)

    def _at(self, age: int) -> float:
        """Of the prefixes that reach this age, the share that returns before the next."""
        first = self.PRIOR * 2.0 ** -(age + 2)
        return (self._returned[age] + first) / (self._seen[age] + self.PRIOR)
