"""The search: from the settings as they are, one dimension after the other, keep what is clearly faster.

The machine is noisy, so the present settings are measured again between any two alternatives, and an
alternative is judged by the ratio to its neighbours in time. It must win by more than the noise, twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import mean, median
from typing import NamedTuple

import msgspec

from cllm.config import EngineConfig
from cllm.errors import SetupError
from cllm.tune.record import Option, Tried, TuneRecord, compare, is_harmless, options_of
from cllm.tune.space import (
    DIMENSIONS,
    KV_TYPES,
    MAX_STREAMS,
    SECOND_LOOK,
    Dimension,
    Part,
    Settings,
    beginning_s,
    first_look,
    make_plans,
    thread_count,
    with_settings,
)
from cllm.tune.trial import Measurement, Plan

MIN_GAIN = 0.03  # a change must win by this much, or by the noise if that is more
PERPLEXITY_TOKENS = 1200
MIN_PERPLEXITY_TOKENS = 256
BUSY_CORES = 0.5  # others that use so much of the machine falsify the result
GIVE_UP = 2.5  # an alternative that takes so many times as long is not waited for
MIN_LIMIT_S = 3.0
FIRST_LIMIT_S = 120.0

Ask = Callable[[EngineConfig, Plan, float], Measurement]
Progress = Callable[[float, str], None]


class Machine(NamedTuple):
    """What the search has to know of where it runs."""

    cores: int
    others: float | None  # cores that other programs use as it begins; None: unknown
    longest: int  # tokens that a request may have here

    @property
    def busy(self) -> bool:
        return self.others is not None and self.others >= BUSY_CORES


class TuneFailed(SetupError):
    """The settings as they are cannot be measured; nothing is known and nothing is changed."""

    code = "tune_failed"


class Search:
    """One search. `ask` measures a setting; `run` returns what was found."""

    def __init__(
        self,
        config: EngineConfig,
        fixed: Mapping[str, int | bool | str],
        machine: Machine,
        ask: Ask,
        *,
        budget_s: float,
        kv_types: bool = False,
        progress: Progress = lambda fraction, text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._machine = machine
        self._ask = ask
        self._budget_s = budget_s
        self._progress = progress
        self._clock = clock
        self._started = self._deadline = clock()
        self._settings: dict[str, int | bool | str] = {}
        self._options: list[Option] = []
        self._left_out: list[str] = []
        self._baseline: Measurement | None = None  # the last of the present settings, with the present plan
        self._seconds: dict[str, float] = {}  # by case, of the present settings
        self._differences: list[float] = []  # between two baselines in a row
        self._others: list[float] = []
        self._speedup = 1.0
        self._fraction = 0.0
        self._kv_types = kv_types
        self._load_s = 0.0
        self._perplexity_tokens = 0
        self._look: dict[str, float] = {}
        self._plans = dict.fromkeys(Part, first_look(config.parallel))
        self._part = Part.ALL
        wanted = (*DIMENSIONS, KV_TYPES) if kv_types else DIMENSIONS
        self._dimensions = [item for item in wanted if not set(item.fields) & set(fixed)]
        if machine.busy and self._dimensions and self._dimensions[0].name == "threads":
            # Neighbours come and go; while serving, the number of threads follows them by itself.
            del self._dimensions[0]
            self._left_out.append("threads: other programs are busy")

    def run(self, identity: Mapping[str, str]) -> TuneRecord:
        """Search. Raises TuneFailed where not even the present settings can be measured."""
        self._calibrate()
        self._measure_baseline()
        self._measure_baseline()  # the difference between the two is the first that is known of the noise
        if self._baseline is None:
            raise TuneFailed("the present settings could not be measured a second time")
        for number, dimension in enumerate(self._dimensions):
            self._fraction = number / len(self._dimensions)
            if dimension.quality:
                # Asked for, so it has a time of its own: half of it for speed, half for perplexity.
                self._deadline = self._clock() + self._budget_s / 2
            self._try_dimension(dimension)
        plan = self._plans[Part.ALL]
        return TuneRecord(
            identity=dict(identity),
            settings=self._settings,
            options=tuple(self._options),
            seconds=self._seconds,
            speedup=self._speedup,
            noise=self._noise,
            left_out=tuple(self._left_out),
            streams=plan.streams,
            short=plan.short,
            long=plan.long,
            provisional=self._provisional(),
            kv_types=self._kv_types,
            perplexity_tokens=self._perplexity_tokens,
            took_s=self._clock() - self._started,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    @property
    def _noise(self) -> float:
        return median(self._differences) if self._differences else 0.0

    @property
    def _largest_noise(self) -> float:
        """The largest difference seen of a setting from itself, but for one hiccup among several."""
        largest = sorted(self._differences, reverse=True)
        return largest[1 if len(largest) > 3 else 0] if largest else 0.0

    def _provisional(self) -> str:
        others = median(self._others) if self._others else 0.0
        if self._machine.others is not None:
            others = max(others, self._machine.others)
        return f"other programs used {others:.1f} cores meanwhile" if others >= BUSY_CORES else ""

    def _calibrate(self) -> None:
        """Look how fast it is, and plan so that all alternatives fit into the time."""
        look = self._measure(self._config, first_look(self._config.parallel), FIRST_LIMIT_S)
        if look.problem:
            raise TuneFailed(f"the present settings cannot be measured: {look.problem}")
        self._load_s, spent_s = look.load_s, look.took_s
        if look.took_s < 0.5 and self._machine.longest > 2 * SECOND_LOOK:
            second = self._measure(
                self._config, first_look(self._config.parallel, SECOND_LOOK), FIRST_LIMIT_S
            )
            spent_s += second.took_s
            look = look if second.problem else second
        self._look = look.seconds
        self._deadline = self._clock() + self._budget_s - spent_s
        alternatives = dict.fromkeys(Part, 0)
        for item in self._dimensions:
            alternatives[item.part] += 0 if item.quality else len(self._alternatives(item))
        self._plans = make_plans(
            self._look,
            self._config.parallel,
            alternatives,
            longest=self._machine.longest,
            budget_s=self._budget_s - spent_s,
        )
        if self._config.parallel > MAX_STREAMS:
            self._left_out.append(f"more than {MAX_STREAMS} of the {self._config.parallel} streams")

    @property
    def _plan(self) -> Plan:
        return self._plans[self._part]

    def _alternatives(self, dimension: Dimension) -> list[Settings]:
        return dimension.alternatives(self._config, self._machine.cores)

    def _measure(self, config: EngineConfig, plan: Plan, limit_s: float) -> Measurement:
        """With a fixed number of threads: what follows the neighbours would not be the same twice."""
        threads = thread_count(config, self._machine.cores)
        if self._machine.busy and not config.threads:
            assert self._machine.others is not None
            threads = max(1, min(threads, self._machine.cores - int(self._machine.others + 1 - BUSY_CORES)))
        measured = self._ask(msgspec.structs.replace(config, threads=threads), plan, limit_s)
        if measured.others is not None:
            self._others.append(measured.others)
        return measured

    def _measure_baseline(self) -> None:
        measured = self._measure(self._config, self._plan, self._limit_s() + 2 * self._load_s)
        if measured.problem:
            return  # it was measured before; the older one has to do
        if self._baseline is not None:
            self._differences.append(abs(compare(measured, [self._baseline], self._seconds)[0] - 1))
        self._set_baseline(measured)

    def _set_baseline(self, measured: Measurement) -> None:
        self._baseline = measured
        self._seconds |= measured.seconds

    def _limit_s(self) -> float:
        if self._baseline is None:
            return FIRST_LIMIT_S
        usual_s = self._baseline.took_s + beginning_s(self._plan, self._look)
        return max(MIN_LIMIT_S, GIVE_UP * usual_s)

    def _turn_to(self, part: Part) -> None:
        """Judge by this part of the mix from now on."""
        if part is not self._part:
            self._part, self._baseline = part, None
            self._measure_baseline()

    def _try_dimension(self, dimension: Dimension) -> None:
        """Measure each alternative; the best one becomes the present setting if it wins twice."""
        if not self._alternatives(dimension):
            return
        self._turn_to(dimension.part)
        tried: list[Tried] = []
        for settings in self._alternatives(dimension):
            config = with_settings(self._config, settings)
            label = dimension.label(config, self._machine.cores)
            if not self._has_time(dimension):
                self._left_out.append(f"{dimension.name} {label}")
                continue
            if dimension.part is Part.PROMPT and not self._tells_apart(config):
                self._left_out.append(f"{dimension.name} {label} (no time for a prompt that long)")
                continue
            self._progress(self._fraction, f"{dimension.name} {label}")
            tried.append(self._try(Tried(settings, config, label), dimension))
        if dimension.quality and tried:
            tried = self._judge_quality(tried)
        present = dimension.label(self._config, self._machine.cores)
        best, won = self._best(tried, dimension)
        if best is not None:  # what it was on the average of both measurements
            tried = [best if item.settings == best.settings else item for item in tried]
        if tried:
            self._options += options_of(dimension.name, present, tried, best if won else None)
        if won:
            assert best is not None and best.ratio is not None
            self._config = best.config
            self._settings.update(best.settings)
            self._speedup /= best.ratio

    def _has_time(self, dimension: Dimension) -> bool:
        if self._baseline is None:
            return False  # there is nothing to compare with
        needed = 2 * self._baseline.took_s + (2 * self._load_s if dimension.reloads else 0.0)
        return self._clock() + needed <= self._deadline

    def _tells_apart(self, config: EngineConfig) -> bool:
        """Whether the prompt is longer than the smaller chunk; else both compute it in one."""
        return self._plan.prompt > min(config.batch_tokens, self._config.batch_tokens)

    def _try(self, tried: Tried, dimension: Dimension) -> Tried:
        """Between the last measurement of the present settings and a new one."""
        limit_s = self._limit_s() + (3 * self._load_s if dimension.reloads else 0.0)
        measured = self._measure(tried.config, self._plan, limit_s)
        before = self._baseline
        assert before is not None
        if measured.timed_out:
            slower = measured.took_s / before.took_s
            return tried._replace(problem=f"{measured.problem}: over {slower:.1f} × as long")
        if measured.problem:
            return tried._replace(problem=measured.problem)
        ratio, cases = self._compare(measured)
        return tried._replace(ratio=ratio, cases=cases)

    def _compare(self, measured: Measurement) -> tuple[float, dict[str, float]]:
        """Against the present settings, measured before it and now once more."""
        before = self._baseline
        self._measure_baseline()
        assert before is not None and self._baseline is not None
        return compare(measured, (before, self._baseline), self._seconds)

    def _best(self, tried: Sequence[Tried], dimension: Dimension) -> tuple[Tried | None, bool]:
        """The fastest that may be chosen, and whether it wins: by more than the noise, and once more so."""
        gain = max(MIN_GAIN, self._largest_noise)
        allowed = [
            item for item in tried if item.ratio is not None and (not dimension.quality or is_harmless(item))
        ]
        best = min(allowed, key=lambda item: item.ratio or 0.0, default=None)
        if best is None or best.ratio is None or best.ratio > 1 - gain:
            return best, False
        limit_s = self._limit_s() + (3 * self._load_s if dimension.reloads else 0.0)
        again = self._measure(best.config, self._plan, limit_s)
        if again.problem:
            return best._replace(ratio=None, cases={}, problem=again.problem), False
        ratio, cases = self._compare(again)
        both = {case: mean((value, cases[case])) for case, value in best.cases.items()}
        best = best._replace(ratio=mean((best.ratio, ratio)), cases=both)
        if ratio > 1 - gain:
            return best, False
        self._set_baseline(again)  # the present settings from now on
        return best, True

    def _judge_quality(self, tried: Sequence[Tried]) -> list[Tried]:
        """The perplexity of each, against the present types, over the same tokens."""
        affordable = int(self._budget_s / 2 / (len(tried) + 1) / self._look["prefill"])
        tokens = min(PERPLEXITY_TOKENS, self._machine.longest, max(MIN_PERPLEXITY_TOKENS, affordable))
        self._perplexity_tokens = tokens
        reference = self._perplexity(self._config, tokens)
        judged: list[Tried] = []
        for item in tried:
            self._progress(self._fraction, f"perplexity with {item.label}")
            found = self._perplexity(item.config, tokens) if item.ratio is not None else None
            change = None if found is None or reference is None else found / reference - 1
            judged.append(item._replace(perplexity_change=change))
        return judged

    def _perplexity(self, config: EngineConfig, tokens: int) -> float | None:
        plan = Plan(streams=1, long=0, steps=0, perplexity_tokens=tokens)
        return self._measure(config, plan, FIRST_LIMIT_S).perplexity
