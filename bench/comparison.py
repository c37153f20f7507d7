"""All rounds of a bench, and what follows: medians with spread, ratios, and whether the bars hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from bench.client import StepTime
from bench.figures import FIGURES, LoadResult
from bench.peers import CLLM, LLAMA_SERVER
from bench.report import Spread
from bench.workloads import BarLine, Definition
from bench.workloads.definition import BUSY, QUIET

MAX_WAITING_CORES = 0.05  # more would spoil the other's figures


@dataclass(frozen=True, slots=True)
class Round:
    """One load on one server; `waiting_cpu_s` is what the servers not under load used meanwhile."""

    peer: str
    family: str
    condition: str
    number: int
    load: LoadResult
    steps: StepTime | None
    server_cpu_s: float
    waiting_cpu_s: float

    def figure(self, name: str) -> float:
        return FIGURES[name].of([self.load])


@dataclass(frozen=True, slots=True)
class ReferenceRound:
    """What something that is no server took for the same work, in the same round."""

    workload: str
    name: str
    number: int
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise, what was measured, and whether it was kept; `kept` is None if it could not be measured."""

    workload: str
    what: str
    measured: str
    kept: bool | None
    by: str = ""  # how much is left, or lacks

    @property
    def verdict(self) -> str:
        if self.kept is None:
            return "not measured"
        met = f"met, {self.by}" if self.by else "met"
        return met if self.kept else f"MISSED by {self.by}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that was measured, and with what."""

    definitions: tuple[Definition, ...]
    rounds: tuple[Round, ...]
    references: tuple[ReferenceRound, ...] = ()
    libraries: Mapping[str, str] = field(default_factory=dict)  # digest by peer
    info: Mapping[str, str] = field(default_factory=dict)  # of the machine and the run
    failures: tuple[str, ...] = ()  # workloads that could not be run, and why
    quick: bool = False

    @property
    def passed(self) -> bool:
        """A quick run is no measurement: its figures may miss, its requests may not."""
        counted = self._sound()[:1] if self.quick else self.bars()
        return not self.failures and all(bar.kept is not False for bar in counted)

    def peers(self, workload: str) -> list[str]:
        """cllm first."""
        names = dict.fromkeys(each.peer for each in self.rounds if each.load.workload == workload)
        return sorted(names, key=lambda name: name != CLLM)

    def conditions(self, workload: str) -> list[str]:
        return list(dict.fromkeys(each.condition for each in self.rounds if each.load.workload == workload))

    def select(self, workload: str, peer: str, condition: str | None = None) -> list[Round]:
        """In the order of their numbers."""
        found = [
            each
            for each in self.rounds
            if each.load.workload == workload and each.peer == peer and condition in (None, each.condition)
        ]
        return sorted(found, key=lambda each: each.number)

    def spread(self, workload: str, peer: str, figure: str, condition: str | None = None) -> Spread:
        """The median over the rounds (of a pooled figure, its value over all of them), lowest and highest."""
        rounds = self.select(workload, peer, condition)
        found = finite_spread(each.figure(figure) for each in rounds)
        if not FIGURES[figure].pooled:
            return found
        return Spread(FIGURES[figure].of([each.load for each in rounds]), found.low, found.high)

    def ratio(self, workload: str, figure: str, peer: str, condition: str | None = None) -> Spread:
        """cllm's figure over the peer's, round by round."""
        ours = {each.number: each.figure(figure) for each in self.select(workload, CLLM, condition)}
        theirs = {each.number: each.figure(figure) for each in self.select(workload, peer, condition)}
        return _ratios(ours, theirs)

    def bars(self) -> list[Bar]:
        """First the two that always hold for a sound measurement, then those of the workloads."""
        bars = self._sound()
        for definition in self.definitions:
            if self.peers(definition.name):
                bars.extend(self._evaluate(definition.name, line) for line in definition.bars)
        return bars

    def _sound(self) -> list[Bar]:
        failed = sum(len(each.load.errors) for each in self.rounds)
        asked = sum(len(each.load.completions) for each in self.rounds)
        measured = f"{asked - failed} of {asked}"
        bars = [Bar("", "every request answered in full", measured, failed == 0, str(failed or ""))]
        shares = [each.waiting_cpu_s / each.load.wall_s for each in self.rounds]
        if shares and len({each.peer for each in self.rounds}) > 1:
            what = f"a server that waits uses ≤ {MAX_WAITING_CORES} cores"
            bars.append(Bar("", what, f"{max(shares):.3f}", *_margin(max(shares), None, MAX_WAITING_CORES)))
        return bars

    def _evaluate(self, workload: str, line: BarLine) -> Bar:
        figure = FIGURES[line.figure]
        bound = f"≥ {line.at_least:g}" if line.at_least is not None else f"≤ {line.at_most:g}"
        if line.against == "limit":
            shown = bound.split()[0] + f" {(line.at_least or line.at_most or 0) * figure.scale:g}"
            what = f"{figure.label} {shown}" + (f" ({line.condition})" if line.condition else "")
            found = self.spread(workload, CLLM, line.figure, line.condition or None)
            return _bar(workload, what, found, line, lambda spread: spread.show(figure.digits, figure.scale))
        against, found = self._against(workload, line)
        what = f"{figure.label}, {against} {bound}"
        return _bar(workload, what, found, line, lambda spread: spread.show(3) + " ×")

    def _against(self, workload: str, line: BarLine) -> tuple[str, Spread]:
        """The name of the ratio, and the ratio; of several layouts the one that is harder to beat."""
        condition = line.condition or None
        if line.against == "quiet":
            busy, quiet = (
                {each.number: each.figure(line.figure) for each in self.select(workload, CLLM, which)}
                for which in (BUSY, QUIET)
            )
            return "busy / quiet", _ratios(busy, quiet)
        if line.against != "peer":
            ours = {each.number: each.figure(line.figure) for each in self.select(workload, CLLM, condition)}
            theirs = {
                each.number: each.figures[line.figure]
                for each in self.references
                if each.workload == workload and each.name == line.against
            }
            return f"cllm / {line.against}", _ratios(ours, theirs)
        families = {each.peer for each in self.rounds if each.family == LLAMA_SERVER}
        names = [peer for peer in self.peers(workload) if peer in families]
        choice = max if FIGURES[line.figure].more_is_better else min
        if not names:
            return f"cllm / {LLAMA_SERVER}", finite_spread([])
        best = choice(names, key=lambda peer: self.spread(workload, peer, line.figure, condition).median)
        return f"cllm / {best}", self.ratio(workload, line.figure, best, condition)


def finite_spread(values: Iterable[float]) -> Spread:
    """Of those that are numbers; all NaN if there are none."""
    known = [value for value in values if math.isfinite(value)]
    return Spread.of(known or [math.nan])


def _ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Spread:
    both = [number for number in ours if theirs.get(number)]
    return finite_spread(ours[number] / theirs[number] for number in both)


def _bar(workload: str, what: str, found: Spread, line: BarLine, show: Callable[[Spread], str]) -> Bar:
    if not math.isfinite(found.median):
        return Bar(workload, what, "–", None)
    return Bar(workload, what, show(found), *_margin(found.median, line.at_least, line.at_most))


def _margin(value: float, at_least: float | None, at_most: float | None) -> tuple[bool, str]:
    """Whether the bar is kept, and the distance to it in parts of the bar."""
    bound = at_least if at_least is not None else at_most
    assert bound
    kept = value >= bound if at_least is not None else value <= bound
    distance = abs(value - bound) / bound
    return kept, f"{distance:.0%}" + (" to spare" if kept else "")
