"""Text on a terminal: nothing of it is a command, words are whole, Markdown is rendered."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from cllm.cli import terminal
from cllm.cli.terminal import Screen, Wrap, is_whole, render
from cllm.names import make_visible

ANSWER = """# Title

A **bold** word in a paragraph that is too long for one row of a narrow terminal.
Its second line.

1. one
2. two `code`

```python
def f():
    return "**no**"

print(f())
```
天空为什么是蓝色的？因为空气分子散射蓝光比红光强得多。

<b>html</b> and [a link](http://example.org)
"""
STYLE = re.compile(r"\x1b\[[0-9;]*m")


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


def show(written: str, width: int) -> list[str]:
    """The rows of a terminal that gets this output."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[AJ]|.|\n", STYLE.sub("", written)):
        if part == "\n":
            row, column = row + 1, 0
            rows += [""] * (row == len(rows))
        elif part == "\r":
            column = 0
        elif part.endswith("A") and len(part) > 1:
            row -= int(part[2:-1])
            assert row >= 0, "above the answer"
        elif part == "\x1b[J":
            del rows[row + 1 :]
            rows[row] = rows[row][:column]
        else:
            rows[row] = rows[row][:column] + part
            column += 1
            assert cell_len(rows[row]) <= width, "the terminal would break it anywhere"
    return [line.rstrip() for line in rows]


@pytest.mark.parametrize("width", [20, 39, 79])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_markdown_is_shown_as_it_comes_and_rendered_when_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, size: int
) -> None:
    monkeypatch.setattr(terminal, "get_size", lambda: (width, 40))
    screen = Screen()
    screen.is_terminal = screen._styled = True
    for begin in range(0, len(ANSWER), size):
        screen.write(ANSWER[begin : begin + size])
    screen.end()
    written = capsys.readouterr().out
    rows = show(written, width)
    assert rows[0].strip() == "Title" and not any("**bold" in row or "```" in row for row in rows)
    text = " ".join(rows)
    for part in ("A bold word in a paragraph", "1 one", "2 two code", "<b>html</b>", "(http://example.org)"):
        assert part in re.sub(r" +", " ", text)
    assert '    return "**no**"' in rows and "print(f())" in rows and rows[-1] == ""
    assert rows.index("Its second line.") and "\x1b[1mbold" in written and "\x1b]" not in written
    if size == 1:
        assert "**bold" in written, "before its paragraph has ended"


def test_a_block_that_fills_the_terminal_stays_as_it_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "get_size", lambda: (20, 4))
    screen = Screen()
    screen.is_terminal = screen._styled = True
    screen.write("many words " * 20 + "\n\nand *more*\n")
    screen.end()
    rows = show(capsys.readouterr().out, 20)
    assert rows[0] == "many words many" and rows[-3:] == ["", "and more", ""]


@given(st.lists(st.text(st.sampled_from("ab 日\n"), max_size=12)), st.integers(8, 30))
def test_words_are_whole_wherever_the_text_is_cut(pieces: list[str], width: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "get_size", lambda: (width, 40))
        patch.setattr(terminal, "MAX_WORD", 12)
        wrap, whole, text = Wrap(), Wrap(), "".join(pieces)
        shown = "".join(map(wrap.add, pieces)) + wrap.add("", end=True)
        assert shown == whole.add(text, end=True)
        assert wrap.row == shown.count("\n") and all(cell_len(row) <= width for row in shown.split("\n"))
        assert "".join(shown.split()) == "".join(text.split())


def test_a_block_ends_by_an_empty_line_outside_of_code() -> None:
    assert is_whole("a\n\n") and is_whole("a\n```\nb\n\nc\n```\n")
    assert not any(map(is_whole, ("a\n", "```\nb\n\n", "```\nb\n```\nc\n", "~~~\n```\n\n")))


def test_lines_stay_lines_and_code_has_no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "get_size", lambda: (40, 40))
    assert STYLE.sub("", render("Roses are red,\nviolets are blue\n")) == "Roses are red,\nviolets are blue\n"
    assert STYLE.sub("", render("```\n  x = 1\n```\n")) == "  x = 1\n"
