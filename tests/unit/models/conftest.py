"""A hub on loopback with a few repositories, and caches of this test's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver.hub import FakeHub
from tests.tiny_models import make_dense

BIG_BYTES = 3_000_001
REPO = "Example/Tiny-Llama-GGUF"
SPLIT_REPO = "Example/Split-GGUF"
VARIABLES = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"),
    *("HF_HUB_OFFLINE", "HF_HUB_DISABLE_SYMLINKS", "MODELSCOPE_API_TOKEN", "CLLM_MODEL_DIR"),
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A tiny model whole, and in parts, by file name."""
    folder = tmp_path_factory.mktemp("tiny")
    make_dense(folder / "tiny-llama-Q4_K_M.gguf")
    make_dense(folder / "split-F32.gguf", split_tensors=8)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's caches; nothing of the user's is seen."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    monkeypatch.setattr("cllm.models.store.cache_directory", lambda: tmp_path / "cllm")
    return tmp_path


@pytest.fixture(scope="session")
def repos(tiny: dict[str, bytes]) -> dict[str, dict[str, bytes]]:
    """What the hub has."""
    model = tiny["tiny-llama-Q4_K_M.gguf"]
    return {
        REPO: {
            "README.md": b"# Tiny",
            "tiny-llama-Q4_K_M.gguf": model,
            "tiny-llama-Q8_0.gguf": model + b"\0" * 1000,
            "mmproj-tiny-llama-F16.gguf": b"no model",
        },
        SPLIT_REPO: {f"F32/{name}": data for name, data in tiny.items() if name.startswith("split")},
        "Example/Big": {"big-Q8_0.gguf": random.Random(1).randbytes(BIG_BYTES)},
        "Example/Empty": {"README.md": b"nothing here"},
        "李雷/模型-GGUF": {"größe 模型 Q4_0.gguf": model},
    }


@pytest.fixture(scope="session")
def running_hub() -> Iterator[FakeHub]:
    with FakeHub({}) as opened:
        yield opened


@pytest.fixture
def hub(
    running_hub: FakeHub, repos: dict[str, dict[str, bytes]], caches: Path, monkeypatch: pytest.MonkeyPatch
) -> FakeHub:
    """The hub that HF_ENDPOINT and MODELSCOPE_ENDPOINT name."""
    running_hub.reset(repos)
    for name, value in running_hub.environment.items():
        monkeypatch.setenv(name, value)
    return running_hub
