"""Tiny encoders with random weights: an embedding model (bert) and a reranker, as real GGUF files.

Their tokenizer is WordPiece over lowercase letters and digits: one token a character (with a mark where a
word begins). So the length of a text in tokens is known: its characters other than spaces, and `[CLS]` and
`[SEP]` around them.
"""

from __future__ import annotations

import math
import string
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

PAD, UNKNOWN, CLS, SEP = range(4)
CHARACTERS = string.ascii_lowercase + string.digits
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"\u2581{c}" for c in CHARACTERS), *CHARACTERS]

CONTEXT = 512
EMBEDDING = 64
LAYERS = 2
HEADS = 4
FEED_FORWARD = 128

Array = NDArray[np.float32]


def make_encoder(path: Path, *, pooling: gguf.PoolingType = gguf.PoolingType.MEAN, seed: int = 0) -> Path:
    """Write a bert model; the same arguments give the same bytes. Returns ``path``."""
    return _write(path, pooling, seed, head=False)


def make_reranker(path: Path, *, seed: int = 0) -> Path:
    """Write a bert model with a ranking head: a dense layer, tanh, one output."""
    return _write(path, gguf.PoolingType.RANK, seed, head=True)


def _write(path: Path, pooling: gguf.PoolingType, seed: int, *, head: bool) -> Path:
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name("tiny bert")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    _tokenizer(writer)
    random = np.random.default_rng(seed)
    _tensors(writer, random)
    if head:
        writer.add_tensor("cls.weight", _matrix(random, EMBEDDING, EMBEDDING))
        writer.add_tensor("cls.bias", _noise(random, EMBEDDING))
        writer.add_tensor("cls.output.weight", 2 * _matrix(random, 1, EMBEDDING))
        writer.add_tensor("cls.output.bias", _noise(random, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    control, unknown, normal = gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN, gguf.TokenType.NORMAL
    writer.add_token_types([control, unknown, control, control, *[normal] * (len(TOKENS) - 4)])
    writer.add_token_type_count(2)
    writer.add_bos_token_id(CLS)
    writer.add_eos_token_id(SEP)
    writer.add_sep_token_id(SEP)
    writer.add_pad_token_id(PAD)
    writer.add_unk_token_id(UNKNOWN)


def _tensors(writer: gguf.GGUFWriter, random: np.random.Generator) -> None:
    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(EMBEDDING, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(EMBEDDING, np.float32))

    writer.add_tensor("token_embd.weight", random.standard_normal((len(TOKENS), EMBEDDING), np.float32))
    writer.add_tensor("token_types.weight", np.zeros((2, EMBEDDING), np.float32))
    writer.add_tensor("position_embd.weight", 0.5 * random.standard_normal((CONTEXT, EMBEDDING), np.float32))
    norm("token_embd_norm")
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        # queries and keys large enough that attention picks, so that every token matters to every other
        for name, gain in (("attn_q", 1.7), ("attn_k", 1.7), ("attn_v", 2.0), ("attn_output", 2.0)):
            writer.add_tensor(f"{prefix}{name}.weight", gain * _matrix(random, EMBEDDING, EMBEDDING))
            writer.add_tensor(f"{prefix}{name}.bias", _noise(random, EMBEDDING))
        writer.add_tensor(f"{prefix}ffn_up.weight", _matrix(random, FEED_FORWARD, EMBEDDING))
        writer.add_tensor(f"{prefix}ffn_up.bias", _noise(random, FEED_FORWARD))
        writer.add_tensor(f"{prefix}ffn_down.weight", _matrix(random, EMBEDDING, FEED_FORWARD))
        writer.add_tensor(f"{prefix}ffn_down.bias", _noise(random, EMBEDDING))
        norm(f"{prefix}attn_output_norm")
        norm(f"{prefix}layer_output_norm")


def _matrix(random: np.random.Generator, outputs: int, inputs: int) -> Array:
    matrix = random.standard_normal((outputs, inputs), np.float32)
    return matrix * np.float32(1 / math.sqrt(inputs))


def _noise(random: np.random.Generator, length: int) -> Array:
    return 0.1 * random.standard_normal(length, np.float32)
