"""Models of real sizes with random weights: they decode as fast as real ones, and need no download."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

Q = gguf.GGMLQuantizationType
_BLOCK = 32  # weights that share a scale, in both types
_POOL = 1 << 26  # random bytes that are used again and again


class Size(NamedTuple):
    """The sizes of a Qwen3 model."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    tied: bool  # the output matrix is the token table
    type: gguf.GGMLQuantizationType
    experts: int = 0  # then `feed_forward` is the width of one of them

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.width}, {self.type.name}"


SIZES = {
    "0.6B": Size(28, 1024, 3072, 16, True, Q.Q8_0),
    "8B": Size(36, 4096, 12288, 32, False, Q.Q4_0),
    "MoE": Size(24, 2048, 768, 16, False, Q.Q4_0, 96),
}
KEY_VALUE_HEADS, HEAD_WIDTH, CONTEXT, EXPERTS_USED = 8, 128, 40960, 8


class _Weights:
    """Random blocks of a type, such that a product keeps the size of its input."""

    def __init__(self, kind: gguf.GGMLQuantizationType) -> None:
        self._kind = kind
        self._pool = np.random.default_rng(0).integers(0, 256, _POOL, np.uint8)
        self._bytes = 2 + (_BLOCK if kind is Q.Q8_0 else _BLOCK // 2)
        self._spread = 74.0 if kind is Q.Q8_0 else 4.6  # of a random quant
        self._used = 0

    def matrix(self, rows: int, columns: int) -> npt.NDArray[np.uint8]:
        count = rows * columns // _BLOCK
        shape = (count, self._bytes)
        begin, self._used = self._used % _BLOCK, self._used + 1
        blocks = np.resize(self._pool[begin:], shape)
        scale = np.float16(1 / (self._spread * math.sqrt(columns)))
        blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
        return blocks.reshape(rows, -1)


def make(path: Path, name: str, vocabulary: Path) -> Path:
    """Write the model of this size, with the tokenizer of a vocabulary file. Returns `path`."""
    size = SIZES[name]
    fields = gguf.GGUFReader(vocabulary).fields.values()
    copied = {field.name: field for field in fields if field.name.startswith("tokenizer.")}
    tokens = len(copied["tokenizer.ggml.tokens"].data)
    writer = gguf.GGUFWriter(path, "qwen3moe" if size.experts else "qwen3")
    writer.add_name(f"random Qwen3 {name}")
    if size.experts:
        writer.add_expert_count(size.experts)
        writer.add_expert_used_count(EXPERTS_USED)
        writer.add_expert_feed_forward_length(size.feed_forward)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(size.width)
    writer.add_block_count(size.layers)
    writer.add_feed_forward_length(size.feed_forward)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_key_length(HEAD_WIDTH)
    writer.add_value_length(HEAD_WIDTH)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    for key, field in copied.items():
        kind = field.types[0]
        items = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=items)
    _add_tensors(writer, size, tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensors(writer: gguf.GGUFWriter, size: Size, tokens: int) -> None:
    weights = _Weights(size.type)

    def matrix(tensor: str, rows: int, columns: int, copies: int = 0) -> None:
        found = weights.matrix(rows * (copies or 1), columns)
        shape = (copies, rows, found.shape[-1]) if copies else found.shape
        writer.add_tensor(f"{tensor}.weight", found.reshape(shape), raw_dtype=size.type)

    def norm(tensor: str, width: int) -> None:
        writer.add_tensor(f"{tensor}.weight", np.ones(width, np.float32))

    matrix("token_embd", tokens, size.width)
    norm("output_norm", size.width)
    if not size.tied:
        matrix("output", tokens, size.width)
    keys = KEY_VALUE_HEADS * HEAD_WIDTH
    for layer in range(size.layers):
        block = f"blk.{layer}."
        for part in ("attn_norm", "ffn_norm"):
            norm(block + part, size.width)
        for part in ("attn_q_norm", "attn_k_norm"):
            norm(block + part, HEAD_WIDTH)
        matrix(f"{block}attn_q", size.heads * HEAD_WIDTH, size.width)
        matrix(f"{block}attn_k", keys, size.width)
        matrix(f"{block}attn_v", keys, size.width)
        matrix(f"{block}attn_output", size.width, size.heads * HEAD_WIDTH)
        kind, copies = ("_exps", size.experts) if size.experts else ("", 0)
        matrix(f"{block}ffn_gate{kind}", size.feed_forward, size.width, copies)
        matrix(f"{block}ffn_up{kind}", size.feed_forward, size.width, copies)
        matrix(f"{block}ffn_down{kind}", size.width, size.feed_forward, copies)
        if copies:
            writer.add_tensor(f"{block}ffn_gate_inp.weight", np.ones((copies, size.width), np.float32))
