"""A model by reference: served from a hub, from the list, and offline; Python's API takes the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from cllm import LLM
from cllm.cli.main import app
from cllm.errors import ModelFileError
from tests.driver.hub import FakeHub
from tests.driver.server import StartServer
from tests.tiny_models import make_dense

REPO = "Example/Tiny-GGUF"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    """A hub with a model in three parts."""
    folder = tmp_path_factory.mktemp("hub")
    make_dense(folder / "tiny-F32.gguf", split_tensors=8)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(files) == 3
    with FakeHub({REPO: files}) as opened:
        yield opened


@pytest.fixture(scope="module")
def environment(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("größe 模型")
    return {
        **hub.environment,
        "HF_HOME": str(home / "hf"),
        "MODELSCOPE_CACHE": str(home / "ms"),
        "HF_TOKEN": "",
        "HF_HUB_CACHE": "",
        "HF_HUB_OFFLINE": "",
    }


@pytest.fixture
def cllm(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    """The command line, and Python's API, with this hub and these caches."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return CliRunner()


def test_a_split_model_is_pulled_served_and_listed(
    start: StartServer, hub: FakeHub, environment: dict[str, str], cllm: CliRunner
) -> None:
    with pytest.raises(ModelFileError, match="is not on this machine, and --offline pulls nothing"):
        LLM(f"hf:{REPO}", offline=True)
    server = start(f"hf:{REPO}", "--ctx-size", "512", "--parallel", "1", **environment)
    assert hub.sent == sum(map(len, hub.repos[REPO].values()))
    assert server.generate("hello", 4)["usage"]["completion_tokens"] == 4
    assert server.get("/v1/models")["data"][0]["id"] == "tiny-F32"
    assert f"hf:{REPO}:F32" in cllm.invoke(app, ["list"]).output
    removed = cllm.invoke(app, ["rm", "--yes", "tiny-f32"])
    assert removed.exit_code == 2 and "is used by process" in removed.output


def test_python_takes_the_same_references(hub: FakeHub, cllm: CliRunner) -> None:
    with LLM(f"hf:{REPO}:F32", parallel=1, ctx_size=512) as llm:
        assert llm.info.name == "tiny-F32"
    asked = len(hub.requests)
    LLM("tiny-gguf", parallel=1, ctx_size=512, offline=True)
    assert len(hub.requests) == asked
    with pytest.raises(ModelFileError, match="no file, folder or model 'nothing-like-it' here"):
        LLM("nothing-like-it")
