"""How many tokens of whom go into a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List

from cllm.engine.budget import StepBudget
from cllm.engine.sequence import Sequence


def share_out(
    running: Iterable[Sequence], budget: StepBudget, urgency: Callable[[Sequence], int]
) -> dict[str, int]:
    """By request id: one token of each who generates, and of prompts what there is time for."""
    sequences = sorted(running, key=lambda sequence: sequence.arrival)
    generating = [sequence for sequence in sequences if sequence.pending == 1]
    prompts = [sequence for sequence in sequences if sequence.pending > 1]
    shares = {sequence.id: 1 for sequence in generating}
    if prompts:
        room = budget.prefill_tokens(
            len(generating),
            context=sum(sequence.computed for sequence in generating),
            position=max(sequence.computed for sequence in prompts),
        )
        parts = divide(room, [prompt.pending for prompt in prompts], [*map(urgency, prompts)])
        shares.update((prompt.id, part) for prompt, part in zip(prompts, parts, strict=True) if part)
    return shares


def divide(room: int, wanted: List[int], urgency: List[int] | None = None) -> list[int]:
    """Shares of a step's prefill tokens between prompts that still want so many each, oldest first.

    The shortest goes first (`urgency`, where given, stands for the length): that makes the sum of all waits
    for first tokens the least. But a quarter belongs to the oldest, so that no stream of short prompts can
    hold up a long one for ever.
    """
    if not wanted:
        return []
    urgency = urgency or wanted
    shares = [0] * len(wanted)
    shares[0] = min(room, wanted[0], max(StepBudget.SMALLEST_CHUNK, room // 4))
    left = room - shares[0]
    for index in sorted(range(len(wanted)), key=lambda index: (urgency[index], index)):
        more = min(wanted[index] - shares[index], left)
        shares[index] += more
        left -= more
    return shares
