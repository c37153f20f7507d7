"""`python -m bench.gpu.report ROWS`: the rows of a GPU machine as tables, each beside bare decode."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.report import Table

BARE = "bare"


def make_tables(rows: list[dict[str, Any]]) -> str:
    """One table a model: tokens/s while all streams generate, the part of bare decode, and end to end."""
    parts: list[str] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        streams = sorted({row["streams"] for row in own})
        bare = {row["streams"]: row["tokens_per_second"] for row in own if row["server"] == BARE}
        kinds = dict.fromkeys((row["server"], row["temperature"]) for row in own)
        lines = []
        for kind in kinds:
            found = {row["streams"]: row for row in own if (row["server"], row["temperature"]) == kind}
            label = kind[0] + (f", sampled at {kind[1]}" if kind[1] else "")
            lines.append((label, *(_cell(found.get(count), bare.get(count)) for count in streams)))
        heads = (f"{model}, tokens/s", *(f"{count} stream{'s' * (count > 1)}" for count in streams))
        parts.append(Table(heads, lines).markdown())
    return "\n\n".join(parts)


def _cell(row: dict[str, Any] | None, bare: float | None) -> str:
    if row is None:
        return ""
    shown = f"{row['tokens_per_second']:,.0f}"
    if row["server"] == BARE or not bare:
        return shown
    part = row.get("of_bare", row["tokens_per_second"] / bare)
    return f"{shown} ({part:.2f}; {row['end_to_end']:,.0f})"


if __name__ == "__main__":
    print(make_tables([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
