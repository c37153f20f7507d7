"""Figures as people read them: medians with spread, a Markdown table, JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path

import numpy as np

from cllm.bench.load import LoadResult


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
class Figures:
    """One load in numbers; times in seconds."""

    tokens_per_second: float
    first_token_p50_s: float
    first_token_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    gap_worst_s: float
    total_p50_s: float
    total_p99_s: float

    @classmethod
    def of(cls, load: LoadResult) -> Figures:
        """Of the requests that were answered; NaN where there is nothing to count."""
        good = [completion for completion in load.completions if completion.error is None]
        first = [each.first_token_s for each in good if each.first_token_s is not None]
        gaps = [gap for each in good for gap in each.gaps_s]
        total = [each.total_s for each in good]
        return cls(
            tokens_per_second=load.tokens_per_second,
            first_token_p50_s=percentile(first, 50),
            first_token_p99_s=percentile(first, 99),
            gap_p50_s=percentile(gaps, 50),
            gap_p99_s=percentile(gaps, 99),
            gap_worst_s=percentile(gaps, 100),
            total_p50_s=percentile(total, 50),
            total_p99_s=percentile(total, 99),
        )


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings; prints as Markdown that is also readable as it stands."""

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


def percentile(values: Sequence[float], rank: float) -> float:
    """The `rank`-th percentile, 0 to 100; NaN of nothing."""
    return float(np.percentile(values, rank)) if len(values) else float("nan")


def write_report(folder: Path, name: str, markdown: str, data: object) -> tuple[Path, Path]:
    """Write `folder`/`name`.md and .json; makes the folder; returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    text, record = folder / f"{name}.md", folder / f"{name}.json"
    text.write_text(markdown.rstrip() + "\n")
    record.write_text(json.dumps(_plain(data), indent=1, ensure_ascii=False) + "\n")
    return text, record


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
