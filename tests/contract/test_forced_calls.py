"""Forced calls with llama.cpp: markers are control tokens, arguments validate, what is cut is no text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.driver.corpus import template_files
from tests.driver.forced_calls import check_forced, make_model
from tests.driver.turns import Family


@pytest.mark.parametrize("name", ["google-gemma-4-31B-it-interleaved"])  # `proof/formats.py` has all
def test_forced_calls_validate(name: str, tmp_path: Path) -> None:
    family = Family(name, template_files()[name].read_text(encoding="utf-8"))
    model = make_model(family, tmp_path / "tiny.gguf")
    complete, cut, wrong = check_forced(model, range(2))
    assert wrong == [] and complete + cut == 2
    assert check_forced(model, range(1), max_tokens=5) == (0, 1, []), "nothing of the opening is text"
