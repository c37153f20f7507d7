"""Fingerprints of saved states: what they depend on, and that no path is part of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cllm.backend.llama.fingerprint import state_fingerprint
from cllm.config import EngineConfig
from tests.tiny_models import make_dense


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that passes for a library: a fingerprint is made without loading it."""
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "libllama.so").write_bytes(b"one build")
    monkeypatch.setenv("CLLM_LIBRARY", str(folder))
    return folder


def test_fingerprint_depends_on_content_and_kv_types(tmp_path: Path, library: Path) -> None:
    first = make_dense(tmp_path / "a.gguf")
    (tmp_path / "elsewhere").mkdir()
    same = tmp_path / "elsewhere" / "b.gguf"
    same.write_bytes(first.read_bytes())
    other = make_dense(tmp_path / "c.gguf", context=2048)

    def fingerprint(path: Path, *, unified: bool = False, **settings: Any) -> str:
        return state_fingerprint(EngineConfig(model=str(path), **settings), unified=unified)

    before = fingerprint(first)
    assert fingerprint(same, parallel=4, threads=1) == before and str(tmp_path) not in before
    changed = (
        fingerprint(other),
        fingerprint(first, unified=True),
        fingerprint(first, flash_attention=False),
        fingerprint(first, cache_type_k="q8_0"),
        fingerprint(first, cache_type_v="q8_0"),
        fingerprint(first, rope_scale=4),
        fingerprint(first, rope_scale=4, rope_scaling="yarn"),
        fingerprint(first, override_kv=("llama.rope.freq_base=float:20000",)),
    )
    assert len({before, *changed}) == 1 + len(changed)
    (library / "libllama.so").write_bytes(b"another build")
    assert fingerprint(first) != before
