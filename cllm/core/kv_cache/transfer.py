"""KV memory copied to host RAM and back, and from one slot to another: timed, for the cost model."""

from __future__ import annotations

import logging
import time

from cllm.backend.base import KVState, ModelRunner
from cllm.core.kv_cache.host_cache import HostKVCache
from cllm.core.sequence import Sequence
from cllm.core.step_cost import StepCostModel

log = logging.getLogger(__name__)


class KVTransfer:
    """The one path for KV memory between slots and host RAM; preempted sequences are swapped through it.

    Swap space is part of the host cache's byte budget. What does not fit, or cannot be saved, is recomputed.
    """

    def __init__(self, runner: ModelRunner, cost: StepCostModel, host: HostKVCache) -> None:
        self._runner = runner
        self._cost = cost
        self._host = host
        self.seconds = 0.0  # in all
        self.swap_outs = self.swap_ins = 0  # in all

    def save(self, seq_id: int) -> KVState | None:
        """As `ModelRunner.save`."""
        started = time.perf_counter()
        state = self._runner.save(seq_id)
        if state is not None:
            self._observe(len(state), time.perf_counter() - started, restore=False)
        return state

    def restore(self, seq_id: int, state: KVState) -> bool:
        """As `ModelRunner.restore`."""
        started = time.perf_counter()
        restored = self._runner.restore(seq_id, state)
        if restored:
            self._observe(len(state), time.perf_counter() - started, restore=True)
        return restored

    def _observe(self, size: int, seconds: float, *, restore: bool) -> None:
        self.seconds += seconds
        self._cost.observe_transfer(size, seconds, restore=restore)

    def swap_out(self, sequence: Sequence) -> None:
        """Keep the KV of a sequence that is about to lose its slot."""
        self.swap_outs += 1
        state = None
        try:
            state = self.save(sequence.seq_id)
        except Exception:
            log.exception("the KV of request %s could not be saved; it will be recomputed", sequence.id)
        length = 0
        if state is not None and self._host.reserve(len(state)):
            sequence.swapped, length = state, sequence.num_computed
        sequence.cut_to(0)
        sequence.num_computed = length  # of cells that it will have for itself

    def swap_in(self, sequence: Sequence) -> None:
        """Put what was kept into the sequence's new slot."""
        state = sequence.swapped
        assert state is not None
        self.discard(sequence)
        restored = False
        try:
            restored = self.restore(sequence.seq_id, state)
        except Exception:
            log.exception("the KV of request %s could not be restored; it is recomputed", sequence.id)
        self.swap_ins += restored
        if not restored:
            self._runner.truncate(sequence.seq_id, 0)
            sequence.cut_to(0)

    def discard(self, sequence: Sequence) -> None:
        """Give back the swap space of a sequence that holds some."""
        assert sequence.swapped is not None
        self._host.give_back(len(sequence.swapped))
        sequence.swapped = None
