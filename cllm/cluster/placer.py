"""Placer: the replica from which the first token of a request is expected soonest.

Pure code without a clock: the router, the simulation and the tests say what happens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from cllm.cluster.block_hashes import BLOCK_TOKENS
from cllm.cluster.block_index import BlockIndex
from cllm.errors import EngineNotReady


class ReplicaSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica has measured of itself."""

    prefill_token_s: float  # beside what else it computes; a relay completes what is not measured yet: 0
    restore_token_s: float = 0.0  # of a prefix that is in its cache
    slot_s: float = 0.0  # how long a request holds a slot
    slots: int = 1


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of itself every other second."""

    speed: ReplicaSpeed
    requests: Mapping[
        str, int
    ]  # all that it has, by id: tokens that are still to be computed for the first token
    blocks: Collection[int] | None = None  # of prompts, in its cache; None: as before
    free_cells: int = 0


class Placement(msgspec.Struct, frozen=True):
    """A request on its way to a replica."""

    request_id: str
    replica: int
    tokens: int  # that are expected to be computed there
    blocks: Sequence[int]


class _Replica:
    """What is known of one replica: its last report, and what was placed there since."""

    def __init__(self, report: ReplicaReport) -> None:
        self.requests: dict[str, int] = {}  # by id: pending tokens
        self.pending = 0  # the sum of them
        self.placed: dict[str, Placement] = {}  # by this placer, not ended
        self.ready_s = 0.0  # until it begins with a new prompt
        self.renew(report)

    def renew(self, report: ReplicaReport) -> None:
        """What is still on its way is not in the report; what has had its first token is pending no more."""
        self.speed, self.free_cells = report.speed, report.free_cells
        requests = dict(report.requests)
        for request_id, placement in self.placed.items():
            known = self.requests.get(request_id, 0)
            requests[request_id] = min(known, requests.get(request_id, placement.tokens))
        self.requests = requests
        self._update(sum(requests.values()))

    def set_pending(self, request_id: str, tokens: int) -> None:
        change = tokens - self.requests.get(request_id, 0)
        self.requests[request_id] = tokens
        self._update(self.pending + change)

    def forget(self, request_id: str) -> None:
        self.placed.pop(request_id, None)
        self._update(self.pending - self.requests.pop(request_id, 0))

    def _update(self, pending: int) -> None:
        self.pending, speed = pending, self.speed
        excess = max(0, len(self.requests) + 1 - speed.slots)
        self.ready_s = pending * speed.prefill_token_s + excess * speed.slot_s / speed.slots

    def seconds(self, tokens: int, hit: int) -> float:
        """Until the first token of such a prompt, of which `hit` tokens are in its cache."""
        speed = self.speed
        return self.ready_s + (tokens - hit) * speed.prefill_token_s + hit * speed.restore_token_s


class Placer:
    """Places requests on replicas, which are numbers. One for each gateway.

    Gateways do not see what the others place between two reports, and all would choose the same idle replica.
    So each has its share of them, and expects one more prompt of average length on any other.
    """

    MEMORY = 0.95

    def __init__(self, block_tokens: int = BLOCK_TOKENS, *, gateway: int = 0, gateways: int = 1) -> None:
        self._block_tokens = block_tokens
        self._gateway, self._gateways = gateway, gateways
        self._mean_tokens = 0.0  # that a prompt is expected to take
        self._replicas: dict[int, _Replica] = {}
        self.index = BlockIndex()

    def share(self, gateway: int, gateways: int) -> None:
        """This is one of so many gateways from now on."""
        self._gateway, self._gateways = gateway, gateways

    def report(self, replica: int, report: ReplicaReport) -> None:
        """A replica says how it is; the first time, it joins."""
        if (known := self._replicas.get(replica)) is None:
            known = self._replicas[replica] = _Replica(report)
        else:
            known.renew(report)
        if report.blocks is not None:
            on_their_way = (block for each in known.placed.values() for block in each.blocks)
            self.index.replace(replica, {*report.blocks, *on_their_way})

    def remove(self, replica: int) -> list[Placement]:
        """A replica has gone; what was placed there and has not ended."""
        gone = self._replicas.pop(replica, None)
        self.index.remove(replica)
        return [] if gone is None else list(gone.placed.values())

    def place(
        self, request_id: str, tokens: int, blocks: Sequence[int], without: Collection[int] = ()
    ) -> Placement:
        """Choose a replica and count the request there at once. Raises EngineNotReady: there is none."""
        hits = self.index.find(blocks)
        best, best_s, best_hit, free_cells = -1, math.inf, 0, 0
        for number, replica in self._replicas.items():
            hit = min(hits[number] * self._block_tokens, tokens - 1) if number in hits else 0
            seconds = replica.seconds(tokens, hit)
            if number % self._gateways != self._gateway:
                seconds += self._mean_tokens * replica.speed.prefill_token_s
            if seconds > best_s or number in without:
                continue
            if seconds < best_s or replica.free_cells > free_cells:
                best, best_s, best_hit, free_cells = number, seconds, hit, replica.free_cells
        if best < 0:
            raise EngineNotReady("no replica is there to compute this request")
        placement = Placement(request_id, best, tokens - best_hit, blocks)
        self._mean_tokens += (1 - self.MEMORY) * (placement.tokens - self._mean_tokens)
        chosen = self._replicas[best]
        chosen.placed[request_id] = placement
        chosen.set_pending(request_id, placement.tokens)
        self.index.add(best, blocks)
        return placement

    def first_token(self, placement: Placement) -> None:
        """It has begun: its prompt is computed."""
        if (replica := self._replicas.get(placement.replica)) is not None:
            replica.set_pending(placement.request_id, 0)

    def ended(self, placement: Placement) -> None:
        if (replica := self._replicas.get(placement.replica)) is not None:
            replica.forget(placement.request_id)
