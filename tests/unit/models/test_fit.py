"""What fits of a model here, and which of its quantisations would."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm.backend.llama import memory
from cllm.backend.llama.gguf import GgufHeader
from cllm.models import fit
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
    monkeypatch.setattr(fit, "list_devices", tuple)


def test_contexts_by_the_number_of_requests(header: GgufHeader, available: None) -> None:
    found = ModelFit(header)
    assert found.fits and found.describe().startswith("fits: 8 requests at a time, up to 4096 tokens each")
    assert found.contexts() == [(1, 4096), (2, 4096), (4, 4096), (8, 4096)]


def test_the_largest_quantisation_that_fits_is_suggested(header: GgufHeader, available: None) -> None:
    found = ModelFit(header)
    assert [model.quant for model in found.fitting(MODELS)] == ["Q4_K_M", "Q2_K"]
    assert found.suggest(MODELS) == "Q4_K_M would (210 MB)"
    assert "none of its quantisations" in found.suggest(MODELS[2:])


def test_what_does_not_fit_says_the_sum(header: GgufHeader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 20 * MIB)
    monkeypatch.setattr(fit, "list_devices", tuple)
    found = ModelFit(header)
    assert not found.fits and found.describe().startswith("does not fit: model ") and found.contexts() == []
