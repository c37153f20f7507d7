"""Fit of a model in the memory of this machine, and the quantisations of it that would fit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cllm.backend.llama.dry_load import DryLoad
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit
from cllm.backend.llama.placement import list_devices
from cllm.config import EngineConfig
from cllm.models.files import ModelFiles, format_size

SLOTS = (1, 2, 4, 8)
SMALL_CONTEXT = 4096  # of one request: what must fit for a model to be of use


def _fit(
    header: GgufHeader,
    parallel: int = 0,
    ctx_size: int = 0,
    *,
    dry: DryLoad | None = None,
    scale: float = 1.0,
) -> MemoryFit:
    config = EngineConfig(parallel=parallel, ctx_size=ctx_size)
    return MemoryFit(header, config, list_devices(), dry=dry, scale=scale)


class ModelFit:
    """Fit of a model in the memory here, by its header."""

    def __init__(self, header: GgufHeader) -> None:
        """Raises LibraryError without a native library, ModelFileError for a model that it cannot load."""
        self._header = header
        self._chosen = _fit(header)
        self.fits, self.memory = self._chosen.fits, self._chosen.describe()

    def describe(self) -> str:
        """Describe in one line what would be served, or the sum that is too large."""
        return f"fits: {self._chosen.describe_context()}" if self.fits else f"does not fit: {self.memory}"

    def contexts(self) -> list[tuple[int, int]]:
        """List numbers of requests at a time with the tokens that each can have, as far as memory goes."""
        with DryLoad() as dry:
            fits = [_fit(self._header, parallel, dry=dry) for parallel in SLOTS]
        tokens = self._header.context_train
        return [(fit.parallel, min(fit.share, tokens)) for fit in fits if fit.fits]

    def fitting(self, models: Sequence[ModelFiles]) -> list[ModelFiles]:
        """Find the quantisations of the model that would fit with a small context, the largest first."""
        small = partial(_fit, self._header, parallel=1, ctx_size=SMALL_CONTEXT)
        found = [model for model in models if small(scale=model.size / self._header.file_bytes).fits]
        return sorted(found, key=lambda model: -model.size)

    def suggest(self, models: Sequence[ModelFiles]) -> str:
        """Suggest a quantisation to take instead."""
        fitting = self.fitting(models)
        if not fitting:
            return "none of its quantisations would fit here; search for a model of fewer parameters"
        best = fitting[0]
        return f"{best.quant or best.stem} would ({format_size(best.size)})"
