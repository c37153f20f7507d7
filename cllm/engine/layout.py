"""Holes between the ids of a step, where each sequence has a stream of its own.

llama.cpp computes a run of consecutive ids at once, so a hole costs another pass over the weights. An empty
sequence in the hole can be given a token that is thrown away: that costs a row. Which is cheaper is measured.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as List
from itertools import pairwise

from cllm.backend.base import Row, count_ubatches
from cllm.engine.cost import StepClock


def fill_holes(rows: List[Row], empty: Collection[int], clock: StepClock, most: int) -> tuple[int, ...]:
    """The empty ids that are worth a row in this step, of at most `most` tokens. Rows ascend by id."""
    ids = [row.sequence_id for row in rows]
    if ids[-1] - ids[0] + 1 == len(ids) or (cost := clock.cost) is None:
        return ()
    room = most - sum(len(row.tokens) for row in rows)
    filled = list(rows)
    fillers: list[int] = []
    passes = count_ubatches(filled, most, unified=False)
    for before, after in pairwise(ids):
        hole = range(before + 1, after)
        if not hole or len(hole) > room or not all(sequence_id in empty for sequence_id in hole):
            continue
        tried = [*filled, *(Row(sequence_id, 0, (0,), 0, None) for sequence_id in hole)]
        passes_then = count_ubatches(tried, most, unified=False)
        if (passes - passes_then) * cost.ubatch > len(hole) * cost.row:
            filled, passes = tried, passes_then
            fillers += hole
            room -= len(hole)
    return tuple(fillers)
