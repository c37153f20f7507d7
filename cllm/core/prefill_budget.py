"""How many tokens a step may carry, so that nobody who is generating waits longer than the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List

from cllm.backend.base import Batch, StepResult
from cllm.core.sequence import Sequence
from cllm.core.step_cost import TILE, GuessClock, StepCostModel, StepShape, attended_pairs


class PrefillBudget:
    """Turns a time target into prefill tokens, with the cost of a step as measured.

    With nobody generating, a step is as large as the batch allows. Chunks are whole tiles where there is
    time for one: at 1,600 tokens of context, 63 tokens take three times as long as 64.
    """

    SMALLEST_CHUNK = 2  # whatever the clock says: a prompt must get on
    GROWTH = 4  # no chunk is more than so many times what was measured
    AIM = 0.85  # of the target; the rest is for what is not measured: noise, the time between steps
    TILE_AIM = 1.1  # for a single tile: the next smaller chunk computes a third as much in the same time

    def __init__(self, batch_tokens: int, target_s: float, *, split: bool = True) -> None:
        self.batch_tokens = batch_tokens
        self.target_s = target_s
        self.clock = StepCostModel()
        self.guesses = GuessClock(batch_tokens, self.AIM * target_s, split=split)
        self.split = split  # then rows of unequal length are computed apart

    @property
    def seconds_per_token(self) -> float | None:
        """What computing one more prompt token costs; None before it was measured."""
        cost = self.clock.cost
        if cost is None or not self.clock.largest_prefill:
            return None
        return cost.prefill_token or None

    def offset(self, generating: int) -> int:
        """What a chunk must have beyond whole tiles, to be computed in whole tiles beside these rows.

        In streams of their own, a row's first token goes along with the others' only ones; in a common
        pool all tokens are computed together.
        """
        return int(generating > 0) if self.split else -(generating % TILE)

    def worth_a_pass(self, tokens: int, *, rows: int, context: int) -> bool:
        """Whether one of `rows` that generate, holding `context` cells together, gets several tokens at once.

        In streams of their own, that is another pass over the weights and all of them wait for it; one by
        one, the others lose nothing and this one waits for some steps.
        """
        cost = self.clock.cost
        if rows == 1 or not self.split or cost is None:
            return True
        step_s = cost.seconds(StepShape(1, 0, rows, context))
        return rows * (cost.ubatch + (tokens - 1) * cost.prefill_token) < (tokens - 1) * step_s

    def prefill_tokens(self, generating: int, *, context: int = 0, position: int = 0) -> int:
        """Most prefill tokens of the next step, beside one token for each of `generating` sequences.

        Those hold `context` cells together; the prefill goes on at about `position`.
        """
        room = self.batch_tokens - generating
        if generating == 0 or room <= 0:
            return max(0, room)
        offset = self.offset(generating)
        cost, measured = self.clock.cost, self.clock.largest_prefill
        if cost is None or not measured:
            return min(room, TILE + offset)
        most = min(room, max(TILE + offset, self.GROWTH * measured))

        def fits(chunk: int, aim: float = self.AIM) -> bool:
            shape = self._shape(chunk, generating, context, position)
            if shape.attended > self.GROWTH * max(self.clock.largest_attended, context):
                return False
            return cost.seconds(shape) <= aim * self.target_s

        tiles = _most(0, (most - offset) // TILE, lambda count: fits(count * TILE + offset))
        if tiles == 0 and most >= TILE + offset:
            tiles = int(fits(TILE + offset, self.TILE_AIM))
        if tiles > 0:
            return tiles * TILE + offset
        smallest = min(room, self.SMALLEST_CHUNK)
        return _most(smallest, max(smallest, min(most, TILE - 1)), fits)

    def _shape(self, chunk: int, generating: int, context: int, position: int) -> StepShape:
        """Of a step with one prefill chunk."""
        together = chunk - 1 if self.split else chunk + generating
        attended, tiled = attended_pairs(chunk, position, together)
        return StepShape(1 + self.split, chunk, generating, context + attended, tiled)

    def observe(self, batch: Batch, result: StepResult) -> None:
        """Learn from a finished step."""
        seconds = result.compute_s + result.sample_s
        self.clock.observe(StepShape.of(batch, result.ubatches, split=self.split), seconds)
        self.guesses.observe(batch, seconds)


def _most(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `high` that fits, `low` if none does; what is larger than a misfit is one."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


class Sharing:
    """One token of each who generates, and of prompts what there is time for.

    Of several prompts the shortest goes first (`urgency` stands for the length): that makes the sum of all
    waits for first tokens the least. But one step in four belongs to the oldest, so that no stream of short
    prompts can hold up a long one for ever. Steps and not parts of steps, since small chunks are slow.
    """

    OLDEST_FIRST = 4

    def __init__(self, budget: PrefillBudget, urgency: Callable[[Sequence], int]) -> None:
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
            context=sum(sequence.num_computed for sequence in generating),
            position=prompts[0].num_computed,
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
            sequence.pending, rows=len(running), context=sum(other.num_computed for other in running)
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
