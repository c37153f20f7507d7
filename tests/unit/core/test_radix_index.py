"""The index over token sequences, against looking at every one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cllm.core.drafts import common_length
from cllm.core.kv_cache.prefix_index import MAX_MATCHES, RadixIndex, _Node

# Few different tokens, so that sequences begin alike; one that needs all of its four bytes.
TOKENS = st.lists(st.sampled_from([1, 2, 256, 151_935]), max_size=12).map(tuple)


@given(
    lives=st.lists(st.tuples(st.sampled_from(["insert", "insert", "remove"]), TOKENS), max_size=30),
    asked=st.lists(TOKENS, min_size=1, max_size=5),
    at_least=st.integers(0, 6),
)
def test_it_finds_what_a_look_at_everything_finds(
    lives: list[tuple[str, tuple[int, ...]]], asked: list[tuple[int, ...]], at_least: int
) -> None:
    index: RadixIndex[int] = RadixIndex()
    stored: dict[tuple[int, ...], int] = {}
    for number, (action, tokens) in enumerate(lives):
        if action == "insert":
            index.insert(tokens, number)
            stored[tokens] = number
        else:
            index.remove(tokens)
            stored.pop(tokens, None)
        assert bool(index) == bool(stored)
    for tokens in (*asked, *stored):
        shared = ((common_length(tokens, other), value) for other, value in stored.items())
        wanted = sorted(pair for pair in shared if pair[0] >= at_least)
        found = index.matches(tokens, at_least)
        assert sorted(found) == wanted
        assert [match.length for match in found] == sorted((length for length, _ in wanted), reverse=True)
        whole = sorted(
            (len(other), value) for other, value in stored.items() if other == tokens[: len(other)]
        )
        assert index.on_path(tokens) == [value for length, value in whole if length]


@given(sequences=st.lists(TOKENS.filter(bool), max_size=20, unique=True))
def test_every_inner_node_is_needed(sequences: list[tuple[int, ...]]) -> None:
    index: RadixIndex[str] = RadixIndex()
    for tokens in sequences:
        index.insert(tokens, "x")
    for tokens in sequences[::2]:
        index.remove(tokens)
    left = list(index._root.children.values())
    while left:
        node = left.pop()
        assert node.value is not None or len(node.children) > 1
        left += node.children.values()


def test_of_thousands_that_begin_alike_only_some_are_looked_at() -> None:
    """A server with a cache of small states had half of its throughput after ten minutes."""
    index: RadixIndex[int] = RadixIndex()
    system = tuple(range(50))
    for number in range(3000):
        index.insert((*system, 1000 + number, 7), number)
    looked_at = 0

    class Counted(dict[bytes, _Node[int]]):
        def values(self) -> Any:
            children = list(super().values())

            class View:
                def __reversed__(self) -> Iterator[_Node[int]]:
                    nonlocal looked_at
                    while children:
                        looked_at += 1
                        yield children.pop()

            return View()

    (parted,) = index._root.children.values()
    assert len(parted.children) == 3000
    parted.children = Counted(parted.children)
    found = index.matches((*system, 1005, 7, 8))
    assert len(found) == MAX_MATCHES and looked_at <= MAX_MATCHES
    assert found[:2] == [(52, 5), (50, 2999)]
    looked_at = 0
    assert index.on_path((*system, 1005, 7, 8)) == [5]
    assert looked_at == 0
