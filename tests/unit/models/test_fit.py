"""What fits of a model here, and which of its quantisations would."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from cllm.backend.llama import memory
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MAX_SHARE, MemoryFit
from cllm.backend.llama.placement import Device
from cllm.cli.main import app
from cllm.config import EngineConfig
from cllm.models import fit
from cllm.models.files import FILE_TYPES, group_files, parse_hub
from cllm.models.fit import TABLE, ModelFit, ModelTable, choose, recommend
from scripts.model_table import SHAPES, write_head

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


@pytest.fixture(scope="module")
def table() -> ModelTable:
    return msgspec.json.decode(TABLE.read_bytes(), type=ModelTable)


def test_table_has_references_that_can_be_pulled(table: ModelTable) -> None:
    for model in table.models:
        assert model.quants.keys() <= FILE_TYPES.keys() and parse_hub(f"hf:{model.repo}:Q8_0") is not None
        assert 0 < model.active <= model.weights < min(model.quants.values()) * 2
    (known,) = (model for model in table.models if model.repo == "Qwen/Qwen3-8B-GGUF")
    assert known.weights == 8_190_735_360 and known.cell == pytest.approx(36 * 2 * 8 * 128 * 2, rel=0.01)


def test_choice_is_that_of_the_memory_sum(
    table: ModelTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By llama.cpp's sums for a file of the same shapes, without its data; plain weights, as in the table."""
    (shape,) = (shape for shape in SHAPES if shape.repo == "Qwen/Qwen3-4B-GGUF")
    header = GgufHeader(write_head(shape, tmp_path / "head.gguf"))
    (row,) = (model for model in table.models if model.repo == shape.repo)
    choice = choose(row, 12 << 30)
    assert choice is not None and choice.tokens < MAX_SHARE
    monkeypatch.setattr(memory, "available_memory", lambda: 12 << 30)
    found = MemoryFit(
        header, EngineConfig(gpu_layers=0, extra_buffers=False), scale=choice.size / header.file_bytes
    )
    assert found.parallel == choice.requests
    assert min(found.share, shape.context) == pytest.approx(choice.tokens, rel=0.03)


@pytest.mark.parametrize("room", [2, 4, 8, 16, 24, 48, 96])
def test_recommended_models_fit(table: ModelTable, room: int) -> None:
    found = recommend(table, room * 10**9)
    assert len(found) == min(3, sum(choose(model, room * 10**9) is not None for model in table.models))
    assert len({choice.model.repo for choice in found.values()}) == len(found) > 1
    for choice in found.values():
        model = choice.model
        cells = choice.requests * (model.slot + model.cell * choice.tokens)
        assert choice.size + model.fixed + cells <= room * 10**9
        assert choice.tokens <= model.context
    assert max(choice.model.weights for choice in found.values()) == found["best answers"].model.weights


def test_recommendations_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = partial(CliRunner().invoke, app, env={"COLUMNS": "80"})
    shown = call(["recommend", "--memory", "16"])
    assert shown.exit_code == 0 and shown.output.startswith("16.0 GB asked for.")
    assert len(re.findall(r"^  cllm pull hf:\S+:\S+$", shown.output, re.MULTILINE)) == 3
    rows = json.loads(call(["recommend", "--memory", "16", "--json"]).output)["models"]
    assert [f"  cllm pull {row['reference']}" in shown.output for row in rows] == [True] * 3
    assert "no model of the table fits" in call(["recommend", "--memory", "0.1"]).output
    monkeypatch.setattr("cllm.cli.pull.list_devices", tuple)
    monkeypatch.setattr("cllm.cli.pull.available_memory", lambda: None)
    assert "--memory GB" in call(["recommend"]).output
    monkeypatch.setattr("cllm.cli.pull.available_memory", lambda: 8 * 10**9)
    here = call(["recommend"]).output
    assert here.startswith("8.0 GB free here, and no GPU.") and "Qwen3-8B" not in here
    gpu = Device("CUDA0", "NVIDIA", 24 * 10**9, 24 * 10**9, False)
    monkeypatch.setattr("cllm.cli.pull.list_devices", lambda: (gpu,))
    assert call(["recommend"]).output.startswith("23.3 GB free on the GPUs here.")
