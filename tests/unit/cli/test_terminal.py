"""Text on a terminal: nothing of it is a command."""

from __future__ import annotations

import pytest

from cllm.cli.terminal import Screen
from cllm.names import make_visible


@pytest.mark.parametrize("code", [*range(0x20), *range(0x7F, 0xA0)])
def test_no_control_character_is_left(code: int) -> None:
    shown = make_visible(f"a{chr(code)}b")
    assert len(shown) == 3
    assert shown[1] == chr(code) if chr(code) in "\n\t" else shown[1].isprintable()


def test_other_text_stays() -> None:
    text = "naïve 日本 😀 ‮\u00a0\n\tend"
    assert make_visible(text) == text


def test_a_pipe_gets_the_answer_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.write("thoughts", dim=True)
    screen.write("an\x1b[0m answer")
    screen.remark("5 tokens")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("an\x1b[0m answer\n", "5 tokens\n")
