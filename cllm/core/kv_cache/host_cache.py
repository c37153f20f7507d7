"""KV cache offload: states in host RAM, of cached prefixes and of preempted requests, in one byte budget.

Preempted requests go first: they push cached prefixes out, never the reverse.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from cllm.backend.base import KVState

MIB = 1 << 20
TOKEN_BYTES = array("i").itemsize


class Entry:
    """The KV state of a sequence that held exactly `tokens`."""

    __slots__ = ("__weakref__", "size", "state", "tenant", "tokens")

    def __init__(self, tenant: str, tokens: Sequence[int], state: KVState) -> None:
        self.tenant = tenant
        self.tokens = array("i", tokens)
        self.state = state
        self.size = get_entry_size(len(tokens), len(state))


def get_entry_size(tokens: int, state_bytes: int) -> int:
    """What an entry counts for: its state and its tokens, in the entry and in the index."""
    return state_bytes + tokens * 2 * TOKEN_BYTES


class HostKVCache:
    """Cached prefixes by tenant and tokens, least recently used out first.

    Never more than `cached_limit` bytes of them, nor more than `swap_limit` bytes of swap space, nor more
    than the larger of the two together.
    """

    def __init__(self, *, cached_limit: int, swap_limit: int = 0) -> None:
        self.cached_limit = cached_limit
        self.swap_limit = swap_limit
        self.limit = max(cached_limit, swap_limit)
        self.cached_bytes = 0
        self.swapped_bytes = 0
        self.evictions = 0
        self.entries: OrderedDict[Entry, None] = OrderedDict()  # least recently used first
        self._indexes: dict[str, RadixIndex[Entry]] = {}

    @property
    def room(self) -> int:
        """Bytes that can be cached without pushing anything out."""
        return min(self.cached_limit - self.cached_bytes, self.limit - self.swapped_bytes - self.cached_bytes)

    # Cached ----------------------------------------------------------------------------------------

    def matches(self, tenant: str, tokens: Sequence[int], min_length: int) -> list[Match[Entry]]:
        """Every entry of this tenant that shares a prefix of at least so many of these tokens."""
        index = self._indexes.get(tenant)
        return index.matches(tokens, min_length) if index is not None else []

    def could_hold(self, size: int) -> bool:
        """Whether an entry of this size fits if everything else is pushed out."""
        return size <= min(self.cached_limit, self.limit - self.swapped_bytes)

    def put(self, entry: Entry) -> bool:
        """Cache an entry; False if it is too large. The same tokens are kept once."""
        if not self.could_hold(entry.size):
            return False
        for match in self.matches(entry.tenant, entry.tokens, len(entry.tokens)):
            if len(match.value.tokens) == len(entry.tokens):
                self.drop(match.value)
        while entry.size > self.room:
            self._evict()
        self.entries[entry] = None
        self._indexes.setdefault(entry.tenant, RadixIndex()).insert(entry.tokens, entry)
        self.cached_bytes += entry.size
        return True

    def put_last(self, entry: Entry) -> bool:
        """Cache an entry as the first to go; False (nothing changed) if it is known or there is no room."""
        length = len(entry.tokens)
        known = self.matches(entry.tenant, entry.tokens, length)
        if entry.size > self.room or any(len(match.value.tokens) == length for match in known):
            return False
        kept = self.put(entry)
        self.entries.move_to_end(entry, last=False)
        return kept

    def touch(self, entry: Entry) -> None:
        """It was of use: the last to be pushed out now."""
        if entry in self.entries:
            self.entries.move_to_end(entry)

    def drop(self, entry: Entry) -> None:
        """Forget an entry; one that is gone already is left alone."""
        if entry not in self.entries:
            return
        del self.entries[entry]
        index = self._indexes[entry.tenant]
        index.remove(entry.tokens)
        if not index:
            del self._indexes[entry.tenant]
        self.cached_bytes -= entry.size

    def _evict(self) -> None:
        self.drop(next(iter(self.entries)))
        self.evictions += 1

    # Swap space ------------------------------------------------------------------------------------

    def reserve(self, size: int) -> bool:
        """Take bytes for a preempted request, from cached prefixes if need be; False if there are too few."""
        if self.swapped_bytes + size > self.swap_limit:
            return False
        while self.swapped_bytes + size + self.cached_bytes > self.limit:
            self._evict()
        self.swapped_bytes += size
        return True

    def give_back(self, size: int) -> None:
        self.swapped_bytes -= size
        assert self.swapped_bytes >= 0, "more was given back than reserved"


Value = TypeVar("Value")


class Match(NamedTuple, Generic[Value]):
    """A stored value whose tokens begin with the first `length` tokens that were looked up."""

    length: int
    value: Value


class _Node(Generic[Value]):
    """The tokens of `edge` lead here from the parent. Every node but the root has a value or two children."""

    __slots__ = ("children", "edge", "value")

    def __init__(self, edge: bytes) -> None:
        self.edge = edge
        self.children: dict[bytes, _Node[Value]] = {}
        self.value: Value | None = None

    def values(self, without: _Node[Value] | None = None) -> Iterator[Value]:
        """What is stored here and below, except below one child."""
        left = [self]
        while left:
            node = left.pop()
            if node.value is not None:
                yield node.value
            left.extend(child for child in node.children.values() if child is not without)


class RadixIndex(Generic[Value]):
    """Values (never None) by token sequences; sequences with a common prefix share its path.

    Tokens are kept as packed 32-bit integers: four bytes each, compared by the thousand at once.
    """

    def __init__(self) -> None:
        self._root: _Node[Value] = _Node(b"")

    def __bool__(self) -> bool:
        return bool(self._root.children) or self._root.value is not None

    def insert(self, tokens: Sequence[int], value: Value) -> None:
        """Store a value under these tokens, in place of what was there."""
        key = _pack(tokens)
        node, depth = self._root, 0
        while depth < len(key):
            child = node.children.get(key[depth : depth + TOKEN_BYTES])
            if child is None:
                child = _Node(key[depth:])
                node.children[child.edge[:TOKEN_BYTES]] = child
            elif (shared := _shared(child.edge, key, depth)) < len(child.edge):
                child = _split(node, child, shared)
            node, depth = child, depth + len(child.edge)
        node.value = value

    def remove(self, tokens: Sequence[int]) -> None:
        """Forget what is stored under exactly these tokens; nothing happens if nothing is."""
        key = _pack(tokens)
        path = [self._root]
        depth = 0
        while depth < len(key):
            child = path[-1].children.get(key[depth : depth + TOKEN_BYTES])
            if child is None or not key.startswith(child.edge, depth):
                return
            path.append(child)
            depth += len(child.edge)
        path[-1].value = None
        for node, parent in pairwise(reversed(path)):
            _tidy(parent, node)

    def matches(self, tokens: Sequence[int], min_length: int = 1) -> list[Match[Value]]:
        """Every value whose tokens share a prefix of `min_length` or more with these."""
        key = _pack(tokens)
        found: list[Match[Value]] = []
        node, depth = self._root, 0
        while True:
            child = node.children.get(key[depth : depth + TOKEN_BYTES])
            if (
                depth >= min_length * TOKEN_BYTES
            ):  # what does not continue with these tokens ends its match here
                found.extend(Match(depth // TOKEN_BYTES, value) for value in node.values(without=child))
            if child is None:
                return found
            shared = _shared(child.edge, key, depth)
            depth += shared
            if shared < len(child.edge):
                if depth >= min_length * TOKEN_BYTES:
                    found.extend(Match(depth // TOKEN_BYTES, value) for value in child.values())
                return found
            node = child


def _pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _shared(edge: bytes, key: bytes, depth: int) -> int:
    """How many bytes of `edge` the key has at `depth`: a whole number of tokens."""
    if key.startswith(edge, depth):
        return len(edge)
    size = min(len(edge), len(key) - depth)
    mine = np.frombuffer(edge, np.int32, size // TOKEN_BYTES)
    theirs = np.frombuffer(key, np.int32, size // TOKEN_BYTES, depth)
    different = mine != theirs
    return int(different.argmax()) * TOKEN_BYTES if different.any() else size


def _split(parent: _Node[Value], node: _Node[Value], at: int) -> _Node[Value]:
    """Put a node where `node`'s edge is cut, and return it."""
    upper: _Node[Value] = _Node(node.edge[:at])
    node.edge = node.edge[at:]
    upper.children[node.edge[:TOKEN_BYTES]] = node
    parent.children[upper.edge[:TOKEN_BYTES]] = upper
    return upper


def _tidy(parent: _Node[Value], node: _Node[Value]) -> None:
    """A node without a value goes: with nothing below it altogether, with one child by becoming it."""
    if node.value is not None or len(node.children) > 1:
        return
    if node.children:
        (child,) = node.children.values()
        child.edge = node.edge + child.edge
        parent.children[child.edge[:TOKEN_BYTES]] = child
    else:
        del parent.children[node.edge[:TOKEN_BYTES]]
