"""Search space: which settings are varied, the most important first, and how much is measured for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import msgspec

from cllm.config import EngineConfig
from cllm.tune.trial import BATCH1_REPEATS, Plan

Value = int | bool | str
Settings = Mapping[str, Value]
Part = Literal["all", "prompt", "short"]  # what is measured: all cases, a long prompt, short contexts
GpuUse = Literal["none", "some", "all"]  # how many of the layers lie on GPUs
PARTS: tuple[Part, ...] = get_args(Part)
_WIDE_TYPES = ("f32", "f16", "bf16")  # values in other types are read by the flash kernels only


class Dimension(NamedTuple):
    """Fields that are varied together while the rest stays, and their values."""

    name: str
    fields: tuple[str, ...]
    values: tuple[tuple[Value, ...], ...] = ((False,), (True,))
    names: tuple[str, str] = ("off", "on")  # of booleans
    part: Part = "all"
    reloads: bool = False  # a change needs the model loaded again
    quality: bool = False  # it changes the output, not only the speed

    def alternatives(self, config: EngineConfig, cores: int) -> list[Settings]:
        """The possible settings other than the present."""
        if self is THREADS:
            counts = {cores, cores - 1, cores // 2, 1} - {0, thread_count(config, cores)}
            return [{"max_threads": count} for count in sorted(counts, reverse=True)]
        if "unified_kv" in self.fields and config.parallel == 1:
            return []
        every = [dict(zip(self.fields, values, strict=True)) for values in self.values]
        changed = [(settings, with_settings(config, settings)) for settings in every]
        return [
            settings
            for settings, new in changed
            if new != config and (new.flash_attention or new.cache_type_v in _WIDE_TYPES)
        ]

    def label(self, config: EngineConfig, cores: int) -> str:
        """The value in `config`, for the report."""
        if self is THREADS:
            return str(thread_count(config, cores))
        values = [getattr(config, name) for name in self.fields]
        return "/".join(self.names[value] if isinstance(value, bool) else str(value) for value in values)


THREADS = Dimension("threads", ("threads", "max_threads"))
DIMENSIONS = (
    THREADS,
    Dimension("flash attention", ("flash_attention",)),
    Dimension("KV layout", ("unified_kv",), names=("split", "unified")),
    Dimension("repacking", ("extra_buffers",), reloads=True),
    Dimension("batch tokens", ("batch_tokens",), ((256,), (512,), (1024,)), part="prompt"),
    Dimension("poll", ("poll",), ((0,), (50,), (100,)), part="short"),
)
# With layers on a GPU. What the CPU would do there is left out where none of the layers is left to it.
GPU_BATCH = Dimension("batch tokens", ("batch_tokens",), ((512,), (1024,), (2048,)), part="prompt")
CPU_ONLY = frozenset({"threads", "repacking", "poll"})
KV_TYPES = Dimension(
    "K/V types",
    ("cache_type_k", "cache_type_v"),
    # None that takes more memory than f16, with which the fit was checked.
    (("bf16", "f16"), ("bf16", "bf16"), ("q8_0", "f16"), ("q8_0", "q8_0")),
    quality=True,
)


def choose_dimensions(gpu: GpuUse) -> tuple[Dimension, ...]:
    """The dimensions that make a difference, with so much of the model on GPUs."""
    if gpu == "none":
        return DIMENSIONS
    found = (GPU_BATCH if item.name == GPU_BATCH.name else item for item in DIMENSIONS)
    return tuple(item for item in found if gpu == "some" or item.name not in CPU_ONLY)


TUNABLE = frozenset(field for dimension in (*DIMENSIONS, KV_TYPES) for field in dimension.fields)


def thread_count(config: EngineConfig, cores: int) -> int:
    """How many threads compute on a quiet machine."""
    return config.threads or min(config.max_threads or cores, cores)


def fixed_settings(config: EngineConfig, given: frozenset[str]) -> dict[str, Value]:
    """The tunable settings that were given, so are not varied. 0 threads means "choose"."""
    values = {name: getattr(config, name) for name in sorted(given & TUNABLE)}
    return {name: value for name, value in values.items() if value or name not in THREADS.fields}


def with_settings(config: EngineConfig, settings: Settings) -> EngineConfig:
    """The configuration with these in place. Raises msgspec.ValidationError where one is out of bounds."""
    return msgspec.convert({**msgspec.to_builtins(config), **settings}, EngineConfig)


LONG = 800
PROMPTS = (1024, 512, 256)
GPU_PROMPTS = (4096, 2048, *PROMPTS)  # of the largest chunk or more
GPU_REPEATS = 3  # of a prompt, which takes milliseconds there
PROMPT_SHARE = 0.07  # of the time, for one prompt; a chunk size takes three measurements or more
PREFIXES = 3  # of long contexts are computed in all: flash attention and layout change their state
OVERHEAD = 1.15  # contexts that are made, states that are copied, pauses between steps
MAX_REQUESTS = 32
FIRST_LOOK = 32
SECOND_LOOK = 256
# From the best to the least useful: (long context, tokens of it that are timed as a prompt, steps of each
# case). Steps are cut before context: long contexts show which attention is the fastest. The last one, for
# big models, has only prefill and decoding after short contexts.
SIZES = (
    *((LONG, 256, 7), (LONG, 128, 5), (LONG, 128, 4), (LONG, 128, 3), (640, 128, 3), (512, 128, 3)),
    *((512, 64, 2), (384, 64, 2), (256, 64, 2), (128, 64, 2), (64, 32, 2), (0, 32, 1)),
)
# On a GPU a step takes some milliseconds, so there is time for many of them, after contexts that are long.
GPU_SIZES = ((4000, 1024, 60), (4000, 512, 40), (2000, 512, 30), (LONG, 256, 20), (LONG, 256, 12), *SIZES)


def first_look(parallel: int, tokens: int = FIRST_LOOK) -> Plan:
    """A small measurement that shows how fast this model is here."""
    return Plan(requests=min(parallel, MAX_REQUESTS), short=tokens, long=0, steps=2)


def make_plans(
    look: Mapping[str, float],
    parallel: int,
    alternatives: Mapping[Part, int],
    *,
    longest: int,
    budget_s: float,
    gpu: GpuUse = "none",
) -> dict[Part, Plan]:
    """The largest plan of each part, so that all alternatives fit into the time, by what a first look took.

    No context is longer than `longest` tokens.
    """
    repeats = 1 if gpu == "none" else GPU_REPEATS
    for tokens in PROMPTS if gpu == "none" else GPU_PROMPTS:
        prompt = Plan(requests=1, short=0, steps=0, prompt=tokens, long=tokens, repeats=repeats)
        prompt = _cut(prompt, longest)
        if prompt.long == tokens and expected_s(prompt, look) <= PROMPT_SHARE * budget_s:
            break
    if alternatives["prompt"]:
        budget_s -= 3 * expected_s(prompt, look)
    # The present settings are measured between any two alternatives, and a winner twice.
    runs = 4 + 2 * alternatives["all"] + alternatives["short"]
    for long, timed, steps in SIZES if gpu == "none" else GPU_SIZES:
        requests = min(parallel, MAX_REQUESTS)
        plan = Plan(requests=requests, long=long, prompt=timed, steps=steps, repeats=repeats)
        plan = _cut(plan, longest)
        if PREFIXES * prefix_s(plan, look) + runs * expected_s(plan, look) <= budget_s:
            break
    return {"all": plan, "prompt": prompt, "short": msgspec.structs.replace(plan, long=0, prompt=0)}


def _cut(plan: Plan, longest: int) -> Plan:
    limit = longest - plan.decode_cells
    short, long, prompt = (min(tokens, limit) for tokens in (plan.short, plan.long, plan.prompt))
    return msgspec.structs.replace(plan, short=short, long=long, prompt=prompt)


def prefix_s(plan: Plan, look: Mapping[str, float]) -> float:
    """Estimated time to compute the prefix of a long context, for a setting that cannot restore it."""
    return max(0, plan.long - plan.prompt) * look["prefill"]


def expected_s(plan: Plan, look: Mapping[str, float]) -> float:
    """Estimated time of a plan. A full batch after long contexts costs some three of short ones."""
    one, full = look["one_short"], look.get("all_short", 0.0)
    steps = BATCH1_REPEATS * one + full
    if plan.long:
        steps = 2 * BATCH1_REPEATS * one + full * (2 + 3 * plan.long / LONG)
    tokens = plan.short + plan.repeats * min(plan.prompt, plan.long)
    return OVERHEAD * (tokens * look["prefill"] + ((plan.steps + 1) * steps if plan.steps else 0.0))
