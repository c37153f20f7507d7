"""Chunked prefill by time: how many tokens of which sequence go into a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from itertools import pairwise
from operator import attrgetter

from cllm.backend.base import Row, count_ubatches
from cllm.core.sequence import Sequence
from cllm.core.step_cost import TILE, TINY, StepCostModel, StepShape, attended_pairs


class PrefillBudget:
    """Turns the inter-token target into prefill tokens, with the cost of a step as measured.

    With no sequence decoding, a step is as large as the batch allows. Chunks are whole tiles where there is
    time for one: at 1,600 tokens of context, 63 tokens take three times as long as 64.
    """

    MIN_CHUNK = 2  # whatever the cost model says: a prompt must get on
    MAX_GROWTH = 4  # a chunk is at most this many times what was measured
    AIM = 0.85  # of the target; the rest is for what is not measured: noise, the time between steps
    OVERRUN = 1.3  # of that, for a chunk of which a smaller one would be wasteful: a single tile, or
    MAX_WASTE = 0.1  # one whose own ubatch takes no more than this part of what its tokens take
    OLDEST_FIRST = 2  # every second step belongs to the oldest prompt
    COSTLY = 3  # times the cheapest tenth of the samplers: those of one kind all take part
    SAMPLING_SHARE = 0.05  # of a step's compute: what samplers may add while there are cheap ones

    def __init__(
        self,
        batch_tokens: int,
        target_s: float,
        cost: StepCostModel,
        *,
        first_chunk: int = TILE,
        defers: bool = False,
    ) -> None:
        """`first_chunk` is what may be tried unmeasured. `defers`: a sequence may be left out of a step."""
        self.batch_tokens = batch_tokens
        self.first_chunk = first_chunk
        self.defers = defers
        self.target_s = target_s
        self.alternates = False  # with steps of another budget: a sequence waits for one of each
        self.contended = False  # another engine waits for each step: its streams may, where none runs here
        self.cost = cost
        self._turn = 0
        self._sampling_credit_s = 0.0

    @property
    def max_step_s(self) -> float:
        """What a step may take while a sequence waits for its next token."""
        return self.AIM * self.target_s / (1 + self.alternates)

    def schedule_tokens(
        self, running: Iterable[Sequence], urgency: Callable[[Sequence], int]
    ) -> dict[str, int]:
        """Tokens by request id; a sequence that is missing has no part in this step.

        Each decoding sequence gets one token, unless its sampler would cost the others too much (`_defer`);
        prompts get what there is time for. Of several prompts the shortest
        goes first (`urgency` stands for the length): that minimises the sum of all times to first token. But
        one step in `OLDEST_FIRST` belongs to the oldest: short prompts may double the time of a long one, not
        more. Steps and not parts of steps, since small chunks are slow.
        """
        sequences = list(running)
        if len(sequences) == 1 and not self.contended and sequences[0].computable <= self.batch_tokens:
            return {sequences[0].id: sequences[0].computable}
        if all(sequence.pending == 1 for sequence in sequences):
            return {sequence.id: 1 for sequence in self._defer(sequences)}
        sequences.sort(key=attrgetter("arrival"))
        context = sum(sequence.num_computed for sequence in sequences)
        prompts = [each for each in sequences if self._at_once(each, len(sequences), context)]
        decoding = self._defer([sequence for sequence in sequences if sequence not in prompts])
        shares = {sequence.id: 1 for sequence in decoding}
        if not prompts:
            return shares
        if len(prompts) > 1:
            self._turn += 1
            begin = int(self._turn % self.OLDEST_FIRST == 0)
            prompts[begin:] = sorted(prompts[begin:], key=urgency)
        room = self.prefill_tokens(
            len(decoding),
            context=sum(sequence.num_computed for sequence in decoding),
            position=prompts[0].num_computed,
            sampling_s=sum(sequence.sample_s for sequence in decoding),
            wanted=prompts[0].computable,
        )
        parts = divide(room, [prompt.computable for prompt in prompts], self._offset(len(decoding)))
        shares.update((prompt.id, part) for prompt, part in zip(prompts, parts, strict=True) if part)
        return shares

    def _at_once(self, sequence: Sequence, rows: int, context: int) -> bool:
        """Several tokens are pending, and as many as there is room for are computed together.

        Prompts are. Tokens that a grammar forced go one by one where that is cheaper for the other rows: with
        split KV, several at once are another ubatch that all of them wait for.
        """
        tokens, step = sequence.pending, self.cost.step
        if tokens == 1 or sequence.num_computed < sequence.known:  # not yet answering
            return tokens > 1
        if rows == 1 or not self.cost.split or step is None:
            return True
        step_s = step.seconds(StepShape(1, 0, rows, context))
        return rows * (step.ubatch + (tokens - 1) * step.prefill_token) < (tokens - 1) * step_s

    def _defer(self, decoding: list[Sequence]) -> list[Sequence]:
        """Those that take part in the next step: costly samplers pay for their time with turns.

        With all samplers a step may take `SAMPLING_SHARE` longer than all rows do without any. Cheap samplers
        (no more than an even part of that, or not `COSTLY` times as costly as the cheapest) always take part.
        The costly ones share what is left, in turn: a row that is left out saves its own time, too. Where all
        are costly, all take part.
        """
        total_s = sum(sequence.sample_s for sequence in decoding)
        if total_s == 0 or not self.defers or (step := self.cost.step) is None:
            return decoding
        rows_s = [step.row + step.attended * sequence.num_computed for sequence in decoding]
        allowed_s = self.SAMPLING_SHARE * (step.ubatch + sum(rows_s))
        cheapest_s = sorted(sequence.sample_s for sequence in decoding)[len(decoding) // 10]
        costly_s = max(allowed_s / len(decoding), self.COSTLY * cheapest_s)
        costly = {
            sequence: row_s + sequence.sample_s
            for sequence, row_s in zip(decoding, rows_s, strict=True)
            if sequence.sample_s > costly_s
        }
        if total_s <= allowed_s or len(costly) == len(decoding):
            return decoding
        left_s = allowed_s - total_s + sum(costly.values())
        self._sampling_credit_s = min(self._sampling_credit_s, 0.0) + left_s
        for sequence in sorted(costly, key=attrgetter("deferred"), reverse=True):
            if self._sampling_credit_s > 0:
                self._sampling_credit_s -= costly[sequence]
                sequence.deferred = 0
            else:
                sequence.deferred += 1
        return [sequence for sequence in decoding if sequence not in costly or not sequence.deferred]

    def _offset(self, decoding: int) -> int:
        """What a chunk must have beyond whole tiles, to be computed in whole tiles beside these rows.

        With split KV, a row's first token is computed along with the decoding rows; with unified KV all
        tokens are computed together.
        """
        return int(decoding > 0) if self.cost.split else -(decoding % TILE)

    def prefill_tokens(
        self,
        decoding: int,
        *,
        context: int = 0,
        position: int = 0,
        sampling_s: float = 0.0,
        wanted: int = 0,
    ) -> int:
        """Most prefill tokens of the next step, beside one token for each of `decoding` sequences.

        Those hold `context` cells together and take `sampling_s`; the prefill goes on at about `position`.
        The first prompt has `wanted` tokens left: it is ended where there is time and that takes less.
        """
        room = self.batch_tokens - decoding
        if (decoding == 0 and not self.contended) or room <= 0:
            return max(0, room)
        offset = self._offset(decoding)
        step, measured = self.cost.step, self.cost.largest_prefill
        if step is None or not measured:
            return min(room, self.first_chunk + offset)
        largest = min(room, max(self.first_chunk + offset, self.MAX_GROWTH * measured))

        def fits(chunk: int, aim: float = 1.0) -> bool:
            shape = self._shape(chunk, decoding, context, position)
            if shape.attended > self.MAX_GROWTH * max(self.cost.largest_attended, context):
                return False
            return step.seconds(shape) + sampling_s <= aim * self.max_step_s

        tiles = bisect_largest(0, (largest - offset) // TILE, lambda count: fits(count * TILE + offset))
        if tiles == 0 and largest >= TILE + offset:
            tiles = int(fits(TILE + offset, self.OVERRUN))
        if tiles > 0:
            chunk = tiles * TILE + offset
            if not chunk < wanted <= largest or not fits(wanted):
                return chunk
            rest = wanted - chunk, position + chunk
            parts = ((wanted, position), (chunk, position), rest)
            shapes = (self._shape(tokens, decoding, context, begin) for tokens, begin in parts)
            whole_s, chunk_s, rest_s = map(step.seconds, shapes)
            rows_s = step.seconds(StepShape(1, 0, decoding, context))
            return wanted if whole_s + rows_s <= chunk_s + rest_s else chunk
        smallest = min(room, self.MIN_CHUNK)
        most = max(smallest, min(largest, TILE - 1))
        chunk = bisect_largest(smallest, most, fits)
        if not self.cost.split:
            return chunk
        token_s = max(step.prefill_token + step.attended * position, TINY)
        sparing = min(most, int(step.ubatch / (self.MAX_WASTE * token_s)))
        return bisect_largest(chunk, max(chunk, sparing), lambda count: fits(count, self.OVERRUN))

    def _shape(self, chunk: int, decoding: int, context: int, position: int) -> StepShape:
        """Of a step with one prefill chunk."""
        apart = self.cost.split and decoding > 0
        together = chunk - 1 if apart else chunk + decoding
        attended, tiled = attended_pairs(chunk, position, together)
        return StepShape(1 + apart, chunk, decoding, context + attended, tiled)


def limit_scored(running: Iterable[Sequence], counts: dict[str, int], max_tokens: int) -> None:
    """Bound the prompt tokens of a step that are scored: each takes a line of logits. One gets on."""
    room = max(1, max_tokens)
    for sequence in running:
        if sequence.unscored and sequence.id in counts:
            counts[sequence.id] = min(counts[sequence.id], room)
            room -= counts[sequence.id]
            if not counts[sequence.id]:
                del counts[sequence.id]


def bisect_largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `high` that fits, `low` if none does; what is larger than a misfit is one."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def divide(room: int, wanted: List[int], offset: int = 0) -> list[int]:
    """Shares of a step's prefill tokens between prompts that want `wanted` each, the first goes first.

    A prompt is ended or gets whole tiles (and `offset`); only the first gets less, if there is no more room.
    """
    shares: list[int] = []
    for want in wanted:
        part = want
        if want > room:
            tiles = (room - offset) // TILE
            if tiles > 1 and want - tiles * TILE - offset < TILE:
                tiles -= 1  # what is left for the end shall be a tile, too
            part = tiles * TILE + offset if tiles > 0 else 0
        if part == 0 and not any(shares):
            part = room
        shares.append(part)
        room -= part
    return shares


def choose_padding(
    rows: List[Row], unused: Mapping[int, int], cost: StepCostModel, max_tokens: int
) -> tuple[int, ...]:
    """Padding rows: unused slots between the rows' ids that are worth a token each. Rows ascend by id.

    With split KV, llama.cpp computes a run of consecutive ids at once, so a gap costs another pass over the
    weights. An unused slot in the gap (`unused`: cells by slot) can be given a token that is discarded, which
    costs a row; and every row of a run looks at as many cells as the longest has.
    """
    ids = [row.seq_id for row in rows]
    if (step := cost.step) is None:
        return ()
    room = max_tokens - sum(len(row.tokens) for row in rows)
    padded = list(rows)
    padding: list[int] = []
    ubatches = count_ubatches(padded, max_tokens, unified=False)
    widest = max(row.position for row in rows)
    for before, after in pairwise(ids):
        gap = range(before + 1, after)
        if not gap or len(gap) > room or not all(seq_id in unused for seq_id in gap):
            continue
        tried = [*padded, *(Row(seq_id, 0, (0,), 0, None) for seq_id in gap)]
        ubatches_then = count_ubatches(tried, max_tokens, unified=False)
        wider = max(0, max(unused[seq_id] for seq_id in gap) - widest)
        padding_s = len(gap) * step.row + len(tried) * wider * step.attended
        if (ubatches - ubatches_then) * step.ubatch > padding_s:
            padded, ubatches = tried, ubatches_then
            padding += gap
            room -= len(gap)
    return tuple(padding)
