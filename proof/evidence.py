"""Evidence: write docs/reliability.md from what the other proofs have recorded.

A proof records its row with `record`, in docs/reliability/NAME.json. The report has all rows, with a plot of
every series.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.footprint import name_processor
from bench.plots import load_pyplot
from bench.report import Table
from proof.command import ROOT, make_parser

FOLDER = ROOT / "docs" / "reliability"
REPORT = ROOT / "docs" / "reliability.md"
INTRODUCTION = """\
# Reliability

What was done to break cllm, and what came of it. Each part is a command to run; it is bounded
in count and time, and says what it found. `make proof ARGS=evidence` writes this page from what the commands
recorded in `docs/reliability`.
"""


class Bar(msgspec.Struct, frozen=True):
    """What must be shown, and what was."""

    what: str
    bar: str
    found: str
    met: bool


class Series(msgspec.Struct, frozen=True):
    """Points of a plot: against `x`, or, as a histogram, without it."""

    title: str
    y_label: str
    y: Sequence[float]
    x_label: str = ""
    x: Sequence[float] = ()


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the proof. `mended`: what failed on the way, and the test that fails without the mend."""

    name: str
    order: int  # its place in the report
    title: str
    about: str
    bars: Sequence[Bar]
    figures: dict[str, Any] = {}
    series: Sequence[Series] = ()
    mended: Sequence[str] = ()
    date: str = ""
    machine: str = ""
    commit: str = ""


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """The median slope of all pairs of points."""
    slopes = [
        (y2 - y1) / (x2 - x1)
        for place, (x1, y1) in enumerate(points)
        for x2, y2 in points[place + 1 :]
        if x2 > x1
    ]
    return median(slopes) if slopes else 0.0


def record(evidence: Evidence, folder: Path = FOLDER) -> int:
    """Print the bars and write them down; the exit code of the command."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    known = msgspec.structs.replace(
        evidence, date=datetime.now(UTC).strftime("%Y-%m-%d"), machine=name_machine(), commit=commit
    )
    folder.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(known), indent=1)
    (folder / f"{known.name}.json").write_bytes(content + b"\n")
    print(_bars(known.bars))
    return int(not all(bar.met for bar in known.bars))


def name_machine() -> str:
    return f"{os.cpu_count()} cores, {name_processor()}, Python {platform.python_version()}"


def _bars(bars: Sequence[Bar]) -> str:
    rows = [(bar.what, bar.bar, bar.found, "met" if bar.met else "**missed**") for bar in bars]
    return Table(("what", "bar", "found", ""), rows).markdown()


def write_report(folder: Path = FOLDER, report: Path = REPORT) -> None:
    """The page, and a PNG of the series of each row."""
    found = [msgspec.json.decode(path.read_bytes(), type=Evidence) for path in folder.glob("*.json")]
    parts = [INTRODUCTION]
    for row in sorted(found, key=lambda each: (each.order, each.name)):
        parts.append(f"## {row.title}\n\n    make proof ARGS={row.name}\n\n{row.about}\n\n{_bars(row.bars)}")
        if row.figures:
            shown = (f"{name} {_shown(value)}" for name, value in row.figures.items())
            parts.append(f"Also: {', '.join(shown)}.")
        if row.series:
            _draw(row, folder / f"{row.name}.png")
            parts.append(f"![{row.title}](reliability/{row.name}.png)")
        parts += [f"Mended on the way: {each}" for each in row.mended]
        parts.append(f"{row.date}, commit {row.commit}, {row.machine}.")
    report.write_text("\n\n".join(part.rstrip() for part in parts) + "\n")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _draw(row: Evidence, path: Path) -> None:
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, len(row.series), figsize=(5 * len(row.series), 3.2), squeeze=False)
    for axis, series in zip(axes[0], row.series, strict=True):
        if series.x:
            axis.plot(series.x, series.y, ".-", markersize=3, linewidth=0.8)
            axis.set_ylim(top=1.15 * max(series.y) or None)  # a flat line is seen, too
        else:
            axis.hist(series.y, bins=60)
        axis.set_title(series.title, fontsize=10)
        axis.set_xlabel(series.x_label)
        axis.set_ylabel(series.y_label)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: Sequence[str]) -> int:
    make_parser(__name__, __doc__).parse_args(arguments)
    write_report()
    print(f"wrote {REPORT.relative_to(ROOT)}")
    return 0
