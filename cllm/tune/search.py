"""Search: from the present settings, one dimension after the other, keep what is clearly faster.

The machine is noisy, so the present settings are measured again between any two alternatives, and an
alternative is judged by the ratio to its neighbours in time. It must win by more than the noise, twice.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from msgspec.structs import replace

from cllm.backend.llama.devices import Device, list_devices
from cllm.backend.llama.fingerprint import tune_fingerprint
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit
from cllm.backend.llama.placement import asked_layers
from cllm.backend.llama.threads import default_threads
from cllm.build.build import cache_directory
from cllm.config import EngineConfig
from cllm.errors import SetupError
from cllm.tune import space
from cllm.tune.record import Option, TuneMemory, TuneRecord
from cllm.tune.space import KV_TYPES, THREADS, TUNABLE, Dimension, GpuUse, Value, with_settings
from cllm.tune.trial import Measurement, Plan, TrialProcess, mix_seconds

MIN_GAIN = 0.03  # a change must win by this much, or by the noise if that is more
PERPLEXITY_TOKENS = 1200
MIN_PERPLEXITY_TOKENS = 256
BUSY_CORES = 0.5  # other programs that use so much of the machine falsify the result
GIVE_UP = 2.5  # an alternative that takes so many times as long is abandoned
MIN_LIMIT_S = 3.0
FIRST_LIMIT_S = 120.0
TRIAL = (sys.executable, "-m", "cllm.tune.trial")

Ask = Callable[[EngineConfig, Plan, float], Measurement]
Progress = Callable[[float, str], None]


class Machine(NamedTuple):
    """The machine as the search sees it."""

    cores: int
    others: float | None  # cores that other programs use as it begins; None: unknown
    longest: int  # tokens that a request may have here
    gpu: GpuUse = "none"
    fits: Callable[[EngineConfig], bool] = lambda config: True  # into the memory of the GPUs

    @property
    def busy(self) -> bool:
        return self.others is not None and self.others >= BUSY_CORES


class TuneFailed(SetupError):
    """The present settings cannot be measured; nothing is known and nothing is changed."""

    code = "tune_failed"


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
        self._kv_types = kv_types
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
        self._perplexity_tokens = 0
        self._plan = space.first_look(config.parallel)
        wanted = (*space.choose_dimensions(machine.gpu), *([KV_TYPES] if kv_types else []))
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
        others = max(median(self._others or [0.0]), self._machine.others or 0.0)
        plan = self._plans["all"]
        return TuneRecord(
            fingerprint=dict(fingerprint),
            settings=self._settings,
            options=tuple(self._options),
            seconds=self._seconds,
            speedup=self._speedup,
            noise=median(self._differences or [0.0]),
            left_out=tuple(self._left_out),
            requests=plan.requests,
            short=plan.short,
            long=plan.long,
            provisional=f"other programs used {others:.1f} cores meanwhile" if others >= BUSY_CORES else "",
            kv_types=self._kv_types,
            perplexity_tokens=self._perplexity_tokens,
            took_s=self._clock() - self._started,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _calibrate(self) -> None:
        """Look how fast it is, and plan so that all alternatives fit into the time."""
        parallel, longest = self._config.parallel, self._machine.longest
        look = self._measure(self._config, self._plan, FIRST_LIMIT_S)
        if look.problem:
            raise TuneFailed(f"the present settings cannot be measured: {look.problem}")
        self._load_s, spent_s = look.load_s, look.took_s
        if look.took_s < 0.5 and longest > 2 * space.SECOND_LOOK:
            second = self._measure(self._config, space.first_look(parallel, space.SECOND_LOOK), FIRST_LIMIT_S)
            spent_s += second.took_s
            look = look if second.problem else second
        self._look = look.seconds
        self._deadline = self._clock() + self._budget_s - spent_s
        alternatives = dict.fromkeys(space.PARTS, 0)
        for item in self._dimensions:
            if not item.quality:
                alternatives[item.part] += len(item.alternatives(self._config, self._machine.cores))
        self._plans = space.make_plans(
            *(self._look, parallel, alternatives),
            longest=longest,
            budget_s=self._budget_s - spent_s,
            gpu=self._machine.gpu,
        )
        self._plan = self._plans["all"]
        if parallel > space.MAX_REQUESTS:
            self._left_out.append(f"more than {space.MAX_REQUESTS} of the {parallel} requests")

    def _measure(self, config: EngineConfig, plan: Plan, limit_s: float) -> Measurement:
        """Measure with a fixed number of threads: following the neighbours would not be repeatable."""
        cores, others = self._machine.cores, self._machine.others or 0.0
        threads = space.thread_count(config, cores)
        if self._machine.busy and not config.threads:
            threads = max(1, min(threads, cores - int(others + 1 - BUSY_CORES)))
        measured = self._ask(replace(config, threads=threads), plan, limit_s)
        if measured.others is not None:
            self._others.append(measured.others)
        return measured

    def _measure_baseline(self) -> None:
        measured = self._measure(self._config, self._plan, self._limit_s() + 2 * self._load_s)
        if measured.problem:
            return  # it was measured before; the older one has to do
        if self._baseline is not None:
            self._differences.append(abs(self._compare(measured, self._baseline)[0] - 1))
        self._set_baseline(measured)

    def _set_baseline(self, measured: Measurement) -> None:
        self._baseline = measured
        self._seconds |= measured.seconds

    def _compare(self, measured: Measurement, *baselines: Measurement) -> tuple[float, dict[str, float]]:
        """The ratio of the mix, and of each case, to the mean of the baselines.

        Cases of the mix that were not measured count on both sides with their time so far.
        """
        mixes = [mix_seconds({**self._seconds, **one.seconds}) for one in (measured, *baselines)]
        cases = {
            case: seconds / mean(baseline.seconds[case] for baseline in baselines)
            for case, seconds in measured.seconds.items()
        }
        return mixes[0] / mean(mixes[1:]), cases

    def _limit_s(self) -> float:
        if self._baseline is None:
            return FIRST_LIMIT_S
        return max(MIN_LIMIT_S, GIVE_UP * (self._baseline.took_s + space.prefix_s(self._plan, self._look)))

    def _try_dimension(self, dimension: Dimension) -> None:
        """Measure each alternative; the best one becomes the present setting if it wins twice."""
        alternatives = dimension.alternatives(self._config, self._machine.cores)
        if alternatives and self._plans[dimension.part] is not self._plan:
            self._plan, self._baseline = self._plans[dimension.part], None
            self._measure_baseline()
        tried: list[Option] = []
        for settings in alternatives:
            config = with_settings(self._config, settings)
            label = dimension.label(config, self._machine.cores)
            reason = self._reason_to_skip(dimension, config)
            if reason is not None:
                self._left_out.append(f"{dimension.name} {label}{reason}")
                continue
            self._progress(self._fraction, f"{dimension.name} {label}")
            option = Option(dimension=dimension.name, label=label, settings=dict(settings))
            tried.append(self._try(option, dimension)[0])
        if dimension.quality and tried:
            tried = self._judge_quality(tried)
        if tried:
            self._choose(tried, dimension)

    def _reason_to_skip(self, dimension: Dimension, config: EngineConfig) -> str | None:
        """Why an alternative is left out: empty for lack of time; None: it is measured."""
        if self._baseline is None:
            return ""  # there is nothing to compare with
        needed = 2 * self._baseline.took_s + (2 * self._load_s if dimension.reloads else 0.0)
        if self._clock() + needed > self._deadline:
            return ""
        if not self._machine.fits(config):
            return " (not enough memory on the GPU)"
        # A prompt that is not longer than the smaller chunk is computed in one by both.
        chunk = min(config.batch_tokens, self._config.batch_tokens)
        if dimension.part == "prompt" and self._plan.prompt <= chunk:
            return " (no time for a prompt that long)"
        return None

    def _try(self, option: Option, dimension: Dimension) -> tuple[Option, Measurement]:
        """Measure it between the last measurement of the present settings and a new one."""
        limit_s = self._limit_s() + (3 * self._load_s if dimension.reloads else 0.0)
        measured = self._measure(with_settings(self._config, option.settings), self._plan, limit_s)
        before = self._baseline
        assert before is not None
        if measured.problem:
            slower = f": over {measured.took_s / before.took_s:.1f} × as long" if measured.timed_out else ""
            return replace(option, ratio=None, cases={}, problem=f"{measured.problem}{slower}"), measured
        self._measure_baseline()
        ratio, cases = self._compare(measured, before, self._baseline or before)
        return replace(option, ratio=ratio, cases=cases), measured

    def _choose(self, tried: list[Option], dimension: Dimension) -> None:
        """Take over the fastest alternative if it wins twice, by more than the noise."""
        # The largest difference of a setting from itself, but for one hiccup among several.
        noise = sorted(self._differences, reverse=True)[1 if len(self._differences) > 3 else 0 :][:1]
        max_ratio = 1 - max(MIN_GAIN, *noise)
        chosen = present = Option(
            dimension=dimension.name,
            label=dimension.label(self._config, self._machine.cores),
            ratio=1.0,
            cases=dict.fromkeys(next((item.cases for item in tried if item.cases), {}), 1.0),
        )
        allowed = [item for item in tried if item.ratio and (item.harmless or not dimension.quality)]
        best = min(allowed, key=lambda item: item.ratio or 0.0, default=present)
        if best.ratio is not None and best.ratio <= max_ratio:
            again, measured = self._try(best, dimension)
            if again.ratio is not None:
                won = again.ratio <= max_ratio
                cases = {case: mean((value, again.cases[case])) for case, value in best.cases.items()}
                again = replace(again, ratio=mean((best.ratio, again.ratio)), cases=cases)
                if won:
                    chosen = again
                    self._set_baseline(measured)  # the present settings from now on
            tried[tried.index(best)] = again
        assert chosen.ratio is not None
        self._options += [option.relative_to(chosen) for option in (present, *tried)]
        self._config = with_settings(self._config, chosen.settings)
        self._settings |= chosen.settings
        self._speedup /= chosen.ratio

    def _judge_quality(self, tried: Sequence[Option]) -> list[Option]:
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
                config = with_settings(self._config, item.settings)
                found = self._measure(config, plan, FIRST_LIMIT_S).perplexity
                change = None if found is None else found / reference - 1
            judged.append(replace(item, perplexity_change=change))
        return judged


class Tuning:
    """The tunable part of a configuration, and its record if there is one.

    `asked` is the configuration as it was given, `ready` the same after the checks and the probe, `given` the
    fields that were set explicitly: those stay. Raises SetupError.
    """

    def __init__(
        self,
        asked: EngineConfig,
        ready: EngineConfig,
        given: frozenset[str],
        trial: Sequence[str] = TRIAL,
        devices: Sequence[Device] | None = None,
    ) -> None:
        """`devices` replaces the GPUs that are here."""
        self._header = header = GgufHeader(Path(ready.model))
        if devices is None:
            devices = list_devices() if asked_layers(ready) else ()
        self._devices = devices
        fit = MemoryFit(header, ready, devices)
        share, self._placement = fit.share, fit.placement
        # A setting that the probe had to change is not tried again.
        held = given | {name for name in TUNABLE if getattr(asked, name) != getattr(ready, name)}
        if ready.max_request_tokens > share:
            held |= {"unified_kv"}  # such a request fits into one of the layouts only
        self.config = ready
        self.fixed = space.fixed_settings(ready, held)
        # The context as it was asked for: next time another size may fit into the memory.
        self.fingerprint = tune_fingerprint(
            *(replace(ready, ctx_size=asked.ctx_size), header, self.fixed), placement=self._placement
        )
        self.memory = TuneMemory(cache_directory() / "tune")
        self.record = self.memory.find(self.fingerprint)
        self.generates = f"{header.architecture}.pooling_type" not in header.metadata  # no embedding model
        self._longest = min(share, header.context_train)
        self._trial = trial

    @property
    def tuned(self) -> EngineConfig:
        """The configuration with the tuned settings, if there is a record; fixed settings stay."""
        found = self.record.settings if self.record is not None else {}
        return with_settings(self.config, {**found, **self.fixed})

    def is_due(self, others: float | None) -> bool:
        """True without a record, or with a provisional one while the machine is quiet."""
        if self.record is None:
            return self.generates
        return bool(self.record.provisional) and not self._machine(others).busy

    def measure(
        self, others: float | None, *, budget_s: float, kv_types: bool = False, progress: Progress
    ) -> TuneRecord:
        """Search, and save the record. Raises TuneFailed; OSError where it cannot be written."""
        with TrialProcess(self._trial) as trial:
            search = Search(
                *(self.config, self.fixed, self._machine(others), trial.ask),
                budget_s=budget_s,
                kv_types=kv_types,
                progress=progress,
            )
            self.record = search.run(self.fingerprint)
        self.memory.save(self.record)
        return self.record

    def _machine(self, others: float | None) -> Machine:
        placement = self._placement
        gpu: GpuUse = "none"
        if placement.gpu_layers:
            gpu = "all" if placement.complete else "some"
        return Machine(default_threads(), others, self._longest, gpu, self._fits)

    def _fits(self, config: EngineConfig) -> bool:
        """Whether the GPUs have the memory that a setting takes; on a CPU none takes notably more."""
        fit = MemoryFit(self._header, config, self._devices)
        return not fit.on_gpu or fit.fits


def with_remembered(asked: EngineConfig, ready: EngineConfig, given: frozenset[str]) -> EngineConfig:
    """`ready` with the settings of an earlier tuning; nothing is measured. Raises SetupError."""
    return Tuning(asked, ready, given).tuned if asked.tune else ready
