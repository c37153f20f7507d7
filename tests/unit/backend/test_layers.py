"""What the layers of an architecture keep in memory, from its metadata, where no tiny model shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.layers import Layers

Make = Callable[..., Layers]
HEADS = {"attention.head_count": 8, "attention.head_count_kv": 2, "embedding_length": 512}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """The layers of a file that has metadata only: `make("gemma2", block_count=4)`."""

    def make_layers(architecture: str, values: dict[str, object], **more: object) -> Layers:
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
        for name, value in {**values, **more}.items():
            key = f"{architecture}.{name}"
            if isinstance(value, list):
                writer.add_array(key, value)
            else:
                assert isinstance(value, int)
                writer.add_uint32(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return Layers(GgufHeader(tmp_path / "m.gguf"))

    return make_layers


def slides(layers: Layers) -> str:
    return "".join("s" if layer.slides else "f" for layer in layers.layers)


@pytest.mark.parametrize(
    ("architecture", "pattern"),
    [
        *(("gemma2", "sfsfsfsf"), ("gemma3", "sssssfss"), ("gpt-oss", "sfsfsfsf"), ("cohere2", "sssfsssf")),
        *(("smallthinker", "fsssfsss"), ("llama", "ffffffff"), ("phi3", "ffffffff"), ("exaone4", "ffffffff")),
    ],
)
def test_which_layers_slide(make: Make, architecture: str, pattern: str) -> None:
    layers = make(architecture, {**HEADS, "block_count": 8, "attention.sliding_window": 100})
    assert slides(layers) == pattern
    full = layers.kv_bytes(4096, 2, batch_tokens=128) * 8 // 8
    cell = 2 * 2 * 64 * 2  # K and V, two heads, 64 wide, two bytes
    cells = sum(256 if kind == "s" else 4096 for kind in pattern)  # 100 + 128 in whole blocks
    assert full == 2 * cells * cell


def test_a_pattern_in_the_file_comes_first(make: Make) -> None:
    values = {**HEADS, "block_count": 4, "attention.sliding_window": 100}
    listed = make("gemma4", {**values, "attention.sliding_window_pattern": [True, False, False, True]})
    assert slides(listed) == "sffs"
    assert slides(make("gemma3", {**values, "attention.sliding_window_pattern": 2})) == "sfsf"


def test_sliding_layers_may_have_heads_of_their_own_width(make: Make) -> None:
    values = {**HEADS, "block_count": 2, "attention.sliding_window": 100, "attention.key_length_swa": 32}
    layers = make("gpt-oss", values).layers
    assert [layer.keys for layer in layers] == [2 * 32, 2 * 64]


def test_layers_that_are_shared_or_not_run_keep_nothing(make: Make) -> None:
    shared = make("gemma4", {**HEADS, "block_count": 5, "attention.shared_kv_layers": 2})
    assert [bool(layer.keys) for layer in shared.layers] == [True, True, True, False, False]
    assert len(make("glm4moe", {**HEADS, "block_count": 5, "nextn_predict_layers": 1}).layers) == 4


@pytest.mark.parametrize(
    ("architecture", "values", "elements"),
    [
        ("rwkv7", {"wkv.head_size": 64, "token_shift_count": 2}, 512 * 2 + 512 * 64),
        ("mamba", {"ssm.conv_kernel": 4, "ssm.inner_size": 1024, "ssm.state_size": 16}, 1024 * (3 + 16)),
    ],
)
def test_recurrent_models_keep_one_state_at_any_length(
    make: Make, architecture: str, values: dict[str, object], elements: int
) -> None:
    layers = make(architecture, {"block_count": 3, "embedding_length": 512, **values})
    assert layers.kv_bytes(100_000, 8) == 0 and not layers.keeps_cells
    assert [layer.state for layer in layers.layers] == [4 * elements] * 3


def test_hybrids_keep_states_and_cells_in_different_layers(make: Make) -> None:
    state = {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.group_count": 1}
    values = {**HEADS, **state, "block_count": 8}

    def kinds(layers: Layers) -> str:
        return "".join(
            "a" if item.keys and not item.state else "r" if item.state else "-" for item in layers.layers
        )

    assert kinds(make("qwen3next", values)) == "rrrarrra"
    assert kinds(make("qwen35", values, full_attention_interval=2)) == "rararara"
    heads = [0, 2, 0, 0, 2, 0, 0, 0]
    assert kinds(make("jamba", {**values, "attention.head_count_kv": heads})) == "rarrarrr"
    forward = [0, 0, 9, 0, 0, 9, 9, 0]  # Nemotron-H has layers without a memory
    nemotron = make(
        "nemotron_h", {**values, "attention.head_count_kv": heads, "feed_forward_length": forward}
    )
    assert kinds(nemotron) == "ra-ra--r"
    both = make("falcon-h1", values)
    assert all(layer.keys and layer.state for layer in both.layers)


def test_an_encoder_keeps_nothing(make: Make) -> None:
    assert not make("modern-bert", {**HEADS, "block_count": 4, "attention.sliding_window": 64}).layers
