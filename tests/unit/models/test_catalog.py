"""The catalog: headers are read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cllm.models import catalog
from cllm.models.catalog import HeaderInfo, list_models


@pytest.fixture
def folder(caches: Path, tiny: dict[str, bytes]) -> Path:
    folder = caches / "models"
    folder.mkdir()
    (folder / "a-Q4_0.gguf").write_bytes(tiny["tiny-llama-Q4_K_M.gguf"])
    (folder / "broken-Q4_0.gguf").write_bytes(b"GGUF")
    return folder


def test_the_list_has_what_the_headers_say(folder: Path) -> None:
    found = {entry.model.stem: entry for entry in list_models(str(folder))}
    header = found["a-Q4_0"].header
    assert header is not None and header.architecture == "llama" and header.chat_template
    assert header.context == 4096
    assert found["broken-Q4_0"].header is None


def test_headers_are_read_again_only_when_a_file_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list_models(str(folder))
    (folder / "broken-Q4_0.gguf").unlink()
    read: list[Path] = []
    real = catalog._read_header

    def read_header(path: Path, size: int, changed: int) -> HeaderInfo:
        read.append(path)
        return real(path, size, changed)

    monkeypatch.setattr(catalog, "_read_header", read_header)
    assert list_models(str(folder))[0] == before[0] and read == []
    os.utime(folder / "a-Q4_0.gguf", ns=(1, 1))
    list_models(str(folder))
    assert read == [folder / "a-Q4_0.gguf"]


def test_a_damaged_memory_is_made_again(folder: Path, caches: Path) -> None:
    list_models(str(folder))
    (caches / "cllm" / "models.json").write_text("{]")
    assert list_models(str(folder))[0].header is not None
