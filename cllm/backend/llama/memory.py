"""Memory fit: one sum over everything that takes memory, before any of it is allocated."""

from __future__ import annotations

import logging
from bisect import bisect_left as bisect
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
from gguf.constants import GGMLQuantizationType

from cllm.backend.base import SCORED_LOGITS
from cllm.backend.llama.context import CELL_BLOCK, DEFAULT_REQUEST_CELLS, request_share
from cllm.backend.llama.devices import gpu_memory, supports_gpu
from cllm.backend.llama.draft_model import SLOTS
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.layers import Layers
from cllm.build.options import features
from cllm.config import EngineConfig
from cllm.errors import ConfigError, ModelFileError, NotEnoughMemory
from cllm.models.resolve import resolve
from cllm.models.store import embedded_model as embedded_model
from cllm.text.chat_template import read_template
from cllm.types import GRAMMAR_CACHE_BYTES, EmbedLimits

log = logging.getLogger(__name__)
_MIB = 1 << 20
RUNTIME = 160 * _MIB  # Python and libraries of the three processes, as measured
VOCABULARY_BYTES = 1400  # of a token's tables in the engine and in the tokenizer worker, as measured
GRAMMAR_SCRATCH = 16 * _MIB  # while a grammar is compiled, at its largest
GRAMMAR_TABLE_PER_TOKEN = 512  # bytes of the grammar compiler's table of the vocabulary, as measured
# Types that llama.cpp repacks, by the feature of the CPU that makes it do so (ggml-cpu/repack.cpp, amx).
_REPACKED = {
    "avx2": ("Q4_0", "Q4_K", "IQ4_NL", "MXFP4"),
    "avx512f": ("Q2_K",),
    "amx_int8": ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
    "asimddp": ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"),
}

MAX_SHARE = 32768  # cells of a slot that are chosen without being asked for
MAX_PARALLEL = 8
# A coding agent's first message (16,000 tokens) and the answer to it: a second slot must not cost that.
AGENT_SHARE = 20480
MIN_SHARE = 512


def _mib(size: int) -> str:
    return f"{size // _MIB} MiB"


def available_memory() -> int | None:
    """Bytes that the system has available, or None where it does not say. A container's limit counts."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # the word "max": no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        usage = Path("/sys/fs/cgroup/memory.stat").read_text().split()
        held = sum(int(usage[usage.index(name) + 1]) for name in ("anon", "shmem"))
        found.append(max(0, limit - held))
    return min(found, default=None)


def repacked_bytes(header: GgufHeader) -> int:
    """Bytes of the weights that llama.cpp lays out anew on this CPU, beside the mapped file."""
    found = features()
    names = {name for feature, types in _REPACKED.items() if feature in found for name in types}
    types = {int(kind) for kind in GGMLQuantizationType if kind.name in names}
    tied = not any(tensor.name == "output.weight" for tensor in header.tensors)
    return sum(
        tensor.size or 0
        for tensor in header.tensors
        if tensor.type_id in types
        and tensor.dimensions > 1
        and (tied or tensor.name != "token_embd.weight")  # a table, unless it is the output matrix, too
    )


class EmbeddingMemory(NamedTuple):
    """Memory of the embedding context, bytes. An upper estimate: llama.cpp reports it only afterwards."""

    kv: int
    logits: int  # llama.cpp reserves them for every token
    attention: int

    @classmethod
    def of(cls, header: GgufHeader, limits: EmbedLimits, vocabulary: int, *, flash: bool) -> EmbeddingMemory:
        widest = limits.batch_tokens if limits.chunked else limits.tokens
        heads = 1 if flash else header.number("attention.head_count", 1)
        return cls(
            kv=Layers(header).kv_bytes(limits.tokens, 1, batch_tokens=limits.tokens) if limits.chunked else 0,
            logits=vocabulary * widest * 4 * (2 if limits.chunked else 1),
            attention=heads * widest * limits.tokens * 4,
        )

    def check(self) -> None:
        """Raises NotEnoughMemory with the sum."""
        available = available_memory()
        if available is not None and sum(self) > available:
            raise NotEnoughMemory(
                f"not enough memory for embeddings: KV {_mib(self.kv)} + logits {_mib(self.logits)} "
                f"+ attention {_mib(self.attention)}, available {_mib(available)}; "
                "try a smaller --embed-tokens"
            )


class MemoryFit:
    """The memory a model needs, part by part, against what is available; and the context that fits.

    Weights, KV cells, recurrent states and compute buffers are allocated at once. RAM for saved states,
    embeddings and grammars is allocated on use: where it does not fit, there is less RAM for states, which
    costs only time. `parallel` and `share` (cells of a slot) are as asked for, or else chosen.
    """

    def __init__(self, header: GgufHeader, config: EngineConfig) -> None:
        self._header, self._config, self._layers = header, config, Layers(header)
        self._draft = GgufHeader(Path(config.draft_model)) if config.draft_model else None
        self.on_gpu = config.gpu_layers != 0 and supports_gpu()
        self.model = header.data_bytes
        # The mapped pages of repacked weights are not used again: the system can drop them.
        self.repacked = repacked_bytes(header) if config.extra_buffers and not self.on_gpu else 0
        self.parallel, self.share = self._choose()
        self.slots = max(config.slots, self.parallel)
        self.cells = config.ctx_size or self.parallel * self.share  # of the requests; other slots add theirs
        self.kv, self.compute, self.draft = self._sizes(self.parallel, self.share)
        self.needed = self.model + self.kv + self.compute + self.draft
        encoder = not self._layers.layers and f"{header.architecture}.pooling_type" in header.metadata
        tokens = min(config.embed_tokens or self.share, header.context_train)
        limits = EmbedLimits(
            tokens=tokens, batch_tokens=min(config.batch_tokens, tokens), chunked=not encoder
        )
        self.embedding = sum(EmbeddingMemory.of(header, limits, header.vocabulary, flash=True))
        # A compiler each in the engine and in the tokenizer worker, which keeps no grammars.
        compiling = 2 * (header.vocabulary * GRAMMAR_TABLE_PER_TOKEN + GRAMMAR_SCRATCH)
        self.grammars = compiling + GRAMMAR_CACHE_BYTES
        self.states = max(config.cache_ram_mb, config.swap_space_mb) * _MIB
        # Everything in the host's memory, at its largest.
        held = RUNTIME if self.on_gpu else self.needed + self.embedding
        self.total = held + self.grammars + self.states

    @cached_property
    def available(self) -> int | None:
        """Bytes available for what is needed; None where they are unknown, as with layers on both sides."""
        layers = self._config.gpu_layers
        if not self.on_gpu or (free := gpu_memory()) is None:
            return available_memory()
        return free if layers < 0 or layers > self._header.number("block_count") else None

    def _choose(self) -> tuple[int, int]:
        """Requests at a time and cells of each: fewer requests before less context, see `AGENT_SHARE`."""
        config = self._config
        asked = config.parallel or min(config.slots, MAX_PARALLEL)
        if config.ctx_size:
            parallel = asked or min(MAX_PARALLEL, max(1, config.ctx_size // DEFAULT_REQUEST_CELLS))
            slots = max(config.slots, parallel)
            return parallel, request_share(config.ctx_size * slots // parallel, slots)
        longest = self._longest
        if self.available is None:
            return asked or MAX_PARALLEL, min(DEFAULT_REQUEST_CELLS, longest)
        if asked:
            return asked, self._largest_share(asked)
        for parallel in range(MAX_PARALLEL, 1, -1):
            if self._is_affordable(parallel, longest):
                return parallel, longest
        share = self._largest_share(2)
        return (2, share) if share >= min(AGENT_SHARE, longest) else (1, self._largest_share(1))

    @property
    def _longest(self) -> int:
        """The most cells that a slot gets without being asked for."""
        tokens = min(self._config.max_request_tokens or MAX_SHARE, self._header.context_train)
        return max(CELL_BLOCK, request_share(tokens, 1))

    def _largest_share(self, parallel: int) -> int:
        """The most cells that so many slots can have each, in whole blocks."""
        blocks = range(1, self._longest // CELL_BLOCK + 1)
        affordable = bisect(
            blocks, True, key=lambda count: not self._is_affordable(parallel, count * CELL_BLOCK)
        )
        return max(min(MIN_SHARE, self._longest), affordable * CELL_BLOCK)

    def _is_affordable(self, parallel: int, share: int) -> bool:
        """Whether KV takes at most half of what the rest leaves free."""
        assert self.available is not None
        kv, compute, draft = self._sizes(parallel, share)
        return 2 * kv <= self.available - self.model - compute - draft

    def _sizes(self, parallel: int, share: int) -> tuple[int, int, int]:
        """KV with recurrent states, compute buffers, and the draft model."""
        config = self._config
        slots = max(config.slots, parallel)
        batch = max(config.batch_tokens, slots)
        types = config.cache_type_k, config.cache_type_v
        flash = config.flash_attention
        kv = self._layers.kv_bytes(
            share, slots, types=types, batch_tokens=batch, unified=config.unified_kv, flash=flash
        )
        kv += self._layers.state_bytes(slots, self._config.draft_rollback)
        draft = 0
        if self._draft is not None:
            cells = config.max_request_tokens or share
            draft = Layers(self._draft).kv_bytes(cells, SLOTS, types=types, batch_tokens=batch, flash=flash)
            draft += self._draft.data_bytes
        return kv, self._compute(parallel, batch, share * slots if config.unified_kv else share), draft

    def _compute(self, parallel: int, batch: int, cells: int) -> int:
        """Processes and buffers of the largest step. Logits that are not asked for stay untouched pages."""
        header, config = self._header, self._config
        scored = SCORED_LOGITS // max(1, header.vocabulary)
        outputs = min(batch, max(scored, parallel * (1 + config.draft_tokens)))
        # What a layer has in its hands for each token, at its widest.
        widths = 8 * header.number("embedding_length") + 3 * header.number("feed_forward_length")
        # Flash attention needs the mask only (f16), otherwise there are scores for each head (f32).
        scores = 2 if config.flash_attention else 4 * (1 + header.number("attention.head_count"))
        tables = header.vocabulary * (VOCABULARY_BYTES + 2 * 4 * outputs)
        if self.on_gpu:  # there every page is taken
            tables = header.vocabulary * 4 * batch
        return RUNTIME + tables + batch * (4 * widths + scores * (cells if self._layers.keeps_cells else 0))

    @property
    def fits(self) -> bool:
        """Whether the needed part fits; the rest uses what is left."""
        return self.available is None or self.needed <= self.available

    def describe(self) -> str:
        """The sum, in MiB."""
        available = "unknown" if self.available is None else _mib(self.available)
        available += " on the GPU" if self.on_gpu else ""
        draft = f"+ draft model {_mib(self.draft)} " if self.draft else ""
        return (
            f"model {_mib(self.model)} + KV {_mib(self.kv)} ({self.share} cells for each of {self.slots}) "
            f"+ compute {_mib(self.compute)} {draft}= {_mib(self.needed)}, available {available}"
        )

    def describe_context(self) -> str:
        """The context, and why it is what it is."""
        config, train = self._config, self._header.context_train
        if config.ctx_size:
            why = "as --ctx-size says"
        elif self.available is None:
            why = "the available memory is unknown"
        elif self.share < self._longest:
            why = "KV takes half of the memory that is left beside the model"
        elif train < MAX_SHARE:
            why = "the model's training context"
        else:
            why = "as --max-request-tokens says" if config.max_request_tokens else "--ctx-size allows more"
        kept = f", {self.slots} slots" if self.slots > self.parallel else ""
        plural = "" if self.parallel == 1 else "s"
        tokens = min(self.share, train)
        return f"{self.parallel} request{plural} at a time, up to {tokens} tokens each ({why}){kept}"

    def describe_rest(self) -> str:
        """The parts that are allocated on use, in MiB."""
        return (
            f"embeddings {_mib(self.embedding)} + grammars {_mib(self.grammars)} "
            f"+ states {_mib(self.states)}, {_mib(self.total)} in all"
        )


def prepare(config: EngineConfig) -> EngineConfig:
    """Resolve the model and the chat template, check header and memory. Raises SetupError; loads nothing.

    The context that is not given is chosen; what is given is honoured or refused.
    RAM for saved states is limited to what is left.
    """
    if config.model:  # a model that a hub has is checked by its header before it is pulled
        replace = msgspec.structs.replace
        path = resolve(
            config.model, offline=config.offline, check=lambda head: prepare(replace(config, model=str(head)))
        )
    else:
        path = embedded_model()
    header = GgufHeader(path)
    template = read_template(config.chat_template) if config.chat_template else ""
    # A link may lead to a file of another name: a hub's cache names it by its hash.
    path = header.path.resolve()
    if path.name != header.path.name or len(header.parts) > 1:
        path = header.path.absolute()
    config = msgspec.structs.replace(config, model=str(path), chat_template=template)
    ranking = config.pooling == "rank" or (not config.pooling and header.number("pooling_type") == 4)
    if ranking and not header.ranks:
        raise ModelFileError(f"{path.name} has no ranking head: choose --pooling mean, cls or last")
    if config.cache_type_v not in ("f32", "f16", "bf16") and not config.flash_attention:
        raise ConfigError(f"cache_type_v {config.cache_type_v} needs flash attention (--flash-attention)")
    if config.draft_model:
        draft = resolve(config.draft_model, offline=config.offline).resolve()
        config = msgspec.structs.replace(config, draft_model=str(draft))
    fit = MemoryFit(header, config)
    if not fit.fits:
        given = config.ctx_size or config.parallel > 1 or config.slots > 1
        hint = (
            "try a smaller --ctx-size or --parallel" if given else "try a model of fewer or smaller weights"
        )
        raise NotEnoughMemory(f"not enough memory: {fit.describe()}; {hint}")
    log.info("context: %s; memory: %s", fit.describe_context(), fit.describe())
    config = msgspec.structs.replace(config, parallel=fit.parallel, ctx_size=fit.cells)
    host = available_memory()
    if host is None or fit.total <= host:
        return config
    limit_mb = max(0, host - (fit.total - fit.states)) // _MIB
    log.warning(
        "memory is tight (%s; %s): %d MiB instead of %d for the prefix cache and preempted requests",
        *(fit.describe(), fit.describe_rest(), limit_mb, fit.states // _MIB),
    )
    return msgspec.structs.replace(
        config,
        cache_ram_mb=min(config.cache_ram_mb, limit_mb),
        swap_space_mb=min(config.swap_space_mb, limit_mb),
    )
