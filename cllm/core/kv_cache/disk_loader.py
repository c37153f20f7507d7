"""Loads from disk: a sequence waits for its prefix where reading that is quicker than computing it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from functools import partial

from cllm.core.kv_cache.disk_cache import Candidate, DiskKVCache, Loading
from cllm.core.kv_cache.disk_folder import DiskEntry
from cllm.core.kv_cache.prefix_index import Match
from cllm.core.kv_cache.tiers import DeviceKVCache, Entry, SlotContent, count_bytes
from cllm.core.kv_cache.transfer import KVTransfer
from cllm.core.sequence import Sequence
from cllm.process import read_available_memory


class DiskLoader:
    """Between the disk and the other tiers: what is read goes to RAM, what they hold can be written.

    A sequence never waits longer than it would take to compute what it waits for.
    """

    def __init__(self, disk: DiskKVCache, device: DeviceKVCache, transfer: KVTransfer) -> None:
        self._disk = disk
        self._device = device
        self._transfer = transfer
        self._host, self._cost = transfer.host, transfer.cost

    def _fits(self, size: int) -> bool:
        """True for a state that RAM holds for the moment in which it is written or restored."""
        return size <= self._host.limit or size <= (read_available_memory() or 0) // 2

    def take(self, sequence: Sequence) -> None:
        """The wait of a sequence is over, if it did wait: put what was read into RAM."""
        loading, sequence.loading = sequence.loading, None
        if loading is None:
            return
        if not loading.future.done():
            self._disk.give_up(loading.future)
            sequence.load_by = 0.0
        elif loading.match is not None and (entry := loading.future.result()) is not None:
            sequence.loaded = Match(loading.match.length, entry)
            self._host.put(entry)

    def look(self, sequence: Sequence, tenant: str, known: int, gain_s: float, max_tokens: int) -> None:
        """Let a sequence wait for the disk if that pays: it has the first `known` tokens elsewhere.

        Those save `gain_s`. At most `max_tokens` can be restored.
        """
        disk, now = self._disk, time.monotonic()
        if not disk.limit or sequence.loaded is not None:
            return
        if sequence.load_by is None:
            sequence.load_by = now + (len(sequence.tokens) - known) * self._transfer.token_s
        if now >= sequence.load_by:
            return
        if not disk.entries and disk.scanning is not None and not disk.scanning.done():
            sequence.loading = Loading(disk.scanning, sequence.load_by)
            return
        found = (
            match
            for match in disk.matches(tenant, sequence.keyed[:-1], known + 1)
            if len(match.value.tokens) <= max_tokens and self._fits(match.value.size)
        )
        best = max(found, key=self._gain_s, default=None)
        if best is None or self._gain_s(best) <= gain_s:
            return
        if (load := disk.load(best.value)) is not None:
            sequence.loading = Loading(load, sequence.load_by, best)
        elif (turn := disk.next_load) is not None:
            sequence.loading = Loading(turn, sequence.load_by)

    def _gain_s(self, match: Match[DiskEntry]) -> float:
        """Seconds saved by loading and restoring it instead of computing."""
        size = match.value.size
        length = match.value.longest_cut(match.length).length
        return length * self._transfer.token_s - self._disk.load_s(size) - self._cost.restore_s(size)

    def candidates(self) -> Iterator[Candidate]:
        """What could be written to disk, as it is now: slots, then RAM, each most recently used first."""
        token_s = self._transfer.token_s
        # Weakly: what is pushed out meanwhile is not kept by this.
        contents = [weakref.ref(content) for content in reversed(self._device.entries)]
        entries = [weakref.ref(entry) for entry in reversed(self._host.entries)]
        for content in filter(None, (known() for known in contents)):
            size = self._transfer.state_bytes(len(content.tokens)) + count_bytes(content.checkpoints)
            if self._fits(size):
                save, save_s = partial(self._save, content), self._cost.save_s(size)
                yield Candidate(content.tenant, content.tokens, size, save_s, token_s, save)
        for known in entries:
            if (entry := known()) is not None:
                yield Candidate(entry.tenant, entry.tokens, entry.size, 0.0, token_s, known)

    def _save(self, content: SlotContent) -> Entry | None:
        """The slot may have been leased meanwhile."""
        return self._transfer.read_entry(content) if content in self._device.entries else None
