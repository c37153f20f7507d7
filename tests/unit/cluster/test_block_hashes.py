"""Block hashes: equal for equal prefixes of one tenant, and for nothing else."""

from __future__ import annotations

from cllm.cluster.block_hashes import BLOCK_TOKENS, hash_blocks

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
