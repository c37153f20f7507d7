"""Placer of replicas: chooses the one from which the first token of a request is expected soonest.

A prompt is chained hashes of its blocks of 64 tokens, apart for each tenant; an index has the replicas that
hold a block in their KV cache. Pure code without a clock: relay, simulation and tests say what happens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b

import msgspec

from cllm.errors import EngineNotReady

BLOCK_TOKENS = 64


def hash_blocks(tokens: Sequence[int], tenant: str = "") -> tuple[int, ...]:
    """Hash each whole block of a prompt; a hash stands for all tokens up to the end of its block.

    The last token is always computed, so that a block which ends with it is left out.
    """
    data = array("i", tokens).tobytes()
    size = BLOCK_TOKENS * array("i").itemsize
    key = blake2b(tenant.encode(), digest_size=8).digest()
    hashes = []
    for end in range(size, len(data), size):
        key = blake2b(data[end - size : end], digest_size=8, key=key).digest()
        hashes.append(int.from_bytes(key, "little"))
    return tuple(hashes)


class BlockIndex:
    """Sets of replicas by block hash, as bits: one look-up a block tells of all replicas."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # by block: a bit for each replica
        self._blocks: dict[int, set[int]] = {}  # by replica

    def count(self, replica: int) -> int:
        """Count the blocks that a replica is known to hold."""
        return len(self._blocks.get(replica, ()))

    def add(self, replica: int, blocks: Iterable[int]) -> None:
        """Add blocks that a replica holds, or will hold soon."""
        bit, holders = 1 << replica, self._holders
        known = self._blocks.setdefault(replica, set())
        for block in blocks:
            if block not in known:
                known.add(block)
                holders[block] = holders.get(block, 0) | bit

    def replace(self, replica: int, blocks: Collection[int]) -> None:
        """Set the blocks that a replica holds."""
        new = set(blocks)
        self._discard(replica, self._blocks.get(replica, set()) - new)
        self.add(replica, new)

    def remove(self, replica: int) -> None:
        """Forget a replica that has gone."""
        self._discard(replica, self._blocks.pop(replica, set()))

    def _discard(self, replica: int, blocks: Collection[int]) -> None:
        bit, holders, known = 1 << replica, self._holders, self._blocks.get(replica, set())
        known.difference_update(blocks)
        for block in blocks:
            if left := holders[block] & ~bit:
                holders[block] = left
            else:
                del holders[block]

    def find(self, blocks: Sequence[int]) -> dict[int, int]:
        """Count a prompt's first blocks on each replica; those that hold none are left out."""
        holders, found = self._holders, dict[int, int]()
        last = holders.get(blocks[0], 0) if blocks else 0
        for count in range(1, len(blocks)):
            now = last & holders.get(blocks[count], 0)
            if now != last:
                found |= dict.fromkeys(_bits(last & ~now), count)
                last = now
                if not now:
                    break
        return found | dict.fromkeys(_bits(last), len(blocks))


def _bits(number: int) -> Iterable[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


class ReplicaSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a replica, as it has measured it."""

    prefill_token_s: float  # beside what else it computes; a relay completes what is not measured yet: 0
    restore_token_s: float = 0.0  # of a prefix that is in its cache
    slot_s: float = 0.0  # how long a request holds a slot
    slots: int = 1


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load of a replica, which it sends every other second for placement, metrics and autoscaling."""

    speed: ReplicaSpeed
    requests: Mapping[str, int]  # all that it has: tokens that are still to be computed before the first one
    blocks: Collection[int] | None = None  # of prompts, in its cache; None: as before
    cells: int = 0
    cells_used: int = 0
    gateways: tuple[str, ...] = ()  # that are connected


class ReplicaChoice(msgspec.Struct, frozen=True):
    """A request on its way to a replica."""

    request_id: str
    replica: int
    tokens: int  # that are expected to be computed there
    blocks: Sequence[int]


class _Replica:
    """State of one replica: its last report, and the requests placed there since."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}  # by id: pending tokens
        self.placed: dict[str, ReplicaChoice] = {}  # by this placer, not ended
        self.ready_s = 0.0  # until it begins with a new prompt

    def renew(self, report: ReplicaReport) -> None:
        """Take a report. It lacks requests on their way; those with a first token are pending no more."""
        self.speed, self.free_cells = report.speed, max(0, report.cells - report.cells_used)
        requests = dict(report.requests)
        for request_id, placement in self.placed.items():
            known = self.requests.get(request_id, 0)
            requests[request_id] = min(known, requests.get(request_id, placement.tokens))
        self.requests = requests
        self.update()

    def update(self) -> None:
        """Expect when it begins with a new prompt; after a change of its requests."""
        pending, speed = sum(self.requests.values()), self.speed
        excess = max(0, len(self.requests) + 1 - speed.slots)
        self.ready_s = pending * speed.prefill_token_s + excess * speed.slot_s / speed.slots


class ReplicaPlacer:
    """Places requests on replicas, which are numbers. One for each gateway.

    Gateways do not see what the others place between two reports, and all would choose the same idle replica.
    So each has its share of them, and expects one more prompt of average length on any other.
    """

    MEMORY = 0.95

    def __init__(self, block_tokens: int = BLOCK_TOKENS, *, gateway: int = 0, gateways: int = 1) -> None:
        self._block_tokens = block_tokens
        self.gateway, self.gateways = gateway, gateways  # the number of this one, and of all
        self._mean_tokens = 0.0  # that a prompt is expected to take
        self._replicas: dict[int, _Replica] = {}
        self.index = BlockIndex()

    def report(self, replica: int, report: ReplicaReport) -> None:
        """Take the report of a replica; with the first one it joins."""
        known = self._replicas.setdefault(replica, _Replica())
        known.renew(report)
        if report.blocks is not None:
            on_their_way = (block for each in known.placed.values() for block in each.blocks)
            self.index.replace(replica, {*report.blocks, *on_their_way})

    def remove(self, replica: int) -> None:
        """Forget a replica that has gone."""
        self._replicas.pop(replica, None)
        self.index.remove(replica)

    def place(
        self, request_id: str, tokens: int, blocks: Sequence[int], without: Collection[int] = ()
    ) -> ReplicaChoice:
        """Choose a replica and count the request there at once. Raises EngineNotReady: there is none."""
        hits = self.index.find(blocks)
        best, best_s, best_hit, free_cells = -1, math.inf, 0, 0
        for number, replica in self._replicas.items():
            hit, speed = min(hits.get(number, 0) * self._block_tokens, tokens - 1), replica.speed
            computed = tokens - hit + (0 if number % self.gateways == self.gateway else self._mean_tokens)
            seconds = replica.ready_s + computed * speed.prefill_token_s + hit * speed.restore_token_s
            if seconds > best_s or number in without:
                continue
            if seconds < best_s or replica.free_cells > free_cells:
                best, best_s, best_hit, free_cells = number, seconds, hit, replica.free_cells
        if best < 0:
            raise EngineNotReady("no replica is there to compute this request")
        placement = ReplicaChoice(request_id, best, tokens - best_hit, blocks)
        self._mean_tokens += (1 - self.MEMORY) * (placement.tokens - self._mean_tokens)
        chosen = self._replicas[best]
        chosen.placed[request_id] = placement
        chosen.requests[request_id] = placement.tokens
        chosen.update()
        self.index.add(best, blocks)
        return placement

    def first_token(self, placement: ReplicaChoice) -> None:
        """Count a request as begun: its prompt is computed."""
        if (replica := self._replicas.get(placement.replica)) is not None:
            replica.requests[placement.request_id] = 0
            replica.update()

    def ended(self, placement: ReplicaChoice) -> None:
        if (replica := self._replicas.get(placement.replica)) is not None:
            replica.placed.pop(placement.request_id, None)
            replica.requests.pop(placement.request_id, None)
            replica.update()
