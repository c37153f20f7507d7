"""Replica load: the requests, speed and cache of a replica, for the gateways that place there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from cllm.cluster.block_hashes import BLOCK_TOKENS, hash_blocks
from cllm.cluster.placer import ReplicaReport, ReplicaSpeed
from cllm.messages import StepStats
from cllm.types import Limits, Request, RequestOutput

MEMORY = 0.9  # of a mean, at each new value
MIN_PREFILL_TOKENS = 64  # a step with so many more than rows tells what a prompt's token takes


class ReplicaLoad:
    """Follows what goes to an engine and what comes back. Times are given by the caller."""

    def __init__(self, *, share_across_tenants: bool = False) -> None:
        self._share = share_across_tenants
        self._limits: Limits | None = None
        self.stats = StepStats()
        self._pending: dict[str, int] = {}  # tokens until the first one comes, by request
        self._began: dict[str, float] = {}
        self._prompts: dict[str, tuple[str, list[int]]] = {}  # tenant and tokens, of those that leave blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._changed = True  # since the blocks were reported
        self._prefill_token_s = 0.0  # not measured yet
        self._slot_s = 0.0

    @property
    def requests(self) -> Mapping[str, int]:
        return self._pending

    @property
    def slots(self) -> int:
        return 1 if self._limits is None else self._limits.parallel or self._limits.sequences

    def reset(self, limits: Limits) -> None:
        """A new engine is ready: it has no request and no cache."""
        self._limits, self.stats = limits, StepStats()
        self._pending.clear()
        self._began.clear()
        self._prompts.clear()
        self.forget_blocks()

    def forget_blocks(self) -> None:
        self._blocks.clear()
        self._changed = True

    def submitted(self, request: Request, now: float) -> None:
        tokens = [*request.prompt.items, *request.generated_prefix]
        tenant = "" if self._share else request.tenant
        count, hit = max(1, len(tokens) or request.input_tokens), 0
        if request.reuse and tokens:
            blocks = hash_blocks(tokens, tenant)
            hit = next((i for i, block in enumerate(blocks) if block not in self._blocks), len(blocks))
            self._touch(blocks)
            self._prompts[request.id] = tenant, tokens
        self._pending[request.id] = max(1, count - hit * BLOCK_TOKENS)
        self._began[request.id] = now

    def processed(self, outputs: Sequence[RequestOutput], stats: StepStats, now: float) -> None:
        self.stats = stats
        if stats.tokens >= stats.running + MIN_PREFILL_TOKENS:
            token_s = stats.step_s / stats.tokens
            self._prefill_token_s = _mean(self._prefill_token_s or token_s, token_s)
        for output in outputs:
            name = output.request_id
            if name not in self._pending:
                continue
            self._pending[name] = 0
            if name in self._prompts:
                self._prompts[name][1].extend(output.tokens)
            if output.finish_reason is not None:
                held_s = now - self._began.pop(name)
                self._slot_s = _mean(self._slot_s, held_s) if self._slot_s else held_s
                del self._pending[name]
                if name in self._prompts:
                    tenant, tokens = self._prompts.pop(name)
                    self._touch(hash_blocks([*tokens, 0], tenant))

    def _touch(self, blocks: Sequence[int]) -> None:
        """These were used last. There are no more of them than the KV memory has room for."""
        for block in reversed(blocks):  # a prefix outlives what follows it
            if block not in self._blocks:
                self._changed = True
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        limit = 0 if self._limits is None else self._limits.cells // BLOCK_TOKENS
        while len(self._blocks) > limit:
            self._blocks.popitem(last=False)
            self._changed = True

    def report(self, *, all_blocks: bool = False) -> ReplicaReport:
        """For all gateways. With `all_blocks`, or where they have changed, with the blocks of its cache."""
        blocks = [*self._blocks] if all_blocks or self._changed else None
        self._changed = False
        limits = self._limits
        return ReplicaReport(
            speed=ReplicaSpeed(prefill_token_s=self._prefill_token_s, slot_s=self._slot_s, slots=self.slots),
            requests=dict(self._pending),
            blocks=blocks,
            free_cells=0 if limits is None else max(0, limits.cells - self.stats.cells_used),
        )

    @property
    def cells(self) -> int:
        return 0 if self._limits is None else self._limits.cells

    @property
    def waiting(self) -> int:
        """Requests beyond its slots."""
        return max(0, len(self._pending) - self.slots)


def _mean(mean: float, value: float) -> float:
    return MEMORY * mean + (1 - MEMORY) * value
