"""Fixtures of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm.core.kv_cache import prefix_cache
from tests.driver.disk import DiskGate, Start
from tests.driver.engine import StepDriver
from tests.driver.fake_runner import FakeRunner


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskGate]:
    gate = DiskGate(monkeypatch)
    yield gate
    gate.open()


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts an engine on the test's cache folder."""

    def start_one(*, trimmable: bool = True, cache_mb: int = 1, **settings: Any) -> StepDriver:
        fields = {"cache_disk_mb": 1, "cache_dir": str(tmp_path), "prefix_cache": True, **settings}
        return StepDriver(FakeRunner(trimmable=trimmable), cache_mb=cache_mb, **fields)

    return start_one


@pytest.fixture
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of four tokens are shared."""
    monkeypatch.setattr(prefix_cache, "MIN_PREFIX_TOKENS", 4)
