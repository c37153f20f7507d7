"""Cached prefixes of tenants, and what each can be cut to."""

from __future__ import annotations

import pytest

from cllm.core.kv_cache.prefix_index import CachedPrefix, Checkpoint, Cut, PrefixTier, longest_cut

CHECKPOINTS = (Checkpoint(4, b"four"), Checkpoint(8, b"eight"))


@pytest.mark.parametrize(
    ("common", "min_length", "cut"),
    [
        (12, 12, Cut(12)),  # all of it
        (11, 12, Cut(8, CHECKPOINTS[1])),
        (8, 12, Cut(8, CHECKPOINTS[1])),
        (7, 12, Cut(4, CHECKPOINTS[0])),
        (3, 12, Cut(0)),
        (3, 0, Cut(3)),  # attention alone can be cut anywhere
        (10, 10, Cut(10)),
        (9, 10, Cut(8, CHECKPOINTS[1])),  # a window that has moved on
    ],
)
def test_the_longest_cut(common: int, min_length: int, cut: Cut) -> None:
    assert longest_cut(common, 12, CHECKPOINTS, min_length) == cut
    assert CachedPrefix("", range(12), CHECKPOINTS, min_length).longest_cut(common) == cut


def test_an_entry_is_found_by_its_tenant_alone() -> None:
    tier: PrefixTier[CachedPrefix] = PrefixTier()
    mine, other = CachedPrefix("me", (1, 2, 3)), CachedPrefix("you", (1, 2, 3))
    tier.insert(mine)
    tier.insert(other)
    assert [match.value for match in tier.matches("me", (1, 2, 3, 4), 1)] == [mine]
    assert tier.matches("nobody", (1, 2, 3), 1) == []
    assert [match.length for match in tier.matches("me", (1, 2, 9), 2)] == [2]
    assert tier.matches("me", (1, 2, 9), 3) == []


def test_what_is_covered_are_the_prefixes_of_an_entry() -> None:
    tier: PrefixTier[CachedPrefix] = PrefixTier()
    short, long, apart = (CachedPrefix("", tokens) for tokens in ((1, 2), (1, 2, 3, 4), (1, 9)))
    one = CachedPrefix("", (1,))
    for entry in (short, long, apart, one):
        tier.insert(entry)
    assert set(tier.covered(CachedPrefix("", (1, 2, 3)))) == {short, one}
    assert set(tier.covered(long)) == {short, long, one}


def test_the_least_recently_used_is_first_and_what_is_removed_is_gone() -> None:
    tier: PrefixTier[CachedPrefix] = PrefixTier()
    entries = [CachedPrefix("", (number,)) for number in range(3)]
    for entry in entries:
        tier.insert(entry)
    tier.touch(entries[0])
    assert list(tier.entries) == [entries[1], entries[2], entries[0]]
    assert tier.remove(entries[1]) and not tier.remove(entries[1])
    tier.touch(entries[1])  # of no use any more
    assert list(tier.entries) == [entries[2], entries[0]]
    assert tier.matches("", (1,), 1) == [] and len(tier.matches("", (2,), 1)) == 1
    assert tier.remove(entries[0]) and tier.remove(entries[2])
    assert not tier._indexes, "an index that is empty is forgotten"
