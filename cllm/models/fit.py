"""Fit of a model in the memory of this machine; quantisations of it, and other models, that would fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from cllm.backend.llama.dry_load import DryLoad
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import AGENT_SHARE, MAX_PARALLEL, MAX_SHARE, MemoryFit
from cllm.backend.llama.placement import list_devices
from cllm.config import EngineConfig
from cllm.models.files import ModelFiles, format_size

SLOTS = (1, 2, 4, 8)
SMALL_CONTEXT = 4096  # of one request: what must fit for a model to be of use
TABLE = Path(__file__).with_name("table.json")  # written by scripts/model_table.py
MAX_CPU_ACTIVE = 5e9  # weights that are read from RAM for each token: some tokens/s on a usual CPU
FASTER = 0.3  # of the weights of another model are computed for a token, at most


class ModelFit:
    """Fit of a model in the memory here, by its header."""

    def __init__(self, header: GgufHeader) -> None:
        """Raises LibraryError without a native library, ModelFileError for a model that it cannot load."""
        self._header = header
        self._chosen = MemoryFit(header, EngineConfig(), list_devices())
        self.fits, self.memory = self._chosen.fits, self._chosen.describe()

    def describe(self) -> str:
        """Describe in one line what would be served, or the sum that is too large."""
        return f"fits: {self._chosen.describe_context()}" if self.fits else f"does not fit: {self.memory}"

    def contexts(self) -> list[tuple[int, int]]:
        """List numbers of requests at a time with the tokens that each can have, as far as memory goes."""
        configs = [EngineConfig(parallel=parallel) for parallel in SLOTS]
        with DryLoad() as dry:
            fits = [MemoryFit(self._header, config, list_devices(), dry=dry) for config in configs]
        tokens = self._header.context_train
        return [(fit.parallel, min(fit.share, tokens)) for fit in fits if fit.fits]

    def fitting(self, models: Sequence[ModelFiles]) -> list[ModelFiles]:
        """Find the quantisations of the model that would fit with a small context, the largest first."""
        config = EngineConfig(parallel=1, ctx_size=SMALL_CONTEXT)
        small = partial(MemoryFit, self._header, config, list_devices())
        found = [model for model in models if small(scale=model.size / self._header.file_bytes).fits]
        return sorted(found, key=lambda model: -model.size)

    def suggest(self, models: Sequence[ModelFiles]) -> str:
        """Suggest a quantisation to take instead."""
        if not (fitting := self.fitting(models)):
            return "none of its quantisations would fit here; search for a model of fewer parameters"
        best = fitting[0]
        return f"{best.quant or best.stem} would ({format_size(best.size)})"


class TableModel(msgspec.Struct, frozen=True):
    """A row of the table. Sizes are bytes; what they mean is said in its `about`."""

    repo: str
    weights: int
    active: int  # weights that a token is computed with
    context: int
    cell: int
    slot: int
    fixed: int
    quants: dict[str, int]


class ModelTable(msgspec.Struct, frozen=True):
    """Models of known sizes, on a date."""

    date: str
    about: str
    models: tuple[TableModel, ...]


class Choice(NamedTuple):
    """A model with the context that the memory leaves room for: tokens for each of `requests` at a time."""

    model: TableModel
    quant: str
    requests: int
    tokens: int

    @property
    def reference(self) -> str:
        return f"hf:{self.model.repo}:{self.quant}"

    @property
    def size(self) -> int:
        return self.model.quants[self.quant]


def choose(model: TableModel, room: int) -> Choice | None:
    """Choose the quantisation and the context, by the rule of `MemoryFit`: KV takes half of what is left.

    The largest quantisation with a context for an agent, else the smallest. None if that does not fit.
    """
    longest = min(MAX_SHARE, model.context)
    for quant, size in sorted(model.quants.items(), key=lambda item: -item[1]):
        budget = (room - size - model.fixed) // 2
        if (requests := min(MAX_PARALLEL, budget // (model.slot + model.cell * longest))) < 2:
            requests = 2 if budget // 2 >= model.slot + model.cell * min(AGENT_SHARE, longest) else 1
        tokens = min(longest, (budget // requests - model.slot) // model.cell)
        if tokens >= min(AGENT_SHARE, longest) or (
            size == min(model.quants.values()) and tokens >= SMALL_CONTEXT
        ):
            return Choice(model, quant, requests, tokens)
    return None


def recommend(table: ModelTable, room: int, *, gpu: bool = True) -> dict[str, Choice]:
    """Recommend up to three models for so much memory, by what each is best for."""
    models = (model for model in table.models if gpu or model.active <= MAX_CPU_ACTIVE)
    found = [choice for model in models if (choice := choose(model, room)) is not None]
    found.sort(key=lambda choice: -choice.model.weights)
    best: dict[str, Choice] = {}
    tests: dict[str, Callable[[Choice], bool]] = {
        "best answers": lambda _: True,
        "many users": lambda choice: choice.requests == MAX_PARALLEL,
        "speed": lambda choice: choice.model.active <= FASTER * found[0].model.active,
    }
    for name, suits in (*tests.items(), ("also", tests["best answers"])):
        left = (choice for choice in found if choice not in best.values() and suits(choice))
        if len(best) < len(tests) and (choice := next(left, None)) is not None:
            best[name] = choice
    return best
