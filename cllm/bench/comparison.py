"""What the rounds of a bench say: tables, ratios, the bars, and a record for machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median

from cllm.bench.client import StepTime
from cllm.bench.load import LoadResult
from cllm.bench.peers import ServerSettings
from cllm.bench.report import Figures, Spread, Table

CLLM = "cllm"
LEAST_RATIO: Mapping[str, float] = {"distinct": 0.95}
"""Bars on tokens per second against the peer, by workload."""
MOST_PYTHON: Mapping[str, float] = {"distinct": 0.05}
"""Bars on Python's share of a step, by workload."""
MOST_WAITING_CORES = 0.05  # more would spoil the other's figures

_ROWS: tuple[tuple[str, Callable[[Figures], float], float, int], ...] = (
    ("tokens/s", lambda figures: figures.tokens_per_second, 1, 1),
    ("first token p50, ms", lambda figures: figures.first_token_p50_s, 1000, 0),
    ("first token p99, ms", lambda figures: figures.first_token_p99_s, 1000, 0),
    ("gap p50, ms", lambda figures: figures.gap_p50_s, 1000, 1),
    ("gap p99, ms", lambda figures: figures.gap_p99_s, 1000, 1),
    ("worst gap, ms", lambda figures: figures.gap_worst_s, 1000, 0),
    ("request p50, ms", lambda figures: figures.total_p50_s, 1000, 0),
    ("request p99, ms", lambda figures: figures.total_p99_s, 1000, 0),
)


@dataclass(frozen=True, slots=True)
class Round:
    """One load on one server; `waiting_cpu_s` is what the servers not under load used meanwhile."""

    peer: str
    number: int
    load: LoadResult
    steps: StepTime | None
    server_cpu_s: float
    waiting_cpu_s: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise, and whether it was kept."""

    what: str
    figure: str
    kept: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rounds of a bench, and what they were run with."""

    settings: ServerSettings
    rounds: tuple[Round, ...]
    libraries: Mapping[str, str]
    load_average: float
    quick: bool

    @property
    def passed(self) -> bool:
        return all(bar.kept for bar in self.bars())

    @property
    def peers(self) -> list[str]:
        return list(self.libraries)

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(each.load.workload for each in self.rounds))

    def bars(self) -> list[Bar]:
        """Every bar that could be measured; that all requests were answered is always one."""
        failed = sum(len(each.load.errors) for each in self.rounds)
        asked = sum(len(each.load.completions) for each in self.rounds)
        bars = [Bar("every request answered in full", f"{asked - failed} of {asked}", failed == 0)]
        if len(self.peers) > 1:
            waiting = max(each.waiting_cpu_s / each.load.wall_s for each in self.rounds)
            what = f"a server that waits uses ≤ {MOST_WAITING_CORES} cores"
            bars.append(Bar(what, f"{waiting:.3f}", waiting <= MOST_WAITING_CORES))
        for workload in self.workloads:
            bars.extend(self._ratio_bars(workload))
            if workload in MOST_PYTHON:
                bars.append(self._python_bar(workload))
        return bars

    def ratio(self, workload: str, peer: str, value: Callable[[Figures], float]) -> Spread:
        """cllm's figure over the peer's, round by round."""
        ours, theirs = self._figures(workload, CLLM), self._figures(workload, peer)
        return Spread.of(value(a) / value(b) for a, b in zip(ours, theirs, strict=True))

    def markdown(self) -> str:
        bars = Table(
            ("bar", "measured", "verdict"),
            [(bar.what, bar.figure, "kept" if bar.kept else "MISSED") for bar in self.bars()],
        )
        sections = [self._heading(), *map(self._section, self.workloads), "### Bars", bars.markdown()]
        return "\n\n".join(sections) + "\n"

    def record(self) -> dict[str, object]:
        """For machines: everything but texts and single gaps."""
        return {
            "settings": self.settings,
            "libraries": self.libraries,
            "load_average": self.load_average,
            "quick": self.quick,
            "bars": [asdict(bar) for bar in self.bars()],
            "rounds": [_round_record(each) for each in self.rounds],
        }

    def _heading(self) -> str:
        settings = self.settings
        lines = [
            f"## {' against '.join(self.peers)}{' (quick: mechanics, not figures)' if self.quick else ''}",
            "",
            f"Model {settings.model or 'embedded SmolLM2-135M'}, {settings.parallel} sequences, "
            f"{settings.ctx_size} KV cells, {settings.thread_count} threads each. "
            f"Load average at the start: {self.load_average:.2f}. Median of the rounds (lowest–highest).",
        ]
        if len(self.peers) > 1:
            same = len(set(self.libraries.values())) == 1
            named = ", ".join(f"{name} {digest}" for name, digest in self.libraries.items())
            lines.append(f"{'The same' if same else 'NOT the same'} libggml-cpu for both: {named}.")
        return "\n".join(lines)

    def _section(self, workload: str) -> str:
        others = [peer for peer in self.peers if peer != CLLM]
        rows = []
        for label, value, scale, digits in _ROWS:
            cells = [
                Spread.of(map(value, self._figures(workload, peer))).show(digits, scale)
                for peer in self.peers
            ]
            ratios = [self.ratio(workload, peer, value).show(3) for peer in others]
            rows.append((label, *cells, *ratios))
        columns = ("", *self.peers, *(f"cllm / {peer}" for peer in others))
        notes = [f"- {note}" for note in self._notes(workload)]
        return "\n".join([f"### {workload}", "", Table(columns, rows).markdown(), "", *notes])

    def _notes(self, workload: str) -> Iterator[str]:
        for peer in self.peers:
            rounds = self._rounds(workload, peer)
            client = Spread.of(each.load.client_cpu_s / each.load.wall_s for each in rounds)
            server = Spread.of(each.server_cpu_s / each.load.wall_s for each in rounds)
            waiting = max(each.waiting_cpu_s / each.load.wall_s for each in rounds)
            counts = {each.prompt_tokens for one in rounds for each in one.load.completions} - {None}
            prompts = f", prompts of {_range(counts)} tokens" if counts else ""
            yield (
                f"{peer}: {server.median:.2f} cores used, the client beside it {client.median:.2f}, "
                f"servers waiting meanwhile at most {waiting:.3f}{prompts}"
            )
        steps = [each.steps for each in self._rounds(workload, CLLM) if each.steps is not None]
        if steps:
            python = Spread.of(step.python_share for step in steps)
            sampling = Spread.of(step.sample_share for step in steps)
            yield (
                f"Python's share of a cllm step (all outside the native decode): {python.show(2, 100)} %, "
                f"of which sampling {sampling.show(2, 100)} %; "
                f"{median(1000 * step.total_s / step.steps for step in steps if step.steps):.2f} ms a step"
            )
        for peer in self.peers[1:]:
            pairs = list(self._text_pairs(workload, peer))
            yield f"same text from cllm and {peer}: {sum(a == b for a, b in pairs)} of {len(pairs)}"

    def _ratio_bars(self, workload: str) -> Iterator[Bar]:
        if workload not in LEAST_RATIO:
            return
        least = LEAST_RATIO[workload]
        for peer in self.peers[1:]:
            ratio = self.ratio(workload, peer, lambda figures: figures.tokens_per_second)
            kept = ratio.median >= least
            yield Bar(f"{workload}: tokens/s, cllm / {peer} ≥ {least:.2f}", ratio.show(3), kept)

    def _python_bar(self, workload: str) -> Bar:
        most = MOST_PYTHON[workload]
        what = f"{workload}: Python's share of a step ≤ {most:.0%}"
        steps = [each.steps for each in self._rounds(workload, CLLM) if each.steps is not None]
        if not steps:
            return Bar(what, "the step counters are not in /metrics", False)
        share = Spread.of(step.python_share for step in steps)
        return Bar(what, f"{share.show(2, 100)} %", share.median <= most)

    def _text_pairs(self, workload: str, peer: str) -> Iterator[tuple[str, str]]:
        both = zip(self._rounds(workload, CLLM), self._rounds(workload, peer), strict=True)
        for ours, theirs in both:
            for a, b in zip(ours.load.completions, theirs.load.completions, strict=True):
                yield a.text, b.text

    def _rounds(self, workload: str, peer: str) -> list[Round]:
        return [each for each in self.rounds if each.load.workload == workload and each.peer == peer]

    def _figures(self, workload: str, peer: str) -> list[Figures]:
        return [Figures.of(each.load) for each in self._rounds(workload, peer)]


def _range(counts: set[int | None]) -> str:
    known = sorted(count for count in counts if count is not None)
    return f"{known[0]}" if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def _round_record(one: Round) -> dict[str, object]:
    requests = [asdict(completion) for completion in one.load.completions]
    for request in requests:
        del request["text"], request["gaps_s"]
    return {
        "peer": one.peer,
        "workload": one.load.workload,
        "number": one.number,
        "wall_s": one.load.wall_s,
        "client_cpu_s": one.load.client_cpu_s,
        "server_cpu_s": one.server_cpu_s,
        "waiting_cpu_s": one.waiting_cpu_s,
        "figures": asdict(Figures.of(one.load)),
        "steps": one.steps,
        "requests": requests,
    }
