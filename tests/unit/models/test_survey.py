"""Survey: files, names and headers of the models to serve."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from cllm.backend.llama.gguf import GgufHeader
from cllm.config import EngineConfig, ModelConfig
from cllm.errors import ConfigError, ModelFileError
from cllm.models.survey import read_info, survey
from tests.tiny_models import make_dense, write

COMMON = ModelConfig(name="", engine=EngineConfig(gpu_layers=0))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"HF_HUB_CACHE": "hf", "MODELSCOPE_CACHE": "ms", "CLLM_MODEL_DIR": "models"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    for name in ("models/one-Q8_0.gguf", "models/two.gguf", "other/one-Q8_0.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        make_dense(tmp_path / name)
    return tmp_path


def ask(reference: Path | str, name: str = "", **fields: object) -> ModelConfig:
    engine = EngineConfig(model=str(reference), gpu_layers=0)
    return ModelConfig(name=name, engine=engine, **fields)  # type: ignore[arg-type]


def test_files_folders_and_names_of_the_list(folder: Path) -> None:
    asked = [ask("TWO"), ask(folder / "models"), ask(folder / "other", "mine", aliases=("own",))]
    found = survey(asked, COMMON)
    two, one, mine = found.models
    assert [each.config.name for each in found.models] == ["two", "one-Q8_0", "mine"]
    assert one.config.engine.model == str(folder / "models" / "one-Q8_0.gguf")
    assert one.config.engine.alias == one.info.name == "one-Q8_0"
    assert "one-q8_0.gguf" in one.config.names and mine.config.aliases == ("own",)
    info = two.info
    assert info.generates and info.architecture == "llama" and info.chat_template and info.context_train
    assert info.parameters > 0 and info.size_bytes == 4 * info.parameters and info.vocabulary_size > 0
    assert one.info.description == "llama Q8_0", "by the file's name"
    assert two.created == int((folder / "models" / "two.gguf").stat().st_mtime)
    assert found.memory["host"] > 0


def test_all_models_of_the_list_without_broken_ones(folder: Path) -> None:
    (folder / "models" / "broken.gguf").write_bytes(b"GGUF\3\0\0\0")
    found = survey([ask(folder / "other" / "one-Q8_0.gguf")], COMMON, all_models=True)
    names = [each.config.name for each in found.models]
    assert names[:3] == ["one-Q8_0", "one-Q8_0-2", "two"] and len(set(names)) == len(names)
    with pytest.raises(ModelFileError, match="truncated"):
        survey([ask(folder / "models" / "broken.gguf")], COMMON)


def test_a_size_label_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    writer.add_uint32("general.size_label", 7)
    header = GgufHeader(write(writer, tmp_path / "odd.gguf"))
    assert read_info(header, "odd", "Q8_0").description == "llama Q8_0"


def test_a_name_stands_for_one_model(folder: Path) -> None:
    asked = [ask("two", "a", aliases=("X",)), ask("one", "b", aliases=("x",))]
    with pytest.raises(ConfigError, match="the name 'x' stands for two models: a and b"):
        survey(asked, COMMON)
