"""The sum over everything that takes memory: refused before it is taken, and states make room first."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cllm.backend.llama import memory
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit, prepare
from cllm.config import EngineConfig
from cllm.errors import NotEnoughMemory
from tests.tiny_models import make_dense

MIB = 1 << 20


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dense(tmp_path_factory.mktemp("gguf") / "dense.gguf")


def with_available(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: size)


def fit_of(good: Path, **settings: object) -> MemoryFit:
    config = EngineConfig(model=str(good), **settings)  # type: ignore[arg-type]
    return MemoryFit(GgufHeader(good), config)


def test_memory_that_does_not_suffice_is_refused_with_the_sum(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_available(monkeypatch, 300 * MIB)
    config = EngineConfig(model=str(good), parallel=8, ctx_size=1_000_000)
    with pytest.raises(NotEnoughMemory, match=r"model \d+ MiB \+ KV \d+ MiB .* = \d+ MiB, available 300 MiB"):
        prepare(config)


def test_left_to_itself_it_takes_the_cells_that_fit(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fit_of(good)
    assert fit.fits
    with_available(monkeypatch, fit.compute + fit.model + fit.kv // 2)
    assert 0 < prepare(EngineConfig(model=str(good))).ctx_size < 8 * 4096


def test_states_have_less_ram_before_anything_is_refused(
    good: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(model=str(good), cache_ram_mb=300, swap_space_mb=200)
    fit = fit_of(good, cache_ram_mb=300, swap_space_mb=200)
    rest = fit.embedding + fit.grammars
    assert fit.states == 300 * MIB, "they share: the larger of the two"
    assert fit.total == fit.model + fit.kv + fit.compute + rest + fit.states
    for spare, cached, parked in ((300, 300, 200), (250, 250, 200), (100, 100, 100), (0, 0, 0), (-50, 0, 0)):
        with_available(monkeypatch, fit.needed + rest + spare * MIB)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            ready = prepare(config)
        assert (ready.cache_ram_mb, ready.swap_space_mb) == (cached, parked)
        assert ("memory is tight" in caplog.text) == (spare < 300)
        assert ready.ctx_size == config.ctx_size
        assert MemoryFit(GgufHeader(good), ready).total <= fit.needed + rest + max(0, spare) * MIB


def test_what_makes_buffers_larger_is_in_the_sum(good: Path) -> None:
    assert fit_of(good, batch_tokens=65536).compute > fit_of(good).compute
    wide = {"batch_tokens": 4096, "ctx_size": 1 << 20, "parallel": 1}
    assert fit_of(good, flash_attention=False, **wide).compute > fit_of(good, **wide).compute
    assert fit_of(good, embed_tokens=4000).embedding > fit_of(good, embed_tokens=100).embedding
