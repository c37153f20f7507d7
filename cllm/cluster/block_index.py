"""Block index: which replicas hold which blocks of prompts in their KV cache, as far as is known."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


class BlockIndex:
    """Sets of replicas by block hash, as bits: one look-up a block tells of all replicas."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # by block: a bit for each replica
        self._blocks: dict[int, set[int]] = {}  # by replica

    def count(self, replica: int) -> int:
        """The blocks that a replica is known to hold."""
        return len(self._blocks.get(replica, ()))

    def add(self, replica: int, blocks: Iterable[int]) -> None:
        """A replica holds these, or will soon."""
        bit, holders = 1 << replica, self._holders
        known = self._blocks.setdefault(replica, set())
        for block in blocks:
            if block not in known:
                known.add(block)
                holders[block] = holders.get(block, 0) | bit

    def replace(self, replica: int, blocks: Collection[int]) -> None:
        """A replica holds these and no others."""
        new = set(blocks)
        self._discard(replica, self._blocks.get(replica, set()) - new)
        self.add(replica, new)

    def remove(self, replica: int) -> None:
        """A replica has gone."""
        self._discard(replica, self._blocks.pop(replica, set()))

    def _discard(self, replica: int, blocks: Collection[int]) -> None:
        bit, holders, known = 1 << replica, self._holders, self._blocks.get(replica, set())
        known.difference_update(blocks)
        for block in blocks:
            if left := holders[block] & ~bit:
                holders[block] = left
            else:
                del holders[block]

    def find(self, blocks: Sequence[int]) -> dict[int, int]:
        """How many of a prompt's first blocks each replica holds; those that hold none are left out."""
        holders, found = self._holders, dict[int, int]()
        last = holders.get(blocks[0], 0) if blocks else 0
        for count in range(1, len(blocks)):
            now = last & holders.get(blocks[count], 0)
            if now != last:
                for replica in _bits(last & ~now):
                    found[replica] = count
                if not now:
                    return found
                last = now
        for replica in _bits(last):
            found[replica] = len(blocks)
        return found


def _bits(number: int) -> Iterable[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
