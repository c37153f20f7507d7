"""Checkpoints: memory that cannot be cut is saved on its way, so that it can be put back to there.

Chat histories change behind our back: thoughts are stripped, a last message is edited. What lies before the
change is kept if there is a checkpoint: at message boundaries, every so many tokens, shortly before the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cllm.core.kv_cache.prefix_index import Checkpoint
from cllm.core.step_cost import TILE

MAX_CHECKPOINTS = 8  # of a sequence
SPACING = MAX_CHECKPOINTS * TILE  # tokens without a message boundary


def plan_stops(tokens: Sequence[int], begin: int, is_control: Callable[[int], bool]) -> list[int]:
    """The lengths of a prompt, beyond `begin`, after which a checkpoint is to be made; ascending.

    Chat templates open and close messages with control tokens. The last stop is before the answer's opening,
    or before the last token of a plain prompt: that one is always computed.
    """
    controls = set(filter(is_control, set(tokens)))  # each is a native call
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


def thin_checkpoints(checkpoints: list[Checkpoint], end: int) -> list[Checkpoint]:
    kept = set(thin([checkpoint.length for checkpoint in checkpoints], end))
    return [checkpoint for checkpoint in checkpoints if checkpoint.length in kept]
