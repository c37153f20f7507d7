"""KV states in RAM, outside the pool of cells: of parked requests, and of prefixes that may come again.

One account of bytes for both. Parked requests go first: they push cached prefixes out, never the reverse.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import KeysView, Sequence

from cllm.engine.radix import Match, RadixIndex

KEY_BYTES = 8  # of a token: four in the entry, four in the index


class Entry:
    """The memory of a sequence that held exactly `tokens`."""

    __slots__ = ("__weakref__", "size", "state", "tenant", "tokens")

    def __init__(self, tenant: str, tokens: Sequence[int], state: bytes) -> None:
        self.tenant = tenant
        self.tokens = array("i", tokens)
        self.state = state
        self.size = size_of(len(tokens), len(state))


def size_of(tokens: int, state_bytes: int) -> int:
    """What an entry counts for: its state and its tokens."""
    return state_bytes + tokens * KEY_BYTES


class RamTier:
    """Cached prefixes by tenant and tokens, least recently used out first.

    Never more than `cached_limit` bytes of them, nor more than `parked_limit` reserved for the parked, nor
    more than the larger of the two together.
    """

    def __init__(self, *, cached_limit: int, parked_limit: int = 0) -> None:
        self.cached_limit = cached_limit
        self.parked_limit = parked_limit
        self.limit = max(cached_limit, parked_limit)
        self.cached_bytes = 0
        self.parked_bytes = 0
        self.evictions = 0
        self._entries: OrderedDict[Entry, None] = OrderedDict()  # least recently used first
        self._indexes: dict[str, RadixIndex[Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> KeysView[Entry]:
        """What is cached, least recently used first."""
        return self._entries.keys()

    @property
    def cache_room(self) -> int:
        """Bytes that can be cached without pushing anything out."""
        return min(self.cached_limit - self.cached_bytes, self.limit - self.parked_bytes - self.cached_bytes)

    # Cached ----------------------------------------------------------------------------------------

    def matches(self, tenant: str, tokens: Sequence[int], at_least: int) -> list[Match[Entry]]:
        """Every entry of this tenant that begins with at least so many of these tokens."""
        index = self._indexes.get(tenant)
        return index.matches(tokens, at_least) if index is not None else []

    def could_hold(self, size: int) -> bool:
        """Whether an entry of this size fits if everything else is pushed out."""
        return size <= min(self.cached_limit, self.limit - self.parked_bytes)

    def put(self, entry: Entry) -> bool:
        """Cache an entry; False if it is too large. The same tokens are kept once."""
        if not self.could_hold(entry.size):
            return False
        for match in self.matches(entry.tenant, entry.tokens, len(entry.tokens)):
            if len(match.value.tokens) == len(entry.tokens):
                self.drop(match.value)
        while entry.size > self.cache_room:
            self._evict()
        self._entries[entry] = None
        self._indexes.setdefault(entry.tenant, RadixIndex()).insert(entry.tokens, entry)
        self.cached_bytes += entry.size
        return True

    def put_last(self, entry: Entry) -> bool:
        """Cache an entry as the first to go; False (nothing changed) if it is known or there is no room."""
        length = len(entry.tokens)
        known = self.matches(entry.tenant, entry.tokens, length)
        if entry.size > self.cache_room or any(len(match.value.tokens) == length for match in known):
            return False
        kept = self.put(entry)
        self._entries.move_to_end(entry, last=False)
        return kept

    def touch(self, entry: Entry) -> None:
        """It was of use: the last to be pushed out now."""
        if entry in self._entries:
            self._entries.move_to_end(entry)

    def drop(self, entry: Entry) -> None:
        """Forget an entry; one that is gone already is left alone."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        index = self._indexes[entry.tenant]
        index.remove(entry.tokens)
        if not index:
            del self._indexes[entry.tenant]
        self.cached_bytes -= entry.size

    def _evict(self) -> None:
        self.drop(next(iter(self._entries)))
        self.evictions += 1

    # Parked ----------------------------------------------------------------------------------------

    def reserve(self, size: int) -> bool:
        """Take bytes for a parked request, from cached prefixes if need be; False if there are too few."""
        if self.parked_bytes + size > self.parked_limit:
            return False
        while self.parked_bytes + size + self.cached_bytes > self.limit:
            self._evict()
        self.parked_bytes += size
        return True

    def give_back(self, size: int) -> None:
        self.parked_bytes -= size
        assert self.parked_bytes >= 0, "more was given back than reserved"
