"""The llama.cpp runner: a GGUF model with its contexts, behind `ModelRunner`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cllm.backend.base import (
    Batch,
    BatchKind,
    Drafter,
    ModelRunner,
    Row,
    RowResult,
    StepResult,
    StepStatus,
    count_ubatches,
)
from cllm.backend.llama import fingerprint
from cllm.backend.llama.batch_sampler import BatchSampler
from cllm.backend.llama.context import LlamaContext, NativeBatch, get_status
from cllm.backend.llama.draft_model import DraftModel, check_cuttable, draft_config
from cllm.backend.llama.embedding import EmbeddingContext, embed_limits
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.library import DeferredFrees, Library, Owned, load
from cllm.backend.llama.memory import MemoryFit
from cllm.backend.llama.model import LlamaModel, LlamaVocabulary
from cllm.backend.llama.sampler import DryPrototypes, LlamaSampler, build_chain
from cllm.backend.llama.threads import default_threads
from cllm.config import EngineConfig
from cllm.types import Limits, ModelInfo, SamplingParams

MAX_SAMPLER_THREADS = 8
_NOTHING_EXCLUDED: npt.NDArray[np.int32] = np.zeros(0, np.int32)


def _with_padding(batch: Batch) -> tuple[Row, ...]:
    padding = (Row(seq_id, 0, (0,), 0, None) for seq_id in batch.padding)
    return tuple(sorted((*batch.rows, *padding), key=lambda row: row.seq_id))


class LlamaRunner(ModelRunner):
    """Everything native, owned by the thread that made it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        library: Library | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        library = library or load()
        self._library = library
        self._config = config
        self._api = library.api
        self._deferred_frees = DeferredFrees()
        self._model = LlamaModel(
            library,
            Path(config.model),
            self._deferred_frees,
            extra_buffers=config.extra_buffers,
            gpu_layers=config.gpu_layers,
            pooling=config.pooling,
            progress=progress,
        )
        self._embedding: EmbeddingContext | None = None
        try:
            self._context = LlamaContext(library, self._model, config, self._deferred_frees)
        except BaseException:
            self._model.close()
            raise
        try:
            self._limits = self._read_limits(config)
            if not self._context.generates:
                self.open_embedding()
        except BaseException:
            self._context.close()
            self._model.close()
            raise
        self._vocabulary = self._model.vocabulary
        self._ends = np.array(sorted(self._vocabulary.ends), np.int32)
        self._info = self._model.info(config.chat_template, generates=self._context.generates)
        self._submitted: Batch | None = None
        self._rows: tuple[Row, ...] = ()
        self._code, self._submitted_at = 0, 0.0
        self._batch = NativeBatch(self._api, self._context.batch_tokens, config.parallel)
        threads = min(MAX_SAMPLER_THREADS, config.threads or default_threads())
        self.batch_sampler = BatchSampler(self._api, self._vocabulary.size, threads)
        self._dry = DryPrototypes(
            self._api, self._vocabulary.pointer, self._limits.sequence_cells, self._deferred_frees
        )
        self._warm_up()
        self._drafts: DraftModel | None = None
        if config.draft_model and self._context.generates:
            try:
                self._drafts = self._open_draft_model()
            except BaseException:
                self.close()
                raise

    def _open_draft_model(self) -> DraftModel:
        """Raises SetupError where it cannot draft for this model."""
        check_cuttable(self._info, "served")
        config = draft_config(self._config, self._limits.request_tokens)
        return DraftModel(LlamaRunner(config, library=self._library), self._vocabulary)

    def _warm_up(self) -> None:
        """A token or two through the model: the first request must not pay for reading the weights."""
        if self._embedding is not None:
            self._embedding.run(Batch((Row(0, 0, (0,), 1, None),), BatchKind.EMBED))
            return
        self._batch.fill((Row(0, 0, (0, 0), 0, None),))
        self._context.decode(self._batch.struct)
        self._context.remove(0)

    def _read_limits(self, config: EngineConfig) -> Limits:
        context = self._context
        most = min(context.sequence_cells, self._model.context_train)
        # The layout must not decide who gets a 400: the default is one split stream's share in both.
        share = min(most, context.request_share)
        request_tokens = min(config.max_request_tokens or share, most)
        return Limits(
            sequences=config.parallel,
            cells=context.cells,
            sequence_cells=most,
            request_tokens=request_tokens,
            batch_tokens=context.batch_tokens,
            unified=context.unified,
            embed=embed_limits(self._model, config, request_tokens, generates=context.generates),
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def vocabulary(self) -> LlamaVocabulary:
        return self._vocabulary

    def submit(self, batch: Batch) -> None:
        self._deferred_frees.free_all()
        self._submitted = batch
        if batch.kind is BatchKind.EMBED:
            return  # computed when it is collected, in a context of its own
        self._rows = _with_padding(batch) if batch.padding else batch.rows
        self._batch.fill(self._rows)
        self._submitted_at = time.perf_counter()
        self._code = self._context.decode(self._batch.struct)

    def collect(self) -> StepResult:
        batch, self._submitted = self._submitted, None
        assert batch is not None, "nothing was submitted"
        if batch.kind is BatchKind.EMBED:
            assert self._embedding is not None, "open_embedding comes first"
            return self._embedding.run(batch)
        code = self._code
        if code == 0:
            self._api.llama_synchronize(self._context.pointer)
        for seq_id in batch.padding:
            self._context.remove(seq_id)
        decoded = time.perf_counter()
        status = get_status(code)
        if status is not StepStatus.DONE:
            return StepResult(status, code=code, compute_s=decoded - self._submitted_at)
        outputs = sum(row.outputs for row in batch.rows)
        if outputs:
            results = self.batch_sampler.sample(batch.rows, self._context.logits(outputs))
        else:
            results = (RowResult(),) * len(batch.rows)
        # A recurrent memory is split by sequence in either layout.
        unified = self._context.unified and not self._context.recurrent
        return StepResult(
            status,
            results,
            ubatches=count_ubatches(self._rows, self._context.ubatch_tokens, unified=unified),
            compute_s=decoded - self._submitted_at,
            sample_s=time.perf_counter() - decoded,
        )

    def interrupt(self, stop: bool) -> None:
        self._context.abort_switch.set(stop)

    def create_sampler(self, params: SamplingParams) -> LlamaSampler:
        chain = None
        if not params.greedy:
            pointer = build_chain(
                self._api,
                params,
                dry=self._dry,
                vocabulary_size=self._vocabulary.size,
                context=self._limits.sequence_cells,
            )
            chain = Owned(pointer, self._api.llama_sampler_free, self._deferred_frees)
        return LlamaSampler(
            self._api,
            params,
            chain,
            self._deferred_frees,
            self._ends if params.ignore_eos else _NOTHING_EXCLUDED,
        )

    def next_position(self, seq_id: int) -> int:
        return self._context.next_position(seq_id)

    def truncate(self, seq_id: int, length: int) -> int:
        return self._context.truncate(seq_id, length)

    def copy(self, source: int, target: int, length: int) -> int:
        return self._context.copy(source, target, length)

    def save(self, seq_id: int) -> bytes | None:
        return self._context.save(seq_id)

    def restore(self, seq_id: int, state: bytes) -> bool:
        return self._context.restore(seq_id, state)

    def memory_bytes(self) -> dict[str, int]:
        fit = MemoryFit(GgufHeader(Path(self._config.model)), self._config)
        return {
            "model": self._info.size_bytes,
            "kv": fit.per_cell * self._limits.cells,
            "buffers": fit.compute,
            "embedding_limit": fit.embedding,
            "grammars_limit": fit.grammars,
        }

    def state_fingerprint(self) -> str:
        return fingerprint.state_fingerprint(self._config, unified=self._context.unified)

    def open_embedding(self) -> None:
        if self._embedding is None:
            self._embedding = EmbeddingContext(
                self._library,
                self._model,
                self._config,
                self._limits.embed,
                self._context.workers,
                self._deferred_frees,
            )

    def reset_embedding(self) -> None:
        if self._embedding is not None:
            self._embedding.reset()

    def create_drafter(self) -> Drafter | None:
        return self._drafts.new_drafter() if self._drafts is not None else None

    def close(self) -> None:
        if self._drafts is not None:
            self._drafts.close()
            self._drafts = None
        self.batch_sampler.close()
        self._dry.close()
        self._deferred_frees.free_all()
        if self._embedding is not None:
            self._embedding.close()  # before the context whose workers it borrows
        self._context.close()
        self._model.close()
