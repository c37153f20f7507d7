"""Layers: what each layer of a model keeps in memory, from the metadata of its GGUF file.

llama.cpp allocates the same, which `tests/contract/test_memory.py` checks. An architecture that is not named
here counts as one with full attention in all layers: its estimate may be too large, not too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from cllm.backend.llama.context import request_share
from cllm.backend.llama.gguf import GgufHeader

_STATE_BYTES = 4  # recurrent states are f32

# Encoders and diffusion models see all tokens at once and keep none.
_NO_MEMORY = {
    *("bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert"),
    *("modern-bert", "gemma-embedding", "wavtokenizer-dec", "dream", "llada", "llada-moe", "rnd1"),
}
_RECURRENT = {"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"}
# Hybrids whose recurrent layers are those without KV heads.
_HYBRID = {
    *("jamba", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"),
    *("kimi-linear", "kimi-k3", "bailingmoe3", "glm5-next"),
}
# Hybrids whose every n-th layer has full attention, by the default of n.
_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
# Sliding windows: in every group of so many layers all but one slide. A list in the file comes first.
_SLIDING = {
    **dict.fromkeys(("gemma2", "gpt-oss"), 2),
    **dict.fromkeys(("cohere2", "cohere2moe", "exaone4", "exaone-moe", "llama4", "olmo2", "afmoe"), 4),
    **dict.fromkeys(("mellum", "muse-glimmer", "laguna", "smallthinker"), 4),
    "gemma3n": 5,
    "gemma3": 6,
    "plamo3": 8,
}
_FULL_FIRST = {"cohere2moe", "laguna", "smallthinker"}  # the first of a group is the full one
_WINDOWS = {"gemma2": 4096, "exaone4": 4096, "llama4": 8192}  # where the file has none


class Layer(NamedTuple):
    """Elements of K and V that a layer keeps of a token, and bytes of recurrent state of a slot."""

    keys: int = 0
    values: int = 0
    slides: bool = False
    state: int = 0


class Layers:
    """The memory of a model: its layers, and the window of those that slide."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        architecture = header.architecture
        count = header.number("block_count")
        self.window = header.number("attention.sliding_window", _WINDOWS.get(architecture, 0))
        recurrent, slides = self._recurrent_layers(count), self._sliding_layers(count)
        state = self._state_bytes()
        # The layers of multi-token prediction, at the end, are not run; shared ones use another layer's KV.
        run = count - min(count, header.number("nextn_predict_layers"))
        own = count - min(count, header.number("attention.shared_kv_layers"))
        layers = []
        for index in range(0 if architecture in _NO_MEMORY else run):
            layer = Layer(state=state) if recurrent[index] else Layer()
            if index < own and (not recurrent[index] or architecture == "falcon-h1"):
                keys, values = self._cell(index, slides[index])
                layer = layer._replace(keys=keys, values=values, slides=slides[index])
            layers.append(layer)
        self.layers: Sequence[Layer] = layers
        self._kinds = set(layers)  # most are alike

    @property
    def keeps_cells(self) -> bool:
        """Whether a longer text takes more memory."""
        return any(layer.keys for layer in self._kinds)

    def kv_bytes(
        self,
        share: int,
        slots: int,
        *,
        types: tuple[str, str] = ("f16", "f16"),
        batch_tokens: int = 512,
        flash: bool = True,
    ) -> int:
        """Bytes of K and V of `slots` KV streams of `share` cells each."""
        return sum(self.kv_by_layer(share, slots, types, batch_tokens, flash=flash))

    def kv_by_layer(
        self,
        share: int,
        slots: int,
        types: tuple[str, str],
        batch_tokens: int,
        *,
        unified: bool = False,
        flash: bool = True,
    ) -> list[int]:
        """The same by layer; with `unified`, of one pool with the cells of all slots."""
        streams, length = (1, share * slots) if unified else (slots, share)
        window = request_share(min(length, self.window * (slots if unified else 1) + batch_tokens), 1)
        widest = max((layer.values for layer in self._kinds), default=0)
        sizes = dict.fromkeys(self._kinds, 0)
        for layer in self._kinds:
            if layer.keys:
                values = widest if layer.values and not flash else layer.values  # V is transposed then
                cell = _row_bytes(layer.keys, types[0]) + _row_bytes(values, types[1])
                sizes[layer] = cell * streams * (window if layer.slides else request_share(length, 1))
        return [sizes[layer] for layer in self.layers]

    def _cell(self, index: int, slides: bool) -> tuple[int, int]:
        """Elements of K and V of a token in this layer."""
        header = self._header
        first = header.of_layer("attention.head_count", 0)
        if not first:
            return 0, 0
        heads = header.of_layer(
            "attention.head_count_kv", index, header.of_layer("attention.head_count", index)
        )
        width = header.number("embedding_length") // first
        key = header.number("attention.key_length", width)
        value = header.number("attention.value_length", width)
        if slides:
            key = header.number("attention.key_length_swa", key)
            value = header.number("attention.value_length_swa", value)
        if header.number("attention.key_length_mla"):
            value = 0  # compressed KV: V is a part of K
        return heads * key + header.number("attention.indexer.key_length"), heads * value

    def _recurrent_layers(self, count: int) -> list[bool]:
        header, architecture = self._header, self._header.architecture
        if architecture in _RECURRENT or architecture == "falcon-h1":
            return [True] * count
        if interval := _INTERVAL.get(architecture):
            if f"{architecture}.attention.recurrent_layers" in header.metadata:
                return [bool(header.of_layer("attention.recurrent_layers", i)) for i in range(count)]
            interval = header.number("full_attention_interval") or interval
            return [(i + 1) % interval != 0 for i in range(count)]
        if architecture not in _HYBRID:
            return [False] * count
        # Nemotron-H has layers that are feed-forward networks only.
        only_forward = architecture.startswith("nemotron")
        return [
            not header.of_layer("attention.head_count_kv", i)
            and not (only_forward and header.of_layer("feed_forward_length", i))
            for i in range(count)
        ]

    def _sliding_layers(self, count: int) -> list[bool]:
        header, architecture = self._header, self._header.architecture
        ignored = architecture == "phi3" or (architecture == "exaone4" and count != 64)
        if not self.window or ignored:
            return [False] * count
        if architecture == "lfm2":
            return [True] * count
        if isinstance(header.metadata.get(f"{architecture}.attention.sliding_window_pattern"), list):
            return [bool(header.of_layer("attention.sliding_window_pattern", i)) for i in range(count)]
        if architecture not in _SLIDING:
            return [False] * count
        group = header.number("attention.sliding_window_pattern", _SLIDING[architecture])
        full = 0 if architecture in _FULL_FIRST else group - 1
        return [group == 0 or i % group != full for i in range(count)]

    def _state_bytes(self) -> int:
        """Bytes of the state of a recurrent layer of one slot: of its convolution, and of its memory."""
        number = self._header.number
        width, kernel, inner = number("embedding_length"), number("ssm.conv_kernel"), number("ssm.inner_size")
        history = max(0, kernel - 1)
        if head := number("wkv.head_size"):  # RWKV
            elements = width * (number("token_shift_count", 2) + head)
        elif length := number("shortconv.l_cache"):  # LFM2
            elements = width * (length - 1)
        elif head := number("kda.head_dim"):  # Kimi
            heads = self._header.of_layer("attention.head_count", 0)
            elements = heads * head * (3 * (history or 3) + head)
        elif self._header.architecture == "minimax-01":
            elements = number("attention.head_count") * number("attention.key_length") ** 2
        else:  # Mamba and gated delta nets
            groups, state = number("ssm.group_count"), number("ssm.state_size")
            elements = history * (inner + 2 * groups * state) + state * inner
        return elements * _STATE_BYTES


def _row_bytes(elements: int, type_name: str) -> int:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name.upper()]]
    return -(-elements // int(block)) * int(block_bytes)
