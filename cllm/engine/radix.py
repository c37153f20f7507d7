"""An index over token sequences: which of those stored begin like this one, and for how long?"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

Value = TypeVar("Value")

_WIDTH = 4  # bytes of a token


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
    """Values (never None) by token sequences; sequences that begin alike share the path of what is alike.

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
            child = node.children.get(key[depth : depth + _WIDTH])
            if child is None:
                child = _Node(key[depth:])
                node.children[child.edge[:_WIDTH]] = child
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
            child = path[-1].children.get(key[depth : depth + _WIDTH])
            if child is None or not key.startswith(child.edge, depth):
                return
            path.append(child)
            depth += len(child.edge)
        path[-1].value = None
        for parent, node in zip(path[-2::-1], path[:0:-1], strict=True):
            _tidy(parent, node)

    def matches(self, tokens: Sequence[int], at_least: int = 1) -> list[Match[Value]]:
        """Every value whose tokens have their first `at_least` or more in common with these."""
        key = _pack(tokens)
        found: list[Match[Value]] = []
        node, depth = self._root, 0
        while True:
            child = node.children.get(key[depth : depth + _WIDTH])
            if depth >= at_least * _WIDTH:  # whoever does not go on with us parts from us here
                found.extend(Match(depth // _WIDTH, value) for value in node.values(without=child))
            if child is None:
                return found
            shared = _shared(child.edge, key, depth)
            depth += shared
            if shared < len(child.edge):
                if depth >= at_least * _WIDTH:
                    found.extend(Match(depth // _WIDTH, value) for value in child.values())
                return found
            node = child


def _pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _shared(edge: bytes, key: bytes, depth: int) -> int:
    """How many bytes of `edge` the key has at `depth`: a whole number of tokens."""
    if key.startswith(edge, depth):
        return len(edge)
    size = min(len(edge), len(key) - depth)
    mine = np.frombuffer(edge, np.int32, size // _WIDTH)
    theirs = np.frombuffer(key, np.int32, size // _WIDTH, depth)
    different = mine != theirs
    return int(different.argmax()) * _WIDTH if different.any() else size


def _split(parent: _Node[Value], node: _Node[Value], at: int) -> _Node[Value]:
    """Put a node where `node`'s edge is cut, and return it."""
    upper: _Node[Value] = _Node(node.edge[:at])
    node.edge = node.edge[at:]
    upper.children[node.edge[:_WIDTH]] = node
    parent.children[upper.edge[:_WIDTH]] = upper
    return upper


def _tidy(parent: _Node[Value], node: _Node[Value]) -> None:
    """A node without a value goes: with nothing below it altogether, with one child by becoming it."""
    if node.value is not None or len(node.children) > 1:
        return
    if node.children:
        (child,) = node.children.values()
        child.edge = node.edge + child.edge
        parent.children[child.edge[:_WIDTH]] = child
    else:
        del parent.children[node.edge[:_WIDTH]]
