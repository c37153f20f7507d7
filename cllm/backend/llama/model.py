"""Model: a loaded GGUF file and its vocabulary."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from cllm.backend.llama.library import DeferredFrees, Library, Owned
from cllm.errors import ModelFileError
from cllm.types import InfillTokens, ModelInfo, Pooling

_CONTROL_OR_UNKNOWN = (1 << 3) | (1 << 0)  # LLAMA_TOKEN_ATTR_CONTROL, _UNKNOWN: what parse_special governs

_POOLING = {"1": Pooling.MEAN, "2": Pooling.CLS, "3": Pooling.LAST, "4": Pooling.RANK}  # as in GGUF files


class LlamaModel(Owned):
    """Owns a `llama_model`. `vocabulary_only` loads no weights: for the tokenizer worker."""

    def __init__(
        self,
        library: Library,
        path: Path,
        deferred_frees: DeferredFrees,
        *,
        vocabulary_only: bool = False,
        extra_buffers: bool = True,
        gpu_layers: int = -1,
        pooling: str = "",
        progress: Callable[[float], None] | None = None,
    ) -> None:
        api = library.api
        params = api.llama_model_default_params()
        params.vocab_only = vocabulary_only
        params.use_extra_bufts = extra_buffers
        params.n_gpu_layers = gpu_layers

        def on_progress(fraction: float, _: Any) -> bool:
            if progress is not None:
                progress(fraction)
            return True

        callback = api.llama_progress_callback(on_progress)
        params.progress_callback = callback
        pointer = api.llama_model_load_from_file(str(path).encode(), params)
        if not pointer:
            raise ModelFileError(f"llama.cpp cannot load {path.name}; CLLM_LOG_LEVEL=debug shows its reasons")
        super().__init__(pointer, api.llama_model_free, deferred_frees)
        self.api = api
        self.name = path.stem
        self._asked_pooling = pooling
        self.vocabulary = LlamaVocabulary(self)

    @property
    def context_train(self) -> int:
        return int(self.api.llama_model_n_ctx_train(self.pointer))

    def metadata(self, key: str) -> str | None:
        """A scalar of the GGUF's metadata as text."""
        buffer = ctypes.create_string_buffer(1024)
        length = self.api.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if length >= 0 else None

    def _template(self, name: bytes | None) -> str | None:
        template = self.api.llama_model_chat_template(self.pointer, name)
        # For a few models llama.cpp returns the name of a built-in template instead of a template.
        return template.decode("utf-8", "replace") if template and b"{" in template else None

    @cached_property
    def architecture(self) -> str:
        return self.metadata("general.architecture") or "unknown"

    @property
    def causal(self) -> bool:
        """Whether a token attends only to those before it."""
        return self.metadata(f"{self.architecture}.attention.causal") != "false"

    @property
    def pooling(self) -> Pooling:
        """The pooling asked for, else the file's own, else the mean.

        The mean, because the last state of a generating model is about the next token, not about the text.
        """
        if self._asked_pooling:
            return Pooling(self._asked_pooling)
        return _POOLING.get(self.metadata(f"{self.architecture}.pooling_type") or "", Pooling.MEAN)

    @property
    def vector_length(self) -> int:
        if self.pooling is Pooling.RANK:
            return int(self.api.llama_model_n_cls_out(self.pointer))
        return int(self.api.llama_model_n_embd_out(self.pointer))

    def info(self, chat_template: str = "", *, generates: bool = True) -> ModelInfo:
        """Describe the model. A `chat_template` replaces all templates of the file.

        Whether it generates is known only to its context.
        """
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
            recurrent=bool(api.llama_model_is_recurrent(pointer) or api.llama_model_is_hybrid(pointer)),
            sliding_window=api.llama_model_n_swa(pointer),
            generates=generates,
            pooling=self.pooling,
            vector_length=self.vector_length,
        )


class LlamaVocabulary:
    """Token look-ups of a loaded model. Read-only, so safe from any thread while the model lives."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
        self._api = model.api
        self._pointer = model.api.llama_model_get_vocab(model.pointer)
        self._size = int(self._api.llama_vocab_n_tokens(self.pointer))
        self._pieces: dict[int, bytes] = {}

    @property
    def pointer(self) -> Any:
        assert self._model.pointer, "the vocabulary is part of the model"
        return self._pointer

    @property
    def size(self) -> int:
        return self._size

    @cached_property
    def ends(self) -> frozenset[int]:
        """Every end-of-generation token."""
        is_end = self._api.llama_vocab_is_eog
        return frozenset(token for token in range(self._size) if is_end(self.pointer, token))

    @cached_property
    def special_texts(self) -> frozenset[str]:
        attributes, text = self._api.llama_vocab_get_attr, self._api.llama_vocab_get_text
        return frozenset(
            text(self.pointer, token).decode("utf-8", "replace")
            for token in range(self._size)
            if attributes(self.pointer, token) & _CONTROL_OR_UNKNOWN
        )

    @cached_property
    def begin_text(self) -> str:
        return self._spelling(self._api.llama_vocab_bos(self.pointer))

    @cached_property
    def end_text(self) -> str:
        return self._spelling(self._api.llama_vocab_eos(self.pointer))

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
        if api.llama_vocab_get_add_bos(self.pointer):
            named["begin"] = api.llama_vocab_bos
        found = {name: token for name, read in named.items() if (token := read(self.pointer)) >= 0}
        return InfillTokens(**found) if {"prefix", "suffix", "middle"} <= found.keys() else None

    def _spelling(self, token: int) -> str:
        if not 0 <= token < self._size:
            return ""
        return str(self._api.llama_vocab_get_text(self.pointer, token).decode("utf-8", "replace"))

    def is_end(self, token: int) -> bool:
        return token in self.ends

    def is_control(self, token: int) -> bool:
        return bool(self._api.llama_vocab_get_attr(self.pointer, token) & _CONTROL_OR_UNKNOWN)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode()
        capacity = len(data) + 8  # a token has at least one byte; a few more for added ones
        tokens = (ctypes.c_int32 * capacity)()
        count = self._api.llama_tokenize(
            self.pointer, data, len(data), tokens, capacity, add_special, parse_special
        )
        if count < 0:
            tokens = (ctypes.c_int32 * -count)()
            count = self._api.llama_tokenize(
                self.pointer, data, len(data), tokens, -count, add_special, parse_special
            )
        found = list(tokens[:count])
        begin = self._api.llama_vocab_bos(self.pointer)
        if add_special and len(found) > 1 and found[0] == found[1] == begin:
            del found[0]  # the text has its own BOS
        return found

    def tokenize_pair(self, query: str, document: str) -> list[int]:
        def tokenize(text: str, parse_special: bool) -> list[int]:
            return self.tokenize(text, add_special=False, parse_special=parse_special)

        return self._rerank_prompt.tokens(query, document, tokenize, self.special_texts)

    @cached_property
    def _rerank_prompt(self) -> RerankPrompt:
        """The model's own rerank template, else its control tokens around query and document."""
        api, pointer = self._api, self.pointer
        template = api.llama_model_chat_template(self._model.pointer, b"rerank")
        begin, separator = api.llama_vocab_bos(pointer), api.llama_vocab_sep(pointer)
        end = api.llama_vocab_eos(pointer)
        ends = [end if end >= 0 else separator] if api.llama_vocab_get_add_eos(pointer) else []
        middle = [separator] if api.llama_vocab_get_add_sep(pointer) else []
        return RerankPrompt(
            before=[begin] if api.llama_vocab_get_add_bos(pointer) else [],
            between=[*ends, *middle],
            after=ends or middle,  # as at the end of a single text
            template=template.decode("utf-8", "replace") if template else None,
        )

    def piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def _read_piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        count = self._api.llama_token_to_piece(self.pointer, token, buffer, len(buffer), 0, False)
        if count < 0:
            buffer = ctypes.create_string_buffer(-count)
            count = self._api.llama_token_to_piece(self.pointer, token, buffer, len(buffer), 0, False)
        return buffer.raw[:count]


Tokenize = Callable[[str, bool], list[int]]  # text, parse_special


class RerankPrompt(NamedTuple):
    """The rerank prompt of a query and a document: control tokens around them, or a template."""

    before: Sequence[int]
    between: Sequence[int]
    after: Sequence[int]
    template: str | None = None  # with {query} and {document} in it

    def tokens(self, query: str, document: str, tokenize: Tokenize, controls: frozenset[str]) -> list[int]:
        """Tokenize it. No text in `query` or `document` becomes a control token."""
        if self.template is None:
            parts = tokenize(query, False), tokenize(document, False)
            return [*self.before, *parts[0], *self.between, *parts[1], *self.after]
        texts = {"{query}": query, "{document}": document}
        pieces = re.split(r"(\{query\}|\{document\})", self.template)
        if not any(control in text for text in texts.values() for control in controls):
            return tokenize("".join(texts.get(piece, piece) for piece in pieces), True)
        return [
            token
            for piece in pieces
            if piece
            for token in tokenize(texts.get(piece, piece), piece not in texts)
        ]
