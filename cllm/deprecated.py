"""Deprecated names that keep working: old name to new name. Using an old setting logs one line."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

METRICS: Mapping[str, str] = {
    "cllm_parks": "cllm_preemptions",
    "cllm_resumes": "cllm_swap_ins",
    "cllm_parked_ram_bytes": "cllm_swapped_ram_bytes",
    "cllm_kv_move_seconds": "cllm_kv_transfer_seconds",
}
FLAGS: Mapping[str, str] = {  # settings: --flag, CLLM_VARIABLE, key of the TOML file, keyword of LLM
    "park_mb": "swap_space_mb",
}
_warned: set[str] = set()


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under their present names; of one given by both names, the present name's value counts."""
    found = {name: value for name, value in settings.items() if name not in FLAGS}
    for old in settings.keys() & FLAGS.keys():
        warn(old)
        found.setdefault(FLAGS[old], settings[old])
    return found


def warn(old: str) -> None:
    """Log the deprecation of a setting, once a process."""
    if old not in _warned:
        _warned.add(old)
        log.warning("the setting %s is deprecated: it is called %s now", old, FLAGS[old])
