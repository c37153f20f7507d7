"""Loading can be given up: what the progress callback raises ends it, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.model import LlamaModel
from cllm.backend.llama.probe import run_probe
from cllm.backend.llama.runner import LlamaRunner
from cllm.config import EngineConfig
from cllm.errors import ShuttingDown


def make_config(models: dict[str, Path]) -> EngineConfig:
    return EngineConfig(model=str(models["dense"]), parallel=1, ctx_size=256, threads=1)


@pytest.mark.parametrize("last", [0, 1, 5])
def test_what_the_progress_raises_ends_the_loading(models: dict[str, Path], last: int) -> None:
    seen: list[float] = []

    def progress(fraction: float) -> None:
        seen.append(fraction)
        if len(seen) > last:
            raise ShuttingDown("enough")

    with pytest.raises(ShuttingDown, match="enough"):
        LlamaModel(load(), make_config(models), DeferredFrees(), progress=progress)
    assert len(seen) == last + 1 and seen == sorted(seen)


def test_a_model_has_the_first_name_of_its_alias(models: dict[str, Path]) -> None:
    config = EngineConfig(model=str(models["dense"]), alias="one, two")
    with LlamaModel(load(), config, DeferredFrees(), vocabulary_only=True) as model:
        assert model.name == "one"


def test_a_runner_gives_up_before_it_reads_the_weights(models: dict[str, Path]) -> None:
    calls = 0

    def progress(fraction: float) -> None:
        nonlocal calls
        calls += 1

    LlamaRunner(make_config(models), progress=progress).close()

    def give_up(fraction: float) -> None:
        nonlocal calls
        calls -= 1
        if not calls:
            raise ShuttingDown("enough")

    with pytest.raises(ShuttingDown, match="enough"):
        LlamaRunner(make_config(models), progress=give_up)


def test_the_probe_passes_with_the_smallest_batches(models: dict[str, Path]) -> None:
    """In this vocabulary its text has more tokens than a batch."""
    result = run_probe(EngineConfig(model=str(models["dense"]), threads=1, batch_tokens=32))
    assert result.passed, result.detail
