"""A llama_context: its KV memory, its threads, and one decode."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cllm.backend.base import SCORED_LOGITS, KVState, Row
from cllm.backend.llama.gguf import TENSOR_TYPES
from cllm.backend.llama.library import DeferredFrees, Library, Owned
from cllm.backend.llama.model import LlamaModel
from cllm.backend.llama.threads import Workers
from cllm.config import EngineConfig, slot_count
from cllm.errors import NotEnoughMemory
from cllm.types import EmbedLimits, Limits

DEFAULT_REQUEST_CELLS = 4096
EMBED_ROWS = 32  # inputs per step
MIN_OUTPUTS = 512  # of a step: for fewer no buffer is made smaller
CELL_BLOCK = 256  # llama.cpp gives cells in multiples of this
MIN_MAPPED_STATE = 256 << 10  # bytes; smaller ones may lie in the heap
MTP = 1  # LLAMA_CONTEXT_TYPE_MTP
MTP_BATCH_TOKENS = 256
WHOLE, PARTIAL = 0, 1  # llama.cpp's flags of a state: all of it, or without the cells that can be cut


def request_share(cells: int, parallel: int) -> int:
    """The share of one of `parallel` KV streams in `cells`, as llama.cpp rounds it where it splits them."""
    return _padded(_padded(cells) // parallel)


def max_outputs(config: EngineConfig, slots: int, vocabulary: int) -> int:
    """Tokens of a step whose logits may be wanted: with a buffer for all of a long step, memory is wasted."""
    wanted = slots * (1 + config.draft_tokens) + SCORED_LOGITS // max(1, vocabulary)
    return min(max(config.batch_tokens, slots), max(MIN_OUTPUTS, wanted))


def used_outputs(config: EngineConfig, vocabulary: int) -> int:
    """Tokens of a step whose logits are computed: of all requests, or of a prompt that is scored."""
    wanted = max(SCORED_LOGITS // max(1, vocabulary), config.parallel * (1 + config.draft_tokens))
    return min(max(config.batch_tokens, slot_count(config)), wanted)


def _padded(cells: int) -> int:
    return -(-cells // CELL_BLOCK) * CELL_BLOCK


def _make_params(
    api: Any, model: LlamaModel, config: EngineConfig, outputs: int | None, target: LlamaContext | None
) -> Any:
    params = api.llama_context_default_params()
    slots = slot_count(config)
    cells = config.ctx_size or config.parallel * min(DEFAULT_REQUEST_CELLS, model.context_train)
    params.n_ctx = cells * slots // config.parallel
    params.n_seq_max = slots
    # A step carries at least a token of each request; on a CPU a larger physical batch wins nothing.
    params.n_batch = params.n_ubatch = max(config.batch_tokens, slots)
    params.n_outputs_max = outputs or max_outputs(config, slots, model.vocabulary.size)
    params.flash_attn_type = int(config.flash_attention)
    params.kv_unified = config.unified_kv
    params.type_k = TENSOR_TYPES[config.cache_type_k.upper()].id
    params.type_v = TENSOR_TYPES[config.cache_type_v.upper()].id
    params.swa_full = False
    params.n_rs_seq = config.draft_rollback if model.recurrent else 0
    params.no_perf = True
    for name, value in config.rope_params.items():
        setattr(params, name, value)
    if target is not None:
        params.ctx_type, params.ctx_other, params.n_rs_seq = MTP, target.pointer, 0
        # It computes one layer: a large physical batch would take memory and win nothing.
        params.n_batch = params.n_ubatch = max(MTP_BATCH_TOKENS, slots)
        params.n_outputs_max = slots
    return params


class LlamaContext(Owned):
    """Owns a `llama_context` and the threads that work for it."""

    def __init__(
        self,
        library: Library,
        model: LlamaModel,
        config: EngineConfig,
        deferred_frees: DeferredFrees,
        *,
        outputs: int | None = None,
        target: LlamaContext | None = None,
    ) -> None:
        """`outputs` replaces `max_outputs`. With `target`, the context of the model, it is the MTP head's."""
        api = library.api
        params = _make_params(api, model, config, outputs, target)
        self._own_workers = target is None  # two contexts never compute at the same time
        workers = Workers(library, config, deferred_frees) if target is None else target.workers
        self.workers: Workers = workers
        params.n_threads = params.n_threads_batch = workers.threads
        if not (pointer := api.llama_init_from_model(model.pointer, params)):
            raise NotEnoughMemory(
                f"llama.cpp cannot create a context of {params.n_ctx} cells "
                f"(K {config.cache_type_k}, V {config.cache_type_v}); try a smaller --ctx-size or --parallel"
            )
        super().__init__(pointer, api.llama_free, deferred_frees)
        self.api = api
        self.memory = api.llama_get_memory(pointer)
        # Encoders (and diffusion models) look at all tokens at once and remember none.
        self.generates = bool(self.memory and api.llama_model_has_decoder(model.pointer))
        self.limits = self._read_limits(model, config, request_share(int(params.n_ctx), slot_count(config)))
        self._recurrent = model.recurrent and target is None  # the head has attention only
        self._sliding_window = model.sliding_window
        self._snapshots: dict[int, int] = {}  # by id: tokens of its last decode that can be taken back
        self._unsettled: set[int] = set()  # ids that were rolled back, until they are decoded again
        self._copying: set[int] = set()  # ids whose cells are copied only at the next decode
        self._vocabulary_size = model.vocabulary.size
        self.media_width, self._position_sections = model.media_width, model.position_sections
        self._batch = self._token_batch = NativeBatch(api, self.limits.batch_tokens, self.limits.sequences)
        self._decode_started = 0.0
        workers.work_for(pointer)
        # llama.cpp's abort callback is called at every node of a graph, thousands of times a step; in Python
        # each call would take the GIL. So it is the C library's `strlen` of a text of no or one character.
        self._stop = ctypes.create_string_buffer(b"\0\0", 2)
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
        self._abort_callback = api.ggml_abort_callback(strlen)
        api.llama_set_abort_callback(pointer, self._abort_callback, ctypes.addressof(self._stop))

    def _read_limits(self, model: LlamaModel, config: EngineConfig, share: int) -> Limits:
        """Limits of the context; `share` is that of one KV stream."""
        api, pointer = self.api, self.pointer
        sequence_cells = min(int(api.llama_n_ctx_seq(pointer)), model.context_train)
        # The layout must not decide which request gets a 400: the default is one KV stream's share in both.
        request_tokens = min(config.max_request_tokens or share, sequence_cells)
        default = request_tokens if self.generates else min(DEFAULT_REQUEST_CELLS, model.context_train)
        embed_tokens = min(config.embed_tokens or default, model.context_train)
        return Limits(
            sequences=slot_count(config),
            parallel=config.parallel,
            cells=int(api.llama_n_ctx(pointer)),
            sequence_cells=sequence_cells,
            request_tokens=request_tokens,
            batch_tokens=int(api.llama_n_batch(pointer)),
            unified=config.unified_kv,
            target_itl_ms=config.target_itl_ms,
            max_itl_ms=config.max_itl_ms,
            rollback_tokens=int(api.llama_n_rs_seq(pointer)),  # 0 where the architecture cannot
            embed=EmbedLimits(
                tokens=embed_tokens,
                batch_tokens=min(config.batch_tokens, embed_tokens),
                rows=EMBED_ROWS,
                # Only causal attention can be cut: in an encoder every token attends to all others.
                chunked=self.generates and model.causal,
            ),
        )

    def close(self) -> None:
        super().close()
        self.__dict__.pop("memory", None)  # part of the context: use after close must fail, not answer
        if self._own_workers:
            self.workers.close()  # after the context: they work for it to the end

    def interrupt(self, stop: bool) -> None:
        """See `ModelRunner.interrupt`: one byte is written at once."""
        self._stop[0] = b"\1" if stop else b"\0"

    def decode(self, rows: Sequence[Row]) -> int:
        """llama_decode; its code. On a GPU it returns before the device is done."""
        media = rows[0].media
        self._batch = self._token_batch if media is None else self._media_batch
        self._batch.fill(rows)
        for row in rows if self.limits.rollback_tokens else ():
            self._snapshots[row.seq_id] = min(len(row.tokens) - 1, self.limits.rollback_tokens)
            self._unsettled.discard(row.seq_id)
        self.workers.work_for(self.pointer)
        self._decode_started = time.perf_counter()
        with self._attention(causal=media is None or media.causal):
            code: int = self.api.llama_decode(self.pointer, self._batch.struct)
        if code != -1:  # a batch that was refused at once has not carried out the copies
            self._copying.clear()
        return code

    @cached_property
    def _media_batch(self) -> NativeBatch:
        limits = self.limits
        return MediaBatch(self.api, limits.batch_tokens, limits.sequences, self._position_sections)

    @contextmanager
    def _attention(self, *, causal: bool) -> Iterator[None]:
        """Around one decode: without `causal`, all its rows attend to each other. It is of the context."""
        if causal:
            yield
            return
        self.api.llama_set_causal_attn(self.pointer, False)
        try:
            yield
        finally:
            self.api.llama_set_causal_attn(self.pointer, True)

    def logits(self, outputs: int) -> npt.NDArray[np.float32]:
        """The last decode's outputs in batch order. A view that is good until the next native call only."""
        address = ctypes.addressof(self.api.llama_get_logits(self.pointer).contents)
        return _view_rows(address, outputs, self._vocabulary_size)

    def hidden_rows(self, count: int, width: int) -> npt.NDArray[np.float32]:
        """The last decode's hidden rows in batch order; likewise."""
        address = ctypes.addressof(self.api.llama_get_embeddings_nextn(self.pointer).contents)
        return _view_rows(address, count, width)

    def next_position(self, seq_id: int) -> int:
        return int(self.api.llama_memory_seq_pos_max(self.memory, seq_id)) + 1

    def remove(self, seq_id: int) -> None:
        """Remove a whole sequence; llama.cpp never refuses that.

        When a unified KV is empty, the place where llama.cpp looks for cells next goes back to the first:
        left in the middle, it would widen the attention of the next requests, and round their text otherwise.
        """
        self._snapshots.pop(seq_id, None)
        self.api.llama_memory_seq_rm(self.memory, seq_id, -1, -1)
        slots = range(self.limits.sequences)
        if self.limits.unified and all(self.next_position(other) == 0 for other in slots):
            self.api.llama_memory_clear(self.memory, False)

    def truncate(self, seq_id: int, length: int, checkpoint: KVState | None = None) -> int:
        """See `ModelRunner.truncate`."""
        held = self.next_position(seq_id)
        if length >= held:
            return held
        shortest = self.min_length(seq_id)
        if self._snapshots.pop(seq_id, 0) >= held - length:
            shortest = length
            self._unsettled.add(seq_id)
        usable = length > 0 and (checkpoint is not None or length >= shortest)
        if usable and checkpoint is not None:  # before the cut, which it allows
            usable = self.restore(seq_id, checkpoint, PARTIAL)
        usable = usable and self.api.llama_memory_seq_rm(self.memory, seq_id, length, -1)
        if usable and self.next_position(seq_id) == length:
            return length
        self.remove(seq_id)
        return 0

    def settle(self, seq_id: int) -> bool:
        """See `ModelRunner.settle`: a rolled back state lies in a snapshot until the next decode of its id.

        Decodes of others may move it about inside the memory, but not its snapshots.
        """
        if seq_id not in self._unsettled:
            return True
        self._unsettled.discard(seq_id)
        state = self.checkpoint(seq_id)
        return state is not None and self.restore(seq_id, state, PARTIAL)

    def min_length(self, seq_id: int) -> int:
        """See `ModelRunner.min_length`: what the next token would look back on must still be there.

        llama.cpp cuts a sliding window even where it is not.
        """
        if self._recurrent:
            return self.next_position(seq_id)
        if not self._sliding_window:
            return 0
        oldest = int(self.api.llama_memory_seq_pos_min(self.memory, seq_id))
        return oldest + self._sliding_window + 1 if oldest > 0 else 0

    def copy(self, source: int, target: int, length: int) -> int:
        """See `ModelRunner.copy`. llama.cpp aborts on a partial copy between KV streams: copy, then trim."""
        if length < self.next_position(source) and length < self.min_length(source):
            return 0
        self.api.llama_memory_seq_cp(self.memory, source, target, -1, -1)
        if not self.limits.unified:
            self._copying |= {source, target}
        return self.truncate(target, length)

    def save(self, seq_id: int, flags: int = WHOLE, more: bytes = b"") -> KVState | None:
        """The sequence's KV as bytes, then `more`; None while its cells are still to be copied."""
        if seq_id in self._copying:
            return None
        size = self.api.llama_state_seq_get_size_ext(self.pointer, seq_id, flags)
        state = _new_state(size + len(more))  # filled once, before it is used: no second copy of it
        written = self.api.llama_state_seq_get_data_ext(self.pointer, _address(state), size, seq_id, flags)
        state[size:] = more
        return state if written == size else None

    def state_bytes(self, seq_id: int) -> int:
        return int(self.api.llama_state_seq_get_size_ext(self.pointer, seq_id, WHOLE))

    def checkpoint(self, seq_id: int) -> KVState | None:
        """See `ModelRunner.checkpoint`."""
        return self.save(seq_id, PARTIAL)

    def restore(self, seq_id: int, state: KVState, flags: int = WHOLE) -> bool:
        """Put saved KV into an empty sequence, or a checkpoint into its own; on failure it is empty."""
        if seq_id in self._copying:
            return False
        self._snapshots.pop(seq_id, None)
        size = len(state)
        if self.api.llama_state_seq_set_data_ext(self.pointer, _address(state), size, seq_id, flags) == size:
            return True
        self.remove(seq_id)
        return False


@lru_cache(maxsize=64)  # making one takes longer than the pass over a small vocabulary
def _view_rows(address: int, count: int, width: int) -> npt.NDArray[np.float32]:
    flat = (ctypes.c_float * (count * width)).from_address(address)
    view: npt.NDArray[np.float32] = np.frombuffer(memoryview(flat).cast("B"), np.float32)
    return view.reshape(count, width)


def _new_state(size: int) -> memoryview:
    """Memory for a state: pages of its own, which are the system's again when it is freed.

    In the heap, states of all sizes that come and go leave gaps: it would take a third more than they do.
    """
    if size >= MIN_MAPPED_STATE:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        with suppress(OSError):  # too many mappings
            return memoryview(mmap.mmap(-1, size, flags=flags))
    return memoryview(bytearray(size))


def _address(state: KVState) -> Any:
    """Address of the bytes; good while `state` is held."""
    return np.frombuffer(state, np.uint8).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class NativeBatch:
    """A `llama_batch` over arrays that Python owns; holds up to `capacity` tokens of `sequences` ids."""

    def __init__(self, api: Any, capacity: int, sequences: int) -> None:
        self.capacity = capacity
        self.lines = 0  # of logits that its rows yield: each first those of `scored`, then those of outputs
        self._token = np.zeros(capacity, np.int32)
        self._position = np.zeros(capacity, np.int32)
        self._id_count = np.ones(capacity, np.int32)
        self._output = np.zeros(capacity, np.int8)
        # Each token points at its sequence's entry in this table.
        self._ids = np.arange(sequences, dtype=np.int32)
        self._base = int(self._ids.ctypes.data)
        self._id_pointer = np.full(capacity + 1, self._base, np.uintp)
        self.struct = api.llama_batch(
            n_tokens=0,
            token=self._token.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            embd=None,
            pos=self._position.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self._id_count.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=ctypes.cast(self._id_pointer.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=self._output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, rows: Sequence[Row]) -> None:
        """Lay the rows out, padding after its row. A batch over the capacity cannot be built: it raises."""
        if (count := sum(len(row.tokens) for row in rows)) > self.capacity:
            raise ValueError(f"a batch of {count} tokens is over the limit of {self.capacity}")
        ids = [row.seq_id for row in rows]
        starts = [(row.seq_id, row.position) for row in rows]
        assert starts == sorted(set(starts)) and ids[0] >= 0 and ids[-1] < len(self._ids), f"rows {ids}"
        base = self._base
        self.struct.n_tokens = count
        lines = [len(row.scored) + row.outputs for row in rows]
        self.lines = sum(lines)
        if count == len(rows):  # one token each: one assignment for all of them
            self._token[:count] = [row.tokens[0] for row in rows]
            self._position[:count] = [row.position for row in rows]
            self._id_pointer[:count] = [base + 4 * seq_id for seq_id in ids]
            self._output[:count] = lines
            return
        begin = 0
        self._output[:count] = 0
        for row, wanted in zip(rows, lines, strict=True):
            end = begin + len(row.tokens)
            self._token[begin:end] = row.tokens
            self._position[begin:end] = np.arange(row.position, row.position + len(row.tokens))
            self._id_pointer[begin:end] = base + 4 * row.seq_id
            self._output[end - wanted : end] = 1
            begin = end


class HiddenBatch(NativeBatch):
    """A `llama_batch` of tokens, each with a hidden row: what the MTP head takes."""

    def fill(self, rows: Sequence[Row]) -> None:
        super().fill(rows)
        self._rows = np.concatenate([row.media.rows for row in rows if row.media is not None])
        self.struct.embd = self._rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


class MediaBatch(NativeBatch):
    """A `llama_batch` of embeddings in place of tokens, each with `sections` positions.

    It holds no more rows than a ubatch, so llama.cpp does not cut a picture that must stay whole: it would
    abort the process.
    """

    def __init__(self, api: Any, capacity: int, sequences: int, sections: int) -> None:
        super().__init__(api, capacity, sequences)
        self.struct.token = None
        self._sections = sections

    def fill(self, rows: Sequence[Row]) -> None:
        super().fill(rows)
        media = [row.media for row in rows if row.media is not None]
        assert len(media) == len(rows) and (len(rows) == 1 or all(each.causal for each in media))
        self._rows = np.concatenate([each.rows for each in media], dtype=np.float32)
        assert len(self._rows) == self.struct.n_tokens
        positions = np.concatenate([each.places for each in media if each.places is not None], axis=1)
        self._positions = np.ascontiguousarray(positions[: self._sections], np.int32)
        self.struct.embd = self._rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self.struct.pos = self._positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
