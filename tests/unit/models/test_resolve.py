"""From what names a model to its file; and what a plain path costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from cllm.adapters import parse_adapter
from cllm.backend.llama import memory
from cllm.config import EngineConfig
from cllm.errors import LibraryError, ModelFileError, NotEnoughMemory
from cllm.models.resolve import find_by_name, find_mmproj, resolve, resolve_config
from cllm.models.store import embedded_model, hf_cache
from tests.driver.hub import FakeHub
from tests.tiny_media import make_causal
from tests.tiny_models import make_adapter, write
from tests.unit.models.conftest import REPO


@pytest.fixture
def folder(caches: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of models that have names."""
    folder = caches / "my models"
    folder.mkdir()
    for name in ("Qwen3-4B-Q4_K_M", "Qwen3-8B-Q4_K_M", "Gemma-3-Q8_0"):
        (folder / f"{name}.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("CLLM_MODEL_DIR", str(folder))
    return folder


def test_a_file_and_a_missing_one(caches: Path) -> None:
    file = caches / "größe 模型.gguf"
    file.touch()
    assert resolve(str(file)) == file
    with pytest.raises(ModelFileError, match=r"there is no model file at not-here\.gguf"):
        resolve("./not-here.gguf")
    assert resolve("") == embedded_model()


def test_a_file_wins_over_a_reference(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(caches)
    Path("hf:a").mkdir()
    Path("hf:a/b").touch()
    assert resolve("hf:a/b") == Path("hf:a/b")


def test_the_only_model_of_a_folder(caches: Path) -> None:
    folder = caches / "one"
    folder.mkdir()
    with pytest.raises(ModelFileError, match=r"there is no \.gguf file in"):
        resolve(str(folder))
    for number in (2, 1):
        (folder / f"m-0000{number}-of-00002.gguf").touch()
    (folder / "mmproj-m.gguf").touch()
    assert resolve(str(folder)) == folder / "m-00001-of-00002.gguf"
    (folder / "other.gguf").touch()
    with pytest.raises(ModelFileError, match=r"has 2 models: m-00001-of-00002.gguf, other.gguf; name one"):
        resolve(str(folder))


@pytest.mark.parametrize("text", ["gemma-3-q8_0", "GEMMA", "gemma-3-Q8_0.gguf", "qwen3-4b", "smollm2"])
def test_names_and_unique_prefixes(folder: Path, text: str) -> None:
    found = find_by_name(text)
    assert found.stem.lower().startswith(text.lower().removesuffix(".gguf"))
    assert resolve(text) == found.path


def test_the_name_of_a_pulled_model(hub: FakeHub) -> None:
    path = resolve(f"hf:{REPO}:Q8_0")
    for name in (f"hf:{REPO}:Q8_0", f"{REPO}:q8_0".lower(), "Tiny-Llama-GGUF", "tiny-llama-q8_0"):
        assert resolve(name) == path


def test_a_model_that_would_not_fit_is_refused_before_it_is_pulled(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=f"hf:{REPO}", gpu_layers=0)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "available_memory", lambda: 10 << 20)
        with pytest.raises(NotEnoughMemory, match="not enough memory: model "):
            resolve_config(config)
    assert not list(hf_cache().rglob("*.gguf"))
    ready = memory.prepare(resolve_config(config))
    assert ready.model.endswith("tiny-llama-Q4_K_M.gguf")  # the name of the link, not of its blob


def test_drafts_are_resolved_and_a_gpu_that_fails_refuses_no_pull(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []

    def prepare(config: EngineConfig) -> None:
        checked.append((config.gpu_layers, Path(config.draft_model)))
        if config.gpu_layers != 0:
            raise LibraryError("it was ended by SIGABRT")

    monkeypatch.setattr(memory, "prepare", prepare)
    found = resolve_config(EngineConfig(model=f"hf:{REPO}", draft_model=f"hf:{REPO}:Q8_0", gpu_layers=1))
    draft = resolve(f"hf:{REPO}:Q8_0")
    assert checked == [(1, draft), (0, draft)] and found.draft_model == str(draft)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen", "'qwen' names 2 models: Qwen3-4B-Q4_K_M, Qwen3-8B-Q4_K_M; give"),
        ("gema-3", "no file, folder or model 'gema-3' here; near it: Gemma-3-Q8_0"),
        ("User/Repo", "`cllm pull hf:User/Repo` gets one"),
    ],
)
def test_an_ambiguous_or_unknown_name_lists_the_candidates(folder: Path, name: str, said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        resolve(name)


def test_a_plain_path_imports_no_hub(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    code = (
        f"import sys; from cllm.models.resolve import resolve; resolve({str(file)!r}); "
        "print(sorted({'httpx', 'rich', 'cllm.models.hub', 'cllm.models.store'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_adapters_are_pulled_from_a_hub(hub: FakeHub, caches: Path) -> None:
    data = make_adapter(caches / "lora.gguf").read_bytes()
    hub.repos["Example/Base-GGUF"] = {"base-Q4_K_M.gguf": b"GGUF", "loras/sql-lora-F32.gguf": data}
    hub.repos["Example/Sql"] = {"sql-F32.gguf": data}
    model = caches / "base.gguf"
    model.touch()
    named = ("a=hf:Example/Sql", "b=hf:Example/Base-GGUF/loras/sql-lora-F32.gguf:0.5")
    for offline in (False, True):  # the second time it is here
        config = resolve_config(EngineConfig(model=str(model), adapter=named, offline=offline))
    found = [parse_adapter(text) for text in config.adapter]
    assert [(each.name, each.scale) for each in found] == [("a", 1.0), ("b", 0.5)]
    assert {Path(each.file).read_bytes() for each in found} == {data}
    assert all(Path(each.file).is_relative_to(hf_cache()) for each in found)
    with pytest.raises(ModelFileError, match="is not on this machine, and --offline"):
        resolve_config(EngineConfig(model=str(model), adapter=("c=hf:Example/Other",), offline=True))


def test_an_mmproj_beside_the_model_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path | None] = [tmp_path]
    monkeypatch.setattr("cllm.backend.llama.library.find", lambda: tmp_path)
    monkeypatch.setattr("cllm.build.module.find_media", lambda _: built[0])
    files = make_causal(tmp_path)
    (tmp_path / "mmproj-a.gguf").write_bytes(b"no model")
    assert find_mmproj(files.model) == ""
    mmproj = files.mmproj.rename(tmp_path / "mmproj-b.gguf")
    assert find_mmproj(files.model) == find_mmproj(files.model, str(mmproj)) == str(mmproj)
    with pytest.raises(ModelFileError, match=r"there is no model file at .*c\.gguf"):
        find_mmproj(files.model, str(tmp_path / "c.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "d.gguf", "clip")
    writer.add_tensor("mm.0.weight", np.zeros((3, 5), np.float32))
    with pytest.raises(ModelFileError, match=r"--mmproj: .*d\.gguf is for another model"):
        find_mmproj(files.model, str(write(writer, tmp_path / "d.gguf")))
    built[0] = None
    assert find_mmproj(files.model) == "", "text is served all the same"
    with pytest.raises(LibraryError, match="cllm build --media"):
        find_mmproj(files.model, str(mmproj))
