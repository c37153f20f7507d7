"""Which layers go to which GPU, and that no GPU has to hold more than it has free. The GPUs are made up."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backend.llama import memory
from cllm.backend.llama.dry_load import DryLoad, Sizes
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit, prepare
from cllm.backend.llama.placement import DEVICE_RESERVE, Device, Placer
from cllm.config import EngineConfig, settle_itl
from cllm.errors import ConfigError, NotEnoughMemory

MIB, GIB = 1 << 20, 1 << 30
LAYERS = 32
EMBEDDING, FEED_FORWARD, KEYS, VOCABULARY = 4096, 14336, 1024, 128256
EXPERTS = 8


def make_sparse(path: Path, *, experts: bool = False) -> Path:
    """A Llama-8B in Q4_0 whose file has a header and a hole, no weights."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(131072)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_vocab_size(VOCABULARY)
    end = 0

    def add(name: str, *shape: int) -> None:
        nonlocal end
        size = int(np.prod(shape)) // 32 * 18
        rows = (*shape[:-1], shape[-1] // 32 * 18)  # in bytes, as the writer takes quantised tensors
        writer.add_tensor_info(
            f"{name}.weight", rows, np.dtype(np.uint8), size, gguf.GGMLQuantizationType.Q4_0
        )
        end += -(-size // 32) * 32

    add("token_embd", VOCABULARY, EMBEDDING)
    for layer in range(LAYERS):
        for name, width in (("q", EMBEDDING), ("k", KEYS), ("v", KEYS), ("output", EMBEDDING)):
            add(f"blk.{layer}.attn_{name}", width, EMBEDDING)
        for name in ("gate", "up", "down"):
            if experts:
                add(f"blk.{layer}.ffn_{name}_exps", EXPERTS, FEED_FORWARD, EMBEDDING)
            else:
                add(f"blk.{layer}.ffn_{name}", FEED_FORWARD, EMBEDDING)
    add("output", VOCABULARY, EMBEDDING)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 64 + end)
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> GgufHeader:
    return GgufHeader(make_sparse(tmp_path_factory.mktemp("sparse") / "dense.gguf"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> GgufHeader:
    return GgufHeader(make_sparse(tmp_path_factory.mktemp("sparse") / "moe.gguf", experts=True))


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 64 * GIB)
    monkeypatch.setattr(memory, "DryLoad", MadeUpCards)


Q4 = 18 / 32  # bytes of an element in Q4_0
TABLE = int(VOCABULARY * EMBEDDING * Q4)
STEP_BUFFER = 64 * MIB


def by_llama(total: int, gpu_layers: int, parts: Sequence[float]) -> list[int]:
    """The device of each layer, -1: the CPU, as llama.cpp computes it."""
    edges = np.cumsum(np.array(parts, np.float32), dtype=np.float32)
    edges = edges / edges[-1]
    count = min(gpu_layers, total)
    found = [-1] * (total - count)
    for layer in range(count):
        found.append(int(np.searchsorted(edges, np.float32(layer) / np.float32(count), side="right")))
    return found


class MadeUpCards(DryLoad):
    """Sums of that model as llama.cpp would give them, on cards that are not there."""

    def measure(self, config: EngineConfig) -> dict[str, Sizes]:
        # The process that measures checks what it is sent.
        config = msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig)
        model: dict[str, float] = defaultdict(float, host=TABLE)
        kv: dict[str, float] = defaultdict(float)
        cells = config.ctx_size * max(config.slots, config.parallel) // config.parallel
        cell = 2 * KEYS * (34 / 32 if config.cache_type_k == "q8_0" else 2)
        experts = EXPERTS if Path(config.model).stem == "moe" else 1
        parts = [float(part) for part in config.tensor_split.split(",") if part] or [1.0]
        first = config.main_gpu if config.split_mode == "none" else 0
        layers = LAYERS + 1 if config.gpu_layers == "all" else int(config.gpu_layers)
        names = [f"CUDA{owner + first}" if owner >= 0 else "host" for owner in by_llama(33, layers, parts)]
        for layer, name in enumerate(names[:-1]):
            kv[name] += cells * cell
            model[name] += (2 * EMBEDDING + 2 * KEYS) * EMBEDDING * Q4
            forward = "host" if layer < (config.n_cpu_moe or 0) else name
            model[forward] += experts * 3 * FEED_FORWARD * EMBEDDING * Q4
        model[names[-1]] += TABLE
        logits = {names[-1]: min(512, config.batch_tokens) * VOCABULARY * 4}
        scores = 0 if config.flash_attention else config.batch_tokens * cells * 4
        return {
            name: Sizes(int(model[name]), int(kv[name]), STEP_BUFFER + scores + logits.get(name, 0))
            for name in model
        }


def cards(*free: float, integrated: bool = False) -> tuple[Device, ...]:
    """GPUs with so many GiB free."""
    sizes = [int(size * GIB) for size in free]
    return tuple(Device(f"CUDA{i}", "A card", size, size, integrated) for i, size in enumerate(sizes))


def fit_of(header: GgufHeader, devices: Sequence[Device], **settings: object) -> MemoryFit:
    config = msgspec.convert({"model": str(header.path), **settings}, EngineConfig)
    return MemoryFit(header, config, devices)


def ready_of(header: GgufHeader, devices: Sequence[Device], **settings: object) -> EngineConfig:
    return prepare(msgspec.convert({"model": str(header.path), **settings}, EngineConfig), devices)


def test_a_card_that_holds_everything_gets_everything(
    dense: GgufHeader, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        ready = ready_of(dense, cards(24))
    assert (ready.gpu_layers, ready.tensor_split, ready.target_itl_ms) == (LAYERS + 1, "", 50)
    assert (ready.parallel, ready.ctx_size) == (2, 2 * 32768), "half of what is left holds two of 4 GiB"
    assert "33 of 33 layers on CUDA0: host: model" in caplog.text
    fit = fit_of(dense, cards(24))
    host, card = fit.places
    assert host.kv == 0 and card.kv == 2 * 32768 * LAYERS * 2 * KEYS * 2
    assert host.model == TABLE and card.model == dense.data_bytes - TABLE
    assert fit.total < 4 * GIB, "the host holds no weights but the table of tokens"


def test_less_context_comes_before_fewer_layers(dense: GgufHeader) -> None:
    fit = fit_of(dense, cards(7))
    assert fit.placement.complete and fit.parallel == 1 and 4096 < fit.share < 20480
    tight = fit_of(dense, cards(5.6))
    assert tight.placement.complete and (tight.parallel, tight.share) == (1, 4096)
    assert "beside 33 layers on the GPU" in tight.describe_context()


def test_a_card_that_holds_half_gets_half_and_the_start_says_so(
    dense: GgufHeader, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        ready = ready_of(dense, cards(4))
    assert isinstance(ready.gpu_layers, int) and 8 < ready.gpu_layers < 24
    assert f"{ready.gpu_layers} of 33 layers on CUDA0, the rest on the CPU: host: model" in caplog.text
    assert ready.target_itl_ms == 250
    assert (ready.parallel, ready.ctx_size) == (1, 4096), "more would cost a third more layers on the CPU"
    fit = fit_of(dense, cards(4))
    host, card = fit.places
    assert host.kv and card.kv and host.kv + card.kv == fit.kv


def test_a_card_that_is_too_small_for_one_layer_is_left_alone(dense: GgufHeader) -> None:
    fit = fit_of(dense, cards(0.6))
    plain = fit_of(dense, ())
    assert fit.placement.gpu_layers == 0 and fit.places == plain.places
    assert "all 33 layers on the CPU, none on CUDA0 (614 MiB free)" in fit.placement.describe()
    ready = ready_of(dense, cards(0.6))
    assert (ready.gpu_layers, ready.target_itl_ms, ready.ctx_size) == (0, 250, plain.cells)


def test_without_a_card_nothing_is_placed(dense: GgufHeader, caplog: pytest.LogCaptureFixture) -> None:
    assert ready_of(dense, ()).gpu_layers == 0 and not caplog.text
    ready = ready_of(dense, (), gpu_layers=5, tensor_split="3,1", main_gpu=1)
    assert ready.gpu_layers == 0 and "--gpu-layers 5: no GPU can be used" in caplog.text


def test_the_inter_token_target_follows_the_placement(dense: GgufHeader) -> None:
    targets = [ready_of(dense, cards(*free)).target_itl_ms for free in ((24,), (4,), ())]
    assert targets == [50, 250, 250]
    assert ready_of(dense, cards(24), target_itl_ms=80).target_itl_ms == 80
    for config, target in ((settle_itl(EngineConfig()), 250), (ready_of(dense, cards(24)), 50)):
        assert (config.target_itl_ms, config.max_itl_ms) == (target, 4 * target)


def test_threads_do_not_poll_with_all_layers_on_gpus(dense: GgufHeader) -> None:
    assert [ready_of(dense, cards(*free)).poll for free in ((24,), (4,), ())] == [0, None, None]
    assert ready_of(dense, cards(24), poll=50).poll == 50


def test_a_number_of_layers_is_honoured(dense: GgufHeader) -> None:
    for asked, placed in ((5, 5), (99, 33), ("all", 33), (-1, 33), (0, 0)):
        ready = ready_of(dense, cards(24), gpu_layers=asked)
        assert ready.gpu_layers == placed


def test_what_does_not_fit_is_refused_with_the_sum_of_each_device(dense: GgufHeader) -> None:
    with pytest.raises(NotEnoughMemory) as refused:
        ready_of(dense, cards(4), gpu_layers="all", ctx_size=4096)
    text = refused.value.message
    assert "host: model" in text and "free 65536 MiB" in text
    assert "CUDA0: model" in text and "+ reserve 640 MiB = " in text and "free 4096 MiB" in text
    assert text.endswith("try --gpu-layers auto, or fewer")
    assert ready_of(dense, cards(4), ctx_size=4096).gpu_layers, "with auto it is served"


def test_a_host_that_is_too_small_is_refused(dense: GgufHeader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1 * GIB)
    assert ready_of(dense, cards(24)).gpu_layers == 33, "its part is small"
    with pytest.raises(NotEnoughMemory, match=r"host: model .* free 1024 MiB; CUDA0: .*smaller weights"):
        ready_of(dense, cards(3))


@pytest.mark.parametrize("parts", ["3,1", "1,1,1", "1,0,2", "0,1", "0.7,0.2,0.1", "5"])
def test_several_cards_get_consecutive_layers_by_their_parts(dense: GgufHeader, parts: str) -> None:
    devices = cards(24, 24, 24)[: max(2, parts.count(",") + 1)]
    config = EngineConfig(model=str(dense.path), tensor_split=parts)
    placer = Placer(dense, config, devices)
    numbers = [float(part) for part in parts.split(",")]
    numbers += [0.0] * (len(devices) - len(numbers))
    for gpu_layers in range(LAYERS + 2):
        placement = placer.place(gpu_layers)
        expected = by_llama(LAYERS + 1, gpu_layers, numbers)
        assert placement.counts == [expected.count(index) for index in range(len(devices))]
        assert placement.starts[0] == expected.count(-1)


def test_unequal_cards_share_by_what_they_have_free(dense: GgufHeader) -> None:
    fit = fit_of(dense, cards(12, 4))
    large, small = fit.placement.counts
    assert large + small == 33 and 3 * small < large, "the reserve of each is taken off before"
    _, first, second = fit.places
    assert first.fits and second.fits and first.kv > 3 * second.kv
    ready = ready_of(dense, cards(12, 4))
    assert ready.tensor_split == "11648,3456" and ready.target_itl_ms == 50
    assert f"{large} of 33 layers on CUDA0, {small} on CUDA1" in fit.placement.describe()


@pytest.mark.parametrize(
    ("given", "split"),
    [("", "3145088,1047936"), ("0,0", "3145088,1047936"), ("0.25,1", "0.25,1"), ("10", "10,0")],
)
def test_parts_reach_llama_as_they_were_counted(dense: GgufHeader, given: str, split: str) -> None:
    devices = tuple(Device(f"CUDA{i}", "", size << 40, size << 40, False) for i, size in enumerate((3, 1)))
    ready = ready_of(dense, devices, tensor_split=given)
    assert ready.tensor_split == split and msgspec.convert(msgspec.to_builtins(ready), EngineConfig) == ready


def test_the_cards_that_are_named(dense: GgufHeader) -> None:
    one = fit_of(dense, cards(8, 24), split_mode="none", main_gpu=1)
    assert [device.name for device in one.placement.devices] == ["CUDA1"] and one.placement.complete
    rows = fit_of(dense, cards(24, 24), split_mode="row", tensor_split="3,1").places[1:]
    assert rows[0].model == pytest.approx(3 * rows[1].model, rel=0.01)
    for wrong, text in (({"main_gpu": 2}, "main_gpu is 2"), ({"tensor_split": "1,1,1"}, "has 3 parts")):
        with pytest.raises(ConfigError, match=f"{text}.*CUDA0, CUDA1"):
            fit_of(dense, cards(24, 24), **wrong)


def test_experts_on_the_cpu_leave_the_card_for_the_rest(experts: GgufHeader) -> None:
    plain = fit_of(experts, cards(12), n_cpu_moe=0)
    held = fit_of(experts, cards(12), n_cpu_moe=20)
    assert not plain.placement.complete and plain.placement.gpu_layers < 24
    assert plain.share == 20480, "with most layers on the CPU, a long context costs little"
    assert held.placement.gpu_layers == 33 and not held.placement.complete
    moved = 20 * 3 * EXPERTS * FEED_FORWARD * EMBEDDING // 32 * 18
    assert held.places[0].model == moved + TABLE
    assert held.places[1].model == experts.data_bytes - moved - TABLE
    assert "33 of 33 layers on CUDA0, experts of 20 layers on the CPU" in held.placement.describe()
    ready = ready_of(experts, cards(12), n_cpu_moe=99)
    assert ready.n_cpu_moe == LAYERS and ready.target_itl_ms == 250
    assert fit_of(experts, cards(200), n_cpu_moe=0).placement.complete


def test_as_many_experts_stay_with_the_host_as_the_card_lacks_room_for(
    experts: GgufHeader, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        ready = ready_of(experts, cards(12))
    held = ready.n_cpu_moe or 0
    assert ready.gpu_layers == 33 and 0 < held < LAYERS
    placed = f"33 of 33 layers on CUDA0, experts of {held} layers on the CPU"
    assert f"{placed} (the GPUs have no room for them): host" in caplog.text
    assert not fit_of(experts, cards(12), n_cpu_moe=held - 1, ctx_size=ready.ctx_size, gpu_layers="all").fits
    assert fit_of(experts, cards(200)).placement.complete
    tiny = fit_of(experts, cards(1.5)).placement
    assert tiny.host_experts == LAYERS and 0 < tiny.gpu_layers < 33, "then fewer layers"
    assert f"experts of {LAYERS} layers on the CPU, the rest on the CPU" in tiny.describe()


@given(free=st.integers(0, 40 * 1024), context=st.sampled_from([0, 4096, 32768]))
def test_no_card_holds_too_much_and_one_layer_of_experts_more_would(
    experts: GgufHeader, free: int, context: int
) -> None:
    fit = fit_of(experts, (Device("CUDA0", "", free * MIB, free * MIB, False),), ctx_size=context)
    placed = fit.placement
    assert all(place.fits for place in fit.places[1:])
    if placed.gpu_layers == placed.total and placed.host_experts:
        more = fit._placer.place(placed.total, placed.host_experts - 1)
        assert not fit._sum_up(fit.parallel, fit.share, more)[1].fits


def test_cards_that_share_each_tensor_share_all_sums(
    dense: GgufHeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Together(MadeUpCards):
        def measure(self, config: EngineConfig) -> dict[str, Sizes]:
            host, *others = super().measure(config).values()
            return {"host": host, "Meta": Sizes(*map(sum, zip(*others, strict=True)))}

    asked = {"ctx_size": 8192, "gpu_layers": "all"}
    plain = fit_of(dense, cards(24, 24), **asked)
    monkeypatch.setattr(memory, "DryLoad", Together)
    fit = fit_of(dense, cards(24, 24), tensor_split="3,1", split_mode="tensor", **asked)
    first, second = fit.places[1:]
    assert first.kv == 3 * second.kv and first.kv + second.kv == plain.kv
    assert (
        first.model == pytest.approx(3 * second.model) and first.reserve == second.reserve == DEVICE_RESERVE
    )


def test_experts_are_no_matter_in_a_dense_model(dense: GgufHeader) -> None:
    assert fit_of(dense, cards(24), n_cpu_moe=20).placement.complete


def test_a_card_without_memory_of_its_own_takes_the_hosts(dense: GgufHeader) -> None:
    fit = fit_of(dense, cards(32, integrated=True))
    host, card = fit.places
    assert fit.placement.complete and host.shared == card.needed
    both = (*cards(24), Device("Vulkan1", "integrated", 64 * GIB, 64 * GIB, True))
    assert [device.name for device in fit_of(dense, both).placement.devices] == ["CUDA0"]


def test_kv_that_attention_needs_converted_takes_a_buffer(dense: GgufHeader) -> None:
    asked = {"parallel": 1, "ctx_size": 16384}
    plain = fit_of(dense, cards(24), **asked).places[1]
    small = fit_of(dense, cards(24), **asked, cache_type_k="q8_0", cache_type_v="q8_0").places[1]
    assert small.kv == plain.kv * 34 // 64
    assert small.compute == plain.compute + 16384 * 2 * KEYS * 2, "a layer's K and V as f16"


def test_a_draft_model_lies_on_the_main_card(dense: GgufHeader) -> None:
    asked = {"draft_model": str(dense.path), "parallel": 1, "ctx_size": 4096, "main_gpu": 1}
    host, first, second = fit_of(dense, cards(24, 24), **asked).places
    assert second.draft > dense.data_bytes and not first.draft and host.draft < GIB
    assert fit_of(dense, (), **asked).places[0].draft > dense.data_bytes


FREE = st.integers(0, 40 * 1024).map(lambda mebibytes: mebibytes * MIB)


@given(
    free=st.lists(FREE, min_size=1, max_size=3),
    context=st.sampled_from([0, 512, 4096, 32768, 200_000]),
    parallel=st.integers(0, 16),
    batch=st.sampled_from([64, 512, 4096]),
    flash=st.booleans(),
    moe=st.integers(0, 40),
)
def test_no_card_holds_more_than_it_has_and_one_layer_more_would(
    dense: GgufHeader,
    experts: GgufHeader,
    free: list[int],
    context: int,
    parallel: int,
    batch: int,
    flash: bool,
    moe: int,
) -> None:
    header = experts if moe else dense
    devices = tuple(Device(f"CUDA{i}", "", size, size, False) for i, size in enumerate(free))
    settings = {"ctx_size": context, "parallel": parallel, "batch_tokens": batch, "flash_attention": flash}
    fit = fit_of(header, devices, n_cpu_moe=moe, **settings)
    assert all(place.needed <= (place.free or 0) for place in fit.places[1:])
    used = [place for place in fit.places[1:] if place.needed]
    assert all(place.reserve == DEVICE_RESERVE for place in used)
    assert sum(place.model for place in fit.places) >= header.data_bytes - 32 * len(header.tensors)
    assert fit.kv == fit_of(header, (), **settings | {"parallel": fit.parallel, "ctx_size": fit.cells}).kv
    if fit.fits and fit.placement.gpu_layers < fit.placement.total:
        more = fit._placer.place(fit.placement.gpu_layers + 1)
        places = fit._sum_up(fit.parallel, fit.share, more)[1:]
        assert not all(place.fits for place in places), "one layer more fits"
