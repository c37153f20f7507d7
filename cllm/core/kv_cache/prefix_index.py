"""Cached prefixes by tenant and tokens, and how likely they are used again: what every tier is made of."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from cllm.backend.base import KVState
from cllm.core.step_cost import TILE
from cllm.types import Prompt, Span

TOKEN_BYTES = array("i").itemsize
MAX_MATCHES = 64  # that are looked at: thousands may begin with the same system prompt


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


class Checkpoint(NamedTuple):
    """What memory that cannot be cut held after its first `length` tokens, apart from attention cells.

    Those cells must still be there when it is put back.
    """

    length: int
    state: KVState


class Cut(NamedTuple):
    """A prefix that something can be cut to."""

    length: int
    checkpoint: Checkpoint | None = None  # put back first


class CachedPrefix:
    """The KV of exactly `tokens`, in some tier; without a checkpoint it can be cut to `min_length`."""

    __slots__ = ("__weakref__", "checkpoints", "min_length", "position", "spans", "tenant", "tokens", "used")

    def __init__(
        self,
        tenant: str,
        tokens: Sequence[int],
        checkpoints: tuple[Checkpoint, ...] = (),
        min_length: int = 0,
        spans: tuple[Span, ...] = (),
    ) -> None:
        """`tenant` is the key of its prompt, `spans` are the media among its tokens."""
        self.position = Prompt(spans=spans).next_position(len(tokens))  # the next one, by the KV memory
        self.spans = spans
        self.tenant = tenant
        self.tokens = array("i", tokens)
        self.checkpoints = checkpoints  # shortest first
        self.min_length = min_length
        self.used = 0  # when it was last, as `Returns` counts; 0: not yet cached

    def longest_cut(self, common: int) -> Cut:
        """The longest prefix of the first `common` tokens that can be had of it; of length 0 if none."""
        return longest_cut(common, len(self.tokens), self.checkpoints, self.min_length)


def longest_cut(common: int, held: int, checkpoints: Sequence[Checkpoint], min_length: int) -> Cut:
    """The longest prefix of the first `common` of `held` tokens in KV that they can be cut to."""
    if common == held or common >= min_length:
        return Cut(common)
    usable = [checkpoint for checkpoint in checkpoints if checkpoint.length <= common]
    return Cut(usable[-1].length, usable[-1]) if usable else Cut(0)


Value = TypeVar("Value")
Prefix = TypeVar("Prefix", bound=CachedPrefix)


class PrefixTier(Generic[Prefix]):
    """Cached prefixes, least recently used first. The same tokens of a tenant are kept once."""

    def __init__(self, returns: Returns | None = None) -> None:
        self.returns = returns or Returns()
        self.entries: OrderedDict[Prefix, None] = OrderedDict()
        self._indexes: dict[str, RadixIndex[Prefix]] = {}

    def matches(self, tenant: str, tokens: Sequence[int], min_length: int) -> list[Match[Prefix]]:
        """Entries of this tenant that share at least `min_length` of these tokens, the longest first."""
        index = self._indexes.get(tenant)
        return index.matches(tokens, min_length) if index is not None else []

    def covered(self, entry: CachedPrefix) -> list[Prefix]:
        """Entries whose tokens are all among the first of this one's."""
        index = self._indexes.get(entry.tenant)
        return index.on_path(entry.tokens) if index is not None else []

    def insert(self, entry: Prefix) -> None:
        """Add an entry; there must be none of the same tokens."""
        entry.used = entry.used or self.returns.tick()
        self.entries[entry] = None
        self._indexes.setdefault(entry.tenant, RadixIndex()).insert(entry.tokens, entry)

    def touch(self, entry: Prefix) -> None:
        """It was of use: the last to be evicted now."""
        if entry in self.entries:
            entry.used = self.returns.clock
            self.entries.move_to_end(entry)

    def remove(self, entry: Prefix) -> bool:
        """Forget an entry; False if it is gone already."""
        if entry not in self.entries:
            return False
        del self.entries[entry]
        index = self._indexes[entry.tenant]
        index.remove(entry.tokens)
        if not index:
            del self._indexes[entry.tenant]
        return True


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
        """What is stored here and below, except below one child; lazily, the newest first."""
        left: list[Iterator[_Node[Value]]] = [iter((self,))]
        while left:
            if (node := next(left[-1], None)) is None:
                left.pop()
            elif node is not without:
                if node.value is not None:
                    yield node.value
                left.append(reversed(node.children.values()))


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
            if (child := node.children.get(key[depth : depth + TOKEN_BYTES])) is None:
                child = _Node(key[depth:])
                node.children[child.edge[:TOKEN_BYTES]] = child
            elif (shared := _shared(child.edge, key, depth)) < len(child.edge):
                child = _split(node, child, shared)
            node, depth = child, depth + len(child.edge)
        node.value = value

    def remove(self, tokens: Sequence[int]) -> None:
        """Forget what is stored under exactly these tokens; nothing happens if nothing is."""
        shared, path = zip(*self._walk(tokens), strict=True)
        if not shared[-1] == sum(len(node.edge) for node in path) == len(tokens) * TOKEN_BYTES:
            return
        path[-1].value = None
        for node, parent in pairwise(reversed(path)):
            _tidy(parent, node)

    def matches(self, tokens: Sequence[int], min_length: int = 1) -> list[Match[Value]]:
        """Values whose tokens share a prefix of `min_length` or more with these: the longest first, some."""
        found: list[Match[Value]] = []
        below: _Node[Value] | None = None
        for shared, node in reversed(self._walk(tokens)):
            if (length := shared // TOKEN_BYTES) < min_length:
                break
            values = node.values(without=below)  # what goes on with other tokens ends its match here
            found.extend(Match(length, value) for value in islice(values, MAX_MATCHES - len(found)))
            if len(found) == MAX_MATCHES:
                break
            below = node
        return found

    def on_path(self, tokens: Sequence[int]) -> list[Value]:
        """Values whose tokens are all among the first of these, the shortest first."""
        depth = 0
        found: list[Value] = []
        for shared, node in self._walk(tokens):
            depth += len(node.edge)
            if depth == shared and shared and node.value is not None:
                found.append(node.value)
        return found

    def _walk(self, tokens: Sequence[int]) -> list[tuple[int, _Node[Value]]]:
        """The nodes that lead along these tokens, each with the bytes shared so far; the last may go on."""
        key = _pack(tokens)
        node, depth = self._root, 0
        nodes = [(0, node)]
        while (child := node.children.get(key[depth : depth + TOKEN_BYTES])) is not None:
            shared = _shared(child.edge, key, depth)
            depth += shared
            nodes.append((depth, child))
            if shared < len(child.edge):
                break
            node = child
        return nodes


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


MAX_CHECKPOINTS = 8  # of a sequence
SPACING = MAX_CHECKPOINTS * TILE  # tokens without a message boundary


def plan_stops(tokens: Sequence[int], begin: int, is_control: Callable[[int], bool]) -> list[int]:
    """The lengths of a prompt, beyond `begin`, after which a checkpoint is to be made; ascending.

    Chat templates open and close messages with control tokens. The last stop is before the answer's opening,
    or before the last token of a plain prompt: that one is always computed.
    """
    controls = {token for token in set(tokens) if token >= 0 and is_control(token)}  # each is a native call
    boundaries = [place for place in range(begin + 1, len(tokens)) if tokens[place] in controls]
    end = len(tokens) - 1
    if boundaries and boundaries[-1] > end - TILE:
        end = boundaries[-1]
    if end <= begin:
        return []
    stops = [end]
    for boundary in reversed([begin, *boundaries]):
        while stops[-1] - boundary > SPACING:
            stops.append(stops[-1] - SPACING)
        if stops[-1] - boundary >= TILE and boundary > begin:
            stops.append(boundary)
    return thin(stops[::-1], len(tokens))


def thin(lengths: list[int], end: int) -> list[int]:
    """At most `MAX_CHECKPOINTS` of them, close to each other near the end and far apart at the beginning."""
    left = list(lengths)
    while len(left) > MAX_CHECKPOINTS:
        before = [0, *left]
        gaps = [(left[place + 1] - before[place]) / (end - left[place] + 1) for place in range(len(left) - 1)]
        del left[gaps.index(min(gaps))]
    return left
