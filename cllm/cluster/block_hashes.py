"""Block hashes: a prompt as chained hashes of its blocks of 64 tokens, apart for each tenant."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BLOCK_TOKENS = 64


def hash_blocks(tokens: Sequence[int], tenant: str = "") -> tuple[int, ...]:
    """A hash for each whole block, which stands for all tokens up to its end.

    The last token is always computed, so that a block which ends with it is left out.
    """
    data = array("i", tokens).tobytes()
    size = BLOCK_TOKENS * array("i").itemsize
    key = blake2b(tenant.encode(), digest_size=8).digest()
    hashes = []
    for end in range(size, len(data), size):
        key = blake2b(data[end - size : end], digest_size=8, key=key).digest()
        hashes.append(int.from_bytes(key, "little"))
    return tuple(hashes)
