"""A cluster worker that places by power of two choices, as Serve's own router does: for comparison."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Sequence

from cllm.cluster import relay
from cllm.cluster.cluster_worker import main
from cllm.cluster.placer import ReplicaChoice, ReplicaPlacer
from cllm.errors import EngineNotReady


class PowerOfTwo(ReplicaPlacer):
    def place(
        self, request_id: str, tokens: int, blocks: Sequence[int], without: Collection[int] = ()
    ) -> ReplicaChoice:
        numbers = [number for number in self._replicas if number not in without]
        if not numbers:
            raise EngineNotReady("there is none")
        two = random.sample(numbers, min(2, len(numbers)))
        best = min(two, key=lambda number: len(self._replicas[number].requests))
        placement = ReplicaChoice(request_id, best, tokens, ())
        chosen = self._replicas[best]
        chosen.placed[request_id], chosen.requests[request_id] = placement, tokens
        chosen.update()
        return placement


if __name__ == "__main__":
    vars(relay)["ReplicaPlacer"] = PowerOfTwo
    sys.exit(main(sys.argv[1:]))
