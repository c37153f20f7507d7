"""Terminal: answers that cannot control it, dim remarks, columns, progress, and the line of an error."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import StringIO, TextIOWrapper
from typing import Annotated

import typer
from rich.cells import cell_len, chop_cells
from typer import Option

from cllm.names import make_visible

AsJson = Annotated[bool, Option("--json", help="Print the result as JSON.")]
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
MAX_WORD = 40  # columns; a longer word is cut where a row ends
_WORDS = re.compile(r"\s|[\u2e80-\uffef]|[^\s\u2e80-\uffef]+")  # Chinese breaks between signs
_OPEN = re.compile(r"[^\s\u2e80-\uffef]+")
_FENCE = re.compile(r"^ *(`{3,}|~{3,})", re.MULTILINE)
_CODE = re.compile(rf"(?ms){_FENCE.pattern} *([\w+#.-]*)[^\n]*\n(.*?)^ *\1[`~]* *(?:\n|\Z)")
_RIGHT = ("size", "downloads", "context", "takes", "requests")  # columns of numbers


def fail(error: Exception, code: int = 2) -> typer.Exit:
    """Print one clear line on standard error."""
    echo(f"cllm: {error}", err=True)
    return typer.Exit(code)


def echo(text: str, *, err: bool = False) -> None:
    """Print a line that may hold names from elsewhere: of files, of hubs, of headers."""
    typer.echo(make_visible(text), err=err)


def print_columns(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below their titles, each column as wide as its widest cell; no line is cut."""
    table = [titles, *([make_visible(cell) for cell in row] for row in rows)]
    widths = [max(cell_len(row[place]) for row in table) for place in range(len(titles))]
    for row in table:
        cells = []
        for title, width, text in zip(titles, widths, row, strict=True):
            padding = " " * (width - cell_len(text))
            cells.append(padding + text if title in _RIGHT else text + padding)
        typer.echo("  ".join(cells).rstrip())


class Wrap:
    """Text in rows that fit the terminal: a word that does not fit begins the next one."""

    def __init__(self) -> None:
        self.column = self.row = 0
        self._word = ""  # its end has not come yet

    def add(self, text: str, *, end: bool = False) -> str:
        """Return what can be shown now: all but a word that may go on."""
        width, shown = get_size()[0], []
        words = _WORDS.findall(self._word + text)
        parts = [part for word in words for part in chop_cells(word, min(width, MAX_WORD)) or (word,)]
        self._word = parts.pop() if not end and parts and _OPEN.fullmatch(parts[-1]) else ""
        for part in parts:
            fits = self.column + cell_len(part) <= width
            if part == "\n" or not (fits or part.isspace()):
                shown.append("\n")
                self.column, self.row = 0, self.row + 1
            if part != "\n" and (fits or not part.isspace()):  # no space ends a row
                shown.append(part)
                self.column += cell_len(part)
        return "".join(shown)


def get_size() -> tuple[int, int]:
    """Columns and rows of the terminal, less one column: a full row would move the cursor."""
    with suppress(OSError, ValueError):
        size = os.get_terminal_size(sys.stdout.fileno())
        return max(size.columns - 1, 8) if size.columns else 79, size.lines or 24
    return 79, 24


def is_whole(block: str) -> bool:
    """Return True if a block of Markdown has ended: by an empty line, or by the end of its code."""
    rest = _CODE.sub("\0", block)
    return not _FENCE.search(rest) and rest.endswith(("\0", "\n\n"))


def render(text: str) -> str:
    """Render Markdown. Line breaks stay, HTML is text, code has colours and no margin."""
    from markdown_it import MarkdownIt
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.syntax import Syntax

    console = Console(file=StringIO(), force_terminal=True, width=get_size()[0], highlight=False)
    before = 0
    for code in (*_CODE.finditer(text), None):
        plain = text[before : code.start() if code else None].strip("\n")
        if plain.strip():
            document = Markdown("", hyperlinks=False)
            parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
            document.parsed = parser.parse(plain.replace("\n", "  \n"))
            console.print(document)
        if code:
            before = code.end()
            shown = Syntax("", code[2] or "text", theme="ansi_dark", background_color="default")
            console.print(shown.highlight(code[3]), end="", soft_wrap=True)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(map(str.rstrip, lines)).strip("\n") + "\n"


class Screen:
    """Standard output. On a terminal answers are made harmless and remarks are dim; a pipe gets answers.

    A terminal shows an answer in whole words as it comes, and where it has styles, each block of Markdown
    once more, rendered, when it has ended. Remarks go to standard error where there is no terminal to tell
    them from the answer.
    """

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding shows what it can
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self._styled = self.is_terminal and not plain
        self.markdown = True
        self._wrap = Wrap()
        self._block = ""  # of Markdown that has not ended
        self._gap = False  # the next block follows an empty line
        self._dim = False

    def write(self, text: str, *, dim: bool = False) -> None:
        """More of an answer. What is dim is not for a pipe."""
        if not text or (dim and not self.is_terminal):
            return
        if self._styled and dim != self._dim:
            sys.stdout.write(_DIM if dim else _PLAIN)
        self._dim = dim
        if not self.is_terminal:
            sys.stdout.write(text)
            self._wrap.column = not text.endswith("\n")
        elif dim or not (self._styled and self.markdown):
            sys.stdout.write(self._wrap.add(make_visible(text)))
        else:
            for line in make_visible(text).expandtabs(4).splitlines(keepends=True):
                self._add(line)
        sys.stdout.flush()

    def _add(self, line: str) -> None:
        """Show a line of Markdown, or a part of one."""
        if not self._block and not line.strip():
            return
        if not self._block and self._gap:
            sys.stdout.write("\n")
        self._gap, self._block = False, self._block + line
        sys.stdout.write(self._wrap.add(line))
        if is_whole(self._block):
            self._render()

    def _render(self) -> None:
        """Show the block again as it is meant; one that fills the terminal stays as it came."""
        sys.stdout.write(self._wrap.add("", end=True))
        if self._wrap.row < get_size()[1]:
            up = f"\x1b[{self._wrap.row}A" if self._wrap.row else ""
            sys.stdout.write(f"\r{up}\x1b[J{render(self._block)}")
            self._wrap, self._gap = Wrap(), True
        self._block, self._wrap.row = "", 0

    def end(self) -> None:
        """End the answer: style and line."""
        if self._block:
            self._render()
        sys.stdout.write(self._wrap.add("", end=True))
        if self._styled and self._dim:
            sys.stdout.write(_PLAIN)
        if self._wrap.column:
            sys.stdout.write("\n")
        sys.stdout.flush()
        self._dim, self._gap, self._wrap = False, False, Wrap()

    def remark(self, text: str) -> None:
        """A dim line beside the answers."""
        self.say(text, dim=True)

    def say(self, text: str, *, dim: bool = False) -> None:
        """A line beside the answers: an error, or what a command shows."""
        self.end()
        line = Wrap().add(make_visible(text), end=True) if self.is_terminal else text
        line = f"{_DIM}{line}{_PLAIN}" if dim and self._styled else line
        print(line, file=sys.stdout if self.is_terminal else sys.stderr, flush=True)
