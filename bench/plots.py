"""Pictures of a comparison, as PNG files. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.comparison import Comparison
from bench.figures import first_tokens
from bench.peers import CLLM
from bench.workloads.definition import ORDER, clients_of
from cllm.errors import SetupError

COLOURS = ("#d1495b", "#30638e", "#66a182", "#8d6a9f", "#edae49", "#4a4a4a")
MARKERS = ("o", "s", "^", "D", "v", "P")
_PANEL_INCHES = (6.2, 3.9)
_MIN_GAP_MS = 0.5  # less is two pieces in one packet


class Picture(NamedTuple):
    """An image file, by its path inside the report's folder."""

    path: str
    caption: str


@dataclass(frozen=True, slots=True)
class _Sheet:
    """A picture of one kind, with a panel for each of these workloads and for those from files."""

    name: str
    caption: str
    panel: Callable[[Any, Comparison, str], None]
    workloads: tuple[str, ...]
    legend_scale: float = 1.0


def load_pyplot() -> Any:
    """matplotlib, for files only. Raises SetupError where it is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise SetupError("no plots: matplotlib is not installed (pip install matplotlib)") from None
    return pyplot


def draw(comparison: Comparison, folder: Path) -> list[Picture]:
    """Write what there is data for into `folder`/plots. Raises SetupError without matplotlib."""
    pyplot = load_pyplot()
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    pictures = []
    for sheet in _sheets():
        workloads = _drawn(comparison, sheet)
        if not workloads:
            continue
        columns = min(2, len(workloads))
        lines = -(-len(workloads) // columns)
        width, height = _PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * lines
        figure, axes = pyplot.subplots(lines, columns, figsize=(width, height), squeeze=False)
        for axis in axes.flat[len(workloads) :]:
            axis.axis("off")
        labels: dict[str, Any] = {}
        for axis, workload in zip(axes.flat, workloads, strict=False):
            sheet.panel(axis, comparison, workload)
            _dress(axis, workload)
            handles, names = axis.get_legend_handles_labels()
            labels |= dict(zip(names, handles, strict=True))
        named = [name for name in _servers(comparison) if name in labels]
        figure.legend(
            [labels[name] for name in named],
            named,
            loc="upper center",
            ncol=len(named),
            frameon=False,
            markerscale=sheet.legend_scale,
        )
        figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / height))
        figure.savefig(folder / "plots" / f"{sheet.name}.png", dpi=110)
        pyplot.close(figure)
        pictures.append(Picture(f"plots/{sheet.name}.png", sheet.caption))
    return pictures


def _sheets() -> tuple[_Sheet, ...]:
    return (
        _Sheet(
            "latency",
            "Latency by request number: first token in stale, the whole request elsewhere; median and range",
            _latency,
            ("distinct", "single", "stale"),
        ),
        _Sheet(
            "first-token",
            "First-token time: the part of all requests that had theirs by then, all rounds",
            _first_token,
            ("real", "agents", "chat", "burst", "shared"),
        ),
        _Sheet(
            "gaps",
            "Gaps between pieces of text over the time of the last round; in stall, before and after the "
            "arrival of the long prompt",
            _gaps,
            ("real", "agents", "stall", "long"),
            legend_scale=2.5,
        ),
        _Sheet(
            "throughput",
            "Throughput over concurrency: median, lowest and highest of the rounds",
            _throughput,
            ("sweep",),
        ),
    )


def _drawn(comparison: Comparison, sheet: _Sheet) -> list[str]:
    """Workloads from files are in every picture that suits them."""
    run = [each.name for each in comparison.definitions if comparison.peers(each.name)]
    sweeps = {name for name in run if any(map(clients_of, comparison.conditions(name)))}
    suited = [name for name in run if (name in sweeps) == (sheet.panel is _throughput)]
    return [name for name in suited if name in sheet.workloads or name not in ORDER]


def _latency(axis: Any, comparison: Comparison, workload: str) -> None:
    first = workload == "stale"
    for look, peer in _looks(comparison, workload):
        series: dict[int, list[float]] = {}
        for one in comparison.select(workload, peer, comparison.conditions(workload)[0]):
            for each in one.load.answered:
                value = each.first_token_s if first else each.total_s
                if value is not None:
                    series.setdefault(each.index + 1, []).append(value * 1000)
        numbers = sorted(series)
        axis.plot(numbers, [median(series[number]) for number in numbers], label=peer, markersize=4, **look)
        axis.fill_between(
            numbers,
            [min(series[number]) for number in numbers],
            [max(series[number]) for number in numbers],
            color=look["color"],
            alpha=0.13,
            linewidth=0,
        )
    axis.set_xlabel("request number")
    axis.set_ylabel("first token, ms" if first else "whole request, ms")
    axis.set_ylim(bottom=0)


def _first_token(axis: Any, comparison: Comparison, workload: str) -> None:
    for look, peer in _looks(comparison, workload):
        times = sorted(first_tokens([one.load for one in comparison.select(workload, peer)]))
        shares = [(number + 1) / len(times) for number in range(len(times))]
        axis.step(
            [time * 1000 for time in times],
            shares,
            where="post",
            label=peer,
            color=look["color"],
            linewidth=1.8,
        )
    axis.set_xscale("log")
    _plain_numbers(axis.xaxis)
    axis.set_xlabel("first token, ms")
    axis.set_ylabel("part of the requests")
    axis.set_ylim(0, 1.02)


def _gaps(axis: Any, comparison: Comparison, workload: str) -> None:
    for look, peer in _looks(comparison, workload):
        one = comparison.select(workload, peer, comparison.conditions(workload)[0])[-1]
        arrivals = [each.started_s for each in one.load.answered if each.late]
        begin = min(arrivals, default=0.0)  # servers differ in when a late prompt comes: it is their zero
        points = [
            (later - begin, (later - earlier) * 1000)
            for each in one.load.answered
            if not each.late
            for earlier, later in pairwise(each.chunks_s)
        ]
        axis.scatter(
            [at for at, _ in points],
            [gap for _, gap in points],
            s=7,
            alpha=0.45,
            label=peer,
            color=look["color"],
            marker=look["marker"],
            linewidths=0,
        )
        if arrivals:
            axis.axvline(0, color="#4a4a4a", linewidth=1, linestyle="--")
    axis.set_yscale("log")
    axis.set_ylim(bottom=max(axis.get_ylim()[0], _MIN_GAP_MS))
    _plain_numbers(axis.yaxis)
    axis.set_xlabel("time since the late prompt was sent, s" if arrivals else "time in the round, s")
    axis.set_ylabel("gap, ms")


def _throughput(axis: Any, comparison: Comparison, workload: str) -> None:
    conditions = comparison.conditions(workload)
    clients = [clients_of(condition) or 0 for condition in conditions]
    for look, peer in _looks(comparison, workload):
        spreads = [
            comparison.spread(workload, peer, "tokens_per_second", condition) for condition in conditions
        ]
        errors = [[each.median - each.low for each in spreads], [each.high - each.median for each in spreads]]
        axis.errorbar(
            clients,
            [each.median for each in spreads],
            yerr=errors,
            label=peer,
            capsize=3,
            markersize=5,
            **look,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(clients, [str(number) for number in clients])
    axis.minorticks_off()
    axis.set_xlabel("clients")
    axis.set_ylabel("tokens/s")
    axis.set_ylim(bottom=0)


def _looks(comparison: Comparison, workload: str) -> list[tuple[dict[str, Any], str]]:
    """A server looks the same in all pictures; cllm is drawn last, over the others."""
    servers = _servers(comparison)
    looks = []
    for peer in comparison.peers(workload):
        number = servers.index(peer) % len(COLOURS)
        looks.append(({"color": COLOURS[number], "marker": MARKERS[number], "linewidth": 1.6}, peer))
    return looks[::-1]


def _servers(comparison: Comparison) -> Sequence[str]:
    names = list(dict.fromkeys(each.peer for each in comparison.rounds))
    return sorted(names, key=lambda name: (name != CLLM, name))


def _plain_numbers(axis: Any) -> None:
    """1, 2, 5, 10 … instead of powers of ten."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _dress(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=11, loc="left")
    axis.grid(True, alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
