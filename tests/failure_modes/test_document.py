"""docs/failure-modes.md and the tests name the same failure modes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `([a-z0-9-]+)` \| .+ \| `(test_\w+\.py)` \|$", re.MULTILINE)
MARK = re.compile(r'^@pytest\.mark\.failure_mode\("([a-z0-9-]+)"\)$', re.MULTILINE)
DOCUMENTED = dict(ROW.findall((ROOT / "docs" / "failure-modes.md").read_text(encoding="utf-8")))
TESTED = {
    (name, file.name)
    for file in Path(__file__).parent.glob("test_*.py")
    for name in MARK.findall(file.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_each_failure_mode_has_a_test(name: str) -> None:
    assert (name, DOCUMENTED[name]) in TESTED


def test_each_marked_test_is_documented() -> None:
    assert {name for name, _ in TESTED} == set(DOCUMENTED) and len(DOCUMENTED) == 52


def test_every_test_is_marked() -> None:
    for file in Path(__file__).parent.glob("test_*.py"):
        if file.name != Path(__file__).name:
            text = file.read_text(encoding="utf-8")
            assert len(MARK.findall(text)) == len(re.findall(r"^def test_", text, re.MULTILINE)), file.name
