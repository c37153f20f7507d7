"""How thorough random tests are: profile `unit` for the fast tier, `full` for everything else.

`pytest tests/unit` takes `unit`, any other selection `full`; the variable TEST_PROFILE overrides it. Both try
the same examples each time, so that a tree that passes once passes again; `random` tries twenty times as
many, others each time.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

UNIT_TESTS = Path(__file__).parent / "unit"
settings.register_profile("unit", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("random", max_examples=1000, deadline=None, database=None)


def load_profile(config: pytest.Config) -> None:
    paths = [(config.invocation_params.dir / argument.partition("::")[0]) for argument in config.args]
    fast = all(path.resolve().is_relative_to(UNIT_TESTS) for path in paths)
    settings.load_profile(os.environ.get("TEST_PROFILE", "unit" if fast else "full"))


def is_random() -> bool:
    return settings.get_current_profile_name() == "random"


def examples(full: int) -> int:
    """`max_examples` of a test that names its own number for `full`; fewer in `unit`, more in `random`."""
    scale = {"unit": 0.2, "full": 0.5, "random": 10}.get(settings.get_current_profile_name(), 1)
    return max(5, int(full * scale))
