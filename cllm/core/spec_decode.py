"""Speculative decoding: drafters, how often their drafts are accepted, and the draft plan of a step.

The runner verifies every draft token, so a wrong draft costs time, never text.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING, NamedTuple

from cllm.backend.base import Batch, Drafter
from cllm.core.step_cost import StepCostModel
from cllm.types import Request

if TYPE_CHECKING:
    from cllm.core.sequence import Sequence


def common_length(one: Tokens[int], other: Tokens[int]) -> int:
    """The length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((length for length, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


class NgramIndex:
    """Where each n-gram of a text stood last: hash chains in flat arrays, some twenty bytes a token.

    A place is the position after an n-gram. `_heads` has the latest place of each hash; from a place,
    `_earlier` leads to the place before it of the same hash. What is found is compared with the text.
    """

    SIZES = (4, 3, 2)
    SHIFT = 17  # a token's own bits, about: the hash is what its factor carries beyond them

    def __init__(self, tokens: int) -> None:
        """For about so many tokens; more of them make it slower, not wrong."""
        buckets = 1 << tokens.bit_length()
        self._mask = buckets - 1
        # Random, so that no text can be made to fall on one chain; one for each token of the longest n-gram.
        bits = self.SHIFT + buckets.bit_length()
        self._factors = [random.getrandbits(bits) | 1 for _ in range(max(self.SIZES))]
        self._heads = [array("i", bytes(buckets * array("i").itemsize)) for _ in self.SIZES]
        self._earlier = [array("i") for _ in self.SIZES]
        self._append = [earlier.append for earlier in self._earlier]
        self._newest: Tokens[int] = [0] * max(self.SIZES)  # before `indexed`; before the text there are zeros
        self.indexed = 0  # places below this are in the index

    @property
    def crowded(self) -> bool:
        """Its chains have become long: a larger one is due."""
        return self.indexed > 2 * self._mask

    @property
    def memory_bytes(self) -> int:
        return array("i").itemsize * len(self.SIZES) * (self._mask + 1 + self.indexed)

    def add(self, tokens: Tokens[int], max_indexed: int) -> None:
        """Of tokens that are new, the first `max_indexed` come into the index.

        It never has the last place: the newest tokens themselves are no earlier occurrence.
        """
        mask, shift, place = self._mask, self.SHIFT, self.indexed
        first, second, third, fourth = self._factors
        heads4, heads3, heads2 = self._heads
        append4, append3, append2 = self._append
        a, b, c, d = self._newest
        for token in tokens[place : place + max_indexed]:
            total = c * second + d * first
            bucket = total >> shift & mask
            append2(heads2[bucket])
            heads2[bucket] = place
            total += b * third
            bucket = total >> shift & mask
            append3(heads3[bucket])
            heads3[bucket] = place
            total += a * fourth
            bucket = total >> shift & mask
            append4(heads4[bucket])
            heads4[bucket] = place
            a, b, c, d = b, c, d, token
            place += 1
        self.indexed, self._newest = place, (a, b, c, d)

    def find(self, tokens: Tokens[int]) -> int:
        """The latest place of the longest of its newest n-grams that stood in it before; 0: none did."""
        mask, shift = self._mask, self.SHIFT
        first, second, third, fourth = self._factors
        heads4, heads3, heads2 = self._heads
        a, b, c, d = self._newest if self.indexed == len(tokens) else tokens[-len(self._factors) :]
        total = c * second + d * first
        bucket2 = total >> shift & mask
        total += b * third
        bucket3 = total >> shift & mask
        bucket4 = total + a * fourth >> shift & mask
        for number, found in enumerate((heads4[bucket4], heads3[bucket3], heads2[bucket2])):
            if found:
                size, earlier = self.SIZES[number], self._earlier[number]
                newest = tokens[-size:]
                while found:
                    if found >= size and tokens[found - size : found] == newest:
                        return found
                    found = earlier[found]
        return 0


class NgramDrafter:
    """Prompt lookup: proposes what followed when the newest tokens stood in the text before.

    Good at summaries, code edits, tables, quoting; needs no second model. A text that repeats a short cycle
    is proposed to go on repeating it.
    """

    MAX_INDEXED = 4096  # tokens of a long prompt indexed in one step

    def __init__(self) -> None:
        self._index: NgramIndex | None = None
        self._larger: NgramIndex | None = None  # takes its place when it has caught up

    @property
    def memory_bytes(self) -> int:
        """Of the index."""
        return sum(index.memory_bytes for index in (self._index, self._larger) if index is not None)

    def learn(self, tokens: Tokens[int]) -> NgramIndex:
        """Take in what is new, before a proposal is wanted."""
        if self._index is None:
            self._index = NgramIndex(len(tokens))
        self._index.add(tokens, self.MAX_INDEXED)
        return self._index

    def propose(self, tokens: Tokens[int], max_tokens: int) -> list[int]:
        index = self.learn(tokens)
        place = index.find(tokens)
        if self._larger is not None or index.crowded:
            self._grow(tokens)
        followed = list(tokens[place : place + max_tokens]) if place else []
        return [followed[number % len(followed)] for number in range(max_tokens)] if followed else []

    def _grow(self, tokens: Tokens[int]) -> None:
        """Bring a larger index forward by a slice."""
        if self._larger is None:
            self._larger = NgramIndex(2 * len(tokens))
        self._larger.add(tokens, self.MAX_INDEXED)
        if self._larger.indexed == len(tokens):
            self._index, self._larger = self._larger, None


class PredictionDrafter:
    """Proposes the text that the client expects, from where the answer has got to in it.

    Where the answer has left it, it is found again by the newest n-gram; until then `others` drafts.
    """

    SIZE = NgramIndex.SIZES[1]

    def __init__(self, prediction: Tokens[int], prompt_tokens: int, others: Drafter | None) -> None:
        self._prediction = prediction
        self._others = others
        self._known = prompt_tokens  # of the tokens at the last call
        self._place = 0  # in the prediction, as far as the answer has followed it
        self._follows = True
        self._places: dict[tuple[int, ...], list[int]] = {}  # after each n-gram
        for end in range(self.SIZE, len(prediction)):
            self._places.setdefault(tuple(prediction[end - self.SIZE : end]), []).append(end)

    @property
    def memory_bytes(self) -> int:
        return self._others.memory_bytes if isinstance(self._others, NgramDrafter) else 0

    def propose(self, tokens: Tokens[int], max_tokens: int) -> list[int]:
        new, self._known = tokens[self._known :], len(tokens)
        if self._follows:
            right = common_length(new, self._prediction[self._place : self._place + len(new)])
            self._place += right
            self._follows = right == len(new)
        if not self._follows:
            places = self._places.get(tuple(tokens[-self.SIZE :]), [])
            if (after := bisect_right(places, self._place)) < len(places):
                self._place, self._follows = places[after], True
        if self._follows and (expected := self._prediction[self._place : self._place + max_tokens]):
            return list(expected)
        return self._others.propose(tokens, max_tokens) if self._others is not None else []


class DraftState:
    """One sequence's drafts: the standing proposal, and how often proposals come true.

    Every proposal is compared with the tokens that are generated afterwards, whether it was submitted or not.
    So text that does not repeat itself is never slowed down, and one that begins to is noticed.
    """

    MEMORY = 0.8  # weight of the acceptance rate so far, when one more token was judged
    MAX_PAUSE = 64  # steps

    def __init__(self, drafter: Drafter, *, acceptance_rate: float, pauses: bool = False) -> None:
        """`pauses`: asking the drafter takes time itself, so it is asked less often after failures."""
        self._drafter = drafter
        self._pauses = pauses
        self._pause = 0  # steps left in which the drafter is not asked
        self._proposed_at = 0  # how many tokens there were
        self.proposal: list[int] = []
        self.acceptance_rate = acceptance_rate
        self.drafted = 0
        self.accepted = 0

    def propose(self, tokens: Tokens[int], max_tokens: int) -> list[int]:
        """Draft tokens for the next step, at most `max_tokens`; often none."""
        self._judge(tokens)
        self.proposal = []
        if self._pause > 0:
            self._pause -= 1
        elif max_tokens > 0:
            self.proposal = self._drafter.propose(tokens, max_tokens)
            self._proposed_at = len(tokens)
        return self.proposal

    def learn(self, tokens: Tokens[int]) -> None:
        """What would otherwise be done when it is asked for drafts."""
        if isinstance(self._drafter, NgramDrafter):
            self._drafter.learn(tokens)

    def _judge(self, tokens: Tokens[int]) -> None:
        for number, token in enumerate(self.proposal):
            place = self._proposed_at + number
            if place >= len(tokens):
                return
            right = tokens[place] == token
            self.acceptance_rate = self.MEMORY * self.acceptance_rate + (1 - self.MEMORY) * right
            if not right:
                if self._pauses and not number:
                    self._pause = min(self.MAX_PAUSE, int(1 / max(self.acceptance_rate, 1 / self.MAX_PAUSE)))
                return

    def expected(self, length: int) -> float:
        """How many of so many draft tokens will be accepted: p + p² + … + pⁿ, p the acceptance rate."""
        rate = self.acceptance_rate
        return float(length) if rate >= 1 else rate * (1 - rate**length) / (1 - rate)

    @property
    def memory_bytes(self) -> int:
        """What an n-gram drafter keeps of the text; a draft model's memory is allocated at its start."""
        drafter = self._drafter
        return drafter.memory_bytes if isinstance(drafter, NgramDrafter | PredictionDrafter) else 0

    def reject(self) -> None:
        """The drafts found no room: they must prove themselves again."""
        self.acceptance_rate = 0.0


class DraftPlan(NamedTuple):
    """All drafts of a step are equally long. `padded`: rows without a draft get other tokens to verify."""

    length: int = 0
    padded: bool = False


class SpecDecodePolicy:
    """Which sequences draft in the next step, and how far: what yields the most tokens for its time."""

    NGRAM_ACCEPTANCE = 0.4  # to start with: three tokens that came true, and drafts pay for a lone sequence
    MODEL_ACCEPTANCE = 0.9  # of a draft model's tokens, until it is known better
    LOOKUP_S = 1e-5  # of a sequence's drafter, about
    MAX_LOOKUP = 0.01  # of a step
    LOOK_EVERY = 4  # steps, where it did not pay, on a GPU: after a look no batch is prepared ahead
    REST = 32  # steps; twice as many each time that it did not pay, up to
    MAX_REST = 256
    TRIAL, TRIAL_REST = 8, 1024  # steps with drafts that have not gained so far; and then none for so long
    LEARN_EVERY = 16  # steps, of each sequence in its turn, meanwhile
    MIN_GAIN = 1.05  # that drafts must promise: acceptance is an estimate, and long contexts cost more
    MAX_SHARED_COST = 1.5  # plain steps at most, where a row does not draft and waits for those that do

    def __init__(
        self,
        max_tokens: int,
        new_drafter: Callable[[], Drafter | None] = NgramDrafter,
        *,
        draft_model: Callable[[str | None], Drafter | None] | None = None,
        share_across_tenants: bool = False,
    ) -> None:
        """`draft_model` makes the drafters instead; it gets the tenant whose KV may be used, or None."""
        self._max_tokens = max_tokens
        self._rest, self._next_rest = 0, self.REST  # steps left without a look; and after the next one
        self._trial = self.TRIAL  # steps left to prove that they gain
        self._look = 0  # steps until the next one, at least
        self._resting = False  # in the last step that was asked about
        self._steps = 0
        self._new_drafter = new_drafter
        self._draft_model = draft_model
        self._across_tenants = share_across_tenants

    @property
    def drafts(self) -> bool:
        return self._max_tokens > 0

    def start(self, request: Request) -> DraftState | None:
        """None where drafts are not wanted, or where a grammar would have to be asked about each.

        A constraint that sleeps until a trigger allows them up to there.
        """
        if self._rest <= self.MAX_REST:  # not where drafts were tried and lost
            self._rest, self._next_rest = 0, self.REST
        constrained = request.constraint is not None and not request.constraint.triggers
        if not self._max_tokens or not request.speculate or constrained:
            return None
        if self._draft_model is None:
            drafter, rate = self._new_drafter(), self.NGRAM_ACCEPTANCE
        else:
            tenant = "" if self._across_tenants else request.tenant
            drafter, rate = self._draft_model(tenant if request.reuse else None), self.MODEL_ACCEPTANCE
        if request.prediction:
            drafter = PredictionDrafter(request.prediction, len(request.prompt), drafter)
            return DraftState(drafter, acceptance_rate=self.MODEL_ACCEPTANCE)
        if drafter is None:
            return None
        return DraftState(drafter, acceptance_rate=rate, pauses=self._draft_model is not None)

    def learn(self, sequences: Iterable[Sequence]) -> None:
        """Take in what was said. On a GPU that is done while it computes; else when drafts are looked for.

        While drafts rest, several tokens at a time: that takes less.
        """
        self._steps += 1
        for sequence in sequences if self._max_tokens else ():
            due = not self._resting or (sequence.arrival + self._steps) % self.LEARN_EVERY == 0
            if due and sequence.drafts is not None:
                sequence.drafts.learn(sequence.tokens)

    def rests(self, rows: int, cost: StepCostModel) -> bool:
        """No drafts are looked for in a step of so many rows; to be asked before each.

        Where looking for drafts is a good part of a step, it is not done for a while after it did not pay.
        """
        if not self._max_tokens or not cost.prices_drafts(rows):
            return True
        self._rest -= self._rest > 0
        self._look -= self._look > 0
        costly = rows * self.LOOKUP_S > self.MAX_LOOKUP * cost.plain_step_s(rows)
        self._resting = self._rest > 0 and (costly or self._look > 0)
        return self._resting

    def draft(
        self, sequences: Collection[Sequence], cost: StepCostModel, *, room: int, max_step_s: float
    ) -> dict[int, list[int]]:
        """Draft tokens by seq_id, all equally long, at most `room` in all; none in a step with a prompt.

        llama.cpp splits rows of different length into separate ubatches, which costs more than longer drafts
        win. Rows without a draft are padded where that is cheaper.
        """
        if not (self._max_tokens and sequences) or any(sequence.pending > 1 for sequence in sequences):
            return {}
        rows = len(sequences)
        if self.rests(rows, cost):
            return {}
        self._look = self.LOOK_EVERY if cost.records else 0
        self._rest = self._next_rest  # unless it pays
        self._next_rest = min(2 * self._next_rest, self.MAX_REST)
        proposals = self._proposals(sequences)
        if not proposals:
            return {}
        plan = self._best_plan(sequences, proposals, cost, room=room, max_step_s=max_step_s)
        if not plan.length:
            cost.doubt_drafts(rows)
            return {}
        if not self._goes_on(cost.drafts_gain(rows)):
            return {}
        drafts = {
            seq_id: state.proposal[: plan.length]
            for seq_id, state in proposals.items()
            if len(state.proposal) >= plan.length
        }
        if plan.padded:
            for sequence in sequences:
                if sequence.seq_id not in drafts and sequence.drafts is not None:
                    padding = [sequence.tokens[-1]] * plan.length
                    drafts[sequence.seq_id] = [*sequence.drafts.proposal, *padding][: plan.length]
        return _before_triggers(drafts, sequences)

    def _goes_on(self, gains: bool) -> bool:
        """Drafts are expected to pay. Where they did not, they have some steps to do better, then a rest."""
        if gains:
            self._rest, self._next_rest, self._trial = 0, self.REST, self.TRIAL
        elif self._trial:
            self._rest, self._trial = 0, self._trial - 1
        else:
            self._rest, self._trial = self.TRIAL_REST, self.TRIAL
        return not self._rest

    def _proposals(self, sequences: Collection[Sequence]) -> dict[int, DraftState]:
        longest = self._max_tokens
        if self._draft_model:  # its own time is in no cost: it drafts for few sequences at a time
            longest = longest // len(sequences) if longest >= 2 * len(sequences) else 0
        proposals: dict[int, DraftState] = {}
        for sequence in sequences:
            drafts, room = sequence.drafts, min(longest, sequence.draft_room)
            if drafts is not None and drafts.propose(sequence.tokens, room):
                proposals[sequence.seq_id] = drafts
        return proposals

    def _best_plan(
        self,
        sequences: Collection[Sequence],
        proposals: Mapping[int, DraftState],
        cost: StepCostModel,
        *,
        room: int,
        max_step_s: float,
    ) -> DraftPlan:
        """The plan that yields the most tokens for its time; of equals the shortest."""
        rows, all_ids = len(sequences), [sequence.seq_id for sequence in sequences]
        max_padding = 0  # with unified KV no row needs padding; nor where one of them must not draft
        if cost.split and all(sequence.drafts is not None for sequence in sequences):
            max_padding = min(sequence.draft_room for sequence in sequences)
        max_cost = max(2.0, max_step_s / cost.plain_step_s(rows))
        context = max(sequence.num_computed for sequence in sequences)
        best, best_rate = DraftPlan(), self.MIN_GAIN * rows  # tokens for a plain step's time
        for length in range(1, max(len(state.proposal) for state in proposals.values()) + 1):
            able = [seq_id for seq_id, state in proposals.items() if len(state.proposal) >= length]
            tokens = rows + sum(proposals[seq_id].expected(length) for seq_id in able)
            partial = len(able) < rows
            for padded in (False, True) if partial and length <= max_padding else (False,):
                drafting = all_ids if padded else able
                relative = cost.draft_step(rows, drafting, length, context)
                allowed = self.MAX_SHARED_COST if partial else max_cost
                fits = len(drafting) * length <= room and (relative <= allowed or rows == 1)
                if fits and tokens / relative > best_rate:
                    best, best_rate = DraftPlan(length, padded), tokens / relative
        return best


def _before_triggers(drafts: dict[int, list[int]], sequences: Collection[Sequence]) -> dict[int, list[int]]:
    """The drafts, cut before a token that would wake a constraint: what follows that is for the grammar."""
    for sequence in sequences:
        if sequence.seq_id in drafts and sequence.constraint is not None and sequence.constraint.watch:
            draft = drafts.pop(sequence.seq_id)
            if kept := draft[: sequence.constraint.watch.count_before(draft)]:
                drafts[sequence.seq_id] = kept
    return drafts


def reject_drafts(batch: Batch, running: Mapping[int, Sequence]) -> bool:
    """There was no room for a batch: True if it held drafts, which are then not made for a while."""
    drafting = [row for row in batch.rows if row.outputs > 1]
    for row in drafting:
        if (drafts := running[row.seq_id].drafts) is not None:
            drafts.reject()
    return bool(drafting)
