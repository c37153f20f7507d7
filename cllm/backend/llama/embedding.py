"""Embedding context: pools embeddings in a llama_context of its own, apart from generation."""

from __future__ import annotations

import time
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from cllm.backend.base import Batch, Row, RowResult, StepResult, StepStatus
from cllm.backend.llama.context import LlamaContext, NativeBatch
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.library import Owned
from cllm.backend.llama.memory import EmbeddingMemory
from cllm.backend.llama.model import POOLING_TYPES, LlamaModel
from cllm.backend.llama.placement import asked_layers
from cllm.config import EngineConfig
from cllm.errors import NotEnoughMemory
from cllm.types import Pooling

# Flash attention on a CPU sums in 16 bits and differently at each batch size: the embeddings of a text alone
# and in a batch had a cosine of 0.996 (0.999999 without). So it is used only above this size of attention.
EXACT_BYTES = 1 << 30
Vector = npt.NDArray[np.float32]


class EmbeddingContext(Owned):
    """Owns a `llama_context` with pooling. One EMBED batch at a time; see `Batch` for its contract."""

    def __init__(
        self, context: LlamaContext, model: LlamaModel, config: EngineConfig, cell_bytes: int
    ) -> None:
        """`context` is that of generation; `cell_bytes` are those of its KV for a token."""
        api, limits = context.api, context.limits.embed
        memory = partial(EmbeddingMemory.of, GgufHeader.of(config), limits, cell_bytes)
        flash = config.flash_attention and memory(flash=False).attention > EXACT_BYTES
        if not asked_layers(config):  # a GPU's memory is not the host's: there llama.cpp finds out
            memory(flash=flash).check()
        widest = limits.batch_tokens if limits.chunked else limits.tokens
        params = api.llama_context_default_params()
        params.n_seq_max = limits.rows
        # Pooling works within one ubatch, so a batch is never cut. llama.cpp aborts at a batch that is no
        # multiple of its rows, when it reserves its largest graph.
        params.n_batch = params.n_ubatch = -(-widest // limits.rows) * limits.rows
        params.n_ctx = max(limits.tokens, params.n_batch)
        params.kv_unified = True  # one input may need all cells, and rows of any length make one ubatch
        params.n_threads = params.n_threads_batch = context.workers.threads
        params.flash_attn_type = int(flash)
        params.embeddings = True
        params.pooling_type = POOLING_TYPES.index(model.pooling)
        params.no_perf = True
        for name, value in config.rope_params.items():
            setattr(params, name, value)
        if not (pointer := api.llama_init_from_model(model.pointer, params)):
            raise NotEnoughMemory(
                f"llama.cpp cannot create a context to embed {limits.tokens} tokens; "
                "try a smaller --embed-tokens"
            )
        super().__init__(pointer, api.llama_free, context.deferred_frees)
        self._api = api
        self._memory = api.llama_get_memory(pointer)  # NULL for encoders, which every function takes
        self._pooling = model.pooling
        self._length = model.vector_length
        self._batch = NativeBatch(api, widest, limits.rows)
        self._sum: Vector | None = None  # over the chunks so far of an unfinished input
        # Shared with generation: the two never compute at the same time.
        self._workers = context.workers

    def run(self, batch: Batch) -> StepResult:
        """Compute the rows; afterwards the KV memory is empty, unless a chunk is to be continued."""
        keep = False
        try:
            self._batch.fill([row._replace(outputs=len(row.tokens)) for row in batch.rows])
            self._workers.work_for(self.pointer)
            started = time.perf_counter()
            if (code := int(self._api.llama_decode(self.pointer, self._batch.struct))) == 0:
                self._api.llama_synchronize(self.pointer)
            compute_s = time.perf_counter() - started
            if code != 0:
                return StepResult(StepStatus(code), code=code, compute_s=compute_s)
            ends = accumulate(len(row.tokens) for row in batch.rows)
            results = tuple(self._result(row, end) for row, end in zip(batch.rows, ends, strict=True))
            keep = not batch.rows[0].outputs
            return StepResult(StepStatus.DONE, results, ubatches=1, compute_s=compute_s)
        finally:
            if not keep:
                self.reset()

    def reset(self) -> None:
        """Clear the KV memory."""
        self._sum = None
        self._api.llama_memory_clear(self._memory, False)

    def _result(self, row: Row, end: int) -> RowResult:
        """The result of a row whose last token is the one before `end` in the batch."""
        api = self._api
        if self._pooling is Pooling.NONE:
            places = range(end - len(row.tokens), end)
            pointers = [api.llama_get_embeddings_ith(self.pointer, place) for place in places]
        else:
            pointers = [api.llama_get_embeddings_seq(self.pointer, row.seq_id)]
        if not all(pointers):
            return RowResult(error="llama.cpp returned no embedding")
        pooled = np.concatenate([np.ctypeslib.as_array(pointer, (self._length,)) for pointer in pointers])
        if row.position or not row.outputs:
            pooled = self._joined(row, pooled)
        if not row.outputs:
            return RowResult()
        if not np.isfinite(pooled).all():
            return RowResult(error="the embedding is not finite")
        return RowResult(embedding=pooled.tobytes())

    def _joined(self, row: Row, pooled: Vector) -> Vector:
        """The embedding of a long input up to this chunk, from that of the chunk alone."""
        before = self._sum
        match self._pooling:
            case Pooling.MEAN:
                self._sum = pooled * len(row.tokens) + (0 if before is None else before)
                return self._sum / np.float32(row.position + len(row.tokens))
            case Pooling.CLS if before is not None:
                return before
            case Pooling.NONE if before is not None:
                pooled = np.concatenate((before, pooled))
        self._sum = pooled
        return pooled
