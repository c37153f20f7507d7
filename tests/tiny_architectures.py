"""More tiny GGUF models with random weights: hybrids, a mixture of experts, compressed KV (MLA).

They share the tokenizer, the sizes and the scaling of `tiny_models`. A hybrid's first layer is recurrent and
its second one has attention, so its memory holds both a state per sequence and KV cells per token.
"""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np

from tests.tiny_models import (
    CONTEXT,
    CONVOLUTION,
    EMBEDDING,
    FEED_FORWARD,
    HEAD_WIDTH,
    HEADS,
    INNER,
    KEY_VALUE_HEADS,
    LAYERS,
    QUERY_GAIN,
    STATE,
    VALUE_GAIN,
    VOCABULARY,
    Array,
    add_attention_layer,
    add_attention_metadata,
    add_ends,
    make_basic,
    make_constant,
    make_matrix,
    make_writer,
    write,
)

GROUPS = 1  # of mamba2's B and C
STATE_HEADS = 4  # heads of mamba2 and of the gated delta net
KEY_HEADS = 2  # of the gated delta net, whose head width is HEAD_WIDTH
SHORT_CONVOLUTION = 3
EXPERTS = 4
USED_EXPERTS = 2
KV_RANK = 64  # width of MLA's compressed KV
QUERY_RANK = 32
ROPE_WIDTH = 32  # the part of an MLA head that is rotated


def make_all(directory: Path) -> dict[str, Path]:
    """Write all tiny models with their defaults into ``directory``, by kind."""
    return make_basic(directory) | {
        "hybrid": make_hybrid(directory / "hybrid.gguf"),
        "hybrid-rollback": make_rollback_hybrid(directory / "hybrid-rollback.gguf"),
        "hybrid-delta": make_delta_hybrid(directory / "hybrid-delta.gguf"),
        "head": make_head(directory / "head.gguf"),
        "head-delta": make_delta_hybrid(directory / "head-delta.gguf", heads=1),
        "experts": make_experts(directory / "experts.gguf"),
        "compressed": make_compressed(directory / "compressed.gguf"),
    }


def make_hybrid(path: Path) -> Path:
    """Write a granitehybrid model: a mamba2 layer, then attention. Its state cannot be rolled back."""
    writer = make_writer(path, "granitehybrid", VOCABULARY, CONTEXT)
    add_attention_metadata(writer, key_value_heads=[0, KEY_VALUE_HEADS])
    _add_state_metadata(writer, state=STATE, groups=GROUPS)
    random = np.random.default_rng(0)
    add_ends(writer, random, VOCABULARY)
    _add_mamba2_layer(writer, random, "blk.0.")
    add_attention_layer(writer, random, "blk.1.")
    return write(writer, path)


def make_rollback_hybrid(path: Path) -> Path:
    """Write an lfm2 model: a short convolution, then attention. Its state can be rolled back (`n_rs_seq`)."""
    writer = make_writer(path, "lfm2", VOCABULARY, CONTEXT)
    # lfm2's attention is as wide as its embedding
    heads = EMBEDDING // HEAD_WIDTH
    add_attention_metadata(writer, heads=heads, key_value_heads=[0, 1])
    writer.add_shortconv_l_cache(SHORT_CONVOLUTION)
    random = np.random.default_rng(0)
    add_ends(writer, random, VOCABULARY, last_norm="token_embd_norm")
    for layer in range(LAYERS):
        _add_feed_forward(writer, random, f"blk.{layer}.")
    tensors = {
        "blk.0.attn_norm": make_constant(EMBEDDING, 1.0),
        "blk.0.shortconv.conv": make_matrix(random, EMBEDDING, SHORT_CONVOLUTION, VALUE_GAIN),
        "blk.0.shortconv.in_proj": make_matrix(random, 3 * EMBEDDING, EMBEDDING, 1.0),
        "blk.0.shortconv.out_proj": make_matrix(random, EMBEDDING, EMBEDDING, VALUE_GAIN),
        "blk.1.attn_norm": make_constant(EMBEDDING, 1.0),
        "blk.1.attn_q": make_matrix(random, EMBEDDING, EMBEDDING, 1.0),
        "blk.1.attn_k": make_matrix(random, HEAD_WIDTH, EMBEDDING, 1.0),
        "blk.1.attn_v": make_matrix(random, HEAD_WIDTH, EMBEDDING, VALUE_GAIN),
        "blk.1.attn_output": make_matrix(random, EMBEDDING, EMBEDDING, VALUE_GAIN),
    }
    return _finish(writer, path, tensors | _query_norms("blk.1."))


def make_delta_hybrid(
    path: Path, *, heads: int = 0, right: float | None = None, mixed: float = 0.0, wide: int = FEED_FORWARD
) -> Path:
    """Write a qwen35 model: a gated delta net, then gated attention. Its state can be rolled back.

    With a head (MTP) it has one more layer of attention; `right`, `mixed`, `wide` are those of `make_head`.
    """
    writer = make_writer(path, "qwen35", VOCABULARY, CONTEXT, layers=LAYERS + heads)
    add_attention_metadata(writer, feed_forward=wide)
    writer.add_rope_dimension_sections([HEAD_WIDTH // 4, HEAD_WIDTH // 8, HEAD_WIDTH // 8, 0])
    writer.add_full_attention_interval(LAYERS)
    _add_state_metadata(writer, state=HEAD_WIDTH, groups=KEY_HEADS)
    random = np.random.default_rng(0)
    add_ends(writer, random, VOCABULARY)
    for layer in range(LAYERS + heads):
        _add_feed_forward(writer, random, f"blk.{layer}.", norm="post_attention_norm", width=wide)
    channels = 2 * KEY_HEADS * HEAD_WIDTH + INNER
    queries, keys = HEADS * HEAD_WIDTH, KEY_VALUE_HEADS * HEAD_WIDTH
    tensors = {
        "blk.0.attn_norm": make_constant(EMBEDDING, 1.0),
        "blk.0.attn_qkv": make_matrix(random, channels, EMBEDDING, VALUE_GAIN),
        "blk.0.attn_gate": make_matrix(random, INNER, EMBEDDING, 1.0),
        "blk.0.ssm_conv1d": make_matrix(random, channels, CONVOLUTION, 1.0),
        "blk.0.ssm_beta": make_matrix(random, STATE_HEADS, EMBEDDING, 1.0),
        "blk.0.ssm_alpha": make_matrix(random, STATE_HEADS, EMBEDDING, 1.0),
        "blk.0.ssm_norm": make_constant(HEAD_WIDTH, 1.0),
        "blk.0.ssm_out": make_matrix(random, EMBEDDING, INNER, VALUE_GAIN),
    }
    for layer in range(1, LAYERS + heads):
        prefix = f"blk.{layer}."
        tensors |= _query_norms(prefix) | {
            f"{prefix}attn_norm": make_constant(EMBEDDING, 1.0),
            f"{prefix}attn_q": make_matrix(random, 2 * queries, EMBEDDING, 1.0),  # queries and gates
            f"{prefix}attn_k": make_matrix(random, keys, EMBEDDING, 1.0),
            f"{prefix}attn_v": make_matrix(random, keys, EMBEDDING, VALUE_GAIN),
            f"{prefix}attn_output": make_matrix(random, EMBEDDING, queries, VALUE_GAIN),
        }
    writer.add_tensor("blk.0.ssm_dt.bias", _steps(random, STATE_HEADS))
    writer.add_tensor("blk.0.ssm_a", -np.geomspace(0.02, 1.0, STATE_HEADS, dtype=np.float32))
    if heads:
        writer.add_nextn_predict_layers(heads)
        _add_head(writer, random, tensors, right, mixed)
    return _finish(writer, path, tensors)


def make_head(
    path: Path, *, right: float | None = None, mixed: float = 0.0, wide: int = FEED_FORWARD
) -> Path:
    """Write a glm4moe model with an MTP head: it has one more layer, and all weights are random.

    With `right` the layers add only a part, `mixed`, of what they compute: without any the next token follows
    from the last one alone, and the head knows it of that part of them. Where the feed-forward network is
    `wide` it is read once for several rows, which then cost little more than one.
    """
    writer = make_writer(path, "glm4moe", VOCABULARY, CONTEXT, layers=LAYERS + 1)
    add_attention_metadata(writer, feed_forward=wide)
    _add_expert_metadata(writer)
    writer.add_expert_shared_count(1)
    writer.add_leading_dense_block_count(1)
    writer.add_nextn_predict_layers(1)
    random = np.random.default_rng(0)
    add_ends(writer, random, VOCABULARY)
    _add_feed_forward(writer, random, "blk.0.", norm="post_attention_norm", width=wide)
    tensors: dict[str, Array] = {}
    for layer in range(LAYERS + 1):
        add_attention_layer(writer, random, f"blk.{layer}.", feed_forward=False)
    for layer in range(1, LAYERS + 1):
        prefix = f"blk.{layer}."
        tensors |= _experts(random, prefix) | {
            f"{prefix}ffn_gate_shexp": make_matrix(random, FEED_FORWARD, EMBEDDING, 1.0),
            f"{prefix}ffn_up_shexp": make_matrix(random, FEED_FORWARD, EMBEDDING, 1.0),
            f"{prefix}ffn_down_shexp": make_matrix(random, EMBEDDING, FEED_FORWARD, VALUE_GAIN),
        }
        tensors[f"{prefix}post_attention_norm"] = tensors.pop(f"{prefix}ffn_norm")
        writer.add_tensor(f"{prefix}exp_probs_b.bias", make_constant(EXPERTS, 0.0))
    _add_head(writer, random, tensors, right, mixed)
    return _finish(writer, path, tensors)


def _add_head(
    writer: gguf.GGUFWriter,
    random: np.random.Generator,
    tensors: dict[str, Array],
    right: float | None,
    mixed: float,
) -> None:
    """Add what makes the last layer an MTP head, with random weights or one that is `right`."""
    head = f"blk.{LAYERS}.nextn."
    joined = make_matrix(random, EMBEDDING, 2 * EMBEDDING, 1.0)
    if right is not None:
        added = ("ffn_down", "attn_output", "ssm_out")
        for name, info in (*writer.tensors[0].items(),):
            if any(part in name for part in added):
                info.tensor[:] *= mixed
        for name in tensors:
            if any(part in name for part in added):
                tensors[name] = tensors[name] * np.float32(mixed)
        joined = np.eye(EMBEDDING, 2 * EMBEDDING, dtype=np.float32)
        table = np.array(writer.tensors[0]["token_embd.weight"].tensor)
        wrong = random.permutation(len(table))[round(right * len(table)) :]
        table[wrong] = table[np.roll(wrong, 1)]
        tensors[f"{head}embed_tokens"] = table
    norms = ("enorm", "hnorm", "shared_head_norm")
    tensors |= {f"{head}{name}": make_constant(EMBEDDING, 1.0) for name in norms}
    tensors[f"{head}eh_proj"] = joined


def make_experts(path: Path) -> Path:
    """Write a qwen3moe model: attention, and two of four experts a token."""
    writer = make_writer(path, "qwen3moe", VOCABULARY, CONTEXT)
    add_attention_metadata(writer)
    _add_expert_metadata(writer)
    random = np.random.default_rng(0)
    add_ends(writer, random, VOCABULARY)
    tensors: dict[str, Array] = {}
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        add_attention_layer(writer, random, prefix, feed_forward=False)
        tensors |= _query_norms(prefix) | _experts(random, prefix)
    return _finish(writer, path, tensors)


def make_compressed(path: Path) -> Path:
    """Write a deepseek2 model: compressed KV (MLA), one dense layer, then one with experts."""
    writer = make_writer(path, "deepseek2", VOCABULARY, CONTEXT)
    # To the KV cache it is one head of K only: V is a part of K.
    add_attention_metadata(
        writer, key_value_heads=1, key=KV_RANK + ROPE_WIDTH, value=KV_RANK, rotated=ROPE_WIDTH
    )
    writer.add_key_length_mla(HEAD_WIDTH + ROPE_WIDTH)
    writer.add_value_length_mla(HEAD_WIDTH)
    writer.add_q_lora_rank(QUERY_RANK)
    writer.add_kv_lora_rank(KV_RANK)
    _add_expert_metadata(writer)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_norm(True)
    random = np.random.default_rng(0)
    add_ends(writer, random, VOCABULARY)
    tensors: dict[str, Array] = {}
    for layer in range(LAYERS):
        tensors |= _compressed_attention(random, f"blk.{layer}.")
    _add_feed_forward(writer, random, "blk.0.")
    tensors |= _experts(random, "blk.1.") | {
        "blk.1.ffn_gate_shexp": make_matrix(random, FEED_FORWARD, EMBEDDING, 1.0),
        "blk.1.ffn_up_shexp": make_matrix(random, FEED_FORWARD, EMBEDDING, 1.0),
        "blk.1.ffn_down_shexp": make_matrix(random, EMBEDDING, FEED_FORWARD, VALUE_GAIN),
    }
    return _finish(writer, path, tensors)


def _finish(writer: gguf.GGUFWriter, path: Path, tensors: dict[str, Array]) -> Path:
    """Add tensors whose names end in ``.weight`` and write the file."""
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    return write(writer, path)


def _add_state_metadata(writer: gguf.GGUFWriter, *, state: int, groups: int) -> None:
    """Add the sizes of a state-space layer."""
    writer.add_ssm_conv_kernel(CONVOLUTION)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(STATE_HEADS)
    writer.add_ssm_group_count(groups)


def _add_mamba2_layer(writer: gguf.GGUFWriter, random: np.random.Generator, prefix: str) -> None:
    """Add one mamba2 layer with its feed-forward network."""
    channels = INNER + 2 * GROUPS * STATE
    tensors = {
        "attn_norm.weight": make_constant(EMBEDDING, 1.0),
        "ssm_in.weight": make_matrix(random, INNER + channels + STATE_HEADS, EMBEDDING, 1.0),
        "ssm_conv1d.weight": make_matrix(random, channels, CONVOLUTION, VALUE_GAIN),
        "ssm_conv1d.bias": make_constant(channels, 0.0),
        "ssm_dt.bias": _steps(random, STATE_HEADS),
        "ssm_a": -np.geomspace(0.02, 2.0, STATE_HEADS, dtype=np.float32).reshape(STATE_HEADS, 1),
        "ssm_d": make_constant(STATE_HEADS, 1.0).reshape(STATE_HEADS, 1),
        "ssm_norm.weight": make_constant(INNER // GROUPS, 1.0).reshape(GROUPS, -1),
        "ssm_out.weight": make_matrix(random, EMBEDDING, INNER, VALUE_GAIN),
    }
    for name, tensor in tensors.items():
        writer.add_tensor(f"{prefix}{name}", tensor)
    _add_feed_forward(writer, random, prefix)


def _steps(random: np.random.Generator, count: int) -> Array:
    """Biases that softplus turns into time steps."""
    steps = np.exp(random.uniform(math.log(0.02), math.log(0.5), count))
    return np.log(np.expm1(steps)).astype(np.float32)


def _add_feed_forward(
    writer: gguf.GGUFWriter,
    random: np.random.Generator,
    prefix: str,
    norm: str = "ffn_norm",
    width: int = FEED_FORWARD,
) -> None:
    """Add a gated feed-forward network and the norm before it."""
    writer.add_tensor(f"{prefix}{norm}.weight", make_constant(EMBEDDING, 1.0))
    writer.add_tensor(f"{prefix}ffn_gate.weight", make_matrix(random, width, EMBEDDING, 1.0))
    writer.add_tensor(f"{prefix}ffn_up.weight", make_matrix(random, width, EMBEDDING, 1.0))
    writer.add_tensor(f"{prefix}ffn_down.weight", make_matrix(random, EMBEDDING, width, VALUE_GAIN))


def _query_norms(prefix: str) -> dict[str, Array]:
    """Norms of queries and keys; they set the spread of the scores."""
    return {f"{prefix}attn_{name}_norm": make_constant(HEAD_WIDTH, QUERY_GAIN) for name in "qk"}


def _add_expert_metadata(writer: gguf.GGUFWriter) -> None:
    """Add how many experts there are, how many a token uses, and their width."""
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED_EXPERTS)
    writer.add_expert_feed_forward_length(FEED_FORWARD)


def _experts(random: np.random.Generator, prefix: str) -> dict[str, Array]:
    """A router and its experts, with the norm before them."""

    def stack(outputs: int, inputs: int, gain: float) -> Array:
        return np.stack([make_matrix(random, outputs, inputs, gain) for _ in range(EXPERTS)])

    return {
        f"{prefix}ffn_norm": make_constant(EMBEDDING, 1.0),
        f"{prefix}ffn_gate_inp": make_matrix(random, EXPERTS, EMBEDDING, 1.0),
        f"{prefix}ffn_gate_exps": stack(FEED_FORWARD, EMBEDDING, 1.0),
        f"{prefix}ffn_up_exps": stack(FEED_FORWARD, EMBEDDING, 1.0),
        f"{prefix}ffn_down_exps": stack(EMBEDDING, FEED_FORWARD, VALUE_GAIN),
    }


def _compressed_attention(random: np.random.Generator, prefix: str) -> dict[str, Array]:
    """Attention over compressed KV: what K and V are made of is stored, not K and V."""
    spread = QUERY_GAIN**2
    absorbed = make_matrix(random, HEADS * KV_RANK, HEAD_WIDTH, 1.0).reshape(HEADS, KV_RANK, HEAD_WIDTH)
    values = make_matrix(random, HEADS * HEAD_WIDTH, KV_RANK, VALUE_GAIN).reshape(HEADS, HEAD_WIDTH, KV_RANK)
    return {
        f"{prefix}attn_norm": make_constant(EMBEDDING, 1.0),
        f"{prefix}attn_q_a": make_matrix(random, QUERY_RANK, EMBEDDING, 1.0),
        f"{prefix}attn_q_a_norm": make_constant(QUERY_RANK, 1.0),
        f"{prefix}attn_q_b": make_matrix(random, HEADS * (HEAD_WIDTH + ROPE_WIDTH), QUERY_RANK, spread),
        f"{prefix}attn_kv_a_mqa": make_matrix(random, KV_RANK + ROPE_WIDTH, EMBEDDING, 1.0),
        f"{prefix}attn_kv_a_norm": make_constant(KV_RANK, 1.0),
        f"{prefix}attn_k_b": absorbed,
        f"{prefix}attn_v_b": values,
        f"{prefix}attn_output": make_matrix(random, EMBEDDING, HEADS * HEAD_WIDTH, VALUE_GAIN),
    }
