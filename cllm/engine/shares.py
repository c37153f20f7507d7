"""How many tokens of whom go into a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List

from cllm.engine.budget import StepBudget
from cllm.engine.cost import TILE
from cllm.engine.sequence import Sequence


class Sharing:
    """One token of each who generates, and of prompts what there is time for.

    Of several prompts the shortest goes first (`urgency` stands for the length): that makes the sum of all
    waits for first tokens the least. But one step in four belongs to the oldest, so that no stream of short
    prompts can hold up a long one for ever. Steps and not parts of steps, since small chunks are slow.
    """

    OLDEST_FIRST = 4

    def __init__(self, budget: StepBudget, urgency: Callable[[Sequence], int]) -> None:
        self._budget = budget
        self._urgency = urgency
        self._turn = 0

    def shares(self, running: Iterable[Sequence]) -> dict[str, int]:
        """Tokens by request id; whoever is not in it has no part in this step."""
        sequences = list(running)
        if all(sequence.pending == 1 for sequence in sequences):
            return {sequence.id: 1 for sequence in sequences}
        sequences.sort(key=lambda sequence: sequence.arrival)
        at_once = {sequence.id for sequence in sequences if self._at_once(sequence, sequences)}
        generating = [sequence for sequence in sequences if sequence.id not in at_once]
        prompts = [sequence for sequence in sequences if sequence.id in at_once]
        shares = {sequence.id: 1 for sequence in generating}
        if not prompts:
            return shares
        if len(prompts) > 1:
            self._turn += 1
            begin = 1 if self._turn % self.OLDEST_FIRST == 0 else 0
            prompts[begin:] = sorted(prompts[begin:], key=self._urgency)
        room = self._budget.prefill_tokens(
            len(generating),
            context=sum(sequence.computed for sequence in generating),
            position=prompts[0].computed,
        )
        parts = divide(room, [prompt.pending for prompt in prompts], self._budget.offset(len(generating)))
        shares.update((prompt.id, part) for prompt, part in zip(prompts, parts, strict=True) if part)
        return shares

    def _at_once(self, sequence: Sequence, running: List[Sequence]) -> bool:
        """It has several tokens to compute, and is to have as many as there is room for.

        Prompts are. A few tokens that a grammar forced go one by one where that costs everybody less.
        """
        if sequence.pending == 1:
            return False
        return not sequence.answering or self._budget.worth_a_pass(
            sequence.pending, rows=len(running), context=sum(other.computed for other in running)
        )


def divide(room: int, wanted: List[int], offset: int = 0) -> list[int]:
    """Shares of a step's prefill tokens between prompts that want so many each, the first goes first.

    A prompt is ended or gets whole tiles (and `offset`); only the first gets less, if there is no more room.
    """
    shares: list[int] = []
    for want in wanted:
        part = want if want <= room else _whole_tiles(room, want, offset)
        if part == 0 and not any(shares):
            part = room
        shares.append(part)
        room -= part
    return shares


def _whole_tiles(room: int, want: int, offset: int) -> int:
    tiles = (room - offset) // TILE
    if tiles > 1 and want - tiles * TILE - offset < TILE:
        tiles -= 1  # what is left for the end shall be a tile, too
    return tiles * TILE + offset if tiles > 0 else 0
