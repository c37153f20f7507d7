"""The block index, against plain sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cllm.cluster.block_index import BlockIndex

blocks = st.lists(st.integers(0, 12), max_size=8, unique=True)
changes = st.lists(
    st.tuples(st.sampled_from(["add", "replace", "remove"]), st.integers(0, 4), blocks), max_size=25
)


@given(changes=changes, prompt=blocks)
def test_it_finds_what_sets_find(changes: list[tuple[str, int, list[int]]], prompt: list[int]) -> None:
    index, known = BlockIndex(), dict[int, set[int]]()
    for change, replica, some in changes:
        if change == "add":
            index.add(replica, some)
            known.setdefault(replica, set()).update(some)
        elif change == "replace":
            index.replace(replica, some)
            known[replica] = set(some)
        else:
            index.remove(replica)
            known.pop(replica, None)
        assert all(index.count(number) == len(known.get(number, ())) for number in range(5))
    expected = {
        number: next((place for place, block in enumerate(prompt) if block not in held), len(prompt))
        for number, held in known.items()
    }
    assert index.find(prompt) == {number: count for number, count in expected.items() if count}
    assert index._holders.keys() == set().union(*known.values()), "nothing is kept of what has gone"
