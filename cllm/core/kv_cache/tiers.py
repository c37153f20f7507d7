"""KV cache offload: states in host RAM, of cached prefixes and of preempted requests, in one byte budget.

Preempted requests go first: they push cached prefixes out, never the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from cllm.backend.base import KVState
from cllm.core.kv_cache.prefix_index import (
    MAX_MATCHES,
    TOKEN_BYTES,
    CachedPrefix,
    Checkpoint,
    PrefixTier,
    Returns,
)
from cllm.core.slot_pool import CellSegment, SlotPool
from cllm.types import Span

MIB = 1 << 20


class Entry(CachedPrefix):
    """The KV state of a sequence that held exactly `tokens`, in RAM."""

    __slots__ = ("size", "state")

    def __init__(
        self,
        tenant: str,
        tokens: Sequence[int],
        state: KVState,
        checkpoints: tuple[Checkpoint, ...] = (),
        min_length: int = 0,
        spans: tuple[Span, ...] = (),
    ) -> None:
        super().__init__(tenant, tokens, checkpoints, min_length, spans)
        self.state = state
        self.size = get_entry_size(len(tokens), len(state) + count_bytes(checkpoints))


def get_entry_size(tokens: int, state_bytes: int) -> int:
    """What an entry counts for: its state and its tokens, in the entry and in the index."""
    return state_bytes + tokens * 2 * TOKEN_BYTES


def count_bytes(checkpoints: Sequence[Checkpoint]) -> int:
    return sum(len(checkpoint.state) for checkpoint in checkpoints)


class HostKVCache(PrefixTier[Entry]):
    """Cached prefixes in RAM. Of those used longest ago, the one goes first whose bytes are worth the least.

    Never more than `cached_limit` bytes of them, nor more than `swap_limit` bytes of swap space, nor more
    than the larger of the two together.
    """

    def __init__(self, *, cached_limit: int, swap_limit: int = 0) -> None:
        super().__init__()
        self.value_s: Callable[[Entry], float] = lambda entry: entry.used  # seconds that it will save
        self.cached_limit = cached_limit
        self.swap_limit = swap_limit
        self.limit = max(cached_limit, swap_limit)
        self.cached_bytes = self.swapped_bytes = 0
        self.count_checkpoints: Callable[[], int] = int  # bytes that sequences and slots hold; at first 0
        self.evictions = 0

    @property
    def room(self) -> int:
        """Bytes that can be cached without pushing anything out."""
        return self._max_cached - self.cached_bytes

    @property
    def _max_cached(self) -> int:
        """Bytes of cached prefixes that fit beside swap space and checkpoints."""
        return min(self.cached_limit, self.limit - self.swapped_bytes) - self.count_checkpoints()

    # Cached ----------------------------------------------------------------------------------------

    def could_hold(self, size: int) -> bool:
        """Whether an entry of this size fits if everything else is pushed out."""
        return size <= self._max_cached

    def put(self, entry: Entry) -> bool:
        """Cache an entry; False if it is too large. The same tokens are kept once."""
        if not self.could_hold(entry.size):
            return False
        for other in self.covered(entry):
            if len(other.tokens) == len(entry.tokens):
                self.drop(other)
        while entry.size > self.room:
            self._evict()
        self.insert(entry)
        self.cached_bytes += entry.size
        return True

    def drop(self, entry: Entry) -> None:
        """Forget an entry; one that is gone already is left alone."""
        if self.remove(entry):
            self.cached_bytes -= entry.size

    def _victims(self) -> Iterator[Entry]:
        """Those used longest ago, the least valuable byte by byte first."""
        yield from sorted(islice(self.entries, MAX_MATCHES), key=lambda each: self.value_s(each) / each.size)

    def loss_s(self, size: int) -> float:
        """Seconds that will be lost by what an entry of this size pushes out."""
        lost_s, missing = 0.0, size - self.room
        victims = self._victims() if missing > 0 else iter(())
        while missing > 0 and (victim := next(victims, None)) is not None:
            lost_s += self.value_s(victim)
            missing -= victim.size
        return lost_s

    def _evict(self) -> None:
        victim = next(self._victims())
        self.returns.observe(victim.used, len(victim.tokens), returned=False)
        self.drop(victim)
        self.evictions += 1

    def make_room(self) -> None:
        """Let cached prefixes give way to checkpoints."""
        while self.entries and self.room < 0:
            self._evict()

    # Swap space ------------------------------------------------------------------------------------

    def reserve(self, size: int) -> bool:
        """Take bytes for a preempted request, from cached prefixes if need be; False if there are too few."""
        if self.swapped_bytes + size > self.swap_limit:
            return False
        while self.swapped_bytes + size + self.cached_bytes > self.limit:
            self._evict()
        self.swapped_bytes += size
        return True

    def give_back(self, size: int) -> None:
        self.swapped_bytes -= size
        assert self.swapped_bytes >= 0, "more was given back than reserved"


class SlotContent(CachedPrefix):
    """The KV that a released slot still holds."""

    __slots__ = ("segments", "seq_id")

    def __init__(
        self,
        seq_id: int,
        tenant: str,
        tokens: Sequence[int],
        segments: list[CellSegment],
        checkpoints: tuple[Checkpoint, ...] = (),
        min_length: int = 0,
        spans: tuple[Span, ...] = (),
    ) -> None:
        super().__init__(tenant, tokens, checkpoints, min_length, spans)
        self.seq_id = seq_id
        self.segments = segments

    @property
    def num_computed(self) -> int:
        return len(self.tokens)

    def mostly_beyond(self, length: int) -> bool:
        """Whether most of it follows its first `length` tokens: another conversation, not another branch."""
        return len(self.tokens) > 2 * length


class DeviceKVCache(PrefixTier[SlotContent]):
    """The contents of free slots."""

    def __init__(self, pool: SlotPool, returns: Returns) -> None:
        super().__init__(returns)
        self.pool = pool
        self.by_slot: dict[int, SlotContent] = {}
        self.evictions = 0

    @property
    def lengths(self) -> dict[int, int]:
        """The next position of each slot, as the KV memory must have it."""
        return {seq_id: content.position for seq_id, content in self.by_slot.items()}

    def insert(self, entry: SlotContent) -> None:
        super().insert(entry)
        self.by_slot[entry.seq_id] = entry

    def remove(self, entry: SlotContent) -> bool:
        """Its slot is about to be leased or cleared."""
        self.by_slot.pop(entry.seq_id, None)
        return super().remove(entry)

    def clear(self, entry: SlotContent) -> None:
        """Forget a content and empty its slot."""
        if self.remove(entry):
            self.pool.clear(entry.seq_id)
