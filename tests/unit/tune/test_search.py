"""Choosing from made-up measurements: what is clearly faster is kept, noise is not, a crash is a result."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from rich.console import Console

from cllm.cli.tune import bars, figures, headline, options_table, page
from cllm.config import EngineConfig
from cllm.tune.record import Option, TuneRecord
from cllm.tune.search import GIVE_UP, MIN_LIMIT_S, Machine, Search, TuneFailed
from cllm.tune.space import LONG, Part, expected_s, first_look, make_plans
from cllm.tune.trial import MIX, Measurement, Plan, mix_seconds

CONFIG = EngineConfig(model="m.gguf", parallel=8)
QUIET = Machine(cores=2, others=0.0, longest=4096)
Cost = Callable[[EngineConfig], dict[str, float]]


def unit(_: EngineConfig) -> dict[str, float]:
    return {case: 0.001 if case == "prefill" else 0.01 for case in MIX}


def measured_cases(plan: Plan) -> set[str]:
    crowd = plan.requests > 1
    cases = {"prefill"} if plan.prompt else set()
    if plan.steps:
        cases |= {"one_short", "all_short"} if crowd else {"one_short"}
    if plan.steps and plan.long:
        cases |= {"one_long", "ragged", "all_long"} if crowd else {"one_long"}
    return cases


class Pretend:
    """A machine whose settings cost its factors say, by case. Time passes when it measures."""

    def __init__(self, **factors: Callable[[EngineConfig], float]) -> None:
        self.factors = factors
        self.now = 0.0
        self.noise = 0.0
        self.others: float | None = 0.0
        self.load_s = 0.0
        self.slowness = 1.0
        self.dies: Callable[[EngineConfig], bool] = lambda config: False
        self.perplexities: dict[str, float] = {}
        self.asked: list[tuple[EngineConfig, Plan, float]] = []
        self._random = random.Random(7)

    def ask(self, config: EngineConfig, plan: Plan, limit_s: float) -> Measurement:
        self.asked.append((config, plan, limit_s))
        if self.dies(config):
            self.now += 0.1
            return Measurement(problem="it was ended by SIGILL", took_s=0.1)
        if plan.perplexity_tokens:
            return Measurement(
                perplexity=self.perplexities.get(f"{config.cache_type_k}/{config.cache_type_v}", 20.0)
            )
        shake = 1 + self._random.uniform(-self.noise, self.noise)
        seconds = {
            name: value
            * (self.factors[name](config) if name in self.factors else 1.0)
            * shake
            * self.slowness
            for name, value in unit(config).items()
            if name in measured_cases(plan)
        }
        took = expected_s(plan, {name: value * self.slowness for name, value in unit(config).items()})
        self.now += took
        return Measurement(seconds=seconds, took_s=took, load_s=self.load_s, others=self.others)

    def search(self, config: EngineConfig = CONFIG, machine: Machine = QUIET, **options: Any) -> TuneRecord:
        fixed = options.pop("fixed", {})
        options.setdefault("budget_s", 100.0)
        search = Search(config, fixed, machine, self.ask, clock=lambda: self.now, **options)
        return search.run({"cpu": "pretended"})


def everywhere(factor: Callable[[EngineConfig], float]) -> Pretend:
    return Pretend(**dict.fromkeys(MIX, factor))


def option(record: TuneRecord, dimension: str, label: str) -> Option:
    (found,) = [item for item in record.options if (item.dimension, item.label) == (dimension, label)]
    return found


def test_nothing_is_changed_where_nothing_is_faster() -> None:
    record = Pretend().search()
    assert record.settings == {} and record.speedup == 1.0 and not record.provisional
    assert {item.dimension for item in record.options} == {
        *("threads", "flash attention", "KV layout", "batch tokens", "repacking", "poll")
    }
    assert all(item.ratio == pytest.approx(1.0) for item in record.options)
    assert "as they are" in headline(record)


def test_what_is_faster_is_chosen_and_the_default_is_shown_as_what_it_would_have_cost() -> None:
    machine = everywhere(lambda config: 1.0 if config.flash_attention else 0.8)
    record = machine.search()
    assert record.settings == {"flash_attention": False}
    assert record.speedup == pytest.approx(1.25)
    on, off = option(record, "flash attention", "on"), option(record, "flash attention", "off")
    assert off.chosen and off.ratio == 1.0
    assert not on.chosen and on.ratio == pytest.approx(1.25) and on.cases["ragged"] == pytest.approx(1.25)
    assert machine.asked[-1][0].flash_attention is False, "what follows is measured with what was chosen"


def test_one_dimension_after_the_other() -> None:
    """Unified is faster only without flash attention: found, because that was chosen before."""

    def factor(config: EngineConfig) -> float:
        return {(True, False): 1.0, (True, True): 1.2, (False, False): 0.9, (False, True): 0.7}[
            config.flash_attention, config.unified_kv
        ]

    assert everywhere(factor).search().settings == {"flash_attention": False, "unified_kv": True}


def test_the_mix_decides_not_a_single_case() -> None:
    """Unified wins where one is alone, and loses more than that where everybody generates."""
    machine = Pretend(
        one_short=lambda config: 0.5 if config.unified_kv else 1.0,
        all_long=lambda config: 3.0 if config.unified_kv else 1.0,
    )
    record = machine.search()
    assert "unified_kv" not in record.settings
    unified = option(record, "KV layout", "unified")
    assert unified.cases["one_short"] == pytest.approx(0.5) and unified.ratio is not None
    assert unified.ratio > 1


@pytest.mark.parametrize(("gain", "chosen"), [(0.02, False), (0.05, True)])
def test_a_gain_must_be_worth_it(gain: float, chosen: bool) -> None:
    record = everywhere(lambda config: 1.0 if config.flash_attention else 1.0 - gain).search()
    assert ("flash_attention" in record.settings) == chosen


@pytest.mark.parametrize(("gain", "chosen"), [(0.05, False), (0.2, True)])
def test_a_gain_in_a_part_counts_for_as_much_as_the_part_has_in_the_mix(gain: float, chosen: bool) -> None:
    machine = everywhere(lambda config: 1.0 if config.poll == 50 else 1.0 - gain)
    record = machine.search()
    assert ("poll" in record.settings) == chosen
    (other,) = [item for item in record.options if (item.dimension, item.label) == ("poll", "0")]
    now, short = unit(CONFIG), ("one_short", "all_short")
    part = mix_seconds({case: now[case] for case in short}) / mix_seconds(now)
    if not chosen:
        assert other.ratio == pytest.approx(1 - gain * part) and set(other.cases) == set(short)
    else:
        assert record.speedup == pytest.approx(1 / (1 - gain * part))
    assert set(record.seconds) == set(now), "of every case, whatever was measured last"


def test_chunks_are_judged_by_prompts_that_are_longer() -> None:
    """256 against 512 tells in a prompt of 512; 1024 needs a longer one, and the time for it."""
    machine = Pretend(prefill=lambda config: {256: 1.2, 512: 1.0, 1024: 0.8}[config.batch_tokens])
    record = machine.search(budget_s=500)
    assert record.settings == {"batch_tokens": 1024}
    record = machine.search(budget_s=11)
    assert record.settings == {} and option(record, "batch tokens", "256").cases.keys() == {"prefill"}
    assert any(text.startswith("batch tokens 1024") for text in record.left_out)


def test_noise_is_not_a_gain() -> None:
    """With 8 % of noise and no difference, hardly anything may be chosen, whatever the draw."""
    wrong = 0
    for seed in range(20):
        machine = Pretend()
        machine.noise = 0.08
        machine._random = random.Random(seed)
        wrong += len(machine.search().settings)
    assert wrong <= 4, "of 160 alternatives"


def test_a_large_gain_is_seen_through_the_noise() -> None:
    for seed in range(10):
        machine = everywhere(lambda config: 1.0 if config.flash_attention else 0.5)
        machine.noise = 0.08
        machine._random = random.Random(seed)
        assert machine.search().settings.get("flash_attention") is False


def test_the_present_settings_are_measured_between_any_two() -> None:
    machine = Pretend()
    machine.search()
    by_cases: dict[frozenset[str], list[bool]] = {}
    for config, plan, _ in machine.asked[2:]:  # after the looks
        present = config == msgspec.structs.replace(CONFIG, threads=2)
        by_cases.setdefault(frozenset(measured_cases(plan)), []).append(present)
    assert len(by_cases) == 3, "everything, prompts alone, short contexts alone"
    for cases, present_ones in by_cases.items():
        assert present_ones[0] and present_ones[-1] and len(present_ones) >= 3
        begin = 1 if "one_long" in cases else 0  # there the noise is measured first
        assert all(left != right for left, right in pairwise(present_ones[begin:]))


def test_a_death_is_a_result_and_the_search_goes_on() -> None:
    machine = everywhere(lambda config: 0.5 if not config.flash_attention or config.poll == 0 else 1.0)
    machine.dies = lambda config: not config.flash_attention
    record = machine.search()
    assert record.settings == {"poll": 0}
    off = option(record, "flash attention", "off")
    assert off.ratio is None and "SIGILL" in off.problem and not off.chosen


def test_settings_that_cannot_be_measured_at_all() -> None:
    machine = Pretend()
    machine.dies = lambda config: True
    with pytest.raises(TuneFailed, match="SIGILL"):
        machine.search()


def test_what_was_given_is_left_out() -> None:
    machine = everywhere(lambda config: 0.5 if not config.flash_attention else 1.0)
    record = machine.search(fixed={"flash_attention": True, "threads": 1})
    assert record.settings == {}
    assert not {"flash attention", "threads"} & {item.dimension for item in record.options}


def test_threads_are_a_limit_that_still_adapts() -> None:
    """One thread is faster: `max_threads`, which follows neighbours, not `threads`, which would not."""
    machine = everywhere(lambda config: 0.7 if config.threads == 1 else 1.0)
    assert machine.search().settings == {"max_threads": 1}
    assert {config.threads for config, _, _ in machine.asked} == {1, 2}, "measured with a fixed number"


def test_one_request_at_a_time_has_no_layout_and_no_crowd() -> None:
    record = Pretend().search(msgspec.structs.replace(CONFIG, parallel=1))
    assert "KV layout" not in {item.dimension for item in record.options}
    assert set(record.seconds) == {"prefill", "one_short", "one_long"}


def test_a_busy_machine_is_reported_and_the_result_is_provisional() -> None:
    machine = everywhere(lambda config: 0.5 if config.threads == 1 else 1.0)
    record = machine.search(machine=Machine(cores=2, others=1.0, longest=4096))
    assert "1.0 cores" in record.provisional and "provisional" in headline(record)
    assert record.settings == {} and any("threads" in text for text in record.left_out)
    assert {config.threads for config, _, _ in machine.asked} == {1}, "as many as the neighbours leave"


def test_a_neighbour_that_comes_later_is_noticed() -> None:
    machine = Pretend()
    machine.others = 0.9
    assert "0.9 cores" in machine.search().provisional
    machine.others = 0.1
    assert not machine.search().provisional


def test_the_time_is_kept_and_what_was_left_out_is_reported() -> None:
    slow, fast = Pretend(), Pretend()
    slow.slowness = 30.0  # a big model
    record = slow.search(budget_s=30)
    assert record.left_out and record.options, "some, not all"
    assert record.took_s < 60
    assert record.long < LONG
    record = fast.search(budget_s=60)
    assert not record.left_out and record.took_s <= 60 and record.long == LONG


def test_a_slow_load_leaves_repacking_out() -> None:
    machine = Pretend()
    machine.load_s = 40.0
    assert "repacking off" in machine.search(budget_s=60).left_out


def test_an_alternative_is_not_waited_for_longer_than_it_is_worth() -> None:
    machine = Pretend()
    machine.search(budget_s=30)
    present = msgspec.structs.replace(CONFIG, threads=2)
    taken = max(limit for config, _, limit in machine.asked if config != present)
    assert taken < 3 * MIN_LIMIT_S + 5


def test_a_long_context_that_must_be_computed_first_is_waited_for() -> None:
    """The present settings find theirs; an alternative that keeps it differently has it to compute."""
    machine = Pretend()
    machine.slowness = 10.0
    machine.search(budget_s=300)
    off = [(plan, limit) for config, plan, limit in machine.asked if not config.flash_attention]
    (plan, limit_s) = off[0]
    usual_s = expected_s(plan, {name: 10 * value for name, value in unit(CONFIG).items()})
    assert plan.long > plan.prompt
    assert limit_s == pytest.approx(GIVE_UP * (usual_s + 0.01 * (plan.long - plan.prompt)))


def test_types_of_keys_and_values_only_when_asked_and_harmless() -> None:
    def factor(config: EngineConfig) -> float:
        return {"f16/f16": 1.0, "q8_0/q8_0": 0.6, "bf16/f16": 0.8}.get(
            f"{config.cache_type_k}/{config.cache_type_v}", 1.1
        )

    machine = everywhere(factor)
    assert machine.search().settings == {}
    machine.perplexities = {"q8_0/q8_0": 20.1, "bf16/f16": 20.01}
    record = machine.search(kv_types=True)
    assert record.settings == {"cache_type_k": "bf16", "cache_type_v": "f16"}, "q8_0 is faster, not harmless"
    chosen = option(record, "K/V types", "bf16/f16")
    assert chosen.perplexity_change == pytest.approx(0.0005)
    assert "+0.050%" in headline(record)
    machine.perplexities = {"q8_0/q8_0": 20.1, "bf16/f16": 20.03}
    assert machine.search(kv_types=True).settings == {}


def test_the_perplexities_are_of_the_same_tokens() -> None:
    machine = everywhere(lambda config: 0.9 if config.cache_type_k != "f16" else 1.0)
    machine.search(kv_types=True)
    assert len({plan.perplexity_tokens for _, plan, _ in machine.asked if plan.perplexity_tokens}) == 1


def test_plans_fit_the_time_and_the_context() -> None:
    look = {"prefill": 0.001, "one_short": 0.006, "all_short": 0.02}

    def plans(longest: int, budget_s: float, parallel: int = 8) -> dict[Part, Plan]:
        alternatives: dict[Part, int] = {"all": 3, "prompt": 0, "short": 0}
        return make_plans(look, parallel, alternatives, longest=longest, budget_s=budget_s)

    plan = plans(4096, 100)["all"]
    assert (plan.long, plan.short, plan.requests) == (LONG, 32, 8)
    assert plans(4096, 5)["all"].long < LONG
    assert plans(4096, 100, parallel=200)["all"].requests == first_look(200).requests == 32
    tight = plans(256, 100)["all"]
    assert tight.long + tight.decode_cells <= 256
    assert plans(4096, 100)["prompt"].prompt == 1024
    assert plans(4096, 15)["prompt"].prompt == 512
    tight = plans(128, 100)["prompt"]
    assert tight.prompt == tight.long == 128 - tight.decode_cells


def test_a_small_model_has_long_contexts_in_the_time_of_a_first_start() -> None:
    """About what two cores take for 135 million weights."""
    look = {"prefill": 0.0012, "one_short": 0.006, "all_short": 0.022}
    plans = make_plans(look, 8, {"all": 4, "prompt": 2, "short": 2}, longest=4096, budget_s=14)
    assert plans["all"].long >= 512 and plans["all"].steps >= 2
    assert plans["prompt"].prompt == 512 and plans["prompt"].steps == 0
    assert plans["short"].long == plans["short"].prompt == 0


def test_the_mix_is_what_it_says() -> None:
    assert mix_seconds({"prefill": 0.001, "one_short": 0.01}) == pytest.approx(2.6)


def test_the_report_shows_every_alternative() -> None:
    machine = everywhere(lambda config: 1.0 if config.flash_attention else 0.8)
    machine.dies = lambda config: config.unified_kv
    record = machine.search()
    table = options_table(record)
    assert table.row_count == len(record.options)
    assert [column.header for column in table.columns][3:] == [
        *("mix", "prefill", "1 short", "1 long", "all short", "ragged", "all long")
    ]
    console = Console(width=100)
    with console.capture() as captured:
        console.print(bars(record))
    picture = captured.get()
    assert "flash attention on " in picture and "1.25" in picture and "█" in picture
    html = page(record)
    for item in record.options:
        assert item.dimension in html and item.label in html
    assert html.count("●") >= 2 and "█" in html and "SIGILL" in html and "http" not in html
    assert "tokens/s" in figures(record) and f"{record.long} tokens (long;" in figures(record)
    assert "no time for long ones" in figures(msgspec.structs.replace(record, long=0))


# With layers on a GPU --------------------------------------------------------------------------------

ON_GPU = QUIET._replace(gpu="all", longest=32768)


class PretendGpu(Pretend):
    """A step takes a millisecond or two, a token of a prompt some microseconds."""

    def __init__(self, **factors: Callable[[EngineConfig], float]) -> None:
        super().__init__(**factors)
        self.slowness = 0.1


def test_what_the_cpu_would_do_is_not_varied_where_gpus_do_it() -> None:
    record = PretendGpu().search(machine=ON_GPU, kv_types=True)
    dimensions = {"flash attention", "KV layout", "batch tokens", "K/V types"}
    assert {item.dimension for item in record.options} == dimensions
    labels = {item.label for item in record.options if item.dimension == "batch tokens"}
    assert labels == {"512", "1024", "2048"}
    some = PretendGpu().search(machine=ON_GPU._replace(gpu="some"))
    assert {item.dimension for item in some.options} >= {"threads", "poll", "batch tokens"}


def test_short_steps_are_repeated_often() -> None:
    machine = PretendGpu()
    record = machine.search(machine=ON_GPU, budget_s=15)
    plans = [plan for _, plan, _ in machine.asked[2:]]  # after the looks
    assert record.took_s <= 15 and not record.left_out
    steps = {plan.steps for plan in plans if plan.steps}
    assert min(steps) >= 12, "the median of so many"
    prompts = [plan for plan in plans if not plan.steps]
    assert prompts and all(plan.repeats > 1 and plan.prompt >= 2048 for plan in prompts)


def test_larger_chunks_on_a_gpu() -> None:
    machine = PretendGpu(prefill=lambda config: {512: 1.0, 1024: 0.7, 2048: 0.5}[config.batch_tokens])
    assert machine.search(machine=ON_GPU).settings == {"batch_tokens": 2048}


def test_what_the_gpu_has_no_memory_for_is_not_tried() -> None:
    machine = PretendGpu()
    tight = ON_GPU._replace(fits=lambda config: config.batch_tokens < 2048 and config.flash_attention)
    record = machine.search(machine=tight)
    assert {"batch tokens 2048 (not enough memory on the GPU)"} <= set(record.left_out)
    assert all(config.batch_tokens < 2048 and config.flash_attention for config, _, _ in machine.asked)
