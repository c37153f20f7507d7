"""Chunked prefill by time: how many tokens of which sequence go into a step."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from cllm.backend.base import SCORED_LOGITS, Row
from cllm.core.sequence import Sequence
from cllm.core.step_cost import TILE, TINY, StepCost, StepCostModel, StepShape, attended_pairs
from cllm.types import Request


class PromptPart(NamedTuple):
    """Tokens of a prompt that are to be computed, or that a step computes."""

    position: int
    tokens: int  # with padding
    scored: bool = False  # their log-probabilities are wanted


class ChunkCost:
    """What prefill chunks cost beside the rows that decode, given the prompts that wait.

    `prompts` has the position and the tokens left of each, in the order in which they are computed.
    """

    def __init__(
        self,
        step: StepCost,
        rows: StepShape,
        prompts: List[tuple[int, int] | PromptPart],
        *,
        split: bool,
        sampling_s: float = 0.0,
    ) -> None:
        self._step, self._rows, self._split = step, rows, split
        self._prompts = [PromptPart(*each) for each in prompts]
        self._lengths = [prompt.tokens for prompt in self._prompts]
        self._sampling_s = sampling_s
        self._rows_s = step.seconds(rows) if rows.rows else 0.0
        self.offset = get_offset(rows.rows, split=split)
        self.wanted = sum(self._lengths)

    def shape(self, tokens: int) -> StepShape:
        """The step with a chunk of up to `tokens`, divided between the prompts."""
        parts = divide(tokens, self._lengths, self.offset)
        found = zip(self._prompts, parts, strict=False)
        return self._shape([prompt._replace(tokens=part) for prompt, part in found if part])

    def _shape(self, parts: List[PromptPart]) -> StepShape:
        """With split KV a row's first token is computed along with the decoding rows, and every length that
        differs takes another ubatch.
        """
        rows, attended, tiled = self._rows.rows, self._rows.attended, 0.0
        prefill = sum(part.tokens for part in parts)
        scored = sum(part.tokens for part in parts if part.scored)
        first = int(rows > 0)
        for position, part, _ in parts:
            together = part - first if self._split else prefill + rows
            pairs = attended_pairs(part, position, together)
            attended, tiled = attended + pairs[0], tiled + pairs[1]
        lengths = {part.tokens for part in parts if part.tokens > first}
        ubatches = first + len(lengths) if self._split else 1
        return StepShape(ubatches, prefill, rows, attended, tiled, scored)

    def seconds(self, tokens: int) -> float:
        return self._step.seconds(self.shape(tokens)) + self._sampling_s

    def price(self, tokens: int) -> float:
        """Seconds a token if all prompts are computed in chunks of this size; rows would run anyway."""
        shape = self.shape(tokens)
        whole, rest = divmod(self.wanted, shape.prefill_tokens)
        total_s = whole * (self._step.seconds(shape) - self._rows_s)
        if rest:
            last = self._shape([self._prompts[-1]._replace(tokens=rest)])
            total_s += self._step.seconds(last) - self._rows_s
        return total_s / self.wanted


class TenantShares:
    """Seconds of steps that a tenant took beyond an even share with the others that computed beside it.

    One that is too far ahead leaves the next steps to others: a prompt fills a step up to its
    limit, a row takes a small part of it, so without this one that sends prompts has nearly all the time.
    """

    def __init__(self, credit_s: float) -> None:
        """A tenant may be `credit_s` ahead: prompts that come now and then do not wait."""
        self._credit_s = credit_s
        self._ahead_s: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Whether any tenant is ahead."""
        return bool(self._ahead_s)

    def get_ahead_s(self, tenant: str) -> float:
        return self._ahead_s.get(tenant, 0.0)

    def may_prefill(self, prompt: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether it is not ahead of others here: of several that are, one always gets on."""
        own_s = self.get_ahead_s(prompt.request.tenant)
        return own_s <= self._credit_s or all(
            self.get_ahead_s(each.request.tenant) >= own_s for each in running
        )

    def charge(self, spent: Iterable[tuple[str, float]]) -> None:
        """A step takes these seconds for requests of tenants; one that waits meanwhile falls back."""
        total, step_s = dict(self._ahead_s), 0.0
        for tenant, seconds in spent:
            total[tenant] = total.get(tenant, 0.0) + seconds
            step_s += seconds
        even_s = step_s / max(1, len(total))
        self._ahead_s = {name: seconds - even_s for name, seconds in total.items() if seconds - even_s > TINY}


class PrefillBudget:
    """Turns the inter-token target into prefill tokens, with the cost of a step as measured.

    With no stream decoding, a step is as large as the batch allows. Else a chunk keeps the target where that
    costs at most `MAX_PRICE` of the prefill's throughput, and beyond that it is the smallest one that does.
    Chunks are whole tiles where possible: at 1,600 tokens of context, 63 tokens take three times as long as
    64.
    """

    MIN_CHUNK = 2  # whatever the cost model says: a prompt must get on
    MAX_GROWTH = 4  # a chunk is at most this many times what was measured
    AIM = 0.85  # of the target; the rest is for what is not measured: noise, the time between steps
    MAX_PRICE = 0.03  # of the best price of a token: what keeping the target may cost
    OLDEST_FIRST = 2  # every second step belongs to the oldest prompt
    CREDIT = TILE // 8  # targets: seconds of steps that a tenant may be ahead of the others beside it
    COSTLY = 3  # times the cheapest tenth of the samplers: those of one kind all take part
    SAMPLING_SHARE = 0.05  # of a step's compute: what samplers may add while there are cheap ones

    def __init__(
        self,
        batch_tokens: int,
        target_s: float,
        cost: StepCostModel,
        *,
        first_chunk: int = TILE,
        max_overrun: float = 1.0,
        defers: bool = False,
    ) -> None:
        """`first_chunk` is what may be tried unmeasured. `defers`: a sequence may be left out of a step.

        A step may take `max_overrun` targets where keeping the target costs too much.
        """
        self.max_overrun = max_overrun
        self.batch_tokens = batch_tokens
        self.first_chunk = first_chunk
        self.defers = defers
        self.target_s = target_s
        self.padded_cells = 0  # up to which prompts may be padded, where that can be removed again
        self.padding: dict[int, int] = {}  # tokens by slot, after those of the prompts in the last step
        self.alternates = False  # with steps of another budget: a sequence waits for one of each
        self.sets = 1  # of adapters, that take turns: a sequence waits for a step of each other one
        self.contended = False  # another engine waits for each step: its streams may, where none runs here
        self.cost = cost
        self._turn = 0
        self._sampling_credit_s = 0.0
        self.shares = TenantShares(self.CREDIT * target_s)
        self._several = False  # there were requests of several tenants at a time
        self.spent: dict[str, float] = {}  # seconds of steps by request, where there are several; to be taken

    @property
    def max_step_s(self) -> float:
        """What a step may take while a sequence waits for its next token."""
        return self.AIM * self.target_s / (self.sets + self.alternates)

    @property
    def max_wait_s(self) -> float:
        """What a sequence may wait where keeping the target costs too much."""
        return self.max_overrun * self.target_s

    @property
    def waited_for(self) -> bool:
        """Whether streams wait for each step that are not in it: of another engine, or of another set."""
        return self.contended or self.sets > 1

    def schedule_tokens(
        self, running: Iterable[Sequence], urgency: Callable[[Sequence], int]
    ) -> dict[str, int]:
        """Tokens by request id; a sequence that is missing has no part in this step. Sets `padding`, too.

        Each decoding sequence gets one token, unless its sampler would cost the others too much (`_defer`);
        prompts get what there is time for. Of several prompts the shortest
        goes first (`urgency` stands for the length): that minimises the sum of all times to first token. But
        one step in `OLDEST_FIRST` belongs to the oldest: short prompts may double the time of a long one, not
        more. Steps and not parts of steps, since small chunks are slow.
        """
        sequences, self.padding = sorted(running, key=attrgetter("arrival")), {}
        context = sum(sequence.num_computed for sequence in sequences)
        prompts = [each for each in sequences if self._at_once(each, len(sequences), context)]
        rows = [sequence for sequence in sequences if sequence not in prompts]
        prompts = [  # a long one makes others' prompts wait, too
            prompt
            for prompt in prompts
            if self.shares.may_prefill(prompt, sequences if prompt.computable > TILE else rows)
        ]
        decoding = self._defer(rows, prefills=bool(prompts))
        shares = {sequence.id: 1 for sequence in decoding}
        if not prompts:
            self.charge_step(sequences, decoding)
            return shares
        longer = self._pad({each: each.computable for each in prompts})
        if len(prompts) > 1:
            self._turn += 1
            oldest = prompts[: int(self._turn % self.OLDEST_FIRST == 0)]
            others = (each for each in longer if each not in oldest)
            prompts = oldest + sorted(others, key=lambda each: urgency(each) + longer[each] - each.computable)
        room = self.prefill_tokens(
            max(len(decoding), int(bool(rows))),  # those left out wait for their token, too
            context=sum(sequence.num_computed for sequence in decoding),
            sampling_s=sum(sequence.sample_s for sequence in decoding),
            prompts=[PromptPart(each.num_computed, longer[each], each.unscored > 0) for each in prompts],
            streamed=any(sequence.request.streamed for sequence in rows),
        )
        offset = get_offset(len(decoding), split=self.cost.split)
        parts = dict(zip(prompts, divide(room, [longer[each] for each in prompts], offset), strict=False))
        own = {prompt: min(part, prompt.computable) for prompt, part in parts.items() if part}
        for prompt, length in self._pad(own).items():  # as long as others in this step
            shares[prompt.id] = own[prompt]
            if padding := min(length, parts[prompt]) - own[prompt]:
                self.padding[prompt.seq_id] = padding
        self.charge_step(sequences, decoding, own.items())
        return shares

    def _pad(self, lengths: dict[Sequence, int]) -> dict[Sequence, int]:
        """The same, as long as a longer one's of its run where that costs less than a ubatch; by slot.

        With split KV, rows of unequal length are computed apart, and so are runs of consecutive ids.
        """
        if not self.padded_cells or len(lengths) < 2 or (step := self.cost.step) is None:
            return lengths
        by_slot = sorted(lengths, key=attrgetter("seq_id"))
        kinds: dict[tuple[int, int], list[Sequence]] = {}
        for rank, each in enumerate(by_slot):
            kinds.setdefault((each.seq_id - rank, -lengths[each]), []).append(each)
        last, longest, padded = None, 0, dict.fromkeys(by_slot, 0)
        for (run, _), alike in sorted(kinds.items()):
            length = lengths[alike[0]]
            pairs_s = max(step.attended, step.tiled) * sum(each.num_computed + length for each in alike)
            padding_s = (longest - length) * (step.prefill_token * len(alike) + pairs_s)
            fits = longest + max(each.num_computed for each in alike) <= self.padded_cells
            last, longest = run, longest if run == last and fits and padding_s < step.ubatch else length
            padded.update(dict.fromkeys(alike, longest))
        return padded

    def charge(self, spent: Iterable[tuple[Request, float]], *, beside: bool = True) -> None:
        """Note what a step takes; does it count for being ahead, too?"""
        found = list(spent)
        if beside:
            self.shares.charge((request.tenant, seconds) for request, seconds in found)
        for request, seconds in found:
            self.spent[request.id] = self.spent.get(request.id, 0.0) + seconds

    def charge_step(
        self, running: List[Sequence], decoding: List[Sequence], chunks: Iterable[tuple[Sequence, int]] = ()
    ) -> None:
        """Note what the next step takes of each tenant's share.

        The pass over the weights is paid for by the rows, unless a tenant waits for slots: then all slots pay
        alike, since one that holds a prompt, or is left out, keeps a row from that pass.
        """
        self._several = self._several or len({each.request.tenant for each in running}) > 1
        if not self._several or (step := self.cost.step) is None:
            return
        backlogged = {each.request.tenant for each in running if each.request.backlogged}
        slot_s, pass_s = (step.ubatch / max(1, len(each)) for each in (running, decoding))
        spent, rows = [], set(decoding)
        for each in running:
            tenant = each.request.tenant
            if each in rows:
                row_s = step.row + step.attended * each.num_computed + each.sample_s
                spent.append((each.request, row_s + (slot_s if tenant in backlogged else pass_s)))
            elif backlogged - {tenant}:
                spent.append((each.request, slot_s))
        for prompt, part in chunks:
            pairs = attended_pairs(part, prompt.num_computed, part)
            scored = part if prompt.unscored else 0
            spent.append((prompt.request, step.seconds(StepShape(1, part, 0, *pairs, scored))))
        self.charge(spent, beside=len(rows) < len(running) or bool(self.shares))

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

    def _defer(self, decoding: list[Sequence], *, prefills: bool = False) -> list[Sequence]:
        """Those that take part in the next step: costly samplers pay for their time with turns.

        With all samplers a step may take `SAMPLING_SHARE` longer than all rows do without any. Cheap samplers
        (no more than an even part of that, or not `COSTLY` times as costly as the cheapest) always take part.
        The costly ones share what is left, in turn: a row that is left out saves its own time, too. Where all
        are costly, all take part, unless the step `prefills`: then they must leave most of it to prompts.
        """
        total_s = sum(sequence.sample_s for sequence in decoding)
        if total_s == 0 or not self.defers or (step := self.cost.step) is None:
            return decoding
        rows_s = [step.row + step.attended * sequence.num_computed for sequence in decoding]
        allowed_s, limit_s = self.SAMPLING_SHARE * (step.ubatch + sum(rows_s)), self.max_step_s / self.COSTLY
        prefills = prefills and total_s > limit_s
        samplers_s = sorted(sequence.sample_s for sequence in decoding)
        cheapest_s = 0.0 if prefills else samplers_s[len(decoding) // 10]
        costly_s = max(allowed_s / len(decoding), self.COSTLY * cheapest_s)
        costly = {
            sequence: row_s + sequence.sample_s
            for sequence, row_s in zip(decoding, rows_s, strict=True)
            if sequence.sample_s > costly_s
        }
        if len(costly) == len(decoding):
            allowed_s = limit_s if prefills else total_s
        if total_s <= allowed_s:
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

    def prefill_tokens(
        self,
        decoding: int,
        *,
        context: int = 0,
        sampling_s: float = 0.0,
        prompts: List[tuple[int, int] | PromptPart] = (),
        streamed: bool = True,
        waited: bool = False,
    ) -> int:
        """Most prefill tokens of the next step, beside one token for each of `decoding` sequences.

        Those hold `context` cells and take `sampling_s`; where none is `streamed`, no client waits for them.
        `waited`: by streams without a token in it. `prompts`: position and tokens left of each, in order.
        """
        room = self.batch_tokens - decoding
        if (decoding == 0 and not (waited or self.waited_for)) or room <= 0:
            return max(0, room)
        step, measured = self.cost.step, self.cost.largest_prefill
        first = self.first_chunk + get_offset(decoding, split=self.cost.split)
        if step is None or not measured:
            return min(room, first)
        rows = StepShape(1, 0, decoding, context)
        cost = ChunkCost(*(step, rows, prompts or ((0, room),)), split=self.cost.split, sampling_s=sampling_s)
        largest = min(room, cost.wanted, max(first, self.MAX_GROWTH * measured))
        max_attended = self.MAX_GROWTH * max(self.cost.largest_attended, context, TILE**2)
        chunks = [each for each in self._chunks(largest, cost) if cost.shape(each).attended <= max_attended]
        if not streamed and not self.waited_for:
            return chunks[-1] if chunks else min(largest, self.MIN_CHUNK)
        return self._keep_target(cost, chunks, min(largest, self.MIN_CHUNK))

    def _keep_target(self, cost: ChunkCost, chunks: list[int], smallest: int) -> int:
        """The largest chunk within the target; or the smallest of those with about the best price."""
        tiles = [chunk for chunk in chunks if chunk >= TILE + cost.offset]
        kept = max((chunk for chunk in tiles if cost.seconds(chunk) <= self.max_step_s), default=0)
        if not kept:
            most = max((chunk for chunk in chunks if chunk not in tiles), default=smallest)
            between = range(smallest + 1, most + 1)  # what is larger than a misfit is one, too
            kept = smallest + bisect(between, False, key=lambda chunk: cost.seconds(chunk) > self.max_step_s)
        limit_s = self.max_wait_s / (self.sets + self.alternates)
        longer = [chunk for chunk in chunks if chunk > kept and cost.seconds(chunk) <= limit_s]
        if not longer:
            return kept
        prices = {chunk: cost.price(chunk) for chunk in (kept, *longer)}
        limit = (1 + self.MAX_PRICE) * min(prices.values())
        return next(chunk for chunk, price in prices.items() if price <= limit)

    def _chunks(self, largest: int, cost: ChunkCost) -> list[int]:
        """Sizes up to `largest` that are worth a look: whole tiles, parts of one, and all that there is."""
        tiles = (largest - cost.offset) // TILE
        counts = {*range(1, tiles + 1, max(1, tiles // TILE.bit_length())), tiles}  # all that a CPU's has
        whole = {count * TILE + cost.offset for count in counts}
        parts = {TILE >> bits for bits in range(1, TILE.bit_length())} | {TILE - 1}
        return sorted(chunk for chunk in {*whole, *parts, largest} if 0 < chunk <= largest)


def get_offset(decoding: int, *, split: bool) -> int:
    """What a chunk must have beyond whole tiles, to be computed in whole tiles beside these rows.

    With split KV, a row's first token is computed along with the decoding rows; with unified KV all tokens
    are computed together.
    """
    return int(decoding > 0) if split else -(decoding % TILE)


def limit_scored(running: Iterable[Sequence], counts: dict[str, int], vocabulary: int) -> None:
    """Bound the prompt tokens of a step that are scored: each takes a line of logits. One gets on."""
    room = max(1, SCORED_LOGITS // vocabulary)
    for sequence in running:
        if sequence.unscored and (count := counts.pop(sequence.id, 0)) and room:
            counts[sequence.id] = min(count, room)
            room -= counts[sequence.id]


def divide(room: int, wanted: List[int], offset: int = 0) -> list[int]:
    """Shares of a step's prefill tokens between prompts that want `wanted` each, the first goes first.

    A prompt is ended or gets whole tiles (and `offset`); only the first gets less, if there is no more room.
    Those at the end that get nothing may be missing.
    """
    shares: list[int] = []
    for want in wanted:
        if not room:
            break
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

    With split KV, llama.cpp computes a run of consecutive ids at once, so gaps between two rows of one token
    cost another pass over the weights. An unused slot (`unused`: cells by slot) can be given a token that is
    discarded, which costs a row; and every row of a run looks at as many cells as the longest has.
    """
    padding: list[int] = []
    if (step := cost.step) is None:
        return ()
    taken, widest = {row.seq_id for row in rows}, max(row.position for row in rows)
    room = max_tokens - sum(len(row.tokens) for row in rows)
    for before, after in pairwise(row.seq_id for row in rows if len(row.tokens) == 1):
        gap = [seq_id for seq_id in range(before + 1, after) if seq_id not in taken]
        if gap and len(gap) <= room - len(padding) and unused.keys() >= set(gap):
            wider = max(0, max(unused[seq_id] for seq_id in gap) - widest)
            attending = len(rows) + len(padding) + len(gap)
            if step.ubatch > len(gap) * step.row + attending * wider * step.attended:
                padding += gap
    return tuple(padding)
