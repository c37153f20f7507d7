"""The real backend: a GGUF on llama.cpp behind the engine's seam."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cllm.backend.base import Backend, Batch, Row, RowResult, StepResult, StepStatus, count_ubatches
from cllm.backend.llama.batch import NativeBatch
from cllm.backend.llama.context import LlamaContext
from cllm.backend.llama.library import Library, load
from cllm.backend.llama.model import LlamaModel, LlamaVocabulary
from cllm.backend.llama.ownership import Graveyard, Owned
from cllm.backend.llama.sampler import Candidates, DryPrototypes, LlamaSampler, build_chain, log_probabilities
from cllm.config import EngineConfig
from cllm.types import Limits, ModelFacts, SamplingParams

_NOTHING_EXCLUDED: npt.NDArray[np.int32] = np.zeros(0, np.int32)


def status_of(code: int) -> StepStatus:
    """The class of a return code of `llama_decode`."""
    match code:
        case 0:
            return StepStatus.DONE
        case 1:
            return StepStatus.NO_ROOM
        case 2:
            return StepStatus.ABORTED
        case -1:
            return StepStatus.BAD_BATCH
        case _:
            return StepStatus.FAILED


def _with_fillers(batch: Batch) -> tuple[Row, ...]:
    if not batch.fillers:
        return batch.rows
    fillers = (Row(sequence_id, 0, (0,), 0, None) for sequence_id in batch.fillers)
    return tuple(sorted((*batch.rows, *fillers), key=lambda row: row.sequence_id))


class LlamaBackend(Backend):
    """Everything native, owned by the thread that made it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        library: Library | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        library = library or load()
        self._api = library.api
        self._graveyard = Graveyard()
        self._model = LlamaModel(
            library,
            Path(config.model),
            self._graveyard,
            extra_buffers=config.extra_buffers,
            gpu_layers=config.gpu_layers,
            progress=progress,
        )
        try:
            self._context = LlamaContext(library, self._model, config, self._graveyard)
        except BaseException:
            self._model.close()
            raise
        self._vocabulary = self._model.vocabulary
        self._ends = np.array(sorted(self._vocabulary.ends), np.int32)
        self._facts = self._model.facts()
        self._limits = self._read_limits(config)
        self._batch = NativeBatch(self._api, self._context.batch_tokens, config.parallel)
        self._candidates = Candidates(self._api, self._vocabulary.size)
        self._dry = DryPrototypes(
            self._api, self._vocabulary.pointer, self._limits.sequence_cells, self._graveyard
        )
        self._warm_up()

    def _warm_up(self) -> None:
        """Two tokens through the model, so that the first request does not pay for reading the weights."""
        self._batch.fill((Row(0, 0, (0, 0), 0, None),))
        self._context.decode(self._batch.struct)
        self._context.remove(0)

    def _read_limits(self, config: EngineConfig) -> Limits:
        context = self._context
        most = min(context.sequence_cells, self._model.context_train)
        # The layout must not decide who gets a 400: the default is one stream's share in both.
        share = min(most, context.cells // config.parallel)
        return Limits(
            sequences=config.parallel,
            cells=context.cells,
            sequence_cells=most,
            request_tokens=min(config.max_request_tokens or share, most),
            batch_tokens=context.batch_tokens,
            unified=context.unified,
        )

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def vocabulary(self) -> LlamaVocabulary:
        return self._vocabulary

    def forward(self, batch: Batch) -> StepResult:
        self._graveyard.bury()
        rows = _with_fillers(batch)
        self._batch.fill(rows)
        started = time.perf_counter()
        code = self._context.decode(self._batch.struct)
        for sequence_id in batch.fillers:
            self._context.remove(sequence_id)
        decoded = time.perf_counter()
        status = status_of(code)
        if status is not StepStatus.DONE:
            return StepResult(status, code=code, compute_s=decoded - started)
        results = self._sample(batch.rows)
        return StepResult(
            status,
            results,
            ubatches=count_ubatches(
                rows,
                self._context.ubatch_tokens,
                # a recurrent memory cuts by sequence in either layout
                unified=self._context.unified and not self._context.recurrent,
            ),
            compute_s=decoded - started,
            sample_s=time.perf_counter() - decoded,
        )

    def _sample(self, rows: Sequence[Row]) -> tuple[RowResult, ...]:
        """One token for each row that wants output; the rows all greedy are one argmax together."""
        outputs = sum(row.outputs for row in rows)
        if outputs == 0:
            return (RowResult(),) * len(rows)
        logits = self._context.logits(outputs)
        wanting = [row for row in rows if row.outputs]
        originals = {index: logits[index].copy() for index, row in enumerate(wanting) if row.logprobs}
        greedy = False
        for index, row in enumerate(wanting):
            assert row.outputs == 1 and isinstance(row.sampler, LlamaSampler)
            row.sampler.exclude(logits[index], row.mask)
            greedy = greedy or row.sampler.chain is None
        best = logits.argmax(axis=1) if greedy else ()
        results: dict[int, RowResult] = {}
        for index, row in enumerate(wanting):
            assert isinstance(row.sampler, LlamaSampler)
            try:
                token = int(best[index]) if row.sampler.chain is None else row.sampler.sample(logits[index])
            except ValueError as error:  # law 5: the others of this step have their tokens
                results[row.sequence_id] = RowResult(error=str(error))
                continue
            logprobs = (log_probabilities(originals[index], token, row.logprobs),) if row.logprobs else ()
            results[row.sequence_id] = RowResult((token,), logprobs)
        return tuple(results.get(row.sequence_id, RowResult()) for row in rows)

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
            chain = Owned(pointer, self._api.llama_sampler_free, self._graveyard)
        return LlamaSampler(
            self._api,
            params,
            chain,
            self._candidates,
            self._graveyard,
            self._ends if params.ignore_eos else _NOTHING_EXCLUDED,
        )

    def next_position(self, sequence_id: int) -> int:
        return self._context.next_position(sequence_id)

    def truncate(self, sequence_id: int, length: int) -> int:
        return self._context.truncate(sequence_id, length)

    def copy(self, source: int, target: int, length: int) -> int:
        return self._context.copy(source, target, length)

    def save(self, sequence_id: int) -> bytes | None:
        return self._context.save(sequence_id)

    def restore(self, sequence_id: int, state: bytes) -> bool:
        return self._context.restore(sequence_id, state)

    def close(self) -> None:
        self._dry.close()
        self._graveyard.bury()
        self._context.close()
        self._model.close()
