"""The placer: the least expected time to the first token, by what is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.cluster.placer import (
    BLOCK_TOKENS,
    BlockIndex,
    ReplicaPlacer,
    ReplicaReport,
    ReplicaSpeed,
    hash_blocks,
)
from cllm.errors import EngineNotReady

BLOCK = 64


def report(token_s: float = 0.001, **fields: object) -> ReplicaReport:
    speed = {name: fields.pop(name) for name in ("restore_token_s", "slot_s", "slots") if name in fields}
    speeds = ReplicaSpeed(prefill_token_s=token_s, **{"slots": 8, **speed})  # type: ignore[arg-type]
    return ReplicaReport(speed=speeds, **{"requests": {}, "blocks": (), **fields})  # type: ignore[arg-type]


def make_placer(*reports: ReplicaReport) -> ReplicaPlacer:
    placer = ReplicaPlacer(BLOCK)
    for number, each in enumerate(reports):
        placer.report(number, each)
    return placer


def test_a_prompt_goes_where_its_prefix_is_unless_the_wait_is_longer() -> None:
    placer = make_placer(report(), report(blocks=(1, 2, 3)))
    placed = placer.place("a", 300, (1, 2, 3, 4))
    assert (placed.replica, placed.tokens) == (1, 300 - 3 * BLOCK)
    assert placer.place("b", 300, (1, 2, 3, 5)).replica == 1
    assert placer.place("c", 300, (1, 9)).replica == 0, (
        "what waits there takes longer than to compute it here"
    )


def test_a_request_counts_from_the_moment_it_is_placed() -> None:
    placer = make_placer(report(), report())
    assert [placer.place(f"r{number}", 100, ()).replica for number in range(4)] == [0, 1, 0, 1]


def test_a_first_token_and_an_end_free_what_they_held() -> None:
    placer = make_placer(report(slots=2, slot_s=10.0), report(0.01))
    first = placer.place("a", 100, ())
    assert first.replica == 0
    placer.first_token(first)
    assert placer.place("b", 100, ()).replica == 0, "nothing is pending, and a slot is free"
    third = placer.place("c", 100, ())
    assert third.replica == 1, "no slot is free: five seconds"
    placer.ended(first)
    placer.first_token(third)
    assert placer.place("d", 100, ()).replica == 0


def test_faster_replicas_get_more() -> None:
    placer = make_placer(report(0.001), report(0.003))
    chosen = [placer.place(f"r{number}", 100, ()).replica for number in range(8)]
    assert chosen.count(0) == 6


def test_restoring_a_prefix_takes_time_too() -> None:
    placer = make_placer(report(blocks=range(10), restore_token_s=0.002), report())
    assert placer.place("a", 700, tuple(range(10))).replica == 1


def test_of_equals_the_one_with_more_free_cells() -> None:
    placer = make_placer(report(cells=10), report(cells=30, cells_used=10), report(cells=15))
    assert placer.place("a", 100, ()).replica == 1


def test_a_report_replaces_what_was_known_but_for_what_is_on_its_way() -> None:
    placer = make_placer(report(), report())
    begun, pending = placer.place("begun", 1000, (1,)), placer.place("pending", 1000, (2,))
    assert (begun.replica, pending.replica) == (0, 1)
    placer.first_token(begun)
    placer.report(0, report(requests={"begun": 400, "another's": 700}))  # made before the first token
    placer.report(1, report())  # made before the request arrived
    known = placer._replicas
    assert known[0].requests == {"begun": 0, "another's": 700}
    assert known[1].requests == {"pending": 1000}
    assert placer.index.find((2,)) == {1: 1}, "its prompt will be there"
    placer.report(1, report(requests={"pending": 250}, blocks=(2,)))
    assert known[1].requests == {"pending": 250}
    placer.ended(begun)
    placer.report(0, report(requests={}))
    assert known[0].requests == {} and placer.index.find((1,)) == {}


def test_a_replica_that_has_gone_is_not_chosen() -> None:
    placer = make_placer(report(blocks=(1,)), report(0.01))
    placed = placer.place("a", 100, (1,))
    placer.remove(0)
    assert placer.place("a", 110, (1,)).replica == 1
    placer.remove(1)
    with pytest.raises(EngineNotReady):
        placer.place("b", 10, ())
    placer.remove(7)
    placer.first_token(placed)
    placer.ended(placed)


def test_some_may_be_left_out() -> None:
    placer = make_placer(report(), report(1.0))
    assert placer.place("a", 100, (), without={0}).replica == 1


# Blocks --------------------------------------------------------------------------------------------

TOKENS = tuple(range(1000))


def test_only_whole_blocks_before_the_last_token_count() -> None:
    assert hash_blocks(TOKENS[:BLOCK_TOKENS]) == ()
    assert len(hash_blocks(TOKENS[: BLOCK_TOKENS + 1])) == 1
    assert len(hash_blocks(TOKENS[: 3 * BLOCK_TOKENS])) == 2
    assert hash_blocks(()) == ()


def test_a_hash_stands_for_all_tokens_before_it() -> None:
    whole = hash_blocks(TOKENS)
    assert hash_blocks(TOKENS[:500]) == whole[: 499 // BLOCK_TOKENS]
    other = hash_blocks((7, *TOKENS[1:]))
    assert not set(whole) & set(other), "the first token is another"
    later = hash_blocks((*TOKENS[:200], 7, *TOKENS[201:]))
    assert later[:3] == whole[:3] and not set(later[3:]) & set(whole[3:])


def test_tenants_have_other_hashes() -> None:
    assert not set(hash_blocks(TOKENS, "ann")) & set(hash_blocks(TOKENS, "ben"))
    assert hash_blocks(TOKENS, "ann") == hash_blocks(list(TOKENS), "ann")


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
