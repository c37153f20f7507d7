"""Terminal: answers that cannot control it, dim remarks, columns, progress, and the line of an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer
from rich.cells import cell_len
from typer import Option

from cllm.names import make_visible

AsJson = Annotated[bool, Option("--json", help="Print the result as JSON.")]
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
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


class Screen:
    """Standard output. On a terminal answers are made harmless and remarks are dim; a pipe gets answers.

    Remarks go to standard error where there is no terminal to tell them from the answer.
    """

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding shows what it can
        self._styled = self.is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._dim = False
        self._column = False  # the cursor is within a line

    def write(self, text: str, *, dim: bool = False) -> None:
        """More of an answer. What is dim is not for a pipe."""
        if not text or (dim and not self.is_terminal):
            return
        if self._styled and dim != self._dim:
            sys.stdout.write(_DIM if dim else _PLAIN)
        self._dim = dim
        sys.stdout.write(make_visible(text) if self.is_terminal else text)
        sys.stdout.flush()
        self._column = not text.endswith("\n")

    def end(self) -> None:
        """End the answer: style and line."""
        if self._styled and self._dim:
            sys.stdout.write(_PLAIN)
        self._dim = False
        if self._column:
            sys.stdout.write("\n")
        sys.stdout.flush()
        self._column = False

    def remark(self, text: str) -> None:
        """A dim line beside the answers."""
        self.say(text, dim=True)

    def say(self, text: str, *, dim: bool = False) -> None:
        """A line beside the answers: an error, or what a command shows."""
        self.end()
        line = f"{_DIM}{make_visible(text)}{_PLAIN}" if dim and self._styled else make_visible(text)
        print(line, file=sys.stdout if self.is_terminal else sys.stderr, flush=True)
