"""Calls drawn from their grammar are read back; `proof/formats.py` tries 200 of every chat template."""

from __future__ import annotations

import pytest

from proof.shared.drawn_calls import CallDrawer
from tests.driver.turns import get_family

ANSWERS = 10
# One of each kind: JSON with and without a frame, named, in tags, in nested tags, Python, Gemma's, harmony.
NAMES = (
    *("Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", "moonshotai-Kimi-K2", "Qwen3-Coder"),
    *("MiniMax-M3", "LFM2-8B-A1B", "google-gemma-4-31B-it", "openai-gpt-oss-120b"),
)


@pytest.mark.parametrize("name", NAMES)
def test_drawn_calls_are_read_and_validate(name: str) -> None:
    drawer = CallDrawer(get_family(name))
    drawn = drawer.draw(range(ANSWERS))
    assert (drawn.faults, drawn.complete) == ([], ANSWERS) and drawn.calls >= ANSWERS
