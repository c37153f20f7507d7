"""The rows of `proof/cpus.py`, their library folders, the selected tests, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm.llm import LLM
from cllm.models.store import embedded_model
from proof.cpus import (
    THREADS,
    Outcome,
    Row,
    link_library,
    make_command,
    make_table,
    plan_rows,
    read_report,
)
from proof.shared.model_tests import find_names
from tests.driver.kinds import Kind

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


def test_several_threads_take_one_worker() -> None:
    one, several, gemma = (
        make_command(row, ["-n", "2"])[3:]
        for row in (
            Row("best", "x64"),
            Row("threads", "x64", threads=THREADS),
            Row("gemma", "x64", gemma=True),
        )
    )
    assert one[-4:] == ["--loads", "model", "-n", "2"]
    assert several[-6:] == ["--loads", "embedded", "-n", "2", "-n", "1"]
    assert gemma[-4:] == ["--loads", "embedded", "-n", "2"]


def test_counts_and_failures_are_read_from_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="passes"/>'
        '<testcase classname="a" name="fails"><failure message="assert 1 == 2&#10;more"/></testcase>'
        '<testcase classname="a" name="breaks"><error message="no server"/></testcase>'
        '<testcase classname="a" name="skips"><skipped/></testcase></testsuite></testsuites>'
    )
    failures = ("a::fails: assert 1 == 2", "a::breaks: no server")
    assert read_report(report) == Outcome(passed=1, failed=2, skipped=1, failures=failures)


def test_the_table_has_every_row_with_its_outcome() -> None:
    results = [
        (Row("lowest", "x64"), Outcome(10, 0, 1, 61.4)),
        (Row("AVX2", "haswell", reason="this CPU lacks AVX2"), None),
        (Row("threads", "x64", threads=2), Outcome(9, 1, 1, 60.0, ("a::b",))),
        (Row("gemma", "x64", gemma=True), Outcome(problem="the time is up")),
    ]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in make_table(results).splitlines()]
    assert cells[2:] == [
        ["lowest", "x64", "1", "SmolLM2 135M", "10", "0", "1", "61", "passed"],
        ["AVX2", "haswell", "1", "SmolLM2 135M", "–", "–", "–", "–", "not run: this CPU lacks AVX2"],
        ["threads", "x64", "2", "SmolLM2 135M", "9", "1", "1", "60", "FAILED"],
        ["gemma", "x64", "1", "Gemma 3 270M", "0", "0", "0", "0", "the time is up"],
    ]


def test_a_row_without_a_passed_test_is_not_good() -> None:
    assert Outcome(1).good
    assert not any(each.good for each in (Outcome(), Outcome(1, 1), Outcome(1, problem="stopped")))


def open_embedded() -> object:
    return embedded_model


def test_names_are_found_in_helpers_of_tests() -> None:
    def direct() -> object:
        return [LLM for _ in range(1)]

    def by_helper() -> object:
        return open_embedded

    def none() -> object:
        return Kind

    assert "LLM" in find_names([direct])
    assert "embedded_model" in find_names([by_helper])
    assert not {"LLM", "embedded_model"} & find_names([none])
