"""What can be varied, in the order in which it is: what matters most comes first, in case time runs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

import msgspec

from cllm.config import EngineConfig
from cllm.tune.trial import ALONE, Plan

Settings = Mapping[str, int | bool | str]
BATCH_TOKENS = (256, 512, 1024)
POLL = (0, 50, 100)
# None that takes more memory than f16: whether it fits has been checked with that.
CACHE_TYPES = (("bf16", "f16"), ("bf16", "bf16"), ("q8_0", "f16"), ("q8_0", "q8_0"))


class Part(Enum):
    """How much of the mix is measured to judge a dimension."""

    ALL = "all"
    PROMPT = "a long prompt alone"
    SHORT = "generating after short contexts"


class Dimension(NamedTuple):
    """Something that is varied while the rest stays. `alternatives` are other settings than the present."""

    name: str
    fields: tuple[str, ...]
    alternatives: Callable[[EngineConfig, int], list[Settings]]
    label: Callable[[EngineConfig, int], str]
    part: Part = Part.ALL  # of the mix: what it can change
    reloads: bool = False  # the model must be loaded anew to try it
    quality: bool = False  # the numbers change, not the speed alone


def thread_count(config: EngineConfig, cores: int) -> int:
    """How many threads compute on a quiet machine."""
    return config.threads or min(config.max_threads or cores, cores)


def _threads(config: EngineConfig, cores: int) -> list[Settings]:
    counts = {cores, cores - 1, cores // 2, 1} - {0, thread_count(config, cores)}
    return [{"max_threads": count} for count in sorted(counts, reverse=True)]


def _flash(config: EngineConfig, _: int) -> list[Settings]:
    if config.cache_type_v not in ("f32", "f16", "bf16"):
        return []  # such values are read by the flash kernels alone
    return [{"flash_attention": not config.flash_attention}]


def _layout(config: EngineConfig, _: int) -> list[Settings]:
    return [] if config.parallel == 1 else [{"unified_kv": not config.unified_kv}]


def _batch(config: EngineConfig, _: int) -> list[Settings]:
    return [{"batch_tokens": count} for count in BATCH_TOKENS if count != config.batch_tokens]


def _repack(config: EngineConfig, _: int) -> list[Settings]:
    return [{"extra_buffers": not config.extra_buffers}]


def _poll(config: EngineConfig, _: int) -> list[Settings]:
    return [{"poll": value} for value in POLL if value != config.poll]


def _cache_types(config: EngineConfig, _: int) -> list[Settings]:
    return [
        {"cache_type_k": keys, "cache_type_v": values}
        for keys, values in CACHE_TYPES
        if (keys, values) != (config.cache_type_k, config.cache_type_v)
        and (config.flash_attention or values in ("f32", "f16", "bf16"))
    ]


DIMENSIONS = (
    Dimension(
        "threads",
        ("threads", "max_threads"),
        _threads,
        lambda config, cores: str(thread_count(config, cores)),
    ),
    Dimension(
        "flash attention",
        ("flash_attention",),
        _flash,
        lambda config, _: "on" if config.flash_attention else "off",
    ),
    Dimension(
        "KV layout", ("unified_kv",), _layout, lambda config, _: "unified" if config.unified_kv else "split"
    ),
    Dimension(
        "repacking",
        ("extra_buffers",),
        _repack,
        lambda config, _: "on" if config.extra_buffers else "off",
        reloads=True,
    ),
    Dimension(
        "batch tokens",
        ("batch_tokens",),
        _batch,
        lambda config, _: str(config.batch_tokens),
        part=Part.PROMPT,
    ),
    Dimension("poll", ("poll",), _poll, lambda config, _: str(config.poll), part=Part.SHORT),
)
KV_TYPES = Dimension(
    "K/V types",
    ("cache_type_k", "cache_type_v"),
    _cache_types,
    lambda config, _: f"{config.cache_type_k}/{config.cache_type_v}",
    quality=True,
)
TUNABLE = frozenset(field for dimension in (*DIMENSIONS, KV_TYPES) for field in dimension.fields)


def fixed_settings(config: EngineConfig, given: frozenset[str]) -> dict[str, int | bool | str]:
    """What of the tunable settings was given, so is not varied. A number of threads of 0 leaves it to us."""
    values = {name: getattr(config, name) for name in sorted(given & TUNABLE)}
    return {name: value for name, value in values.items() if value or name not in ("threads", "max_threads")}


def with_settings(config: EngineConfig, settings: Settings) -> EngineConfig:
    """The configuration with these in place. Raises msgspec.ValidationError where one is out of bounds."""
    return msgspec.convert({**msgspec.to_builtins(config), **settings}, EngineConfig)


LONG = 800
PROMPTS = (1024, 512, 256)
PROMPT_SHARE = 0.07  # of the time, for one prompt; a chunk's size takes three measurements or more
BEGINNINGS = 3  # of long contexts are computed in all: flash attention and layout change how they are kept
OVERHEAD = 1.15  # contexts that are made, states that are copied, pauses between steps
MAX_STREAMS = 32
FIRST_LOOK = 32
SECOND_LOOK = 256
# From what is wanted to the least that tells anything: (long context, tokens of it that are timed as a
# prompt, steps of each case). Steps go before context: which attention is the fastest shows in long ones.
# Without a long one there is still prefill and generation after short ones, a big model's daily bread.
SIZES = (
    *((LONG, 256, 7), (LONG, 128, 5), (LONG, 128, 4), (LONG, 128, 3), (640, 128, 3), (512, 128, 3)),
    *((512, 64, 2), (384, 64, 2), (256, 64, 2), (128, 64, 2), (64, 32, 2), (0, 32, 1)),
)


def first_look(parallel: int, tokens: int = FIRST_LOOK) -> Plan:
    """A small measurement that says how fast this model is here."""
    return Plan(streams=min(parallel, MAX_STREAMS), short=tokens, long=0, steps=2)


def make_plans(
    look: Mapping[str, float],
    parallel: int,
    alternatives: Mapping[Part, int],
    *,
    longest: int,
    budget_s: float,
) -> dict[Part, Plan]:
    """What is measured for each part of the mix, so that so many alternatives fit into the time."""
    prompt = prompt_plan(look, longest=longest, budget_s=budget_s)
    # The present settings are measured between any two alternatives, and a winner twice.
    plan = fitted_plan(
        look,
        parallel,
        longest=longest,
        budget_s=budget_s - (3 * expected_s(prompt, look) if alternatives[Part.PROMPT] else 0.0),
        runs=4 + 2 * alternatives[Part.ALL] + alternatives[Part.SHORT],
    )
    short = msgspec.structs.replace(plan, long=0, prompt=0)
    return {Part.ALL: plan, Part.PROMPT: prompt, Part.SHORT: short}


def fitted_plan(
    look: Mapping[str, float], parallel: int, *, longest: int, budget_s: float, runs: int
) -> Plan:
    """The largest plan of which `runs` take about `budget_s`, by what a first look took.

    No context is longer than `longest` tokens.
    """
    plan = first_look(parallel)
    for long, prompt, steps in SIZES:
        wanted = Plan(streams=plan.streams, long=long, prompt=prompt, steps=steps)
        most = longest - wanted.room
        plan = msgspec.structs.replace(wanted, short=min(wanted.short, most), long=min(long, most))
        if BEGINNINGS * beginning_s(plan, look) + runs * expected_s(plan, look) <= budget_s:
            break
    return plan


def prompt_plan(look: Mapping[str, float], *, longest: int, budget_s: float) -> Plan:
    """A long prompt and nothing else: what the size of its chunks can be judged by."""
    for prompt in PROMPTS:
        plan = Plan(streams=1, short=0, steps=0, prompt=prompt, long=prompt)
        if prompt + plan.room <= longest and expected_s(plan, look) <= PROMPT_SHARE * budget_s:
            break
    most = longest - plan.room
    return msgspec.structs.replace(plan, prompt=min(plan.prompt, most), long=min(plan.long, most))


def beginning_s(plan: Plan, look: Mapping[str, float]) -> float:
    """About what a setting takes longer whose beginning of a long context is not there yet."""
    return max(0, plan.long - plan.prompt) * look["prefill"]


def expected_s(plan: Plan, look: Mapping[str, float]) -> float:
    """About what a setting will take. A step of everybody after long contexts costs some three short ones."""
    one, everybody = look["one_short"], look.get("all_short", 0.0)
    steps = 2 * ALONE * one + everybody * (2 + 3 * plan.long / LONG) if plan.long else ALONE * one + everybody
    tokens = plan.short + min(plan.prompt, plan.long)
    return OVERHEAD * (tokens * look["prefill"] + ((plan.steps + 1) * steps if plan.steps else 0.0))
