"""Every fault of the list has a test that carries its number."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

FAULTS = range(1, 53)


def numbers() -> set[int]:
    """The faults that tests here are named after."""
    found = set()
    for file in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and (match := re.match(r"test_fault_(\d\d)_", node.name)):
                found.add(int(match.group(1)))
    return found


@pytest.mark.parametrize("number", FAULTS)
def test_each_fault_has_a_test(number: int) -> None:
    assert number in numbers()
