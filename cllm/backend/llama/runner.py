"""The llama.cpp runner: a GGUF model with its contexts, behind `ModelRunner`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path

import numpy as np

from cllm.adapters import Adapter
from cllm.backend.base import (
    RECORDED_AFTER,
    Batch,
    BatchKind,
    DraftCost,
    Drafter,
    KVState,
    ModelRunner,
    Row,
    RowResult,
    StepResult,
    StepStatus,
    count_ubatches,
)
from cllm.backend.llama import fingerprint
from cllm.backend.llama.adapter import LlamaAdapters
from cllm.backend.llama.candidates import IDLE_PART, NO_TOKENS, PART, make_logit_scan
from cllm.backend.llama.context import WHOLE, LlamaContext
from cllm.backend.llama.draft_model import DraftModel, ModelDrafter, check_cuttable, draft_config
from cllm.backend.llama.dry_load import Sizes, read_sizes
from cllm.backend.llama.embedding import EmbeddingContext
from cllm.backend.llama.library import DeferredFrees, Library, Owned, load
from cllm.backend.llama.model import LlamaModel
from cllm.backend.llama.mtp import MtpContext
from cllm.backend.llama.placement import asked_layers, wants_gpu
from cllm.backend.llama.sampler import BatchSampler, DryPrototypes, LlamaSampler, build_chain
from cllm.backend.llama.threads import compute_threads, default_threads, encoder_threads
from cllm.backend.llama.token_rows import find_token_rows
from cllm.config import EngineConfig
from cllm.types import SamplingParams

MAX_SAMPLER_THREADS = 12
MEASURED_DRAFT = 8  # tokens
MEASURED_ROUNDS = 3
MEASURED_S = 0.5  # then no further round: a large model's steps take long, and vary less
REMEMBERED_STEPS = 8


class LlamaRunner(LlamaContext, ModelRunner):
    """A context with its model, samplers, embeddings and draft model. Owned by the thread that made it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        library: Library | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._library = library or load(gpu=wants_gpu(config))
        self._library.use_kernels(config.own_kernels)
        self._config = config
        frees = DeferredFrees()
        self._embedding: EmbeddingContext | None = None
        self._drafts: DraftModel | None = None
        self._head: MtpContext | None = None
        self._head_bytes = 0
        self._submitted: Batch | None = None
        self._rows: tuple[Row, ...] = ()
        self._padding: dict[int, int] = {}  # position by id
        self._code = 0  # of what was submitted
        self._plain_s: dict[int, list[float]] = {}  # by rows: the device's last steps of a token a row
        self._open = ExitStack()  # what is open; closed in reverse order
        try:
            model = LlamaModel(self._library, config, frees, progress=progress)
            self._model = self._open.enter_context(model)
            super().__init__(self._library, model, config, frees)
            self._open.callback(super().close)
            self._adapters = LlamaAdapters(self, model, Path(config.model))
            self._open.callback(self._adapters.close)
            self.adapters = self._adapters.sizes
            self._open.callback(frees.free_all)
            self._load(progress)
        except BaseException:
            self.close()
            raise

    def _load(self, progress: Callable[[float], None] | None) -> None:
        config, library = self._config, self._library
        self._sizes = Sizes(*map(sum, zip(*read_sizes(library, self.pointer).values(), strict=True)))
        self.info = self._model.info(config.chat_template, generates=self.generates)
        layers = asked_layers(config)
        complete = layers is None or layers > self.info.layers
        self.asynchronous = complete and bool(self.api.llama_supports_gpu_offload())
        self.vocabulary = self._model.vocabulary
        self._ends = np.array(sorted(self.vocabulary.ends), np.int32)
        threads = min(MAX_SAMPLER_THREADS, default_threads())
        scan = make_logit_scan(threads, IDLE_PART if self.asynchronous else PART)
        self.batch_sampler = BatchSampler(self.api, self.vocabulary.size, threads, scan)
        self._open.callback(self.batch_sampler.close)
        context = self.limits.sequence_cells
        self._dry = DryPrototypes(self.api, self.vocabulary.pointer, context, self.deferred_frees)
        self._open.callback(self._dry.close)
        if not self.info.generates:
            self.open_embedding()
        if progress is not None:
            progress(1.0)  # the last point to give up loading: the first decode reads all weights
        if config.drafter == "mtp" and self.info.generates:
            self._open_head()
        self._warm_up()
        if config.drafter == "model" and self.info.generates:
            check_cuttable(self.info, "served")
            draft = LlamaRunner(
                draft_config(config, self.limits.request_tokens),
                library=library,
                progress=progress and (lambda _: progress(1.0)),
            )
            self._drafts = DraftModel(draft, self.vocabulary)
            self._open.callback(self._drafts.close)
        if config.mmproj and self.info.generates:
            self.token_rows = find_token_rows(self, self._model)

    def _open_head(self) -> None:
        if not self.limits.rollback_tokens:
            check_cuttable(self.info, "served")
        self._head = MtpContext(self._library, self._model, self._config, self, repeats=self.asynchronous)
        self._open.callback(self._head.close)
        sizes = zip(*read_sizes(self._library, self._head.pointer).values(), strict=True)
        self._head_bytes = sum(map(sum, sizes)) - self._sizes.model  # the weights are in both
        self.has_head = True

    def _warm_up(self) -> None:
        """A token or two through the model: the first request must not pay for reading the weights."""
        if self._embedding is not None:
            self._embedding.run(Batch((Row(0, 0, (0,), 1, None),), BatchKind.EMBED))
            return
        self._decode_s(2)
        self.stream_copy_s = self._measure_copy()
        if self._config.draft_tokens:
            self.draft_cost = self._measure_drafts(1 + min(self._config.draft_tokens, MEASURED_DRAFT))

    def _measure_copy(self) -> float | None:
        """Seconds to copy a slot's KV stream on the device, which llama.cpp does before its next step.

        Not on a CPU, where it would fill memory that may never be needed.
        """
        cuttable = not (self.info.recurrent or self.info.sliding_window)
        if not self.asynchronous or self.limits.unified or self.limits.sequences < 2 or not cuttable:
            return None
        shortest = {False: math.inf, True: math.inf}
        for _ in range(RECORDED_AFTER + MEASURED_ROUNDS):
            for copies in shortest:
                if copies:
                    self.copy(0, 1, 0)
                shortest[copies] = min(shortest[copies], self._decode_s(1))
        return max(0.0, shortest[True] - shortest[False])

    def _measure_drafts(self, longest: int) -> DraftCost:
        """One kind of CPU verifies eight draft tokens in twice the time of a step, another in eight times.

        A step is planned anew unless it is like the one before, and a GPU repeats it from its recording then:
        the beginning of a run of drafts costs some steps, and its end. The shortest of a few times counts:
        what else the machine does only makes steps longer.
        """
        shortest: dict[int, float] = {}  # of a step in a run of such steps
        runs: dict[int, float] = {}  # a run, and the plain steps after it that it makes longer
        started = time.perf_counter()
        after = RECORDED_AFTER if self.asynchronous else 1
        for _ in range(MEASURED_ROUNDS):
            for tokens in (1, 2, longest):
                steps = [self._decode_s(each) for each in (*[tokens] * (1 + after), *[1] * after)]
                shortest[tokens] = min(steps[after], shortest.get(tokens, math.inf))
                runs[tokens] = min(sum(steps), runs.get(tokens, math.inf))
            if time.perf_counter() - started > MEASURED_S:
                break
        if longest <= 2 or not all(shortest.values()):
            return DraftCost()
        step_s = shortest[1]
        token = max(0.0, shortest[longest] - shortest[2]) / (longest - 2) / step_s
        begin = (runs[2] - runs[1]) / step_s - (1 + after) * (shortest[2] / step_s - 1)
        head = self._head.measure_s(MEASURED_ROUNDS) / step_s if self._head is not None else 0.0
        verify = max(0.0, (shortest[2] - shortest[1]) / step_s - token)
        return DraftCost(verify, token, max(0.0, begin), head)

    def _decode_s(self, tokens: int) -> float:
        """Seconds to compute `tokens` tokens of an empty sequence, each with output; 0 if that fails."""
        started = time.perf_counter()
        code = self.decode((Row(0, 0, (0,) * tokens, tokens, None),))
        self.api.llama_synchronize(self.pointer)
        seconds = time.perf_counter() - started
        self.remove(0)
        return 0.0 if code else seconds

    def submit(self, batch: Batch) -> None:
        if not self.deferred_frees.empty():
            self.deferred_frees.free_all()
        self._submitted = batch
        if batch.kind is BatchKind.EMBED:
            return  # computed when it is collected, in a context of its own
        self._rows = batch.rows
        self._padding = {}
        if batch.padding:
            ends = {row.seq_id: row.position + len(row.tokens) for row in batch.rows}
            self._padding = {each: ends.get(each) or self.next_position(each) for each in batch.padding}
            padding = (Row(each, self._padding[each], (0,) * n, 0, None) for each, n in batch.padding.items())
            self._rows = tuple(sorted((*batch.rows, *padding), key=attrgetter("seq_id", "position")))
        if not self.asynchronous:
            self.workers.left = encoder_threads(compute_threads(self._config)) if self.encoding else 0
        if batch.adapter != self._adapters.key:
            self._adapters.use(batch.adapter)
        self._code = self.decode(self._rows)

    def _wait(self) -> None:
        """Wait until a GPU is done with a token of each row.

        Sampler chains take two passes on all threads, which are then woken before; the shortest of the last
        such steps says when. For the likeliest token it would not pay.
        """
        rows = len(self._rows)
        if not any(isinstance(row.sampler, LlamaSampler) and row.sampler.chain for row in self._rows):
            self.api.llama_synchronize(self.pointer)
            return
        known = self._plain_s.setdefault(rows, [])
        if len(known) == REMEMBERED_STEPS:
            known.clear()  # the next one is waited for awake: sleep that is too long must not be remembered
        taken_s = time.perf_counter() - self._decode_started
        expected_s = min(known) - taken_s if known else 0.0
        logits = self._batch.lines * self.vocabulary.size
        self.batch_sampler.scan.wait(self.api.llama_synchronize, self.pointer, expected_s, logits)
        known.append(time.perf_counter() - self._decode_started)

    def collect(self) -> StepResult:
        batch, self._submitted = self._submitted, None
        assert batch is not None, "nothing was submitted"
        if batch.kind is BatchKind.EMBED:
            assert self._embedding is not None, "open_embedding comes first"
            return self._embedding.run(batch)
        code, lines = self._code, self._batch.lines
        # A recurrent memory is split by sequence in either layout.
        unified = self.limits.unified and not self.info.recurrent
        ubatches = count_ubatches(self._rows, self.limits.batch_tokens, unified=unified)
        if code == 0 and self.asynchronous and self._batch.struct.n_tokens == len(self._rows):
            self._wait()
        elif code == 0:
            self.api.llama_synchronize(self.pointer)
        # Not as `truncate`, which may have to drop the whole sequence: a token more has pushed nothing out of
        # a sliding window that its successor at the same position looks back on.
        for seq_id, position in self._padding.items():
            self.api.llama_memory_seq_rm(self.memory, seq_id, position, -1)
        decoded = time.perf_counter()
        compute_s = decoded - self._decode_started
        if code != 0:
            return StepResult(StepStatus(code), code=code, compute_s=compute_s)
        if self._head is not None:
            self._head.observe(self._rows, self._padding)
            self.draft_gaps = self._head.gaps
        if lines:
            results = self.batch_sampler.sample(batch.rows, self.logits(lines))
        else:
            results = (RowResult(),) * len(batch.rows)
        sample_s = time.perf_counter() - decoded
        return StepResult(StepStatus.DONE, results, 0, ubatches, compute_s, sample_s)

    def create_sampler(self, params: SamplingParams) -> LlamaSampler:
        chain = None
        context = self.limits.sequence_cells
        if not params.greedy:
            size = self.vocabulary.size
            pointer = build_chain(self.api, params, dry=self._dry, vocabulary_size=size, context=context)
            chain = Owned(pointer, self.api.llama_sampler_free, self.deferred_frees)
        return LlamaSampler(self.api, params, chain, self._ends if params.ignore_eos else NO_TOKENS, context)

    def memory_bytes(self) -> dict[str, int]:
        return {
            "model": self.info.size_bytes,
            "kv": self._sizes.kv,
            "buffers": self._sizes.compute,
            "draft_model": self._drafts.memory_bytes if self._drafts is not None else self._head_bytes,
            "adapters": sum(self.adapters.values()),
        }

    def state_fingerprint(self) -> str:
        return fingerprint.state_fingerprint(self._config, unified=self.limits.unified)

    def open_embedding(self) -> None:
        if self._embedding is None:
            cell_bytes = self._sizes.kv // self.limits.cells
            self._embedding = EmbeddingContext(self, self._model, self._config, cell_bytes)
            self._open.callback(self._embedding.close)  # before the context, whose workers it borrows

    def reset_embedding(self) -> None:
        if self._embedding is not None:
            self._embedding.reset()

    def check_adapter(self, adapter: Adapter) -> Adapter:
        return self._adapters.check(adapter)

    def load_adapter(self, adapter: Adapter) -> None:
        self._adapters.load(adapter)

    def unload_adapter(self, digest: str) -> None:
        self._adapters.unload(digest)

    def create_drafter(self, tenant: str | None) -> Drafter | None:
        return ModelDrafter(self._drafts, tenant) if self._drafts is not None else None

    def draft(self, newest: Mapping[int, int], length: int) -> dict[int, list[int]]:
        return self._head.draft(newest, length) if self._head is not None else {}

    # Cuts are noticed by the head itself.

    def copy(self, source: int, target: int, length: int) -> int:
        if self._head is not None:
            self._head.load(target, self._head.dump(source))
        return super().copy(source, target, length)

    def save(self, seq_id: int, flags: int = WHOLE, more: bytes = b"") -> KVState | None:
        more = self._head.dump(seq_id, whole=flags == WHOLE) if self._head is not None else b""
        return super().save(seq_id, flags, more)

    def state_bytes(self, seq_id: int) -> int:
        return super().state_bytes(seq_id) + (self._head.state_bytes(seq_id) if self._head is not None else 0)

    def restore(self, seq_id: int, state: KVState, flags: int = WHOLE) -> bool:
        own, of_head = self._head.split(state) if self._head is not None else (state, b"")
        if (restored := super().restore(seq_id, own, flags)) and self._head is not None:
            self._head.load(seq_id, of_head, whole=flags == WHOLE)
        return restored

    def close(self) -> None:
        self._open.close()
