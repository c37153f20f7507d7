"""The architecture holds: imports go down only, files and functions stay small, names are the field's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cllm"
PATHS = sorted(PACKAGE.rglob("*.py"))

# A module may import from lower layers, and from its own folder. One entry for each folder; three modules of
# the root lie above some of them.
LAYERS = {
    "cllm": 0,
    "cllm.text": 1,
    "cllm.build": 1,
    "cllm.messages": 2,
    "cllm.backend": 2,
    "cllm.models": 3,
    "cllm.core": 3,
    "cllm.workers": 4,
    "cllm.cluster": 5,
    "cllm.frontend": 5,
    "cllm.chat": 6,
    "cllm.server": 7,
    "cllm.llm": 8,
    "cllm.cli": 9,
    "cllm.testing": 10,  # the scripted server runs the whole program
    "cllm.__main__": 10,
}
# The HTTP process: nothing native to inference, so that no input can crash it.
HTTP_PACKAGES = ("cllm.server", "cllm.chat", "cllm.frontend")
NOT_IN_HTTP = ("cllm.core", "cllm.backend.llama", "llguidance")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
FORBIDDEN = re.compile(
    r"(?<![a-z])(guess|park)|\btold\b|MOST_|LEAST_|\b(no|some|every|any)body\b|\bwhoever\b"
    r"|\blaws? \d|\bfaults? \d",
    re.IGNORECASE,
)


def get_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {get_name(path): path for path in PATHS}
EMPTY = [name for name, path in MODULES.items() if not path.read_text().strip()]


def get_layer(module: str) -> int:
    prefixes = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    assert prefixes, f"{module} has no layer"
    return LAYERS[max(prefixes, key=len)]


def walk(node: ast.AST, *, lazy: bool) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported; with `lazy`, also those in functions and for types."""
    for child in ast.iter_child_nodes(node):
        if not lazy and isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        if lazy or not isinstance(child, FUNCTIONS):
            yield child
            yield from walk(child, lazy=lazy)


@cache
def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def get_imports(module: str, *, lazy: bool) -> frozenset[str]:
    """The names of what a module imports: modules of ours, and of others."""
    found: set[str] = set()
    for node in walk(parse(module), lazy=lazy):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update({name for name in names if name in MODULES} or {node.module})
    return frozenset(name for name in found if name in MODULES or not name.startswith("cllm"))


def test_imports_go_down_only() -> None:
    wrong = []
    for module in MODULES.keys() - {"cllm", *EMPTY}:
        layer, package = get_layer(module), module.split(".")[:-1][:2]
        for other in get_imports(module, lazy=True) & MODULES.keys() - {"cllm"}:
            same = get_layer(other) == layer and other.split(".")[: len(package)] == package
            if get_layer(other) >= layer and not same:
                wrong.append(f"{module} may not import {other}")
    assert not wrong


def test_there_are_no_import_cycles() -> None:
    graph = {name: get_imports(name, lazy=True) & MODULES.keys() - {"cllm", name} for name in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_the_http_process_imports_nothing_native_to_inference() -> None:
    """What it imports when it starts, followed through the sources; `cllm.workers` starts the processes."""
    reached: dict[str, str] = {}
    waiting = [(name, "the HTTP process") for name in MODULES if name.startswith(HTTP_PACKAGES)]
    while waiting:
        module, importer = waiting.pop()
        assert not module.startswith(NOT_IN_HTTP), f"{module} is imported by {importer}"
        if module not in reached:
            reached[module] = importer
            if module in MODULES:
                waiting += [(other, module) for other in get_imports(module, lazy=False)]
    assert "cllm.workers.executor" in reached
    assert len(reached.keys() & MODULES.keys()) <= 91


def test_a_file_has_at_most_600_lines() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}


def test_a_function_has_at_most_60_lines() -> None:
    """Without the functions inside it."""
    long = []
    for module in MODULES:
        for node in filter(is_long, ast.walk(parse(module))):
            inner = {
                line
                for child in ast.walk(node)
                if isinstance(child, FUNCTIONS) and child is not node
                for line in range(child.lineno, (child.end_lineno or 0) + 1)
            }
            if count_lines(node) - len(inner) > MAX_FUNCTION_LINES:
                long.append(f"{module}.{getattr(node, 'name', '')}")
    assert not long


def is_long(node: ast.AST) -> bool:
    return isinstance(node, FUNCTIONS) and count_lines(node) > MAX_FUNCTION_LINES


def count_lines(node: ast.AST) -> int:
    return getattr(node, "end_lineno", 0) - getattr(node, "lineno", 0) + 1


def test_words_are_the_fields() -> None:
    found = []
    for module, path in MODULES.items():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if word := FORBIDDEN.search(line):
                found.append(f"{module}:{number} {word.group()!r}")
    assert not found
