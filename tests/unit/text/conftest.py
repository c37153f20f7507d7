"""Templates and grammars have limits of CPU time: no collection of what other tests have left counts."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def frozen_garbage() -> None:
    """As the workers do it: a collection leaves out what is here now."""
    gc.collect()
    gc.freeze()
