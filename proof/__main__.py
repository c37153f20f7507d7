"""`python -m proof NAME …`: run one proof with its own arguments; without a name, list all of them.

A proof is a module of this folder. It has a `main`, or it is a file of tests that pytest runs.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
# What `cllm build` makes for a proof before it runs, minutes the first time.
BUILDS = {"gpu": ("--gpu", "vulkan"), "llama-server": ("--with-server",)}


def find_proofs() -> dict[str, ast.Module]:
    """Parse every proof, by name. None is imported: pytest must be the first to import a file of tests."""
    paths = sorted(FOLDER.glob("[a-z]*.py"))
    found = {path.stem.replace("_", "-"): ast.parse(path.read_text()) for path in paths}
    return {name: tree for name, tree in found.items() if _defines(tree, "main") or _defines(tree, "test_")}


def _defines(tree: ast.Module, prefix: str) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name.startswith(prefix) for node in tree.body)


def main(arguments: Sequence[str]) -> int:
    proofs = find_proofs()
    if not arguments:
        for name, tree in proofs.items():
            print(f"{name:14} {(ast.get_docstring(tree) or '').partition(chr(10))[0]}")
        return 0
    name, *own = arguments
    name = name.replace("_", "-")
    if name not in proofs:
        print(f"no proof {name}: `python -m proof` lists them", file=sys.stderr)
        return 2
    if build := BUILDS.get(name):
        subprocess.run([sys.executable, "-m", "cllm", "build", *build], check=True)
    module = name.replace("-", "_")
    if _defines(proofs[name], "main"):
        return int(importlib.import_module(f"proof.{module}").main(own))
    return _run_tests(FOLDER / f"{module}.py", own)


def _run_tests(path: Path, arguments: Sequence[str]) -> int:
    """Run a file of tests with the fixtures of `tests`; its times are measured, so one test at a time."""
    import pytest

    return int(pytest.main(["-p", "tests.conftest", "-n", "0", str(path), *arguments]))


# A process that measures how an interpreter ends falls off the end of this file.
if __name__ == "__main__" and (code := main(sys.argv[1:])):
    sys.exit(code)
