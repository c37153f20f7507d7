"""Reports: medians with spread, Markdown tables, JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some measurements, and the lowest and highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Raises ValueError if there are none."""
        known = list(values)
        if not known:
            raise ValueError("no measurements")
        return cls(statistics.median(known), min(known), max(known))

    def show(self, digits: int = 1, scale: float = 1.0) -> str:
        median, low, high = (f"{value * scale:.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{median} ({low}–{high})"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings, as Markdown that is also readable as it stands."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [[str(cell).replace("|", "\\|") for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        heading, *body = (
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in lines
        )
        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        return "\n".join([heading, rule, *body])


def write_report(folder: Path, name: str, markdown: str, data: object) -> None:
    """Write `folder`/`name`.md and .json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(markdown.rstrip() + "\n")
    write_json(folder / f"{name}.json", data, indent=1)


def write_json(path: Path, data: object, indent: int | None = None) -> None:
    """`data` may hold dataclasses and NaN (null there); without `indent`, as short as can be."""
    separators = (",", ":") if indent is None else None
    path.write_text(json.dumps(_plain(data), indent=indent, separators=separators, ensure_ascii=False) + "\n")


def _plain(value: object) -> object:
    """`value` in JSON's own types: dataclasses become objects, floats get six digits, NaN becomes null."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
