"""Ways to place requests on replicas: cllm's placer, an oracle, and what other routers do."""

from __future__ import annotations

import random
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping
from hashlib import blake2b

from bench.cluster.replica import Job, SimulatedReplica
from bench.cluster.trace import BLOCK_TOKENS
from cllm.cluster.placer import BlockIndex, ReplicaChoice, ReplicaPlacer, ReplicaReport

Replicas = Mapping[int, SimulatedReplica]  # those that are alive


class Policy:
    """Places requests, of one gateway. It hears what a gateway hears."""

    def __init__(self, replicas: Replicas, seed: int, gateway: int, gateways: int) -> None:
        """One of so many gateways."""
        self.replicas = replicas
        self.random = random.Random(seed)
        self.load: Counter[int] = Counter()  # requests that it placed, by replica

    def choose(self, job: Job) -> int:
        raise NotImplementedError

    def place(self, job: Job) -> int:
        number = self.choose(job)
        self.load[number] += 1
        return number

    def report(self, number: int, report: ReplicaReport) -> None:
        """A replica says how it is."""

    def begun(self, job: Job) -> None:
        """The first token of an answer has come."""

    def ended(self, job: Job) -> None:
        self.load[job.replica] -= 1

    def died(self, number: int) -> None:
        self.load[number] = 0

    def least_loaded(self) -> int:
        load = self.load
        return min(self.replicas, key=lambda number: (load[number], self.random.random()))


class RandomPolicy(Policy):
    def choose(self, job: Job) -> int:
        return self.random.choice(tuple(self.replicas))


class RoundRobin(Policy):
    turn = -1

    def choose(self, job: Job) -> int:
        self.turn += 1
        return tuple(self.replicas)[self.turn % len(self.replicas)]


class LeastRequests(Policy):
    def choose(self, job: Job) -> int:
        return self.least_loaded()


class PrefixHash(Policy):
    """Consistent hashing of a prompt's beginning, with bounded loads (as KubeAI and llm-d have it)."""

    BLOCKS = 4
    POINTS = 100  # of each replica, on the ring
    BOUND = 1.25  # of the mean load

    def __init__(self, replicas: Replicas, seed: int, gateway: int, gateways: int) -> None:
        super().__init__(replicas, seed, gateway, gateways)
        self._ring = sorted(
            (_point(number, turn), number) for number in replicas for turn in range(self.POINTS)
        )

    def choose(self, job: Job) -> int:
        limit = self.BOUND * (sum(self.load.values()) + 1) / len(self.replicas)
        begin = bisect(self._ring, (_point(*job.trace.blocks[: self.BLOCKS]), -1))
        for place in range(len(self._ring)):
            number = self._ring[(begin + place) % len(self._ring)][1]
            if number in self.replicas and self.load[number] + 1 <= max(1.0, limit):
                return number
        return self.least_loaded()


def _point(*numbers: int) -> int:
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=8).digest(), "big")


class CacheAware(Policy):
    """As the routers of SGLang and vLLM: by a tree of what each replica was sent, while loads are even."""

    MIN_MATCH = 0.5  # of the prompt; less goes to the smallest tree
    MAX_DIFFERENCE, MAX_RATIO = 32, 1.1  # of loads, then the least loaded is next

    def __init__(self, replicas: Replicas, seed: int, gateway: int, gateways: int) -> None:
        super().__init__(replicas, seed, gateway, gateways)
        self._index = BlockIndex()

    def choose(self, job: Job) -> int:
        loads = [self.load[number] for number in self.replicas]
        highest, lowest = max(loads), min(loads)
        if highest - lowest > self.MAX_DIFFERENCE and highest > self.MAX_RATIO * lowest:
            chosen = self.least_loaded()
        else:
            found = self._index.find(job.trace.blocks)
            best = max(found, key=lambda number: found[number], default=-1)
            if best >= 0 and found[best] * BLOCK_TOKENS > self.MIN_MATCH * job.trace.tokens:
                chosen = best
            else:
                chosen = min(self.replicas, key=lambda number: (self._index.count(number), number))
        self._index.add(chosen, job.trace.blocks)
        return chosen

    def died(self, number: int) -> None:
        super().died(number)
        self._index.remove(number)


class Expected(Policy):
    """cllm's placer: the least expected time to the first token."""

    def __init__(self, replicas: Replicas, seed: int, gateway: int, gateways: int) -> None:
        super().__init__(replicas, seed, gateway, gateways)
        self.placer = ReplicaPlacer(BLOCK_TOKENS, gateway=gateway, gateways=gateways)
        self._placements: dict[str, ReplicaChoice] = {}
        self.took_s: list[float] = []  # of each decision
        for number, replica in replicas.items():
            self.placer.report(number, replica.report())

    def choose(self, job: Job) -> int:
        began = time.perf_counter()
        placement = self.placer.place(job.trace.name, job.tokens, job.trace.blocks)
        self.took_s.append(time.perf_counter() - began)
        self._placements[job.trace.name] = placement
        return placement.replica

    def report(self, number: int, report: ReplicaReport) -> None:
        self.placer.report(number, report)

    def begun(self, job: Job) -> None:
        self.placer.first_token(self._placements[job.trace.name])

    def ended(self, job: Job) -> None:
        super().ended(job)
        self.placer.ended(self._placements.pop(job.trace.name))

    def died(self, number: int) -> None:
        super().died(number)
        self.placer.remove(number)


class Oracle(Policy):
    """The same expectation, from the true state of every replica at this moment."""

    def choose(self, job: Job) -> int:
        return min(self.replicas, key=lambda number: self._seconds(self.replicas[number], job))

    def _seconds(self, replica: SimulatedReplica, job: Job) -> float:
        speed = replica.speed
        hit = self._count_soon_cached(replica, job) * BLOCK_TOKENS
        waiting, running = (*replica.waiting, *replica.prefilling), replica.decoding
        excess = max(0, len(waiting) + len(running) + 1 - speed.slots)
        tokens = sum(other.pending for other in waiting) + job.tokens - hit
        wait_s = excess * speed.slot_s / speed.slots
        return tokens * speed.prefill_token_s + hit * speed.restore_token_s + wait_s

    def _count_soon_cached(self, replica: SimulatedReplica, job: Job) -> int:
        blocks = job.trace.blocks
        found = replica.count_cached(blocks)
        for other in (*replica.prefilling, *replica.waiting):
            pairs = enumerate(zip(blocks, other.trace.blocks, strict=False))
            common = next(
                (place for place, (one, two) in pairs if one != two),
                min(len(blocks), len(other.trace.blocks)),
            )
            found = max(found, common)
        return found


POLICIES: dict[str, Callable[[Replicas, int, int, int], Policy]] = {
    "random": RandomPolicy,
    "round robin": RoundRobin,
    "least requests": LeastRequests,
    "prefix hash": PrefixHash,
    "cache-aware": CacheAware,
    "cllm": Expected,
    "oracle": Oracle,
}
