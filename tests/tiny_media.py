"""Tiny models that take pictures: a text model and its multimodal projector (mmproj), with random weights.

One for each way in which llama.cpp decodes media rows: causal, non-causal, and with M-RoPE positions. And one
that takes sound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from tests.tiny_models import (
    CONTEXT,
    EMBEDDING,
    FEED_FORWARD,
    HEAD_WIDTH,
    LAYERS,
    QUERY_GAIN,
    VALUE_GAIN,
    VOCABULARY,
    Array,
    add_attention_metadata,
    add_ends,
    make_constant,
    make_dense,
    make_matrix,
    make_sliding_window,
    make_writer,
    write,
)

WIDTH = 32  # of the vision encoder
VISION_LAYERS = 1
VISION_HEADS = 2
VISION_FEED_FORWARD = 64
IMAGE_SIZE = 32  # where a picture is scaled to it
MERGE = 2  # patches of each side that become one row
STACK = 4  # frames of sound that become one row
MEL_BINS = 80


class MediaModel(NamedTuple):
    """A text model, and the file beside it that turns pictures into its rows."""

    model: Path
    mmproj: Path


def make_causal(directory: Path) -> MediaModel:
    """Write a llama model with a projector of Janus: 16 rows a picture, each at a position of its own."""
    random = np.random.default_rng(1)
    patch = 8
    projector = {
        "v.patch_embd.bias": make_constant(WIDTH, 0.0),
        "v.position_embd.weight": make_matrix(random, (IMAGE_SIZE // patch) ** 2, WIDTH, 1.0),
        "mm.0.weight": make_matrix(random, EMBEDDING, WIDTH, 1.0),
        "mm.0.bias": make_constant(EMBEDDING, 0.0),
        "mm.1.weight": make_matrix(random, EMBEDDING, EMBEDDING, 1.0),
        "mm.1.bias": make_constant(EMBEDDING, 0.0),
    }
    mmproj = _write_mmproj(directory / "causal.mmproj", "janus_pro", patch, projector, random)
    return MediaModel(make_dense(directory / "causal.gguf"), mmproj)


def make_non_causal(directory: Path) -> MediaModel:
    """Write a gemma3 model with its projector: 16 rows a picture, each of which attends to all of them."""
    random = np.random.default_rng(2)
    patch = 4
    projector = {
        "v.patch_embd.bias": make_constant(WIDTH, 0.0),
        "v.position_embd.weight": make_matrix(random, (IMAGE_SIZE // patch) ** 2, WIDTH, 1.0),
        "mm.input_projection.weight": make_matrix(random, WIDTH, EMBEDDING, 1.0),
        "mm.soft_emb_norm.weight": make_constant(WIDTH, 1.0),
    }
    mmproj = _write_mmproj(directory / "non_causal.mmproj", "gemma3", patch, projector, random)
    return MediaModel(make_sliding_window(directory / "non_causal.gguf"), mmproj)


def make_grid(directory: Path) -> MediaModel:
    """Write a qwen2vl model with its projector: a row for 8 × 8 pixels, and M-RoPE positions."""
    random = np.random.default_rng(3)
    patch, merged = 4, MERGE * MERGE * WIDTH
    projector = {
        "v.patch_embd.weight.1": _make_kernel(random, patch),
        "mm.0.weight": make_matrix(random, merged, merged, 1.0),
        "mm.0.bias": make_constant(merged, 0.0),
        "mm.2.weight": make_matrix(random, EMBEDDING, merged, 1.0),
        "mm.2.bias": make_constant(EMBEDDING, 0.0),
    }
    mmproj = _write_mmproj(directory / "grid.mmproj", "qwen2vl_merger", patch, projector, random)
    return MediaModel(_write_qwen2vl(directory / "grid.gguf"), mmproj)


def make_hearing(directory: Path) -> MediaModel:
    """Write a llama model with a projector of Ultravox: a row for 80 ms of sound, 30 s at a time."""
    random = np.random.default_rng(5)
    stacked = STACK * WIDTH
    projector: dict[str, Any] = {
        "a.conv1d.1.weight": make_matrix(random, WIDTH, MEL_BINS * 3, 1.0)
        .reshape(WIDTH, MEL_BINS, 3)
        .astype(np.float16),
        "a.conv1d.1.bias": make_constant(WIDTH, 0.0).reshape(WIDTH, 1),
        "a.conv1d.2.weight": make_matrix(random, WIDTH, WIDTH * 3, 1.0)
        .reshape(WIDTH, WIDTH, 3)
        .astype(np.float16),
        "a.conv1d.2.bias": make_constant(WIDTH, 0.0).reshape(WIDTH, 1),
        "a.position_embd.weight": make_matrix(random, 1500, WIDTH, 1.0),
        "mm.a.norm_pre.weight": make_constant(stacked, 1.0),
        "mm.a.mlp.1.weight": make_matrix(random, 2 * WIDTH, stacked, 1.0),
        "mm.a.norm_mid.weight": make_constant(WIDTH, 1.0),
        "mm.a.mlp.2.weight": make_matrix(random, EMBEDDING, WIDTH, 1.0),
    }
    mmproj = _write_mmproj(directory / "hearing.mmproj", "ultravox", 0, projector, random)
    return MediaModel(make_dense(directory / "hearing.gguf"), mmproj)


MAKERS: dict[str, Callable[[Path], MediaModel]] = {
    "causal": make_causal,
    "non-causal": make_non_causal,
    "grid": make_grid,
}


def _write_mmproj(
    path: Path, projector: str, patch: int, tensors: Mapping[str, Array], random: np.random.Generator
) -> Path:
    """Write an encoder with its projector's tensors, and return the path. Without a `patch` it hears."""
    kind, prefix = ("vision", "v") if patch else ("audio", "a")
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_name(f"tiny {projector}")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_bool(f"clip.has_{kind}_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    writer.add_string("clip.projector_type", projector)
    numbers = {
        "image_size": IMAGE_SIZE,
        "patch_size": patch,
        "embedding_length": WIDTH,
        "feed_forward_length": VISION_FEED_FORWARD,
        "block_count": VISION_LAYERS,
        "projection_dim": EMBEDDING,
        "attention.head_count": VISION_HEADS,
        "projector.scale_factor": MERGE,
        "projector.stack_factor": STACK,
        "num_mel_bins": MEL_BINS,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"clip.{kind}.{name}", number)
    writer.add_float32(f"clip.{kind}.attention.layer_norm_epsilon", 1e-5)
    if patch:
        for name in ("image_mean", "image_std"):
            writer.add_array(f"clip.vision.{name}", [0.5] * 3)
        writer.add_tensor("v.patch_embd.weight", _make_kernel(random, patch))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    shapes = {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (WIDTH, WIDTH)),
        "ffn_up": (VISION_FEED_FORWARD, WIDTH),
        "ffn_down": (WIDTH, VISION_FEED_FORWARD),
    }
    for layer in range(VISION_LAYERS):
        for name, (outputs, inputs) in shapes.items():
            writer.add_tensor(
                f"{prefix}.blk.{layer}.{name}.weight", make_matrix(random, outputs, inputs, 1.0)
            )
            if patch or name != "attn_k":  # Whisper's keys have no bias
                writer.add_tensor(f"{prefix}.blk.{layer}.{name}.bias", make_constant(outputs, 0.0))
    norms = (f"{prefix}.blk.{layer}.{name}" for layer in range(VISION_LAYERS) for name in ("ln1", "ln2"))
    for norm in (f"{prefix}.post_ln", *norms):
        writer.add_tensor(f"{norm}.weight", make_constant(WIDTH, 1.0))
        writer.add_tensor(f"{norm}.bias", make_constant(WIDTH, 0.0))
    return write(writer, path)


def _make_kernel(random: np.random.Generator, patch: int) -> Array:
    """Make the convolution that turns the pixels of a patch into a vector."""
    return make_matrix(random, WIDTH, 3 * patch * patch, 1.0).reshape(WIDTH, 3, patch, patch)


def _write_qwen2vl(path: Path) -> Path:
    """Write a text model whose heads are turned by time, row and column."""
    heads, key_value_heads = EMBEDDING // HEAD_WIDTH, 1
    writer = make_writer(path, "qwen2vl", VOCABULARY, CONTEXT)
    add_attention_metadata(writer, heads=heads, key_value_heads=key_value_heads)
    writer.add_rope_dimension_sections([4, 6, 6, 0])
    random = np.random.default_rng(4)
    add_ends(writer, random, VOCABULARY)
    keys = key_value_heads * HEAD_WIDTH
    for layer in range(LAYERS):
        tensors = {
            "attn_norm.weight": make_constant(EMBEDDING, 1.0),
            "attn_q.weight": make_matrix(random, EMBEDDING, EMBEDDING, QUERY_GAIN),
            "attn_k.weight": make_matrix(random, keys, EMBEDDING, QUERY_GAIN),
            "attn_v.weight": make_matrix(random, keys, EMBEDDING, VALUE_GAIN),
            "attn_q.bias": make_constant(EMBEDDING, 0.0),
            "attn_k.bias": make_constant(keys, 0.0),
            "attn_v.bias": make_constant(keys, 0.0),
            "attn_output.weight": make_matrix(random, EMBEDDING, EMBEDDING, VALUE_GAIN),
            "ffn_norm.weight": make_constant(EMBEDDING, 1.0),
            "ffn_gate.weight": make_matrix(random, FEED_FORWARD, EMBEDDING, 1.0),
            "ffn_up.weight": make_matrix(random, FEED_FORWARD, EMBEDDING, 1.0),
            "ffn_down.weight": make_matrix(random, EMBEDDING, FEED_FORWARD, VALUE_GAIN),
        }
        for name, tensor in tensors.items():
            writer.add_tensor(f"blk.{layer}.{name}", tensor)
    return write(writer, path)
