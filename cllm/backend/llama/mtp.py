"""MTP head: drafts by a layer that a model has for it, in a second context on the same weights.

The head gets each token with the model's hidden row of the token before, and keeps KV of its own. Rows of the
model's steps wait until the head is to draft, or until there are many: a step without drafts costs a copy.
"""

from __future__ import annotations

import struct
import timeit
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from cllm.backend.base import KVState, MediaRows, Row
from cllm.backend.llama.context import HiddenBatch, LlamaContext, NativeBatch
from cllm.backend.llama.library import Library
from cllm.backend.llama.model import LlamaModel
from cllm.config import EngineConfig

HiddenRow = npt.NDArray[np.float32]
MAX_WAITING = 64  # tokens of a sequence that the head has not got yet
KEPT_ROWS = 16  # rows of tokens that it has got: a cut by fewer tokens loses nothing
_FOOTER = struct.Struct("<qqq")  # of a saved state: bytes of the head's KV, rows, tokens


class _Slot:
    """What is known of a slot's sequence. `rows` are of its last tokens, and end with that of the newest."""

    def __init__(self, row: HiddenRow) -> None:
        self.computed = 0  # tokens in the model's KV
        self.held = 0  # in the head's: one more than `computed` after drafts
        self.newest = -1  # that one
        self.waiting: list[int] = []  # tokens between the two
        self.given: list[int] = []  # the newest of those in the head's
        self.rows = [row]  # before the first token there is a row of zeros
        self.lost = False  # the head's KV: no drafts until the slot is filled anew

    def add(self, tokens: Sequence[int], rows: HiddenRow) -> None:
        """The model has computed `tokens`, and these are their rows."""
        self.waiting += tokens[max(0, self.held - self.computed) :]
        self.rows += [row.copy() for row in rows]
        self.computed += len(tokens)
        needed = max(KEPT_ROWS, len(self.waiting) + 1)
        if len(self.rows) > 2 * needed:
            del self.rows[:-needed]

    def take(self, seq_id: int, count: int, newest: Sequence[int] = ()) -> Row:
        """The next waiting tokens and their rows, as the head takes them. `newest` follows all of them."""
        begin = len(self.rows) - (self.computed - self.held) - 1
        tokens = [*self.waiting[:count], *newest]
        media = MediaRows(np.stack(self.rows[begin : begin + len(tokens)]))
        row = Row(seq_id, self.held, tokens, len(newest), None, media=media)
        self.held, self.newest = self.held + len(tokens), tokens[-1]
        self.given = [*self.given, *tokens][-KEPT_ROWS:]
        del self.waiting[:count]
        return row

    def give_back(self, count: int) -> int:
        """Let the head get its last `count` tokens again, as far as they are known. Returns what it keeps."""
        count = max(0, min(count, len(self.given), len(self.rows) - (self.computed - self.held) - 1))
        begin = len(self.given) - count
        self.waiting[:0], self.held = self.given[begin:], self.held - count
        del self.given[begin:]
        return self.held

    def cut(self, length: int, row: HiddenRow) -> bool:
        """The model has cut it. False if the newest token's row was not kept: then `row` stands for it."""
        gone = max(0, self.computed - length)
        del self.waiting[max(0, length - self.held) :]
        del self.given[max(0, len(self.given) - max(0, self.held - length)) :]
        self.held, self.computed = min(self.held, length), min(self.computed, length)
        del self.rows[max(0, len(self.rows) - gone) :]
        known = bool(self.rows)
        self.rows = self.rows or [row]
        return known


class MtpContext(LlamaContext):
    """Owns the head's context. It follows the slots of the model's context, `target`.

    A failure costs drafts and nothing else: the head forgets the sequence.
    """

    def __init__(
        self,
        library: Library,
        model: LlamaModel,
        config: EngineConfig,
        target: LlamaContext,
        *,
        repeats: bool = False,
    ) -> None:
        """With `repeats` the device repeats steps of a shape from their recording: see `draft`."""
        super().__init__(library, model, config, target.deferred_frees, target=target)
        self.repeats = repeats
        self._target, self._width = target, int(self.api.llama_model_n_embd_out(model.pointer))
        # Of every token: of those with output alone, the head's rows are wrong.
        for context in (self, target):
            self.api.llama_set_embeddings_nextn(context.pointer, True, False)
        self._zeros = np.zeros(self._width, np.float32)
        self._slots = [_Slot(self._zeros) for _ in range(self.limits.sequences)]
        self.gaps = 0  # sequences that lacked KV or a row of the head's, in all

    @cached_property
    def _media_batch(self) -> NativeBatch:
        return HiddenBatch(self.api, self.limits.batch_tokens, self.limits.sequences)

    def observe(self, rows: Sequence[Row], padding: Mapping[int, int]) -> None:
        """Take in what the model has just computed; it keeps nothing from the positions of `padding` on."""
        hidden = self._target.hidden_rows(sum(len(row.tokens) for row in rows), self._width)
        end = 0
        for seq_id, position, tokens, *_, media in rows:
            begin, end = end, end + len(tokens)
            if padding.get(seq_id) == position:
                continue
            slot = self._slots[seq_id]
            if position < slot.computed or not position or slot.newest != tokens[0]:
                slot = self._cut(seq_id, position)
            if slot.lost:
                continue
            if media is not None or position != slot.computed:
                self._lose(seq_id)
            else:
                slot.add(tokens, hidden[begin:end])
        self._catch_up([row.seq_id for row in rows if len(self._slots[row.seq_id].waiting) > MAX_WAITING])

    def draft(self, newest: Mapping[int, int], length: int) -> dict[int, list[int]]:
        """The likeliest `length` tokens to follow the newest of each slot; none of a slot that is lost.

        With `repeats` each of the head's steps has equally many tokens of each slot, the newest ones, however
        many are new: what has been recorded takes half the time, and slots of equal length share a ubatch.
        """
        self._follow(newest)
        room = self.limits.batch_tokens
        window = min(length, room // max(1, len(newest)) - 1) if self.repeats else 0
        if sum(max(len(self._slots[each].waiting), window) + 1 for each in newest) > room:
            self._catch_up(newest)
        drafts: dict[int, list[int]] = {each: [] for each in sorted(newest) if not self._slots[each].lost}
        rows = []
        for seq_id in drafts:
            slot = self._slots[seq_id]
            self.truncate(seq_id, slot.give_back(window - len(slot.waiting)))
            rows.append(slot.take(seq_id, MAX_WAITING, (newest[seq_id],)))
        for left in range(length, 0, -1):
            if not rows or not self._compute(rows):
                return {}
            likeliest = self.logits(len(rows)).argmax(axis=1).tolist()
            ends = [*accumulate(len(row.tokens) for row in rows)]
            hidden = self.hidden_rows(ends[-1], self._width)[[end - 1 for end in ends]]
            for place, (row, token) in enumerate(zip(rows, likeliest, strict=True)):
                drafts[row.seq_id].append(token)
                if left > 1:
                    rows[place] = self._follow_up(row, token, hidden[place : place + 1], window)
        for seq_id in drafts:  # what it drafted will come again, with the model's own rows
            self.truncate(seq_id, self._slots[seq_id].held)
        return drafts

    def _follow_up(self, row: Row, token: int, hidden: HiddenRow, again: int) -> Row:
        """The row after a row of the head's: a token, and before it as many as it is to get again."""
        assert row.media is not None
        begin = max(1, len(row.tokens) - again)
        position, rows = row.position + begin, np.concatenate((row.media.rows[begin:], hidden))
        self.truncate(row.seq_id, position)
        return Row(row.seq_id, position, [*row.tokens[begin:], token], 1, None, media=MediaRows(rows))

    def measure_s(self, rounds: int) -> float:
        """Seconds for a token of a draft; all slots are empty, and slot 0 is again afterwards."""
        shortest = min(timeit.repeat(partial(self.draft, {0: 0}, 1), number=1, repeat=rounds))
        self._cut(0, 0)
        return shortest

    def _catch_up(self, ids: Collection[int]) -> None:
        """Give the head the tokens that wait."""
        while waiting := [seq_id for seq_id in ids if self._slots[seq_id].waiting]:
            share = max(1, self.limits.batch_tokens // len(waiting))
            self._compute([self._slots[seq_id].take(seq_id, share) for seq_id in sorted(waiting)])

    def _compute(self, rows: Sequence[Row]) -> bool:
        if (code := self.decode(rows)) == 1:  # cells that the model has freed since
            self._follow(range(len(self._slots)))
            code = self.decode(rows)
        for row in rows if code else ():
            self._lose(row.seq_id)
        return code == 0

    def _lose(self, seq_id: int) -> None:
        self._cut(seq_id, 0).lost = True
        self.gaps += 1

    def _follow(self, ids: Iterable[int]) -> None:
        """The model may have cut these sequences, and drafts may not have been submitted."""
        for seq_id in ids:
            slot = self._slots[seq_id]
            length = min(self._target.next_position(seq_id), slot.computed)
            if length < max(slot.held, slot.computed):
                self._cut(seq_id, length)

    def _cut(self, seq_id: int, length: int, row: HiddenRow | None = None) -> _Slot:
        """The model's KV of a slot has this length; `row` is that of its newest token, if known."""
        slot = self._slots[seq_id]
        if slot.held > length:
            self.truncate(seq_id, length)
        if not length:
            slot = self._slots[seq_id] = _Slot(self._zeros)
        elif not slot.cut(length, self._zeros if row is None else row) and row is None:
            self.gaps += 1  # one cell of the head's will be a little wrong
        return slot

    def dump(self, seq_id: int, *, whole: bool = True) -> bytes:
        """What is to be saved with a sequence's KV; without `whole`, with a checkpoint of it."""
        self._follow((seq_id,))
        if whole:
            self._catch_up([seq_id])
        slot = self._slots[seq_id]  # with no rows if that failed
        state = bytes(self.save(seq_id) or b"") if whole and not slot.lost else b""
        rows = [row.tobytes() for row in slot.rows[-KEPT_ROWS if whole else -1 :]]
        return b"".join((state, *rows, _FOOTER.pack(len(state), len(rows), slot.computed)))

    def split(self, state: KVState) -> tuple[memoryview, memoryview]:
        """The two parts of a saved state: the model's, and what `dump` returned."""
        view = memoryview(state)
        size, rows, _ = _FOOTER.unpack(view[-_FOOTER.size :])
        end = len(view) - size - rows * self._zeros.nbytes - _FOOTER.size
        return view[:end], view[end:]

    def load(self, seq_id: int, dumped: KVState, *, whole: bool = True) -> None:
        """Put back what `dump` returned: all of it, or the newest row of a slot that is about to be cut."""
        size, count, computed = _FOOTER.unpack(dumped[-_FOOTER.size :])
        rows = np.frombuffer(dumped, np.float32, count * self._width, size).reshape(count, -1).copy()
        slot = self._cut(seq_id, 0 if whole else computed, None if whole else rows[-1])
        if whole and computed:
            slot.computed = slot.held = computed
            slot.rows = [*rows]
            self._follow(set(range(len(self._slots))) - {seq_id})  # cells that the model has freed since
        if whole and (not size or not self.restore(seq_id, dumped[:size])):
            self._lose(seq_id)
