"""Old names of settings that still work, each with its new name; using one logs one line."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

FLAGS = {"park_mb": "swap_space_mb"}  # settings: --flag, CLLM_VARIABLE, TOML key, keyword of LLM

_warned: set[str] = set()


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under their present names; a setting given by both names keeps the present one's value."""
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
