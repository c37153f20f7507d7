"""The sum over everything that takes memory, refused before it is taken; the context that fits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import pytest

from cllm.backend.llama import memory
from cllm.backend.llama.dry_load import DryLoad, Sizes
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit, prepare
from cllm.config import EngineConfig
from cllm.errors import ConfigError, NotEnoughMemory
from tests.tiny_architectures import make_rollback_hybrid
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


def test_states_have_less_ram_before_anything_is_refused(
    good: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"cache_ram_mb": 300, "swap_space_mb": 200, "parallel": 8, "ctx_size": 32768}
    config = EngineConfig(model=str(good), **settings)  # type: ignore[arg-type]
    fit = fit_of(good, **settings)
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


def test_values_below_16_bits_need_flash_attention(good: Path) -> None:
    model, header = str(good), GgufHeader(good)
    with pytest.raises(ConfigError, match="flash attention"):
        prepare(EngineConfig(model=model, cache_type_v="q8_0", flash_attention=False))
    full = MemoryFit(header, EngineConfig(model=model)).kv
    assert MemoryFit(header, EngineConfig(cache_type_k="f32", cache_type_v="f32")).kv == 2 * full
    assert MemoryFit(header, EngineConfig(cache_type_k="q8_0", cache_type_v="q8_0")).kv == full * 34 // 64


def test_each_draft_rollback_takes_one_more_state_a_slot(tmp_path: Path) -> None:
    header = GgufHeader(make_rollback_hybrid(tmp_path / "m.gguf"))
    fits = [MemoryFit(header, EngineConfig(parallel=5, draft_rollback=count)) for count in (0, 1, 8)]
    none, one, eight = (fit.kv for fit in fits)
    assert eight - none == 8 * (one - none) > 0


def test_slots_beyond_the_requests_have_cells_of_their_own(good: Path) -> None:
    plain = fit_of(good, parallel=4, ctx_size=8192)
    more = fit_of(good, parallel=4, ctx_size=8192, slots=12)
    assert (plain.share, plain.slots, more.share, more.slots) == (2048, 4, 2048, 12)
    assert more.kv == 3 * plain.kv and more.cells == plain.cells == 8192
    assert fit_of(good, parallel=4, ctx_size=8192, slots=2).slots == 4


# The context that is chosen --------------------------------------------------------------------------


class Chosen(NamedTuple):
    parallel: int
    share: int


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained for 128k tokens."""
    return make_dense(tmp_path_factory.mktemp("long") / "long.gguf", context=131072)


class OnlyKV(DryLoad):
    def measure(self, config: EngineConfig) -> dict[str, Sizes]:
        return {name: sizes._replace(compute=0) for name, sizes in super().measure(config).items()}


def choose(model: Path, monkeypatch: pytest.MonkeyPatch, left: float, **settings: object) -> Chosen:
    """The context chosen where a model leaves memory for twice so many tokens of KV."""
    monkeypatch.setattr(memory, "DryLoad", OnlyKV)
    monkeypatch.setattr(memory, "used_outputs", lambda *_: 0)
    for name in ("RUNTIME", "VOCABULARY_BYTES"):
        monkeypatch.setattr(memory, name, 0)
    fixed = fit_of(model, parallel=1, ctx_size=256)
    with_available(monkeypatch, fixed.model + int(2 * left) * fixed.kv // 256)
    fit = fit_of(model, **settings)
    assert fit.fits and fit.kv <= left * fixed.kv // 256
    return Chosen(fit.parallel, fit.share)


@pytest.mark.parametrize(
    ("tokens", "chosen"),
    [
        (9 * 32768, Chosen(8, 32768)),
        (6.5 * 32768, Chosen(6, 32768)),
        (2.5 * 32768, Chosen(2, 32768)),
        (1.5 * 32768, Chosen(2, 24576)),  # an agent's first message fits into both
        (1.125 * 32768, Chosen(1, 32768)),  # a second slot would cost it
        (0.5 * 32768, Chosen(1, 16384)),
    ],
)
def test_fewer_requests_come_before_less_context(
    long: Path, monkeypatch: pytest.MonkeyPatch, tokens: float, chosen: Chosen
) -> None:
    assert choose(long, monkeypatch, tokens) == chosen


def test_what_is_given_stays_and_the_rest_is_chosen(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 4 * 32768
    assert choose(long, monkeypatch, tokens, parallel=2) == (2, 32768)
    assert choose(long, monkeypatch, tokens, parallel=16) == (16, 8192)
    assert choose(long, monkeypatch, tokens, slots=16) == (8, 8192), "slots that are cache take cells, too"
    assert choose(long, monkeypatch, tokens, max_request_tokens=5000) == (8, 5120)
    for cells, chosen in ((65536, (8, 8192)), (16384, (4, 4096)), (1000, (1, 1024))):
        fit = fit_of(long, ctx_size=cells)
        assert (fit.parallel, fit.share) == chosen


def test_never_more_than_the_model_was_trained_for(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_available(monkeypatch, 64 << 30)
    fit = fit_of(good)
    assert (fit.parallel, fit.share, fit.cells) == (8, 4096, 32768)
    assert "the model's training context" in fit.describe_context()


def test_unknown_memory_gives_a_small_context(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    fit = fit_of(long)
    assert (fit.parallel, fit.share) == (8, 4096) and "unknown" in fit.describe_context()


def test_the_start_says_what_was_chosen_and_why(
    long: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_available(monkeypatch, 1 << 40)
    with caplog.at_level(logging.INFO):
        ready = prepare(EngineConfig(model=str(long)))
    assert (ready.parallel, ready.ctx_size) == (8, 8 * 32768)
    assert "8 requests at a time, up to 32768 tokens each (--ctx-size allows more)" in caplog.text
    caplog.clear()
    with_available(monkeypatch, 220 * MIB)
    with caplog.at_level(logging.INFO):
        ready = prepare(EngineConfig(model=str(long)))
    assert ready.parallel == 1 and ready.ctx_size < 32768 and "KV takes half of the memory" in caplog.text


def test_a_model_that_leaves_no_memory_is_refused(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_available(monkeypatch, 100 * MIB)
    with pytest.raises(NotEnoughMemory, match="smaller weights"):
        prepare(EngineConfig(model=str(long)))
    with pytest.raises(NotEnoughMemory, match="smaller --ctx-size or --parallel"):
        prepare(EngineConfig(model=str(long), parallel=4))


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 999 kB\nMemAvailable:   4096 kB\n",
        "/sys/fs/cgroup/memory.max": f"{3 * MIB}\n",
        "/sys/fs/cgroup/memory.stat": f"anon {MIB}\nfile {MIB}\nshmem 0\n",
    }

    def read(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert memory.available_memory() == 2 * MIB, "what files take can be dropped"
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert memory.available_memory() == 4 * MIB
    del files["/sys/fs/cgroup/memory.max"]
    assert memory.available_memory() == 4 * MIB
    files.clear()
    assert memory.available_memory() is None
