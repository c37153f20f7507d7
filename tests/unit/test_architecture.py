"""The house stays as drawn: imports go down only, files stay one noun."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cllm"
MODULES = sorted(PACKAGE.rglob("*.py"))

# The first pattern that fits gives a module's layer. Rooms on the same layer are blind to each other,
# except inside one room.
LAYERS = (
    ("cllm.types", 0),
    ("cllm.errors", 0),
    ("cllm.config", 0),
    ("cllm.logs", 0),
    ("cllm.backend.base", 1),
    ("cllm.text", 1),
    ("cllm.core", 2),
    ("cllm.backend", 2),
    ("cllm.server", 3),
    ("cllm.tune", 3),
    ("bench", 3),
    ("cllm.llm", 4),
    ("cllm.tune.session", 4),
    ("cllm.workers.engine_worker", 4),
    ("cllm.workers.tokenizer_worker", 4),
    ("cllm.cli", 4),
    ("cllm.__main__", 4),
)
# Only these name the llama runner.
KNOW_LLAMA = (
    *(
        "cllm.cli",
        "cllm.workers.engine_worker",
        "cllm.workers.tokenizer_worker",
        "cllm.llm",
        "cllm.tune.session",
    ),
    "cllm.backend.llama",
)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> tuple[int, str]:
    for prefix, layer in LAYERS:
        if module == prefix or module.startswith(prefix + "."):
            return layer, prefix
    assert module == "cllm", f"{module} stands in no room"
    return 0, "cllm"


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in found if name.startswith("cllm.") and is_module(name)}


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down_only(path: Path) -> None:
    module = name_of(path)
    if module == "cllm":
        return  # the lazy front door
    layer, room = layer_of(module)
    for imported in imports_of(path):
        other_layer, other_room = layer_of(imported)
        if other_room == room or imported == "cllm":
            continue
        assert other_layer < layer or (layer == 4 and other_layer == 4), f"{module} may not import {imported}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_entrances_name_the_llama_backend(path: Path) -> None:
    module = name_of(path)
    if not module.startswith(KNOW_LLAMA):
        assert not [name for name in imports_of(path) if name.startswith("cllm.backend.llama")]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_file_is_one_noun(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400, "split it"


def test_every_module_has_its_place_in_the_drawing() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawn: list[str] = []
    for room, rows in re.findall(r"^### `(cllm/[a-z0-9_/]*)`.*\n((?:\|.*\n)+)", page, re.MULTILINE):
        drawn += [f"{room}{name}.py" for name in re.findall(r"^\| `([a-z0-9_]+)` \|", rows, re.MULTILINE)]
    there = [str(path.relative_to(ROOT)) for path in MODULES if not path.name.startswith("__")]
    assert sorted(drawn) == sorted(there), "docs/architecture.md lists every module once, in its room"
