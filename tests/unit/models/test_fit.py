"""What fits of a model here, and which of its quantisations would."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm.backend.llama import memory
from cllm.backend.llama.gguf import GgufHeader
from cllm.models.files import group_files
from cllm.models.fit import ModelFit

MIB = 1 << 20
MODELS = group_files({"m-Q2_K.gguf": 10 * MIB, "m-Q4_K_M.gguf": 200 * MIB, "m-Q8_0.gguf": 4000 * MIB})


@pytest.fixture
def header(tiny: dict[str, bytes], tmp_path: Path) -> GgufHeader:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny["tiny-llama-Q4_K_M.gguf"])
    return GgufHeader(path)


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 500 * MIB)
    monkeypatch.setattr(memory, "supports_gpu", lambda: False, raising=False)


def test_contexts_by_the_number_of_requests(header: GgufHeader, available: None) -> None:
    fit = ModelFit(header)
    assert fit.fits and fit.describe().startswith("fits: 8 requests at a time, up to 4096 tokens each")
    assert [tuple(context) for context in fit.contexts()] == [(1, 4096), (2, 4096), (4, 4096), (8, 4096)]


def test_the_largest_quantisation_that_fits_is_suggested(header: GgufHeader, available: None) -> None:
    fit = ModelFit(header)
    assert [model.quant for model in fit.fitting(MODELS)] == ["Q4_K_M", "Q2_K"]
    assert fit.suggest(MODELS) == "Q4_K_M would (210 MB)"
    assert "none of its quantisations" in fit.suggest(MODELS[2:])


def test_what_does_not_fit_says_the_sum(header: GgufHeader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 20 * MIB)
    monkeypatch.setattr(memory, "supports_gpu", lambda: False, raising=False)
    fit = ModelFit(header)
    assert not fit.fits and fit.describe().startswith("does not fit: model ") and fit.contexts() == []
