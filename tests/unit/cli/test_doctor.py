"""`cllm doctor`: which library is used, and whether `cllm build` would pay."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.table import Table

from cllm.backend.llama import library
from cllm.cli import doctor


def describe(folder: Path, *features: str) -> dict[str, str]:
    """The rows on the library."""
    table = Table()
    doctor._library(folder, features, table)
    names, values = (list(column.cells) for column in table.columns)
    return dict(zip(map(str, names), map(str, values), strict=True))


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library for every CPU, compiled for NEON and dot products."""
    (tmp_path / "build.json").write_text(json.dumps({"version": "1", "variants": True}))
    monkeypatch.delenv("CLLM_LIBRARY", raising=False)
    api = SimpleNamespace(llama_print_system_info=lambda: b"CPU : NEON = 1 | DOTPROD = 1 | ")
    loaded = SimpleNamespace(api=api, use_kernels=lambda: True)
    monkeypatch.setattr(library, "load", lambda _: loaded)
    monkeypatch.setattr(doctor, "loaded_variant", lambda: "armv8.2_1")
    return tmp_path


def test_a_build_pays_where_the_variant_leaves_features_unused(packaged: Path) -> None:
    rows = describe(packaged, "asimd", "asimddp", "i8mm", "sve")
    assert rows["library"] == f"{packaged} (of the package cllm-native)" and rows["variant"] == "armv8.2_1"
    assert rows["`cllm build`"].startswith(
        "would pay: this CPU has i8mm, sve, which the variant does not use ("
    )
    assert "minute" in rows["`cllm build`"]


def test_a_build_gains_little_where_the_variant_uses_all(packaged: Path) -> None:
    assert describe(packaged, "asimd", "asimddp")["`cllm build`"].startswith(
        "would gain a few percent at most"
    )


def test_a_build_for_this_cpu_is_not_offered_another(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (packaged / "build.json").write_text(json.dumps({"version": "1"}))
    rows = describe(packaged, "i8mm")
    assert rows["library"].endswith("(built by `cllm build`)") and "`cllm build`" not in rows
    monkeypatch.setenv("CLLM_LIBRARY", str(packaged))
    assert describe(packaged)["library"].endswith("(named by CLLM_LIBRARY)")
