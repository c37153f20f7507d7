"""`python scripts/readme_plot.py`: the README's bar plot, from the committed reports of the benchmarks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "images" / "against-llama-server.png"
WORKLOADS = {
    "distinct": "8 clients,\nshort prompts",
    "single": "1 client",
    "shared": "8 questions on\none long text",
    "chat": "16 users,\n3 turns",
}
OURS, THEIRS = "#1f6f8b", "#c9c9c9"


def read_cpu() -> tuple[str, dict[str, tuple[float, float]]]:
    """The date of the report, and tokens/s of cllm and of the better llama-server by workload."""
    text = (ROOT / "bench" / "REPORT.md").read_text()
    date = re.search(r"all of (\d{4}-\d{2}-\d{2})", text)
    table = text[text.index("| workload | tokens/s: cllm") :].split("\n\n")[0]
    found = {}
    for line in table.splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        ours, split, unified = (float(cell.split()[0]) for cell in cells[:3])
        found[name] = ours, max(split, unified)
    assert date is not None
    return date[1], {label: found[name] for name, label in WORKLOADS.items()}


def read_gpu() -> tuple[str, dict[str, tuple[float, float]]]:
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


def draw(axes: plt.Axes, title: str, figures: dict[str, tuple[float, float]]) -> None:
    places = range(len(figures))
    for offset, index, colour, label in ((-0.2, 0, OURS, "cllm"), (0.2, 1, THEIRS, "llama-server")):
        values = [pair[index] for pair in figures.values()]
        bars = axes.bar([place + offset for place in places], values, 0.38, color=colour, label=label)
        labels = [f"{value:,.0f}" for value in values]
        axes.bar_label(bars, labels, fontsize=8, padding=2)
    axes.set_xticks(list(places), list(figures), fontsize=8)
    axes.set_title(title, fontsize=9)
    axes.set_ylabel("tokens/s", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    (cpu_date, cpu), (gpu_date, gpu) = read_cpu(), read_gpu()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(4, 3))
    draw(left, f"SmolLM2-135M Q4_1 on two vCPUs, {cpu_date}", cpu)
    draw(right, f"8B Q4_0, no drafts, on an H200, {gpu_date}", gpu)
    left.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(OUT, dpi=120)


if __name__ == "__main__":
    main()
