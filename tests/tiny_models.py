"""Tiny GGUF models with random weights: real files for llama.cpp that load in milliseconds.

All three share one tokenizer, so the same text gives the same tokens in each:

* token ids 0 to 255 are the single bytes of that value, so any text round-trips;
* 256 to 258 are the control tokens ``<|endoftext|>`` (bos and eos), ``<|im_start|>`` and ``<|im_end|>``
  (eot); the output matrix gives them a logit of 0, so greedy generation never ends by itself and sampling
  ends rarely;
* the rest are merges: common English pairs, a two-byte character, the first two bytes of a three-byte one
  (a token that ends inside a character), then pairs and triples of lowercase letters.

The weights are scaled so that the next token depends on the whole context, not on the last token alone, and
the head width is 32, so that a quantised KV cache (whose blocks are 32 wide) can be tried too.
"""

from __future__ import annotations

import itertools
import math
import shutil
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

END_OF_TEXT = 256
TURN_START = 257
TURN_END = 258
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

VOCABULARY = 512
CONTEXT = 4096
WINDOW = 64

EMBEDDING = 64
LAYERS = 2
HEADS = 4
KEY_VALUE_HEADS = 2
HEAD_WIDTH = 32
FEED_FORWARD = 128
INNER = 2 * EMBEDDING  # llama.cpp's mamba accepts an expansion factor of 2 only
STATE = 16
CONVOLUTION = 4
TIME_STEP_RANK = 4
NORM_EPSILON = 1e-5

QUERY_GAIN = 1.7  # standard deviation of a query's or a key's elements: scores spread by its square
VALUE_GAIN = 2.0  # keeps what the layers add as large as the token's own embedding
LOGIT_SPREAD = 3.0  # standard deviation of the logits

COMMON_MERGES = (
    (b"t", b"h"), (b"h", b"e"), (b"i", b"n"), (b"e", b"r"), (b"a", b"n"), (b"r", b"e"), (b"o", b"n"),
    (b" ", b"t"), (b" ", b"a"), (b" ", b"th"), (b"th", b"e"), (b"in", b"g"), (b"an", b"d"),
    (b"\xc3", b"\xa9"),  # é
    (b"\xe2", b"\x82"),  # the first two bytes of €
)  # fmt: skip

Array = NDArray[np.float32]


def make_basic(directory: Path) -> dict[str, Path]:
    """Write the three models with their defaults into ``directory``, by kind."""
    return {
        "dense": make_dense(directory / "dense.gguf"),
        "sliding": make_sliding_window(directory / "sliding.gguf"),
        "recurrent": make_recurrent(directory / "recurrent.gguf"),
    }


def make_dense(
    path: Path,
    *,
    vocabulary: int = VOCABULARY,
    context: int = CONTEXT,
    seed: int = 0,
    controls: Sequence[str] = (),
    roles: Mapping[str, str] | None = None,
    templates: Mapping[str, str] | None = None,
    split_tensors: int = 0,
) -> Path:
    """Write a llama model with full attention; the same arguments give the same bytes. Returns ``path``.

    With ``split_tensors`` the model has several files of so many tensors; the path of the first is returned.

    ``controls`` are more control tokens, the last ids of the vocabulary; ``roles`` says what some are for
    (``{"fim_pre": "<PRE>"}``); ``templates`` replaces the chat template (the key "default" is the plain one).
    """
    writer = make_writer(path, "llama", vocabulary, context, controls, templates, split_tensors)
    for role, spelling in (roles or {}).items():
        token = vocabulary - len(controls) + list(controls).index(spelling)
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token)
    add_attention_metadata(writer)
    random = np.random.default_rng(seed)
    add_ends(writer, random, vocabulary)
    for layer in range(LAYERS):
        add_attention_layer(writer, random, f"blk.{layer}.")
    return write(writer, path)


def make_reader(path: Path, source: Path, *, context: int, seed: int = 0) -> Path:
    """Write a llama model with full attention and the tokenizer of `source`; its answers end by chance.

    So it reads a prompt in as many tokens as a real model does. Returns ``path``.
    """
    fields = gguf.GGUFReader(source).fields.values()
    copied = {field.name: field for field in fields if field.name.startswith("tokenizer.")}
    vocabulary = len(copied["tokenizer.ggml.tokens"].data)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny llama")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(context)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(LAYERS)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)
    for name, field in copied.items():
        kind = field.types[0]
        items = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=items)
    add_attention_metadata(writer)
    random = np.random.default_rng(seed)
    output = make_matrix(random, vocabulary, EMBEDDING, LOGIT_SPREAD)
    output[copied["tokenizer.ggml.eos_token_id"].contents()] *= 4
    writer.add_tensor("token_embd.weight", make_matrix(random, vocabulary, EMBEDDING, math.sqrt(EMBEDDING)))
    writer.add_tensor("output_norm.weight", make_constant(EMBEDDING, 1.0))
    writer.add_tensor("output.weight", output)
    for layer in range(LAYERS):
        add_attention_layer(writer, random, f"blk.{layer}.")
    return write(writer, path)


def make_sliding_window(path: Path) -> Path:
    """Write a gemma3 model whose first layer sees ``WINDOW`` tokens and whose second sees all."""
    writer = make_writer(path, "gemma3", VOCABULARY, CONTEXT)
    add_attention_metadata(writer)
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern(LAYERS)  # every LAYERS-th layer is full, the others slide
    random = np.random.default_rng(0)
    # gemma3 multiplies the embeddings by the square root of their width: undo that here
    add_ends(writer, random, VOCABULARY, embedding_deviation=1 / math.sqrt(EMBEDDING))
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        add_attention_layer(writer, random, prefix)
        for name in ("attn_q_norm", "attn_k_norm"):
            writer.add_tensor(f"{prefix}{name}.weight", make_constant(HEAD_WIDTH, QUERY_GAIN))
        for name in ("post_attention_norm", "post_ffw_norm"):
            writer.add_tensor(f"{prefix}{name}.weight", make_constant(EMBEDDING, 1.0))
    return write(writer, path)


def make_recurrent(path: Path, *, vocabulary: int = VOCABULARY) -> Path:
    """Write a mamba model (no KV cache). Returns ``path``."""
    writer = make_writer(path, "mamba", vocabulary, CONTEXT)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(CONVOLUTION)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(TIME_STEP_RANK)
    random = np.random.default_rng(0)
    add_ends(writer, random, vocabulary)
    for layer in range(LAYERS):
        _recurrent_layer(writer, random, f"blk.{layer}.")
    return write(writer, path)


def make_adapter(
    path: Path,
    *,
    seed: int = 1,
    architecture: str = "llama",
    rank: int = 4,
    gain: float = 1.0,
    invocation: Sequence[int] = (),
    model: Path | None = None,
    weights: Sequence[str] = ("attn_q", "attn_v"),
    **metadata: str,
) -> Path:
    """Write a LoRA adapter of random matrices for ``make_dense``; the same arguments give the same bytes.

    ``gain`` is the standard deviation of what it adds to a query and a value. With ``invocation`` it is an
    aLoRA. With ``model`` it is for that file, and adapts the ``weights`` of each layer that has them.
    ``metadata`` replaces entries, a double underscore is a dot. Returns ``path``.
    """
    width = {"attn_q": HEADS * HEAD_WIDTH, "attn_v": KEY_VALUE_HEADS * HEAD_WIDTH}
    sizes = {
        f"blk.{layer}.{name}.weight": (EMBEDDING, width[name]) for layer in range(LAYERS) for name in width
    }
    if model is not None:
        reader = gguf.GGUFReader(model)
        architecture = reader.fields["general.architecture"].contents()
        ends = tuple(f".{name}.weight" for name in weights)
        shapes = {tensor.name: tensor.shape for tensor in reader.tensors if tensor.name.endswith(ends)}
        sizes = {name: (int(shape[0]), int(shape[1])) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, architecture)
    kinds = {"general.type": "adapter", "adapter.type": "lora"}
    for key, value in (kinds | {name.replace("__", "."): value for name, value in metadata.items()}).items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", float(rank))
    if invocation:
        writer.add_key_value(
            "adapter.alora.invocation_tokens",
            list(invocation),
            gguf.GGUFValueType.ARRAY,
            sub_type=gguf.GGUFValueType.UINT32,
        )
    random = np.random.default_rng(1000 + seed)
    for name, (inputs, outputs) in sizes.items():
        writer.add_tensor(f"{name}.lora_a", make_matrix(random, rank, inputs, 1.0))
        writer.add_tensor(f"{name}.lora_b", make_matrix(random, outputs, rank, gain))
    return write(writer, path)


def merge_adapters(path: Path, model: Path, scales: Mapping[Path, float]) -> Path:
    """Write a copy of a model with adapters of ``make_adapter`` added to its weights. Returns ``path``."""
    shutil.copy(model, path)
    weights = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path, "r+").tensors}
    for adapter, scale in scales.items():
        parts = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(adapter).tensors}
        for name in {name.rpartition(".")[0] for name in parts}:
            weights[name] += scale * parts[f"{name}.lora_b"] @ parts[f"{name}.lora_a"]
    weights[name].base.flush()
    return path


def make_writer(
    path: Path,
    architecture: str,
    vocabulary: int,
    context: int,
    controls: Sequence[str] = (),
    templates: Mapping[str, str] | None = None,
    split_tensors: int = 0,
    layers: int = LAYERS,
) -> gguf.GGUFWriter:
    """A writer that holds what every model needs besides its tensors and its own hyperparameters."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_tensors)
    writer.add_name(f"tiny {architecture}")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(context)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(layers)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)
    _tokenizer(writer, vocabulary, controls)
    if templates is None:
        writer.add_chat_template(CHAT_TEMPLATE)
    else:
        writer.add_chat_template([{"name": name, "template": text} for name, text in templates.items()])
    return writer


def write(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Write the file out (or several) and return its path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    count = len(writer.tensors)
    writer.close()
    return path if count == 1 else path.with_name(f"{path.stem}-00001-of-{count:05}.gguf")


def _tokenizer(writer: gguf.GGUFWriter, vocabulary: int, controls: Sequence[str] = ()) -> None:
    """Add the module's tokenizer, cut to ``vocabulary`` tokens in all; the last of them are ``controls``.

    Raises ValueError below 260, as llama.cpp wants one merge at least, or when there are not enough merges.
    """
    spelling = _byte_spelling()
    count = vocabulary - len(spelling) - len(CONTROL_TOKENS) - len(controls)
    merges = list(itertools.islice(_merges(), max(count, 0)))
    if not merges or len(merges) != count:
        raise ValueError(f"no tokenizer of {vocabulary} tokens can be made")
    spelled = [["".join(spelling[byte] for byte in part) for part in merge] for merge in merges]
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    # "qwen2" and not "default" or "gpt-2": with those llama_detokenize drops the space before punctuation
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*spelling, *CONTROL_TOKENS, *("".join(merge) for merge in spelled), *controls])
    writer.add_token_types(
        [normal] * len(spelling)
        + [control] * len(CONTROL_TOKENS)
        + [normal] * count
        + [control] * len(controls)
    )
    writer.add_token_merges([" ".join(merge) for merge in spelled])
    writer.add_bos_token_id(END_OF_TEXT)
    writer.add_eos_token_id(END_OF_TEXT)
    writer.add_eot_token_id(TURN_END)
    writer.add_add_bos_token(False)


def _byte_spelling() -> list[str]:
    """GPT-2's printable character for each of the 256 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = itertools.count(0x100)
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


def _merges() -> Iterator[tuple[bytes, bytes]]:
    """Merges in order of rank, each joining pieces that are there already, none joined twice."""
    seen = {first + second for first, second in COMMON_MERGES}
    yield from COMMON_MERGES
    for length in (2, 3):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            word = "".join(letters).encode()
            if word not in seen:
                yield word[:-1], word[-1:]


def add_attention_metadata(
    writer: gguf.GGUFWriter,
    *,
    heads: int = HEADS,
    key_value_heads: int | list[int] = KEY_VALUE_HEADS,
    key: int = HEAD_WIDTH,
    value: int = HEAD_WIDTH,
    rotated: int = HEAD_WIDTH,
    feed_forward: int = FEED_FORWARD,
) -> None:
    """Add the hyperparameters that the architectures with attention share."""
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_value_heads)
    writer.add_key_length(key)
    writer.add_value_length(value)
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(10000.0)


def add_ends(
    writer: gguf.GGUFWriter,
    random: np.random.Generator,
    vocabulary: int,
    embedding_deviation: float = 1.0,
    last_norm: str = "output_norm",
) -> None:
    """Add the tensors before and after the layers: the embeddings, the last norm and the output matrix."""
    embeddings = make_matrix(random, vocabulary, EMBEDDING, embedding_deviation * math.sqrt(EMBEDDING))
    output = make_matrix(random, vocabulary, EMBEDDING, LOGIT_SPREAD)
    output[END_OF_TEXT : TURN_END + 1] = 0
    writer.add_tensor("token_embd.weight", embeddings)
    writer.add_tensor(f"{last_norm}.weight", make_constant(EMBEDDING, 1.0))
    writer.add_tensor("output.weight", output)


def add_attention_layer(
    writer: gguf.GGUFWriter, random: np.random.Generator, prefix: str, *, feed_forward: bool = True
) -> None:
    """Add one layer of attention and, by default, a gated feed-forward network."""
    queries, keys = HEADS * HEAD_WIDTH, KEY_VALUE_HEADS * HEAD_WIDTH
    tensors = {
        "attn_norm": make_constant(EMBEDDING, 1.0),
        "attn_q": make_matrix(random, queries, EMBEDDING, QUERY_GAIN),
        "attn_k": make_matrix(random, keys, EMBEDDING, QUERY_GAIN),
        "attn_v": make_matrix(random, keys, EMBEDDING, VALUE_GAIN),
        "attn_output": make_matrix(random, EMBEDDING, queries, VALUE_GAIN),
    }
    if feed_forward:
        tensors |= {
            "ffn_norm": make_constant(EMBEDDING, 1.0),
            "ffn_gate": make_matrix(random, FEED_FORWARD, EMBEDDING, 1.0),
            "ffn_up": make_matrix(random, FEED_FORWARD, EMBEDDING, 1.0),
            "ffn_down": make_matrix(random, EMBEDDING, FEED_FORWARD, VALUE_GAIN),
        }
    for name, tensor in tensors.items():
        writer.add_tensor(f"{prefix}{name}.weight", tensor)


def _recurrent_layer(writer: gguf.GGUFWriter, random: np.random.Generator, prefix: str) -> None:
    """Add one mamba layer whose states forget over some tokens to some thousands of tokens."""
    steps = np.exp(random.uniform(math.log(0.02), math.log(0.5), INNER))
    decays = np.tile(np.geomspace(0.02, 2.0, STATE), (INNER, 1))
    tensors = {
        "attn_norm.weight": make_constant(EMBEDDING, 1.0),
        "ssm_in.weight": make_matrix(random, 2 * INNER, EMBEDDING, VALUE_GAIN),
        "ssm_conv1d.weight": make_matrix(random, INNER, CONVOLUTION, 1.0),
        "ssm_conv1d.bias": make_constant(INNER, 0.0),
        "ssm_x.weight": make_matrix(random, TIME_STEP_RANK + 2 * STATE, INNER, 1.0),
        "ssm_dt.weight": make_matrix(random, INNER, TIME_STEP_RANK, 1.0),
        "ssm_dt.bias": np.log(np.expm1(steps)).astype(np.float32),  # softplus turns it back into steps
        "ssm_a": (-decays).astype(np.float32),
        "ssm_d": make_constant(INNER, 1.0),
        "ssm_out.weight": make_matrix(random, EMBEDDING, INNER, VALUE_GAIN),
    }
    for name, tensor in tensors.items():
        writer.add_tensor(f"{prefix}{name}", tensor)


def make_matrix(random: np.random.Generator, outputs: int, inputs: int, gain: float) -> Array:
    """A matrix that turns inputs of standard deviation 1 into outputs of standard deviation ``gain``."""
    matrix = random.standard_normal((outputs, inputs), dtype=np.float32)
    matrix *= np.float32(gain / math.sqrt(inputs))
    return matrix


def make_constant(length: int, value: float) -> Array:
    """A vector of equal elements."""
    return np.full(length, value, dtype=np.float32)
