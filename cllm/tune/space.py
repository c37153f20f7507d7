"""What can be varied, in the order in which it is: what matters most comes first, in case time runs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

import msgspec

from cllm.config import EngineConfig

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
