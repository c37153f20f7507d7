"""`python scripts/readme_plot.py`: the README's bar plot, from the committed rows of a GPU machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "images" / "against-llama-server.png"
OURS, THEIRS = "#1f6f8b", "#c9c9c9"


def read_rows() -> tuple[str, dict[str, tuple[float, float]]]:
    """The date of the report, and tokens/s of the 8B model by number of streams, without drafts."""
    date = re.search(r"\d{4}-\d{2}-\d{2}", (ROOT / "bench" / "gpu" / "REPORT.md").read_text())
    rows = [json.loads(line) for line in (ROOT / "bench" / "gpu" / "rows.jsonl").read_text().splitlines()]
    rates = {
        (row["server"], row["streams"]): row["tokens_per_second"]
        for row in rows
        if row["model"] == "8B" and not row["temperature"]
    }
    assert date is not None
    counts = sorted(streams for server, streams in rates if server == "llama-server")
    return date[0], {
        f"{count} stream{'s' if count > 1 else ''}": (
            rates["cllm, drafts off", count],
            rates["llama-server", count],
        )
        for count in counts
    }


def main() -> None:
    date, figures = read_rows()
    figure, axes = plt.subplots(figsize=(7, 2.8))
    places = range(len(figures))
    for offset, index, colour, label in ((-0.2, 0, OURS, "cllm"), (0.2, 1, THEIRS, "llama-server")):
        values = [pair[index] for pair in figures.values()]
        bars = axes.bar([place + offset for place in places], values, 0.38, color=colour, label=label)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], fontsize=8, padding=2)
    axes.set_xticks(list(places), list(figures), fontsize=8)
    axes.set_title(f"8B Q4_0 on an H200, greedy, drafts off, {date}", fontsize=9)
    axes.set_ylabel("tokens/s", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    figure.tight_layout()
    figure.savefig(OUT, dpi=120)


if __name__ == "__main__":
    main()
