"""Columns: plain tables for the terminal and for scripts; no line is cut."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.cells import cell_len

_RIGHT = ("size", "downloads", "context", "takes", "requests")


def print_columns(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below their titles, each column as wide as its widest cell; numbers to the right."""
    table = [titles, *rows]
    widths = [max(cell_len(row[place]) for row in table) for place in range(len(titles))]
    for row in table:
        cells = []
        for title, width, text in zip(titles, widths, row, strict=True):
            padding = " " * (width - cell_len(text))
            cells.append(padding + text if title in _RIGHT else text + padding)
        typer.echo("  ".join(cells).rstrip())
