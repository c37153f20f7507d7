"""The bench of KV pressure, in small, and the rule it judges by."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from proof.pressure import run_pressure
from proof.shared.answers import Answer, compare
from tests.driver.server import environment


def answer(text: str, ties: str = "", finish: str = "length") -> Answer:
    """One token a letter; a tie where `ties` has an x."""
    gaps = tuple(0.01 if mark == "x" else 1.0 for mark in ties.ljust(len(text)))
    return Answer(tuple(text.encode()), gaps, finish)


def test_texts_may_part_at_a_tie_and_nowhere_else() -> None:
    alone = answer("abcdef", "  x")
    assert compare([alone], [answer("abcdef")])[:4] == (1, 0, 1, 6)
    assert compare([alone], [answer("abXYZ")])[:4] == (0, 1, 1, 2)
    for wrong in (answer("aXcdef"), answer("abcdeX"), answer("abcde"), answer("abcdef", finish="stop")):
        assert len(compare([alone], [wrong]).faults) == 1


def test_a_load_on_a_quarter_of_the_cells(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    command = (sys.executable, "-m", "cllm")
    assert run_pressure(tiny_model, 8, command, tmp_path) == 0, capsys.readouterr().out
    assert " 0 wrong" in capsys.readouterr().out
