"""The RAM tier: never over its bytes, the least recently used goes first, the parked before the cached."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cllm.core.kv_cache.tiers import Entry, HostKVCache, get_entry_size


def entry(tokens: str, size: int = 100, tenant: str = "") -> Entry:
    """An entry that counts for `size` bytes."""
    return Entry(tenant, tuple(tokens.encode()), bytes(size - get_entry_size(len(tokens), 0)))


def held(tier: HostKVCache, tokens: str, tenant: str = "") -> bool:
    found = tier.matches(tenant, tuple(tokens.encode()), len(tokens))
    return any(len(match.value.tokens) == len(tokens) for match in found)


def test_the_least_recently_used_goes_first() -> None:
    tier = HostKVCache(cached_limit=300)
    first, second, third = entry("abc"), entry("abd"), entry("xyz")
    assert tier.put(first) and tier.put(second) and tier.put(third)
    tier.touch(first)
    assert tier.put(entry("new"))
    assert [held(tier, name) for name in ("abc", "abd", "xyz", "new")] == [True, False, True, True]
    assert tier.evictions == 1 and tier.cached_bytes == 300


def test_an_entry_that_is_too_large_evicts_nothing() -> None:
    tier = HostKVCache(cached_limit=300)
    tier.put(entry("abc"))
    assert not tier.put(entry("big", 301))
    assert held(tier, "abc")
    assert not HostKVCache(cached_limit=0).put(entry("abc"))


def test_preempted_states_evict_cached_ones_and_never_the_reverse() -> None:
    tier = HostKVCache(cached_limit=300, swap_limit=200)
    for name in ("aaa", "bbb", "ccc"):
        tier.put(entry(name))
    assert tier.reserve(150)
    assert [held(tier, name) for name in ("aaa", "bbb", "ccc")] == [False, False, True]
    assert not tier.reserve(51), "over what parking may take"
    assert not tier.put(entry("ddd", 151)), "beside what is parked it does not fit"
    assert tier.swapped_bytes == 150
    tier.give_back(150)
    assert tier.put(entry("ddd", 200))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "touch", "drop", "park", "resume"]),
        st.text("ab", min_size=1, max_size=6),
        st.integers(60, 400),
    ),
    max_size=50,
)


@given(actions=ACTIONS, cached=st.sampled_from([0, 200, 1000]), parked=st.sampled_from([0, 300, 2000]))
def test_no_limit_is_ever_passed_and_the_sums_are_right(
    actions: list[tuple[str, str, int]], cached: int, parked: int
) -> None:
    tier = HostKVCache(cached_limit=cached, swap_limit=parked)
    known: dict[tuple[str, str], Entry] = {}
    reserved: list[int] = []
    for action, tokens, size in actions:
        tenant = "even" if size % 2 == 0 else "odd"
        match action:
            case "put":
                made = entry(tokens, size, tenant)
                if tier.put(made):
                    known[tenant, tokens] = made
            case "touch" if (tenant, tokens) in known:
                tier.touch(known[tenant, tokens])
            case "drop" if (tenant, tokens) in known:
                tier.drop(known.pop((tenant, tokens)))
            case "park":
                if tier.reserve(size):
                    reserved.append(size)
            case "resume" if reserved:
                tier.give_back(reserved.pop())
        assert tier.cached_bytes <= cached
        assert tier.swapped_bytes == sum(reserved) <= parked
        assert tier.cached_bytes + tier.swapped_bytes <= max(cached, parked)
        there = [made for (tenant, tokens), made in known.items() if held(tier, tokens, tenant)]
        assert len(there) == len(tier.entries)
        assert sum(made.size for made in there) == tier.cached_bytes
