"""Write the table of `cllm recommend` anew: `python scripts/model_table.py [REPO=FILE.gguf …]`.

Without files: the models of SHAPES, from the public figures of their architectures. Files (their headers are
enough, as `cllm pull --dry-run` reads them) add the models of their repositories, or replace them. All bytes
are llama.cpp's own: weights by a dry run of its quantisation, the rest by its sums for three contexts.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from cllm.backend.llama.conversion import predict_size
from cllm.backend.llama.gguf import GgufHeader
from cllm.backend.llama.memory import MemoryFit
from cllm.config import EngineConfig
from cllm.models.files import FILE_TYPES, parse_quant
from cllm.models.fit import TABLE

CELLS = 4096
ABOUT = (
    "Sizes are bytes: weights by a dry run of llama.cpp's quantisation of a file with these shapes, cell, "
    "slot and fixed by llama.cpp's sums for 1 × 4096, 1 × 8192 and 2 × 4096 cells of f16 on a CPU. One cell "
    "holds a token, one slot a request; fixed is what remains beside the weights. Shapes: the architectures "
    "as published."
)
K_QUANTS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M")
QWEN: dict[str, Any] = {"vocabulary": 151936, "context": 40960}
GEMMA: dict[str, Any] = {"vocabulary": 262144, "context": 131072, "head": 256, "tied": True}
SMOL: dict[str, Any] = {
    "vocabulary": 49152,
    "context": 8192,
    "head": 64,
    "tied": True,
    "quants": ("Q8_0", "Q4_K_M"),
}


class Shape(NamedTuple):
    """An architecture by its public figures."""

    repo: str
    kind: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    context: int
    head: int = 128
    tied: bool = False
    experts: int = 0
    used_experts: int = 0
    window: int = 0
    quants: tuple[str, ...] = K_QUANTS


SHAPES = (
    Shape(
        "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
        "llama",
        32,
        960,
        15,
        5,
        2560,
        **SMOL | {"quants": ("Q8_0",)},
    ),
    Shape(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
        "llama",
        24,
        2048,
        32,
        32,
        8192,
        **SMOL | {"quants": ("Q4_K_M",)},
    ),
    Shape("Qwen/Qwen3-0.6B-GGUF", "qwen3", 28, 1024, 16, 8, 3072, **QWEN, tied=True, quants=("Q8_0",)),
    Shape("Qwen/Qwen3-1.7B-GGUF", "qwen3", 28, 2048, 16, 8, 6144, **QWEN, tied=True, quants=("Q8_0",)),
    Shape("Qwen/Qwen3-4B-GGUF", "qwen3", 36, 2560, 32, 8, 9728, **QWEN, tied=True),
    Shape("Qwen/Qwen3-8B-GGUF", "qwen3", 36, 4096, 32, 8, 12288, **QWEN),
    Shape("Qwen/Qwen3-14B-GGUF", "qwen3", 40, 5120, 40, 8, 17408, **QWEN),
    Shape("Qwen/Qwen3-32B-GGUF", "qwen3", 64, 5120, 64, 8, 25600, **QWEN),
    Shape("Qwen/Qwen3-30B-A3B-GGUF", "qwen3moe", 48, 2048, 32, 4, 768, **QWEN, experts=128, used_experts=8),
    Shape(
        "ggml-org/gemma-3-1b-it-GGUF",
        "gemma3",
        26,
        1152,
        4,
        1,
        6912,
        **GEMMA | {"context": 32768},
        window=512,
        quants=("Q8_0", "Q4_K_M"),
    ),
    Shape(
        "ggml-org/gemma-3-4b-it-GGUF",
        "gemma3",
        34,
        2560,
        8,
        4,
        10240,
        **GEMMA,
        window=1024,
        quants=("Q8_0", "Q4_K_M"),
    ),
    Shape(
        "ggml-org/gemma-3-12b-it-GGUF",
        "gemma3",
        48,
        3840,
        16,
        8,
        15360,
        **GEMMA,
        window=1024,
        quants=("Q8_0", "Q4_K_M"),
    ),
    Shape(
        "ggml-org/gemma-3-27b-it-GGUF",
        "gemma3",
        62,
        5376,
        32,
        16,
        21504,
        **GEMMA | {"head": 128},
        window=1024,
        quants=("Q8_0", "Q4_K_M"),
    ),
)


def write_head(shape: Shape, path: Path) -> Path:
    """Write a GGUF with these shapes as F16; its data is a hole."""
    writer = gguf.GGUFWriter(path, shape.kind)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    if shape.kind == "llama":
        writer.add_rope_dimension_count(shape.head)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used_experts)
        writer.add_expert_feed_forward_length(shape.feed_forward)
    size = _add_tensors(writer, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size + (1 << 20))
    return path


def _add_tensors(writer: gguf.GGUFWriter, shape: Shape) -> int:
    total = 0

    def add(name: str, *dimensions: int) -> None:
        nonlocal total
        kind, each = ("float32", 4) if len(dimensions) == 1 else ("float16", 2)
        count = each
        for dimension in dimensions:
            count *= dimension
        writer.add_tensor_info(f"{name}.weight", dimensions, np.dtype(kind), count)
        total += count + 32

    width, keys, heads = shape.width, shape.kv_heads * shape.head, shape.heads * shape.head
    add("token_embd", shape.vocabulary, width)
    add("output_norm", width)
    if not shape.tied:
        add("output", shape.vocabulary, width)
    norms = ["attn_norm", "ffn_norm"]
    if shape.kind == "gemma3":
        norms += ["post_attention_norm", "post_ffw_norm"]
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        for norm in norms:
            add(block + norm, width)
        if shape.kind != "llama":
            add(f"{block}attn_q_norm", shape.head)
            add(f"{block}attn_k_norm", shape.head)
        add(f"{block}attn_q", heads, width)
        add(f"{block}attn_k", keys, width)
        add(f"{block}attn_v", keys, width)
        add(f"{block}attn_output", width, heads)
        more, ending = ((shape.experts,), "_exps") if shape.experts else ((), "")
        if shape.experts:
            add(f"{block}ffn_gate_inp", shape.experts, width)
        add(f"{block}ffn_gate{ending}", *more, shape.feed_forward, width)
        add(f"{block}ffn_up{ending}", *more, shape.feed_forward, width)
        add(f"{block}ffn_down{ending}", *more, width, shape.feed_forward)
    return total


def measure(repo: str, path: Path, quants: tuple[str, ...]) -> dict[str, Any]:
    """A row of the table. Raises SetupError."""
    header = GgufHeader(path)

    def need(parallel: int, cells: int) -> int:
        config = EngineConfig(model=str(path), parallel=parallel, ctx_size=parallel * cells, gpu_layers=0)
        fit = MemoryFit(header, config)
        return fit.needed - fit.model

    small, longer, two = need(1, CELLS), need(1, 2 * CELLS), need(2, CELLS)
    cell = (longer - small) // CELLS
    slot = two - small - cell * CELLS
    weights = sum(tensor.weights for tensor in header.tensors)
    experts = sum(tensor.weights for tensor in header.tensors if "_exps" in tensor.name)
    used = header.number("expert_used_count") / max(1, header.number("expert_count"))
    own = parse_quant(path.name)
    return {
        "repo": repo,
        "weights": weights,
        "active": weights - experts + int(experts * used),
        "context": header.context_train,
        "cell": cell,
        "slot": max(0, slot),
        "fixed": small - cell * CELLS - max(0, slot),
        "quants": {kind: predict_size(header, FILE_TYPES[kind]) for kind in quants}
        if quants
        else {own: header.file_bytes},
    }


def main(arguments: list[str]) -> int:
    rows: dict[str, dict[str, Any]] = {}
    if arguments:
        rows = {row["repo"]: row for row in json.loads(TABLE.read_text())["models"]}
    for argument in arguments:
        repo, _, file = argument.partition("=")
        rows[repo] = measure(repo, Path(file), ())
        if not set(rows[repo]["quants"]) <= FILE_TYPES.keys():
            print(f"{file}: its name says no quantisation", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as folder:
        for shape in () if arguments else SHAPES:
            head = write_head(shape, Path(folder, "head-F16.gguf"))
            rows[shape.repo] = measure(shape.repo, head, shape.quants)
            head.unlink()
            print(shape.repo, file=sys.stderr, flush=True)
    found = sorted(rows.values(), key=lambda row: row["weights"])
    lines = ",\n  ".join(json.dumps(row) for row in found)
    date = datetime.date.today().isoformat()
    TABLE.write_text(
        f'{{"date": "{date}",\n "about": {json.dumps(ABOUT, ensure_ascii=False)},\n'
        f' "models": [\n  {lines}\n ]}}\n'
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
