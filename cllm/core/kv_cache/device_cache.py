"""The device tier: what free slots still hold.

A sequence that ends keeps its cells in its slot. Nothing is copied: the slot is free, its content is cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from cllm.core.kv_cache.prefix_index import CachedPrefix, Checkpoint, PrefixTier
from cllm.core.sequence import CellSegment
from cllm.core.slot_pool import SlotPool


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
    ) -> None:
        super().__init__(tenant, tokens, checkpoints, min_length)
        self.seq_id = seq_id
        self.segments = segments

    @property
    def num_computed(self) -> int:
        return len(self.tokens)

    def mostly_beyond(self, length: int) -> bool:
        """Whether most of it follows its first `length` tokens: another conversation, not another branch."""
        return len(self.tokens) > 2 * length


class DeviceKVCache(PrefixTier[SlotContent]):
    """The contents of free slots, least recently used first."""

    def __init__(self, pool: SlotPool) -> None:
        super().__init__()
        self._pool = pool
        self._by_slot: dict[int, SlotContent] = {}
        self.evictions = 0

    @property
    def lengths(self) -> dict[int, int]:
        """Cells by slot, as the KV memory must have them."""
        return {seq_id: len(content.tokens) for seq_id, content in self._by_slot.items()}

    def get(self, seq_id: int) -> SlotContent | None:
        return self._by_slot.get(seq_id)

    def insert(self, entry: SlotContent) -> None:
        super().insert(entry)
        self._by_slot[entry.seq_id] = entry

    def remove(self, entry: SlotContent) -> bool:
        """Its slot is about to be leased or cleared."""
        self._by_slot.pop(entry.seq_id, None)
        return super().remove(entry)

    def clear(self, entry: SlotContent) -> None:
        """Forget a content and empty its slot."""
        if self.remove(entry):
            self._pool.clear(entry.seq_id)

    def exchange(self, first: int, second: int) -> None:
        """The contents of two slots are exchanged."""
        contents = (self._by_slot.pop(first, None), self._by_slot.pop(second, None))
        for content, seq_id in zip(contents, (second, first), strict=True):
            if content is not None:
                content.seq_id = seq_id
                self._by_slot[seq_id] = content

    def empty_slots(self) -> list[int]:
        return sorted(self._pool.free_ids - self._by_slot.keys())

    def next_victim(self, keep: SlotContent | None = None) -> SlotContent | None:
        """The content to be evicted next, other than `keep`."""
        return next((content for content in self.entries if content is not keep), None)
