"""Search: from the present settings, one dimension after the other, keep what is clearly faster.

The machine is noisy, so the present settings are measured again between any two alternatives, and an
alternative is judged by the ratio to its neighbours in time. It must win by more than the noise, twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import mean, median
from typing import NamedTuple

from msgspec.structs import replace

from cllm.config import EngineConfig
from cllm.errors import SetupError
from cllm.tune import space
from cllm.tune.record import Option, TuneRecord, relative_to
from cllm.tune.space import KV_TYPES, THREADS, Dimension, Part, Settings, Value, with_settings
from cllm.tune.trial import Measurement, Plan, mix_seconds

MIN_GAIN = 0.03  # a change must win by this much, or by the noise if that is more
PERPLEXITY_TOKENS = 1200
MIN_PERPLEXITY_TOKENS = 256
BUSY_CORES = 0.5  # other programs that use so much of the machine falsify the result
GIVE_UP = 2.5  # an alternative that takes so many times as long is abandoned
MIN_LIMIT_S = 3.0
FIRST_LIMIT_S = 120.0

Ask = Callable[[EngineConfig, Plan, float], Measurement]
Progress = Callable[[float, str], None]


class Machine(NamedTuple):
    """The machine as the search sees it."""

    cores: int
    others: float | None  # cores that other programs use as it begins; None: unknown
    longest: int  # tokens that a request may have here

    @property
    def busy(self) -> bool:
        return self.others is not None and self.others >= BUSY_CORES


class TuneFailed(SetupError):
    """The present settings cannot be measured; nothing is known and nothing is changed."""

    code = "tune_failed"


def compare(
    measured: Measurement, baselines: Sequence[Measurement], rest: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """The ratio of the mix, and of each case, to the mean of the present settings before and after.

    Cases of the mix that were not measured count with their time in `rest`, on both sides.
    """

    def mix(one: Measurement) -> float:
        return mix_seconds({**rest, **one.seconds})

    cases = {
        case: seconds / mean(baseline.seconds[case] for baseline in baselines)
        for case, seconds in measured.seconds.items()
    }
    return mix(measured) / mean(map(mix, baselines)), cases


class Search:
    """One search. `ask` measures a setting; `run` returns the record."""

    def __init__(
        self,
        config: EngineConfig,
        fixed: Mapping[str, Value],
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
        self._settings: dict[str, Value] = {}
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
        self._plans = dict.fromkeys(Part, space.first_look(config.parallel))
        self._part = Part.ALL
        wanted = (*space.DIMENSIONS, KV_TYPES) if kv_types else space.DIMENSIONS
        self._dimensions = [item for item in wanted if not set(item.fields) & set(fixed)]
        if machine.busy and THREADS in self._dimensions:
            # Neighbours come and go; while serving, the number of threads follows them.
            self._dimensions.remove(THREADS)
            self._left_out.append("threads: other programs are busy")

    def run(self, fingerprint: Mapping[str, str]) -> TuneRecord:
        """Search. Raises TuneFailed where not even the present settings can be measured."""
        self._calibrate()
        self._measure_baseline()
        self._measure_baseline()  # the difference between the two is the first estimate of the noise
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
            fingerprint=dict(fingerprint),
            settings=self._settings,
            options=tuple(self._options),
            seconds=self._seconds,
            speedup=self._speedup,
            noise=median(self._differences) if self._differences else 0.0,
            left_out=tuple(self._left_out),
            requests=plan.requests,
            short=plan.short,
            long=plan.long,
            provisional=self._provisional(),
            kv_types=self._kv_types,
            perplexity_tokens=self._perplexity_tokens,
            took_s=self._clock() - self._started,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _provisional(self) -> str:
        others = max(median(self._others) if self._others else 0.0, self._machine.others or 0.0)
        return f"other programs used {others:.1f} cores meanwhile" if others >= BUSY_CORES else ""

    def _calibrate(self) -> None:
        """Look how fast it is, and plan so that all alternatives fit into the time."""
        parallel = self._config.parallel
        look = self._measure(self._config, space.first_look(parallel), FIRST_LIMIT_S)
        if look.problem:
            raise TuneFailed(f"the present settings cannot be measured: {look.problem}")
        self._load_s, spent_s = look.load_s, look.took_s
        if look.took_s < 0.5 and self._machine.longest > 2 * space.SECOND_LOOK:
            second = self._measure(self._config, space.first_look(parallel, space.SECOND_LOOK), FIRST_LIMIT_S)
            spent_s += second.took_s
            look = look if second.problem else second
        self._look = look.seconds
        self._deadline = self._clock() + self._budget_s - spent_s
        alternatives = dict.fromkeys(Part, 0)
        for item in self._dimensions:
            alternatives[item.part] += 0 if item.quality else len(self._alternatives(item))
        self._plans = space.make_plans(
            self._look,
            parallel,
            alternatives,
            longest=self._machine.longest,
            budget_s=self._budget_s - spent_s,
        )
        if parallel > space.MAX_REQUESTS:
            self._left_out.append(f"more than {space.MAX_REQUESTS} of the {parallel} requests")

    @property
    def _plan(self) -> Plan:
        return self._plans[self._part]

    def _alternatives(self, dimension: Dimension) -> list[Settings]:
        return dimension.alternatives(self._config, self._machine.cores)

    def _measure(self, config: EngineConfig, plan: Plan, limit_s: float) -> Measurement:
        """Measure with a fixed number of threads: following the neighbours would not be repeatable."""
        threads = space.thread_count(config, self._machine.cores)
        if self._machine.busy and not config.threads:
            assert self._machine.others is not None
            threads = max(1, min(threads, self._machine.cores - int(self._machine.others + 1 - BUSY_CORES)))
        measured = self._ask(replace(config, threads=threads), plan, limit_s)
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
        return max(MIN_LIMIT_S, GIVE_UP * (self._baseline.took_s + space.prefix_s(self._plan, self._look)))

    def _try_dimension(self, dimension: Dimension) -> None:
        """Measure each alternative; the best one becomes the present setting if it wins twice."""
        alternatives = self._alternatives(dimension)
        if alternatives and dimension.part is not self._part:
            self._part, self._baseline = dimension.part, None
            self._measure_baseline()
        by_label: dict[str, Settings] = {}
        tried: list[Option] = []
        for settings in alternatives:
            config = with_settings(self._config, settings)
            option = Option(dimension=dimension.name, label=dimension.label(config, self._machine.cores))
            reason = self._reason_to_skip(dimension, config)
            if reason is not None:
                self._left_out.append(f"{option.dimension} {option.label}{reason}")
                continue
            self._progress(self._fraction, f"{option.dimension} {option.label}")
            by_label[option.label] = settings
            tried.append(self._try(option, config, dimension)[0])
        if dimension.quality and tried:
            tried = self._judge_quality(tried, by_label)
        if tried:
            self._choose(tried, by_label, dimension)

    def _reason_to_skip(self, dimension: Dimension, config: EngineConfig) -> str | None:
        """Why an alternative is left out: empty for lack of time; None: it is measured."""
        if self._baseline is None:
            return ""  # there is nothing to compare with
        needed = 2 * self._baseline.took_s + (2 * self._load_s if dimension.reloads else 0.0)
        if self._clock() + needed > self._deadline:
            return ""
        # A prompt that is not longer than the smaller chunk is computed in one by both.
        chunk = min(config.batch_tokens, self._config.batch_tokens)
        if dimension.part is Part.PROMPT and self._plan.prompt <= chunk:
            return " (no time for a prompt that long)"
        return None

    def _try(self, option: Option, config: EngineConfig, dimension: Dimension) -> tuple[Option, Measurement]:
        """Measure it between the last measurement of the present settings and a new one."""
        limit_s = self._limit_s() + (3 * self._load_s if dimension.reloads else 0.0)
        measured = self._measure(config, self._plan, limit_s)
        before = self._baseline
        assert before is not None
        if measured.problem:
            slower = f": over {measured.took_s / before.took_s:.1f} × as long" if measured.timed_out else ""
            problem = f"{measured.problem}{slower}"
            return replace(option, ratio=None, cases={}, problem=problem), measured
        self._measure_baseline()
        assert self._baseline is not None
        ratio, cases = compare(measured, (before, self._baseline), self._seconds)
        return replace(option, ratio=ratio, cases=cases), measured

    def _choose(self, tried: list[Option], by_label: Mapping[str, Settings], dimension: Dimension) -> None:
        """Take over the fastest alternative if it wins twice, by more than the noise."""
        # The largest difference of a setting from itself, but for one hiccup among several.
        noise = sorted(self._differences, reverse=True)[1 if len(self._differences) > 3 else 0 :][:1]
        max_ratio = 1 - max(MIN_GAIN, *noise)
        allowed = [item for item in tried if item.ratio and (item.harmless or not dimension.quality)]
        best = min(allowed, key=lambda item: item.ratio or 0.0, default=None)
        won = None
        if best is not None and best.ratio is not None and best.ratio <= max_ratio:
            again, measured = self._try(best, with_settings(self._config, by_label[best.label]), dimension)
            first, second = best.ratio, again.ratio
            if second is not None:
                cases = {case: mean((value, again.cases[case])) for case, value in best.cases.items()}
                again = replace(again, ratio=mean((first, second)), cases=cases)
                if second <= max_ratio:
                    won = again
                    self._set_baseline(measured)  # the present settings from now on
            tried[tried.index(best)] = again
        present = Option(
            dimension=dimension.name,
            label=dimension.label(self._config, self._machine.cores),
            ratio=1.0,
            cases=dict.fromkeys(next((item.cases for item in tried if item.cases), {}), 1.0),
        )
        self._options += relative_to(won or present, [present, *tried])
        if won is not None and won.ratio is not None:
            self._config = with_settings(self._config, by_label[won.label])
            self._settings.update(by_label[won.label])
            self._speedup /= won.ratio

    def _judge_quality(self, tried: Sequence[Option], by_label: Mapping[str, Settings]) -> list[Option]:
        """The perplexity of each, against the present cache types, over the same tokens."""
        affordable = int(self._budget_s / 2 / (len(tried) + 1) / self._look["prefill"])
        tokens = min(PERPLEXITY_TOKENS, self._machine.longest, max(MIN_PERPLEXITY_TOKENS, affordable))
        self._perplexity_tokens = tokens
        plan = Plan(requests=1, long=0, steps=0, perplexity_tokens=tokens)
        reference = self._measure(self._config, plan, FIRST_LIMIT_S).perplexity
        judged: list[Option] = []
        for item in tried:
            self._progress(self._fraction, f"perplexity with {item.label}")
            change = None
            if item.ratio is not None and reference is not None:
                config = with_settings(self._config, by_label[item.label])
                found = self._measure(config, plan, FIRST_LIMIT_S).perplexity
                change = None if found is None else found / reference - 1
            judged.append(replace(item, perplexity_change=change))
        return judged
