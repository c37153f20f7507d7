"""The prefix cache: finds a computed prefix of a prompt, applies it, keeps what a sequence leaves.

A match comes from a running sequence, from what a free slot still holds, or from a state in RAM. A slot is
continued in place, or its prefix is copied where cutting it would destroy what is worth more.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from cllm.core.kv_cache import prefix_index
from cllm.core.kv_cache.disk_cache import DiskKVCache
from cllm.core.kv_cache.disk_loader import DiskLoader
from cllm.core.kv_cache.slot_choice import SlotChoice
from cllm.core.kv_cache.tiers import DeviceKVCache, Entry, SlotContent, count_bytes
from cllm.core.kv_cache.transfer import KVTransfer
from cllm.core.sequence import Sequence
from cllm.core.slot_pool import KVLayout, SlotPool, share_cells
from cllm.core.step_cost import TILE
from cllm.errors import InvalidRequest, StorageFailed

log = logging.getLogger(__name__)

MIN_PREFIX_TOKENS = 8  # all prompts of a template begin alike; what more is worth follows from its price


class PrefixMatch(NamedTuple):
    """The first `length` tokens of a sequence are those that `origin` holds, or will soon."""

    length: int
    origin: Sequence | SlotContent | Entry
    checkpoint: prefix_index.Checkpoint | None = None  # what cutting the origin takes

    @property
    def ready(self) -> bool:
        """False while the origin is still computing what is wanted of it."""
        return not isinstance(self.origin, Sequence) or self.origin.num_computed >= self.length


class PrefixCache:
    """Finds prefix matches, applies them, keeps and evicts. What fails is computed instead."""

    def __init__(
        self,
        pool: SlotPool,
        transfer: KVTransfer,
        disk: DiskKVCache,
        layout: KVLayout,
        running: Mapping[int, Sequence],
        *,
        keeps: bool,
        across_tenants: bool,
    ) -> None:
        self._runner = transfer.runner
        self._pool = pool
        self._transfer = transfer
        self._cost = transfer.cost
        self.host = transfer.host
        self.device = DeviceKVCache(pool, transfer.host.returns)
        self.loader = DiskLoader(disk, self.device, transfer)
        self._running = running  # by slot, as the scheduler has it
        if not transfer.cuttable:  # else there are none
            self.host.count_checkpoints = self._count_checkpoints
        self._keeps = keeps
        self._across_tenants = across_tenants
        self.slots = SlotChoice(self.device, transfer, layout)
        self._cuttable = transfer.cuttable
        self.layout = layout
        self.hits = self.hit_tokens = 0  # in all

    def _key(self, sequence: Sequence) -> str:
        """What its prefixes are cached under."""
        return sequence.request.prompt.key("" if self._across_tenants else sequence.request.tenant)

    # Finding ---------------------------------------------------------------------------------------

    def find(self, sequence: Sequence, running: Iterable[Sequence]) -> PrefixMatch | None:
        """The best match there is for a sequence, or will be soon: then it is not `ready` yet.

        Where the disk has more, the sequence is `loading` afterwards.
        """
        if not sequence.request.reuse or len(sequence.tokens) <= MIN_PREFIX_TOKENS or sequence.swapped:
            return None
        if sequence.unscored:  # its prompt is to be computed
            return None
        running = tuple(running)
        self.loader.take(sequence)
        if (best := self._find_now(sequence, running)) is None or best.ready:
            known, gain_s = (best.length, self._gain_s(best, sequence)) if best is not None else (0, 0.0)
            self.loader.look(sequence, self._key(sequence), known, gain_s, self.layout.room(running))
        return best

    def _find_now(self, sequence: Sequence, running: tuple[Sequence, ...]) -> PrefixMatch | None:
        shared = self._best_source(sequence, running)
        cached = self._best_cached(sequence, running)
        if shared is None or cached is None:
            return shared or cached
        assert isinstance(shared.origin, Sequence)
        if not shared.ready and shared.origin.num_computed < cached.length:
            return cached  # waiting pays only if the source is ahead of what can be had at once
        # As good as each other before anything was measured: only in unified KV a copy is free.
        favourite = cached if self.layout.splits else shared
        return max(shared, cached, key=lambda match: (self._gain_s(match, sequence), match is favourite))

    def _best_source(self, sequence: Sequence, running: tuple[Sequence, ...]) -> PrefixMatch | None:
        opening = sequence.keyed[:MIN_PREFIX_TOKENS]
        tenant = self._key(sequence)
        matches = (
            self._match_source(sequence, other)
            for other in running
            if other.keyed[:MIN_PREFIX_TOKENS] == opening
            and other.request.reuse
            and self._key(other) == tenant
        )
        # It waits only for sequences that came before it: later ones could keep it waiting without end.
        useful = (
            match
            for match in matches
            if match.ready or (isinstance(match.origin, Sequence) and match.origin.arrival < sequence.arrival)
        )
        best = max(useful, key=lambda match: match.length, default=None)
        return best if best is not None and best.length and self._gain_s(best, sequence) > 0 else None

    def _match_source(self, sequence: Sequence, other: Sequence) -> PrefixMatch:
        """What a running sequence has for this one; where its memory cannot be cut, at its checkpoints."""
        prompt, spans = sequence.request.prompt, other.request.prompt.spans
        common = prompt.floor(sequence.shared_with(other.keyed), spans)
        if self._cuttable:
            return PrefixMatch(common, other)
        if planned := [length for length in other.stops if length <= common]:
            return PrefixMatch(planned[-1], other)
        cut = prefix_index.longest_cut(common, other.num_computed, other.checkpoints, self._min_length(other))
        return PrefixMatch(cut.length, other, cut.checkpoint)

    def _best_cached(self, sequence: Sequence, running: tuple[Sequence, ...]) -> PrefixMatch | None:
        floor = sequence.request.prompt.floor
        room = self.layout.room(running)  # a state comes whole, even where only its prefix is wanted
        wanted = (self._key(sequence), sequence.keyed[:-1], MIN_PREFIX_TOKENS)  # the last is always computed
        held: list[prefix_index.Match[SlotContent] | prefix_index.Match[Entry]]
        held = [*self.device.matches(*wanted), *self.host.matches(*wanted)]
        held += [sequence.loaded] if sequence.loaded is not None else []
        known = (
            PrefixMatch(cut.length, match.value, cut.checkpoint)
            for match in held
            if (cut := match.value.longest_cut(floor(match.length, match.value.spans))).length
            >= MIN_PREFIX_TOKENS
            and (isinstance(match.value, SlotContent) or len(match.value.tokens) <= room)
        )
        best = max(known, key=lambda match: (self._gain_s(match, sequence), match.length), default=None)
        if best is not None and self._gain_s(best, sequence) < 0:
            self._cost.doubt_transfers()
            return None
        return best

    def _gain_s(self, match: PrefixMatch, sequence: Sequence) -> float:
        """Seconds saved by applying a match instead of computing."""
        origin = match.origin
        if isinstance(origin, Entry):
            cost = self._cost.restore_s(len(origin.state))
        else:
            cost = self._transfer.copy_s(max(origin.num_computed, match.length))
            if isinstance(origin, SlotContent):
                cost = min(cost, self.slots.loss_s(origin, match.length, sequence))
            elif not match.ready and (step := self._cost.step) is not None:
                cost += step.ubatch  # it starts a step later, in one of its own
        return match.length * self._transfer.token_s - cost

    # Slots -----------------------------------------------------------------------------------------

    def choose_slot(
        self, sequence: Sequence, match: PrefixMatch | None, running: Mapping[int, Sequence]
    ) -> tuple[int, PrefixMatch | None] | None:
        """A free slot for a sequence, None if there is none: one that holds its prefix, or an empty one.

        Without a match, what an evicted slot shares with the sequence stays there: that costs nothing.
        """
        origin = match.origin if match is not None else None
        content = origin if isinstance(origin, SlotContent) else None
        length = match.length if match is not None else 0
        if not self.layout.splits:
            needed = len(sequence.tokens) + 1
            needed = max(needed, len(origin.tokens)) if isinstance(origin, Entry) else needed - length
            self.slots.make_room(needed, running.values(), content)
        # Ids of one set of adapters are computed together: those of others make no gap smaller.
        beside = {slot: each for slot, each in running.items() if each.adapter == sequence.adapter}
        shared = partial(self._match_content, sequence)
        found = self.slots.choose(
            *(sequence, beside, content, length),
            others=bool(running),
            shares=lambda held: match is None and shared(held).length >= MIN_PREFIX_TOKENS,
        )
        return found and (found[0], match if found[1] is None else shared(found[1]))

    def _match_content(self, sequence: Sequence, held: SlotContent) -> PrefixMatch:
        """What a slot has of the beginning of a sequence."""
        fits = sequence.request.reuse and not sequence.unscored and not sequence.swapped
        common = sequence.shared_with(held.tokens) if fits and held.tenant == self._key(sequence) else 0
        cut = held.longest_cut(sequence.request.prompt.floor(common, held.spans))
        return PrefixMatch(cut.length, held, cut.checkpoint)

    def order(self, waiting: Iterable[Sequence]) -> list[Sequence]:
        """Sequences that start together, shortest first: so those of equal length get neighbouring slots.

        Those with a common opening stay in their order: one may wait for another's prefix.
        """
        groups: dict[tuple[str, *tuple[int, ...]], list[Sequence]] = {}
        for sequence in waiting:
            groups.setdefault((self._key(sequence), *sequence.keyed[:TILE]), []).append(sequence)
        ordered = sorted(groups.values(), key=lambda group: len(group[0].tokens))
        return [sequence for group in ordered for sequence in group]

    # Applying --------------------------------------------------------------------------------------

    def apply_match(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Fill the sequence's own slot with its prefix: it is empty, or the one that holds it.

        Returns how many cells were cut off.
        """
        assert match.ready
        first_start = sequence.decoded_tokens == 0
        held, copied, origin = 0, False, match.origin
        in_place = isinstance(origin, SlotContent) and origin.seq_id == sequence.seq_id
        try:
            if in_place:
                held = self._cut(sequence, match)
            elif (entry := origin if isinstance(origin, Entry) else self._through_ram(match)) is not None:
                held = self._restore(sequence, entry, match)
                shared = None if held else self._best_source(sequence, tuple(self._running.values()))
                if shared is not None and shared.ready:  # cells of its slot are still to be copied elsewhere
                    match, origin = shared, shared.origin
            if not held and not in_place and not isinstance(origin, Entry):
                position = sequence.request.prompt.next_position(match.length)
                copied = self._runner.copy(origin.seq_id, sequence.seq_id, position) == position
                held = match.length if copied else 0
        except Exception:
            log.exception("the cached prefix of request %s could not be applied; it is computed", sequence.id)
            if isinstance(origin, Entry):
                self.host.drop(origin)
        if held != match.length:
            held = self._runner.truncate(sequence.seq_id, 0)
        if not isinstance(origin, Entry) and in_place:
            sequence.segments = origin.segments
        sequence.checkpoints = list(origin.checkpoints)
        sequence.cut_to(held)
        if copied and not self.layout.splits and not isinstance(origin, Entry):
            sequence.segments = share_cells(origin, held)
        if first_start and held:  # a preempted one has computed this before
            sequence.cached_tokens = held
            from_disk = sequence.loaded is not None and origin is sequence.loaded.value
            sequence.cached_from = "disk" if from_disk else "ram" if isinstance(origin, Entry) else "device"
            sequence.cached_from += "+checkpoint" if match.checkpoint is not None else ""
        sequence.loaded = None
        if held and isinstance(origin, prefix_index.CachedPrefix) and len(origin.tokens) <= 2 * held:
            self.device.returns.observe(origin.used, len(origin.tokens), returned=True)
        self.hits += held > 0
        self.hit_tokens += held
        return len(origin.tokens) - held if in_place else 0

    def _cut(self, sequence: Sequence, match: PrefixMatch) -> int:
        position, checkpoint = sequence.request.prompt.next_position(match.length), match.checkpoint
        kept = self._runner.truncate(sequence.seq_id, position, checkpoint and checkpoint.state)
        return match.length if kept == position else 0

    def _through_ram(self, match: PrefixMatch) -> Entry | None:
        """The state of a slot saved to RAM, where that is the best way to another slot."""
        origin = match.origin
        assert not isinstance(origin, Entry)
        content = origin if isinstance(origin, SlotContent) else self._content_of(origin)
        self.device.touch(content)
        needs_slot = not self._cuttable and match.checkpoint is None and match.length < origin.num_computed
        if needs_slot or not self._transfer.copies_through_ram(origin.num_computed):
            return None
        return self._transfer.save_entry(content)

    def _restore(self, sequence: Sequence, entry: Entry, match: PrefixMatch) -> int:
        """Restore a state and cut it; 0 if that fails. One that only finds no room now is kept."""
        runner, seq_id, held = self._runner, sequence.seq_id, 0
        if self._transfer.restore(seq_id, entry.state):
            self.host.touch(entry)
            if runner.next_position(seq_id) == entry.position:
                held = self._cut(sequence, match)
        elif any(runner.next_position(other) for other in range(runner.limits.sequences) if other != seq_id):
            return 0  # other sequences are in its way
        if held != match.length:
            self.host.drop(entry)
        return held

    # Keeping ---------------------------------------------------------------------------------------

    def keep(self, sequence: Sequence) -> SlotContent | None:
        """What the slot of a sequence that ends is to be kept for; None if it is to be cleared."""
        if sequence.num_computed >= sequence.known:  # it has begun to answer
            self.slots.answer_tokens.observe(len(sequence.tokens) - len(sequence.request.prompt))
        if not self._keeps or not sequence.request.reuse or sequence.num_computed < MIN_PREFIX_TOKENS:
            return None
        try:
            if not self._runner.settle(sequence.seq_id):
                return None
            if self._runner.next_position(sequence.seq_id) != sequence.next_position:
                return None
            self._transfer.observe_slot(sequence.seq_id, sequence.num_computed)
            return self._content_of(sequence)
        except Exception:
            log.exception("the KV of request %s could not be kept", sequence.id)
            return None

    def insert(self, content: SlotContent) -> None:
        """Cache what a slot holds that was released just now, in place of what it covers."""
        for other in self.device.covered(content):
            if self._cuttable or len(other.tokens) == len(content.tokens):
                self.device.clear(other)
        self.device.insert(content)

    def plan_checkpoints(self, sequence: Sequence) -> None:
        """Before a prompt is computed in memory that cannot be cut: where that is saved on the way."""
        info = self._runner.info
        needed = info.recurrent or sequence.stopping.token_limit > info.sliding_window > 0
        if needed and sequence.request.reuse and self.host.cached_limit:
            prompt, begin = sequence.request.prompt, sequence.num_computed
            stops = prefix_index.plan_stops(prompt.items, begin, self._runner.vocabulary.is_control)
            sequence.stops = sorted({stop for stop in map(prompt.floor, stops) if stop > begin})

    def checkpoint(self, sequence: Sequence) -> None:
        """A sequence has come to a stop. What has no room in RAM is left."""
        del sequence.stops[0]
        try:
            state = self._transfer.checkpoint(sequence.seq_id)
        except Exception:
            log.exception("no checkpoint of request %s could be made", sequence.id)
            return
        if state is not None:
            made = [*sequence.checkpoints, prefix_index.Checkpoint(sequence.num_computed, state)]
            kept = prefix_index.thin([checkpoint.length for checkpoint in made], len(sequence.tokens))
            sequence.checkpoints = [checkpoint for checkpoint in made if checkpoint.length in kept]
            # Half of the RAM at most: those of the least recently used contents go first.
            held = self._count_checkpoints()
            for content in self.device.entries:
                if 2 * held > self.host.cached_limit:
                    held -= count_bytes(content.checkpoints)
                    content.checkpoints = ()
            if 2 * held > self.host.cached_limit:
                sequence.checkpoints.pop()
            self.host.make_room()

    def _count_checkpoints(self) -> int:
        """Bytes of the checkpoints of running sequences and of free slots."""
        slots = sum(count_bytes(content.checkpoints) for content in self.device.entries)
        return slots + sum(count_bytes(sequence.checkpoints) for sequence in self._running.values())

    def _content_of(self, sequence: Sequence) -> SlotContent:
        tokens = sequence.keyed[: sequence.num_computed]
        spans = tuple(span for span in sequence.request.prompt.spans if span.begin < len(tokens))
        held = (tuple(sequence.checkpoints), 0 if self._cuttable else self._min_length(sequence), spans)
        return SlotContent(sequence.seq_id, self._key(sequence), tokens, sequence.segments, *held)

    def _min_length(self, sequence: Sequence) -> int:
        """The runner's, in items: those of a picture may share a position."""
        return self._runner.min_length(sequence.seq_id) + sequence.num_computed - sequence.next_position

    def read_slot(self, seq_id: int) -> Entry:
        """What a free slot holds, as an entry that is in no tier. Raises InvalidRequest or StorageFailed."""
        if (content := self.device.by_slot.get(seq_id)) is None:
            message = "id_slot: this slot computes or holds nothing; `cached` of /debug/kv has those that do"
            raise InvalidRequest(message, "id_slot")
        fits = self._transfer.state_bytes(len(content.tokens)) <= self.host.limit
        if (entry := self._transfer.read_entry(content) if fits else None) is None:
            raise StorageFailed("the slot could not be copied to RAM: raise --cache-ram-mb")
        return entry

    def erase(self, seq_id: int) -> SlotContent | None:
        """Forget what a free slot holds, in RAM too, and return it."""
        if (content := self.device.by_slot.get(seq_id)) is not None:
            for entry in self.host.covered(content):
                self.host.drop(entry)
            self.device.clear(content)
        return content

    def clear(self) -> tuple[int, int]:
        """Forget what slots and RAM have; returns the number of prefixes and of their tokens."""
        entries = [*self.device.entries, *self.host.entries]
        self.clear_slots()
        for entry in tuple(self.host.entries):
            self.host.drop(entry)
        return len(entries), sum(len(entry.tokens) for entry in entries)

    def clear_slots(self) -> None:
        """Empty every free slot."""
        for content in tuple(self.device.entries):
            self.device.remove(content)
        for seq_id in tuple(self._pool.free):
            self._pool.clear(seq_id)

    def count_cells(self, running: Collection[Sequence]) -> tuple[int, int]:
        """Cells of running sequences, and those that free slots keep beside them."""
        used = self.layout.count(running)
        return used, self.layout.count([*running, *self.device.entries]) - used
