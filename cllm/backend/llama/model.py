"""Model: a loaded GGUF file and its vocabulary."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Mapping
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from cllm.backend.llama.gguf import GgufFile, GgufHeader
from cllm.backend.llama.library import DeferredFrees, Library, Owned
from cllm.backend.llama.placement import asked_layers, experts_pattern
from cllm.config import LOAD_MODES, EngineConfig
from cllm.errors import ConfigError, ModelFileError
from cllm.types import InfillTokens, ModelInfo, Pooling, TokenBound

_CONTROL_OR_UNKNOWN = (1 << 3) | (1 << 0)  # LLAMA_TOKEN_ATTR_CONTROL, _UNKNOWN: what parse_special governs
_SPELLED = _CONTROL_OR_UNKNOWN | (1 << 4)  # _USER_DEFINED: found in a text as they are written
_NORMAL = 1 << 2  # LLAMA_TOKEN_ATTR_NORMAL
_STRIPS = (1 << 7) | (1 << 8)  # LLAMA_TOKEN_ATTR_LSTRIP, _RSTRIP: drops the spaces beside it


def _byte_level() -> list[tuple[int, bytes]]:
    """The bytes of UTF-8, each with its character in byte-level BPE: itself where that is printable."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    characters = {byte: 256 + index for index, byte in enumerate(others)}
    return [(byte, chr(characters.get(byte, byte)).encode()) for byte in (*range(0xC0), *range(0xC2, 0xF5))]


_BYTE_LEVEL = _byte_level()
_NO_ROPE, _MROPE_TYPES = -1, (8, 40)  # LLAMA_ROPE_TYPE_NONE, _MROPE, _IMROPE: a media row has four positions
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}  # llama_split_mode
# By their numbers in llama.cpp and in GGUF files.
POOLING_TYPES = (Pooling.NONE, Pooling.MEAN, Pooling.CLS, Pooling.LAST, Pooling.RANK)


def _place(library: Library, config: EngineConfig, params: Any, *, vocabulary_only: bool) -> list[Any]:
    """Set in `params` where the layers go. Returns what has to live until the model is loaded."""
    api, layers = library.api, asked_layers(config)
    # A negative number means all. Without a layer there no GPU is touched: its context would take memory.
    params.n_gpu_layers = -1 if layers is None else layers
    if vocabulary_only or layers == 0:
        devices = (ctypes.c_void_p * 1)()
        params.devices = devices
        return [devices]
    params.split_mode = _SPLIT_MODES[config.split_mode]
    params.main_gpu = config.main_gpu
    split = (ctypes.c_float * api.llama_max_devices())()
    for index, part in enumerate(part for part in config.tensor_split.split(",") if part):
        split[index] = float(part)
    params.tensor_split = split
    placed = [text.rpartition("=")[::2] for text in config.override_tensor]  # the first that matches counts
    placed += [(experts_pattern(config.n_cpu_moe), "CPU")] if config.n_cpu_moe else []
    overrides = (api.llama_model_tensor_buft_override * (len(placed) + 1))()  # the last one is the end
    for override, (pattern, name) in zip(overrides, placed, strict=False):
        if not (device := api.ggml_backend_dev_by_name(name.encode())):
            raise ConfigError(f"override_tensor: there is no device {name}; CPU is one")
        override.pattern, override.buft = pattern.encode(), api.ggml_backend_dev_buffer_type(device)
    params.tensor_buft_overrides = overrides
    return [split, overrides]


def _pack_overrides(metadata: Mapping[str, int | float | bool | str]) -> Any:
    """Metadata instead of the file's: an array of `llama_model_kv_override`."""
    data = b""
    for key, value in metadata.items():
        tag, form = {int: (0, "q"), float: (1, "d"), bool: (2, "?"), str: (3, "128s")}[type(value)]
        packed = struct.pack(form, value.encode() if isinstance(value, str) else value)
        data += struct.pack("i128s4x128s", tag, key.encode(), packed)
    return ctypes.create_string_buffer(data, len(data) + struct.calcsize("i128s4x128s"))  # the end is empty


def _load(api: Any, path: Path, params: Any, progress: Callable[[float], None] | None) -> Any:
    """Load a file. What `progress` raises ends the loading and is raised here."""
    raised: list[BaseException] = []

    def on_progress(fraction: float, _: Any) -> bool:
        try:
            if progress is not None:
                progress(fraction)
        except BaseException as error:  # it cannot pass through native code
            raised.append(error)
        return not raised

    params.progress_callback = api.llama_progress_callback(on_progress)
    pointer = api.llama_model_load_from_file(str(path).encode(), params)
    if raised:
        if pointer:
            api.llama_model_free(pointer)
        raise raised[0]
    if not pointer:
        raise ModelFileError(f"llama.cpp cannot load {path.name}; CLLM_LOG_LEVEL=debug shows its reasons")
    return pointer


class LlamaModel(Owned):
    """Owns a `llama_model`. For the tokenizer worker `vocabulary_only` suffices.

    Without `weights` it has its hyperparameters, too: what libmtmd asks of it.
    """

    def __init__(
        self,
        library: Library,
        config: EngineConfig,
        deferred_frees: DeferredFrees,
        *,
        vocabulary_only: bool = False,
        weights: bool = True,
        dry: GgufHeader | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Load it. What `progress` raises ends the loading and is raised here.

        With `dry`, the header of the file, llama.cpp only simulates its allocations: see `dry_load`.
        """
        api = library.api
        params = api.llama_model_default_params()
        params.load_mode = LOAD_MODES.index(config.load_mode) - 1
        if dry is not None or not weights:
            params.no_alloc, params.load_mode = True, 0  # LLAMA_LOAD_MODE_NONE: nothing is mapped, either
        metadata = config.metadata
        if dry is not None:  # without the vocabulary, which takes long to read
            metadata |= {"tokenizer.ggml.model": "none", f"{dry.architecture}.vocab_size": dry.vocabulary}
        overrides = _pack_overrides(metadata)
        params.kv_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        params.vocab_only = vocabulary_only
        params.load_mtp = config.drafter == "mtp"
        params.use_extra_bufts = config.extra_buffers is not False
        placed = _place(library, config, params, vocabulary_only=vocabulary_only or not weights)
        path = Path(config.model)
        pointer = _load(api, path, params, progress)
        del placed  # llama.cpp reads it while it loads
        super().__init__(pointer, api.llama_model_free, deferred_frees)
        self.api = api
        self.file = path.name
        # Of all files of a model.
        self.name = next(iter(config.names), re.sub(r"-\d{5}-of-\d{5}$", "", path.stem))
        self.vocabulary = LlamaVocabulary(self)
        self.recurrent = bool(api.llama_model_is_recurrent(pointer) or api.llama_model_is_hybrid(pointer))
        self.sliding_window = int(api.llama_model_n_swa(pointer))
        self.media_width = int(api.llama_model_n_embd_inp(pointer))
        self.architecture = self.metadata("general.architecture") or "unknown"
        rope = api.llama_model_rope_type(pointer)
        self.position_sections = 4 if rope in _MROPE_TYPES else 1
        self.context_train = trained = int(api.llama_model_n_ctx_train(pointer))
        if rope != _NO_ROPE:  # positions that were learned end there
            original = self.metadata(f"{self.architecture}.rope.scaling.original_context_length")
            self.context_train = config.extend_context(trained, int(original or trained))
        # A token of a causal model attends only to those before it.
        self.causal = self.metadata(f"{self.architecture}.attention.causal") != "false"
        # Not LAST by default: a generating model's last state is about the next token, not about the text.
        own = self.metadata(f"{self.architecture}.pooling_type") or ""
        own_pooling = POOLING_TYPES[int(own)] if own in ("1", "2", "3", "4") else Pooling.MEAN
        self._senses = GgufFile(Path(config.mmproj)).metadata if config.mmproj else {}
        self.pooling = Pooling(config.pooling) if config.pooling else own_pooling
        length = api.llama_model_n_cls_out if self.pooling is Pooling.RANK else api.llama_model_n_embd_out
        self.vector_length = int(length(pointer))

    def close(self) -> None:
        super().close()
        self.vocabulary.__dict__.pop("pointer", None)  # a part of the model

    def metadata(self, key: str) -> str | None:
        """A scalar of the GGUF's metadata as text."""
        buffer = ctypes.create_string_buffer(1024)
        length = self.api.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if length >= 0 else None

    def _template(self, name: bytes | None) -> str | None:
        template = self.api.llama_model_chat_template(self.pointer, name)
        # For a few models llama.cpp returns the name of a built-in template instead of a template.
        return template.decode("utf-8", "replace") if template and b"{" in template else None

    def info(self, chat_template: str = "", *, generates: bool = True) -> ModelInfo:
        """Describe the model. A `chat_template` replaces the file's; only a context knows if it generates."""
        api, pointer = self.api, self.pointer
        description = ctypes.create_string_buffer(256)
        api.llama_model_desc(pointer, description, len(description))
        return ModelInfo(
            name=self.name,
            architecture=self.architecture,
            description=description.value.decode("utf-8", "replace"),
            parameters=api.llama_model_n_params(pointer),
            size_bytes=api.llama_model_size(pointer),
            vocabulary_size=self.vocabulary.size,
            context_train=self.context_train,
            embedding_length=api.llama_model_n_embd(pointer),
            layers=api.llama_model_n_layer(pointer),
            chat_template=chat_template or self._template(None),
            tool_template=None if chat_template else self._template(b"tool_use"),
            recurrent=self.recurrent,
            sliding_window=self.sliding_window,
            generates=generates,
            pooling=self.pooling,
            vector_length=self.vector_length,
            file=self.file,
            begin_text=self.vocabulary.begin_text,
            end_text=self.vocabulary.end_text,
            sees=bool(self._senses.get("clip.has_vision_encoder")),
            hears=bool(self._senses.get("clip.has_audio_encoder")),
        )


class LlamaVocabulary:
    """Token look-ups of a loaded model. Read-only, so safe from any thread while the model lives."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
        self._api = api = model.api
        self.pointer = api.llama_model_get_vocab(model.pointer)
        self.size = int(api.llama_vocab_n_tokens(self.pointer))
        self._adds_begin = bool(api.llama_vocab_get_add_bos(self.pointer))  # llama.cpp, before a text
        self.piece: Callable[[int], bytes] = cache(self._read_piece)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Every end-of-generation token."""
        is_end, pointer = self._api.llama_vocab_is_eog, self.pointer
        return frozenset(token for token in range(self.size) if is_end(pointer, token))

    @property
    def special_texts(self) -> frozenset[str]:
        return self._scanned[0]

    @property
    def bound(self) -> TokenBound:
        return self._scanned[1]

    @cached_property
    def _scanned(self) -> tuple[frozenset[str], TokenBound]:
        """Everything that needs a look at each token: two calls for each of up to 256,000."""
        api, pointer = self._api, self.pointer
        attribute, text_of = api.llama_vocab_get_attr, api.llama_vocab_get_text
        special: list[str] = []
        short: set[bytes] = set()
        longest, strips = 0, 0
        kind = self._model.metadata("tokenizer.ggml.model")
        space = self.tokenize(" ", add_special=False, parse_special=False) if kind == "gpt2" else []
        # BPE over bytes, each written as a character of its own.
        byte_level = [text_of(pointer, token) for token in space] == ["Ġ".encode()]
        for token in range(self.size):
            attributes, text = attribute(pointer, token), text_of(pointer, token)
            strips |= attributes & _STRIPS
            if attributes & _CONTROL_OR_UNKNOWN:
                special.append(text.decode("utf-8", "replace"))
            if len(text) <= 2:
                short.add(text)
            if len(text) > longest:
                # In byte-level BPE a character stands for a byte.
                characters = byte_level and attributes & (_NORMAL | _SPELLED) == _NORMAL
                longest = max(longest, len(text.decode("utf-8", "replace") if characters else text))
        if strips or not (byte_level or kind == "llama"):
            return frozenset(special), TokenBound()
        dropped = bytes(byte for byte, text in _BYTE_LEVEL if text not in short) if byte_level else b""
        return frozenset(special), TokenBound(longest, dropped)

    @cached_property
    def begin_text(self) -> str:
        return self.spelling(self._api.llama_vocab_bos(self.pointer))

    @cached_property
    def end_text(self) -> str:
        return self.spelling(self._api.llama_vocab_eos(self.pointer))

    @cached_property
    def infill(self) -> InfillTokens | None:
        """Fill-in-the-middle tokens; None unless the model has prefix, suffix and middle."""
        api = self._api
        named = {
            "prefix": api.llama_vocab_fim_pre,
            "suffix": api.llama_vocab_fim_suf,
            "middle": api.llama_vocab_fim_mid,
            "repository": api.llama_vocab_fim_rep,
            "separator": api.llama_vocab_fim_sep,
        }
        if self._adds_begin:
            named["begin"] = api.llama_vocab_bos
        found = {name: token for name, read in named.items() if (token := read(self.pointer)) >= 0}
        return InfillTokens(**found) if {"prefix", "suffix", "middle"} <= found.keys() else None

    def spelling(self, token: int) -> str:
        if not 0 <= token < self.size:
            return ""
        return str(self._api.llama_vocab_get_text(self.pointer, token).decode("utf-8", "replace"))

    def is_control(self, token: int) -> bool:
        return bool(self._api.llama_vocab_get_attr(self.pointer, token) & _CONTROL_OR_UNKNOWN)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if add_special and parse_special and self._adds_begin:
            text = text.removeprefix(self.begin_text)  # asked for twice, llama.cpp warns of it
        data = text.encode()
        count = -(len(data) + 8)  # a token has at least one byte; a few more for added ones
        while count < 0:  # room for -count is needed
            tokens = (ctypes.c_int32 * -count)()
            room, flags = (tokens, -count), (add_special, parse_special)
            count = self._api.llama_tokenize(self.pointer, data, len(data), *room, *flags)
        return list(tokens[:count])

    def tokenize_pair(self, query: str, document: str) -> list[int]:
        """The model's own rerank template, else its control tokens around query and document."""
        api, pointer, tokenize = self._api, self.pointer, partial(self.tokenize, add_special=False)
        if template := api.llama_model_chat_template(self._model.pointer, b"rerank"):
            texts = {"{query}": query, "{document}": document}
            pieces = re.split(r"(\{query\}|\{document\})", template.decode("utf-8", "replace"))
            if not any(control in text for text in texts.values() for control in self.special_texts):
                return tokenize("".join(texts.get(piece, piece) for piece in pieces), parse_special=True)
            parts = [tokenize(texts.get(one, one), parse_special=one not in texts) for one in pieces if one]
            return [token for part in parts for token in part]
        first, second = (tokenize(text, parse_special=False) for text in (query, document))
        begin = [api.llama_vocab_bos(pointer)] if self._adds_begin else []
        separator, end = api.llama_vocab_sep(pointer), api.llama_vocab_eos(pointer)
        ends = [end if end >= 0 else separator] if api.llama_vocab_get_add_eos(pointer) else []
        middle = [separator] if api.llama_vocab_get_add_sep(pointer) else []
        # After the document as at the end of a single text.
        return [*begin, *first, *ends, *middle, *second, *(ends or middle)]

    def _read_piece(self, token: int) -> bytes:
        count = -64
        while count < 0:  # room for -count bytes is needed
            buffer = ctypes.create_string_buffer(-count)
            count = self._api.llama_token_to_piece(self.pointer, token, buffer, len(buffer), 0, False)
        return buffer.raw[:count]
