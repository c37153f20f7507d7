"""A simulated replica: slots, chunked prefill, decode steps and a cache of blocks, by the cost of a step.

Steps with a prompt are computed one by one. Where only answers are computed, many steps are one event, which
an arrival cuts short.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from bench.cluster.trace import BLOCK_TOKENS, TraceRequest
from cllm.cluster.placer import ReplicaReport, ReplicaSpeed
from cllm.config import MAX_ITL, TARGET_ITL_MS
from cllm.core.prefill_budget import PrefillBudget
from cllm.core.step_cost import TILE


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step takes, as `cllm.core.step_cost` has it; seconds."""

    base: float
    prefill_token: float
    row: float
    attended: float  # for each pair of a token and a cell before it
    restore_token: float = 0.0  # of a cached prefix

    def step_s(self, tokens: int, rows: int, attended: float) -> float:
        return self.base + self.prefill_token * tokens + self.row * rows + self.attended * attended


@dataclass(frozen=True, slots=True)
class ReplicaSize:
    slots: int = 16
    chunk_tokens: int = 512  # prefill tokens of a step
    target_s: float = TARGET_ITL_MS / 1000  # between two tokens of an answer
    cache_blocks: int = 1000


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the cluster."""

    trace: TraceRequest
    gateway: int = 0
    replica: int = -1
    generated: int = 0
    first_s: float | None = None
    ended_s: float | None = None
    moved: int = 0  # times that its replica died
    pending: int = 0  # tokens to be computed for its next token
    position: int = 0  # tokens in KV
    admitted_s: float = 0.0

    @property
    def tokens(self) -> int:
        """What a replica must have in KV before the next token: prompt and answer so far."""
        return self.trace.tokens + self.generated

    @property
    def left(self) -> int:
        return self.trace.answer_tokens - self.generated


@dataclass(slots=True)
class StepEnd:
    """What a step has brought: first tokens, also of answers that were resumed, and ends."""

    begun: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)


class SimulatedReplica:
    """One replica. The simulation says when; it holds no clock."""

    MEMORY = 0.9

    def __init__(self, number: int, costs: StepCosts, size: ReplicaSize, speed: float = 1.0) -> None:
        self.number = number
        self._costs, self._size, self._slower = costs, size, 1 / speed
        self.version = 0  # of the event that is its next
        self.alive = True
        self.computed = self.reused = 0  # prompt tokens
        self._turn = 0
        self.prefill_token_s = costs.prefill_token * self._slower
        self.slot_s = 1.0
        self._clear()

    def _clear(self) -> None:
        self.waiting: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.decoding: list[Job] = []
        self.cache: OrderedDict[int, None] = OrderedDict()
        self._changed = True  # since the last report
        self._began = self._step_s = 0.0
        self._steps = 0  # decode-only steps of this event; 0: it has a prompt
        self._chunks: list[tuple[Job, int]] = []
        self._busy = False

    # What comes ------------------------------------------------------------------------------------

    def submit(self, job: Job, now: float) -> float | None:
        """Take a request; when its present event ends now, if that changes."""
        job.replica = self.number
        job.pending = job.tokens - self.count_cached(job.trace.blocks) * BLOCK_TOKENS
        self.waiting.append(job)
        if not self._busy:
            return self._begin(now)
        free = len(self.prefilling) + len(self.decoding) < self._size.slots
        if self._steps and free:  # it need not wait for more than the step that runs
            self._steps = min(self._steps, max(1, ceil((now - self._began) / self._step_s)))
            return self._schedule(self._began + self._steps * self._step_s)
        return None

    def die(self) -> list[Job]:
        """What it had; the cache is gone with it."""
        lost = [*self.decoding, *self.prefilling, *self.waiting]
        self.alive, self.version = False, self.version + 1
        self._clear()
        for job in lost:
            job.moved += 1
            job.position = 0
        return lost

    def finish(self, now: float) -> tuple[StepEnd, float | None]:
        """The present event is over: what it brought, and when the next one is."""
        end = StepEnd()
        steps = max(1, self._steps)
        for job in self.decoding:
            job.generated += steps
            job.position += steps
        for job, tokens in self._chunks:
            job.pending -= tokens
            job.position += tokens
            self.computed += tokens
        for job in [job for job in self.prefilling if not job.pending]:
            self.prefilling.remove(job)
            self.decoding.append(job)
            job.generated += 1
            self._keep(job.trace.blocks)
            end.begun.append(job)
        for job in [job for job in self.decoding if job.left <= 0]:
            self.decoding.remove(job)
            self._keep(job.trace.blocks)
            self.slot_s += (1 - self.MEMORY) * (now - job.admitted_s - self.slot_s)
            end.ended.append(job)
        return end, self._begin(now)

    # Steps -----------------------------------------------------------------------------------------

    def _begin(self, now: float) -> float | None:
        """Begin the next event; when it ends, None if there is nothing to do."""
        restore_s = self._admit(now)
        self._busy = bool(self.prefilling or self.decoding)
        if not self._busy:
            return None
        rows = len(self.decoding)
        context = sum(job.position for job in self.decoding)
        self._began, self._steps, self._chunks = now, 0, []
        if not self.prefilling:
            self._steps = min(job.left for job in self.decoding)
            context += rows * self._steps // 2
            self._step_s = self._costs.step_s(0, rows, context) * self._slower
            return self._schedule(now + self._steps * self._step_s)
        tokens, attended = 0, float(context)
        prompts = self._in_turn()
        room = self._room(rows, context, prompts[0].position)
        for job in prompts:
            if part := min(job.pending, room - tokens):
                self._chunks.append((job, part))
                tokens += part
                attended += part * (job.position + part / 2)
        step_s = self._costs.step_s(tokens, rows, attended) * self._slower + restore_s
        weight = (1 - self.MEMORY) * tokens / self._size.chunk_tokens
        self.prefill_token_s += weight * (step_s / tokens - self.prefill_token_s)
        return self._schedule(now + step_s)

    def _schedule(self, end: float) -> float:
        self.version += 1
        return end

    def _room(self, rows: int, context: int, position: int) -> int:
        """Prefill tokens of a step beside so many answers, by time and in tiles: see `PrefillBudget`."""
        if not rows:
            return self._size.chunk_tokens
        costs, aim_s = self._costs, PrefillBudget.AIM * self._size.target_s / self._slower
        answers_s = costs.base + costs.step_s(0, rows, context)  # the prompt is another pass over the weights
        token_s = costs.prefill_token + costs.attended * position
        tokens = int((aim_s - answers_s) / token_s)
        if tokens < TILE <= (MAX_ITL * aim_s - answers_s) / token_s:
            tokens = TILE
        whole = tokens // TILE * TILE
        return min(self._size.chunk_tokens, max(PrefillBudget.MIN_CHUNK, whole or tokens))

    def _in_turn(self) -> Sequence[Job]:
        """The shortest prompt first; one step in some belongs to the oldest."""
        self._turn += 1
        if len(self.prefilling) == 1:
            return self.prefilling
        first = int(self._turn % PrefillBudget.OLDEST_FIRST == 0)
        return [*self.prefilling[:first], *sorted(self.prefilling[first:], key=lambda job: job.pending)]

    def _admit(self, now: float) -> float:
        """Start what waits while there are slots; the seconds that cached prefixes take to be restored."""
        restored = 0
        while self.waiting and len(self.prefilling) + len(self.decoding) < self._size.slots:
            job = self.waiting.popleft()
            hit = self.count_cached(job.trace.blocks) * BLOCK_TOKENS
            self._keep(job.trace.blocks[: hit // BLOCK_TOKENS])
            job.position, job.pending, job.admitted_s = hit, job.tokens - hit, now
            restored += hit
            self.reused += hit
            self.prefilling.append(job)
        return restored * self._costs.restore_token * self._slower

    # The cache -------------------------------------------------------------------------------------

    def count_cached(self, blocks: Sequence[int]) -> int:
        """The first blocks of a prompt that are in the cache."""
        return next((place for place, block in enumerate(blocks) if block not in self.cache), len(blocks))

    def _keep(self, blocks: Sequence[int]) -> None:
        """Use blocks: the last ones of a prompt are evicted first."""
        for block in reversed(blocks):
            self._changed |= block not in self.cache
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self._size.cache_blocks:
            self.cache.popitem(last=False)

    # What it says ----------------------------------------------------------------------------------

    @property
    def speed(self) -> ReplicaSpeed:
        return ReplicaSpeed(
            prefill_token_s=self.prefill_token_s,
            restore_token_s=self._costs.restore_token * self._slower,
            slot_s=self.slot_s,
            slots=self._size.slots,
        )

    def report(self) -> ReplicaReport:
        """What it says of itself; the blocks of its cache, if they have changed since the last time."""
        pending = {job.trace.name: job.pending for job in (*self.waiting, *self.prefilling)}
        decoding = dict.fromkeys((job.trace.name for job in self.decoding), 0)
        blocks = frozenset(self.cache) if self._changed else None
        self._changed = False
        return ReplicaReport(speed=self.speed, requests=pending | decoding, blocks=blocks)
