"""Media encoder: turns pictures and sound into rows of embeddings that a text model computes as items."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from cllm.backend.llama.fingerprint import sample_digest
from cllm.backend.llama.library import DeferredFrees, Library, Owned
from cllm.backend.llama.model import LlamaModel
from cllm.errors import EngineError, InvalidRequest, ModelFileError, NotSupported
from cllm.types import Prompt, Span, make_pseudo_ids

Rows = npt.NDArray[np.float32]
Name = TypeVar("Name", bound=Hashable)
_TEXT, _IMAGE = 0, 1  # mtmd_input_chunk_type
_SENTINEL, _CONTEXT_WORDS = 0x5EED_2E5, 128  # a number of threads to be found again; of an mtmd_context
_FULL, _OTHER_SHAPE = 2, 3  # of mtmd_batch_add_chunk: it goes into the next batch


class PromptText(NamedTuple):
    """Text of a prompt; control tokens in it are parsed only where it is the template's."""

    text: str
    parse_special: bool = False


class Picture(NamedTuple):
    """A decoded picture: three bytes a pixel, row by row."""

    width: int
    height: int
    rgb: bytes


class Sound(NamedTuple):
    """Decoded sound: one channel at the encoder's sample rate."""

    samples: Rows


Part = PromptText | Picture | Sound


class MediaPrompt(Owned):
    """A prompt with media. Owns its native chunks, which are needed until they are encoded."""

    prompt: Prompt
    chunks: dict[str, Any]  # of media, by their digests

    def close(self) -> None:
        super().close()
        self.chunks = {}  # parts of the pointer


class MediaEncoder(Owned):
    """Owns an `mtmd_context`: a multimodal projector (mmproj) for a text model.

    The model needs no weights. Client bytes are decoded before: only pixels and samples come here.
    """

    def __init__(
        self,
        library: Library,
        model: LlamaModel,
        mmproj: Path,
        deferred_frees: DeferredFrees,
        *,
        threads: int,
        device: str = "",
    ) -> None:
        """The `device` is a GPU's name; else the CPU encodes.

        Raise LibraryError without libmtmd, ModelFileError for a file that does not suit the model.
        """
        library.load_media()
        self._api = api = library.api
        params = api.mtmd_context_params_default()
        params.use_gpu, params.print_timings, params.n_threads = bool(device), False, _SENTINEL
        if device:
            params.device = api.ggml_backend_dev_by_name(device.encode())
        if not (pointer := api.mtmd_init_from_file(str(mmproj).encode(), model.pointer, params)):
            raise ModelFileError(
                f"{mmproj.name} cannot be loaded as the multimodal projector of {model.file}; "
                "CLLM_LOG_LEVEL=debug shows llama.cpp's reasons"
            )
        super().__init__(pointer, api.mtmd_free, deferred_frees)
        self._threads = self._find_threads()
        self._threads.value = threads
        self.sees = bool(api.mtmd_support_vision(pointer))
        self.sample_rate = max(0, int(api.mtmd_get_audio_sample_rate(pointer)))  # 0: it does not hear
        self._model = model  # whose vocabulary it reads
        self._mrope = bool(api.mtmd_decode_use_mrope(pointer))
        self._salt = f"{mmproj.stat().st_size}:{sample_digest(mmproj)}".encode()

    # Tokenizing ------------------------------------------------------------------------------------

    def tokenize(self, parts: Sequence[Part], *, add_special: bool = True) -> MediaPrompt:
        """The prompt that these parts make, not yet encoded. Raises InvalidRequest or NotSupported."""
        api = self._api
        for part in parts:
            self._check(part)
        found = MediaPrompt(api.mtmd_input_chunks_init(), api.mtmd_input_chunks_free, self.deferred_frees)
        try:
            with self._native_parts(parts) as pointers:
                arguments = (self.pointer, found.pointer, pointers, len(parts), add_special)
                if api.mtmd_tokenize_from_parts(*arguments) != 0:
                    raise InvalidRequest("the model's projector cannot process this picture or sound")
            found.prompt, found.chunks = self._read_chunks(found.pointer)
        except BaseException:
            found.close()
            raise
        return found

    def decode_sound(self, data: bytes) -> Sound:
        """The samples of a WAV, MP3 or FLAC file. Raises InvalidRequest."""
        if not self.sample_rate:
            raise InvalidRequest("this model does not take sound")
        api, given = self._api, (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        options = api.mtmd_helper_init_opt_default()
        bitmap = api.mtmd_helper_bitmap_init_from_buf(self.pointer, given, len(data), False, options).bitmap
        if not bitmap:
            raise InvalidRequest("the sound cannot be read: it must be a whole WAV, MP3 or FLAC file")
        with Owned(bitmap, api.mtmd_bitmap_free, self.deferred_frees):
            size = api.mtmd_bitmap_get_n_bytes(bitmap)
            return Sound(np.frombuffer(ctypes.string_at(api.mtmd_bitmap_get_data(bitmap), size), np.float32))

    def _check(self, part: Part) -> None:
        """Raise unless the projector takes this kind, and the data is as long as it says."""
        if isinstance(part, Picture):
            if not self.sees:
                raise InvalidRequest("this model does not take pictures")
            if min(part.width, part.height) < 1 or len(part.rgb) != 3 * part.width * part.height:
                raise InvalidRequest(f"a picture of {part.width} × {part.height} pixels has 3 bytes for each")
        elif isinstance(part, Sound):
            if not self.sample_rate:
                raise InvalidRequest("this model does not take sound")
            if not len(part.samples):
                raise InvalidRequest("the sound is empty")

    @contextmanager
    def _native_parts(self, parts: Sequence[Part]) -> Iterator[Any]:
        """An array of pointers to `mtmd_input_part`, good inside the block."""
        api = self._api
        structs = (api.mtmd_input_part * len(parts))()
        kept: list[Any] = [structs]
        with ExitStack() as bitmaps:
            for part, struct in zip(parts, structs, strict=True):
                if isinstance(part, PromptText):
                    data = part.text.encode()
                    kept.append(text := api.mtmd_input_text(data, len(data), False, part.parse_special))
                    struct.text = ctypes.pointer(text)
                    continue
                bitmap = self._make_bitmap(part)
                bitmaps.callback(api.mtmd_bitmap_free, bitmap)
                api.mtmd_bitmap_set_id(bitmap, self._digest(part).encode())
                struct.bitmap = bitmap
            yield (ctypes.POINTER(api.mtmd_input_part) * len(parts))(*map(ctypes.pointer, structs))

    def _make_bitmap(self, part: Picture | Sound) -> Any:
        if isinstance(part, Picture):
            pixels = np.frombuffer(part.rgb, np.uint8).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            return self._api.mtmd_bitmap_init(part.width, part.height, pixels)
        samples = np.ascontiguousarray(part.samples, np.float32)
        address = samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return self._api.mtmd_bitmap_init_from_audio(len(samples), address)

    def _digest(self, part: Picture | Sound) -> str:
        """What its rows depend on: the projector, the shape and the data."""
        shape = f"{part.width}x{part.height}" if isinstance(part, Picture) else "sound"
        data = part.rgb if isinstance(part, Picture) else np.ascontiguousarray(part.samples, np.float32).data
        digest = hashlib.sha256(self._salt + b"\0" + shape.encode() + b"\0")
        digest.update(data)
        return digest.hexdigest()

    def _read_chunks(self, chunks: Any) -> tuple[Prompt, dict[str, Any]]:
        api = self._api
        items: list[int] = []
        spans: list[Span] = []
        found: dict[str, Any] = {}
        counts: dict[str, int] = {}  # of chunks by picture: a large one has several tiles
        for index in range(api.mtmd_input_chunks_size(chunks)):
            chunk = api.mtmd_input_chunks_get(chunks, index)
            if api.mtmd_input_chunk_get_type(chunk) == _TEXT:
                items += self._read_tokens(chunk)
                continue
            name = api.mtmd_input_chunk_get_id(chunk).decode()
            counts[name] = counts.get(name, -1) + 1
            span = self._read_span(chunk, len(items), f"{name}.{counts[name]}")
            items += make_pseudo_ids(span.media, span.end - span.begin)
            spans.append(span)
            found[span.media] = chunk
        return Prompt(tuple(items), tuple(spans)), found

    def _read_tokens(self, chunk: Any) -> list[int]:
        count = ctypes.c_size_t()
        found = self._api.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
        tokens: list[int] = found[: count.value]
        if any(token < 0 for token in tokens):  # mtmd looks them up by their spelling
            raise ModelFileError("the model's vocabulary lacks a token that its projector puts around media")
        return tokens

    def _read_span(self, chunk: Any, begin: int, media: str) -> Span:
        api = self._api
        count = int(api.mtmd_input_chunk_get_n_tokens(chunk))
        positions = int(api.mtmd_input_chunk_get_n_pos(chunk))
        causal = not api.mtmd_decode_use_non_causal(self.pointer, chunk)
        image = self._mrope and api.mtmd_input_chunk_get_type(chunk) == _IMAGE
        columns = self._read_columns(chunk, count) if image else 0
        if not columns and positions != count:
            raise NotSupported("the positions of this model's media are not supported")
        return Span(begin, begin + count, positions, media, columns, causal)

    def _read_columns(self, chunk: Any, count: int) -> int:
        """The width of a picture whose rows lie in a grid. Raises NotSupported for another order of them."""
        places = (self._api.mtmd_decoder_pos * count)()
        image = self._api.mtmd_input_chunk_get_tokens_image(chunk)
        self._api.mtmd_helper_image_get_decoder_pos(image, 0, places)
        columns = 1 + max(int(place.x) for place in places)
        expected = ((0, index % columns, index // columns) for index in range(count))
        if any((place.t, place.x, place.y) != at for place, at in zip(places, expected, strict=True)):
            raise NotSupported("the positions of this model's media are not supported")
        return columns

    # Encoding --------------------------------------------------------------------------------------

    def encode_batch(self, chunks: Mapping[Name, Any], threads: int = 0) -> dict[Name, Rows]:
        """Encode as many of the chunks as go together, at least one; with other `threads` from now on."""
        api = self._api
        if threads:
            self._threads.value = threads
        with Owned(api.mtmd_batch_init(self.pointer), api.mtmd_batch_free, self.deferred_frees) as batch:
            taken: dict[Name, Any] = {}
            for media, chunk in chunks.items():
                code = api.mtmd_batch_add_chunk(batch.pointer, chunk)
                if code in (_FULL, _OTHER_SHAPE) and taken:
                    continue
                if code != 0:
                    raise EngineError(f"libmtmd refused a picture or sound (code {code})")
                taken[media] = chunk
            if (code := api.mtmd_batch_encode(batch.pointer)) != 0:
                raise EngineError(f"libmtmd could not encode a picture or sound (code {code})")
            return {media: self._read_rows(batch.pointer, chunk) for media, chunk in taken.items()}

    def _find_threads(self) -> ctypes.c_int32:
        """Where the context has its number of threads: libmtmd takes it at the load only."""
        address = ctypes.cast(self.pointer, ctypes.c_void_p).value or 0
        words = (ctypes.c_int32 * _CONTEXT_WORDS).from_address(address)
        (place,) = (index for index, word in enumerate(words) if word == _SENTINEL)
        return ctypes.c_int32.from_buffer(words, 4 * place)

    def _read_rows(self, batch: Any, chunk: Any) -> Rows:
        count = int(self._api.mtmd_input_chunk_get_n_tokens(chunk))
        if not (found := self._api.mtmd_batch_get_output_embd(batch, chunk)):
            raise EngineError("libmtmd returned no rows of a picture or sound")
        rows = np.array(np.ctypeslib.as_array(found, (count, self._model.media_width)), np.float32)
        if not np.isfinite(rows).all():
            raise EngineError("the rows of a picture or sound are not finite")
        return rows
