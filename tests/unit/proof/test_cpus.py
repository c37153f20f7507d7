"""The rows of `proof/cpus.py`, their library folders, and the selected tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from proof.cpus import Row, find_embedded, link_library, plan_rows

SKYLAKE = {"x64": 1, "sse42": 5, "sandybridge": 21, "haswell": 64, "skylakex": 192, "alderlake": 0, "zen4": 0}
GRAVITON2 = {"armv8.0_1": 1, "armv8.2_1": 3, "armv8.2_2": 7, "armv8.2_3": 0, "armv8.6_1": 0}


def planned(scores: dict[str, int], architecture: str) -> list[tuple[str, str, str]]:
    return [(row.name, row.variant, row.reason) for row in plan_rows(scores, architecture)]


def test_rows_are_the_lowest_the_middle_and_the_best_variant() -> None:
    assert planned(SKYLAKE, "x86_64") == [
        ("lowest", "x64", ""),
        ("AVX2", "haswell", ""),
        ("best", "skylakex", ""),
        ("threads", "skylakex", ""),
        ("gemma", "skylakex", ""),
    ]
    assert planned(GRAVITON2, "aarch64")[:3] == [
        ("lowest", "armv8.0_1", ""),
        ("dotprod", "armv8.2_1", ""),
        ("best", "armv8.2_2", ""),
    ]


def test_a_row_that_this_cpu_lacks_says_so() -> None:
    nehalem = {name: score if name in ("x64", "sse42") else 0 for name, score in SKYLAKE.items()}
    assert planned(nehalem, "x86_64")[1:3] == [
        ("AVX2", "haswell", "this CPU lacks AVX2"),
        ("best", "sse42", ""),
    ]
    assert planned({"power0": 1}, "ppc64le")[1] == ("middle", "none", "no such variant on ppc64le")


def test_a_variant_of_two_rows_runs_once() -> None:
    haswell = {**SKYLAKE, "skylakex": 0}
    assert planned(haswell, "x86_64")[2] == ("best", "haswell", "haswell is that of the row AVX2")
    assert [reason for _, _, reason in planned({"x64": 1, "haswell": 0}, "x86_64")] == [
        "",
        "this CPU lacks AVX2",
        "x64 is that of the row lowest",
        "",
        "",
    ]


@pytest.mark.parametrize(
    ("row", "linked"),
    [
        (Row("AVX2", "haswell"), {"haswell"}),
        (Row("best", "skylakex", every=True), {"x64", "haswell", "skylakex"}),
    ],
    ids=lambda value: value.name if isinstance(value, Row) else "",
)
def test_a_folder_has_the_variants_of_its_row(row: Row, linked: set[str], tmp_path: Path) -> None:
    library, folder = tmp_path / "library", tmp_path / "folder"
    library.mkdir()
    folder.mkdir()
    others = {"libllama.so", "libggml-base.so", "build.json"}
    for name in (*others, *(f"libggml-cpu-{each}.so" for each in ("x64", "haswell", "skylakex"))):
        (library / name).write_text(name)
    link_library(library, row, folder)
    names = others | {f"libggml-cpu-{each}.so" for each in linked}
    assert {path.name: path.read_text() for path in folder.iterdir()} == {name: name for name in names}


def test_files_are_found_by_what_opens_the_embedded_model() -> None:
    found = find_embedded()
    assert "tests/e2e/test_python_api.py" in found and "tests/e2e/test_page.py" not in found
