"""A model by reference: served from a hub, from the list, and offline; Python's API takes the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cllm import LLM
from cllm.errors import ModelFileError
from tests.driver.hub import FakeHub
from tests.driver.server import StartServer
from tests.tiny_models import make_dense

REPO = "Example/Tiny-GGUF"
LIMIT_S = 120


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
    }


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cllm", *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S)


def test_a_split_model_is_pulled_listed_served_and_not_removed_meanwhile(
    start: StartServer, hub: FakeHub, environment: dict[str, str]
) -> None:
    refused = run(environment, "serve", f"hf:{REPO}", "--offline", "--port", "0")
    assert refused.returncode == 2 and "is not on this machine, and --offline" in refused.stderr
    settings = ("--ctx-size", "512", "--parallel", "1", "--no-tune")
    server = start(f"hf:{REPO}", *settings, **environment)
    assert hub.sent == sum(map(len, hub.repos[REPO].values()))
    assert server.generate("hello", 4)["usage"]["completion_tokens"] == 4
    assert server.get("/v1/models")["data"][0]["id"] == "tiny-F32"
    listed = run(environment, "list").stdout
    assert f"hf:{REPO}:F32" in listed and "llama" in listed
    removed = run(environment, "rm", "--yes", "tiny-f32")
    assert removed.returncode == 2 and "is used by process" in removed.stderr
    server.stop()
    asked = len(hub.requests)
    by_name = start("tiny-gguf", "--offline", *settings, **environment)
    assert by_name.generate("hello", 4)["usage"]["completion_tokens"] == 4
    assert len(hub.requests) == asked


def test_python_takes_the_same_references(
    hub: FakeHub, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with LLM(f"hf:{REPO}:F32", parallel=1, ctx_size=512) as llm:
        assert llm.info.name == "tiny-F32"
    with pytest.raises(ModelFileError, match="no file, folder or model 'nothing-like-it' here"):
        LLM("nothing-like-it")
