"""The documents name what is there: invariants, failure modes, classes, folders, routes and each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import reference, screenshots

ROOT = Path(__file__).parents[2]
FAILURE_MODES = ROOT / "tests" / "failure_modes"
ROW = re.compile(r"^\| `([a-z0-9-]+)` \| .+ \| `(test_\w+\.py)` \|$", re.MULTILINE)
MARK = re.compile(r'^@pytest\.mark\.failure_mode\("([a-z0-9-]+)"\)$', re.MULTILINE)
DEFINITION = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
INVARIANTS = (
    *("Single owner", "Slots", "Derived positions", "One terminal event", "Isolation"),
    *("Refusal is an answer", "KV accounting", "Survives native death", "Owned native resources"),
    "Whole-step rollback",
)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


DOCUMENTED = dict(ROW.findall(read(ROOT / "docs" / "failure-modes.md")))
MARKED = {(name, file.name) for file in FAILURE_MODES.glob("test_*.py") for name in MARK.findall(read(file))}
SECTIONS = dict(
    re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", read(ROOT / "docs" / "invariants.md"), re.MULTILINE)
)
ARCHITECTURE = read(ROOT / "docs" / "architecture.md")
LAYER = re.compile(r"^\| (\d+) \| (.+?) \|", re.MULTILINE)
PLOT = "docs/images/against-llama-server.png"
HEADERS = {"Host"}  # in backticks, too, and no class
TESTS = {name for file in (ROOT / "tests").rglob("test_*.py") for name in DEFINITION.findall(read(file))}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_each_failure_mode_has_a_test(name: str) -> None:
    assert (name, DOCUMENTED[name]) in MARKED


def test_each_marked_failure_mode_is_documented() -> None:
    assert {name for name, _ in MARKED} == set(DOCUMENTED) and len(DOCUMENTED) == 53


def test_every_test_of_failure_modes_is_marked() -> None:
    for file in FAILURE_MODES.glob("test_*.py"):
        assert len(MARK.findall(read(file))) == len(DEFINITION.findall(read(file))), file.name


def test_the_invariants_are_ten() -> None:
    assert tuple(SECTIONS) == INVARIANTS


@pytest.mark.parametrize("name", INVARIANTS)
def test_each_invariant_is_enforced_and_tested(name: str) -> None:
    modules = re.findall(r"`(cllm/[\w/]+\.py)`", SECTIONS[name])
    tests = re.findall(r"`(test_\w+)`", SECTIONS[name])
    assert modules and [module for module in modules if not (ROOT / module).is_file()] == []
    assert tests and sorted(set(tests) - TESTS) == []


def test_the_architecture_names_classes_that_exist() -> None:
    sources = "\n".join(read(path) for path in (ROOT / "cllm").rglob("*.py"))
    defined = set(re.findall(r"^(?:class )?([A-Z]\w+)(?=[:(\[]| = )", sources, re.MULTILINE))
    named = set(re.findall(r"`([A-Z][a-z]+\w*)(?:\.\w+)?`", ARCHITECTURE))
    assert named and sorted(named - HEADERS - defined) == []
    assert len(ARCHITECTURE.splitlines()) <= 250


def test_the_layer_table_has_each_folder_once() -> None:
    table = ARCHITECTURE.partition("## Layers")[2].partition("## ")[0]
    rows = [(int(layer), re.findall(r"`([\w./]+)`", names)) for layer, names in LAYER.findall(table)]
    listed = [name for _, names in rows for name in names]
    paths = (ROOT / "cllm").glob("[a-z]*")
    modules = [path for path in paths if path.suffix == ".py" or any(path.glob("*.py"))]
    assert sorted(listed) == sorted(path.name + "/" * path.is_dir() for path in modules)
    assert [layer for layer, _ in rows] == sorted(layer for layer, _ in rows)


def test_links_between_documents_lead_somewhere() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    targets = {(page, target) for page in pages for target in re.findall(r"\]\(([^)#:]+)[#)]", read(page))}
    assert [str(page) for page, target in targets if not (page.parent / target).exists()] == []


def test_every_picture_is_shown_by_a_document() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in (*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"))
        for target in re.findall(r"!\[.*?\]\(([^)]+)", read(page))
    }
    assert sorted(set((ROOT / "docs").rglob("*.png")) - shown) == []
    taken = {ROOT / "docs" / "images" / name for name in screenshots.SHOWN}
    assert taken == set((ROOT / "docs" / "images").glob("*.png")) - {ROOT / PLOT}


def test_no_document_or_message_names_a_package_of_no_index() -> None:
    """`cllm` and `cllm-native` are on none: they come from a folder of wheels."""
    folders = [ROOT / name for name in ("docs", "cllm", "bench", "proof")]
    paths = [path for folder in folders for suffix in ("md", "py") for path in folder.rglob(f"*.{suffix}")]
    named = re.compile(
        r"pip install (?!--no-index --find-links)[^#\n`]*\bcllm(-native|\[)|package cllm-native,"
    )
    assert [str(path) for path in (*ROOT.glob("*.md"), *paths) if named.search(read(path))] == []


def test_the_index_lists_every_page_of_the_site() -> None:
    pages = set(re.findall(r": ([\w/-]+\.md)", read(ROOT / "mkdocs.yml")))
    listed = set(re.findall(r"\(([\w/-]+\.md)\)", read(ROOT / "docs" / "index.md")))
    assert pages - listed == {"index.md", "log-archive.md"}


def test_the_plot_is_near_the_top_of_the_readme() -> None:
    assert PLOT in "\n".join(read(ROOT / "README.md").splitlines()[:10])


def test_the_readme_and_the_page_on_models_name_a_model_to_paste() -> None:
    for page in ("README.md", "README.zh-CN.md", "docs/models.md"):
        assert re.search(r"`[^`]*\bhf:(?!USER/)[\w.-]+/[\w.-]+:\w+`", read(ROOT / page)), page


def test_the_table_of_the_second_audit_names_tests_that_exist() -> None:
    named = re.findall(r"::(test_\w+)", read(ROOT / "docs" / "reliability" / "audit-2.md"))
    assert len(named) > 100 and sorted(set(named) - TESTS) == []


def test_the_reference_is_what_the_code_says() -> None:
    assert reference.main(["--check"]) == 0, "run python scripts/reference.py"


def test_the_chinese_readme_is_in_step() -> None:
    english, chinese = (read(ROOT / name) for name in ("README.md", "README.zh-CN.md"))
    blocks = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
    assert blocks.findall(english) == blocks.findall(chinese)
    plain = [blocks.sub("", text) for text in (english, chinese)]
    levels, rows, links = (
        [re.findall(pattern, text, re.MULTILINE) for text in plain]
        for pattern in (r"^(#+) ", r"^\|(?: [^|]*`)?", r"\]\((?!README)(docs/[^)]+|SECURITY\.md)\)")
    )
    assert levels[0] == levels[1] and len(rows[0]) == len(rows[1])
    assert set(links[0]) <= set(links[1])
    assert len(english.splitlines()) <= 150 and len(chinese.splitlines()) <= 150
    for target in {*links[0], *links[1]}:
        assert (ROOT / target).is_file(), target
