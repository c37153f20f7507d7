"""Media worker: decodes pictures and sound, and encodes them to rows, for a model with an mmproj.

It runs in a process of its own: a client's bytes may crash the decoders (invariant: survives native death).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import threading
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageOps

from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.media import MediaEncoder, Picture, Sound
from cllm.backend.llama.model import LlamaModel
from cllm.backend.llama.threads import default_threads
from cllm.config import EngineConfig
from cllm.errors import CllmError, InvalidRequest, NotSupported
from cllm.limits import MAX_PICTURE_BYTES, MAX_PICTURES, MAX_PIXELS, MAX_ROW_BYTES, MAX_SOUND_S, check
from cllm.messages import EncodedMedia, EncodeMedia, TokenizerAnswer, TokenizerTask
from cllm.types import Failure, Prompt, TokenBound
from cllm.workers.channel import Channel
from cllm.workers.tokenizer import answer_tasks, limit_memory

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
CACHE_BYTES = 256 << 20  # of rows: some hundred pictures of a usual model
SHARE = 2  # half of the cores: the engine computes meanwhile
Image.MAX_IMAGE_PIXELS = None  # `decode_picture` has a limit of its own, and says which


class CachedRows(NamedTuple):
    """A picture as a part of a prompt, and the rows of its spans."""

    prompt: Prompt
    rows: dict[str, bytes]

    @property
    def size(self) -> int:
        return sum(map(len, self.rows.values()))


class RowCache:
    """Rows of pictures by tenant and file, least recently used out; at most `limit` bytes."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit = limit
        self.size = 0
        self._entries: OrderedDict[tuple[str, bytes], CachedRows] = OrderedDict()

    def get(self, key: tuple[str, bytes]) -> CachedRows | None:
        if (found := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: tuple[str, bytes], rows: CachedRows) -> None:
        """Keep rows that are not here yet, unless they are larger than the whole cache."""
        if rows.size <= self.limit and key not in self._entries:
            self._entries[key] = rows
            self.size += rows.size
        while self.size > self.limit:
            self.size -= self._entries.popitem(last=False)[1].size


class MediaWorker:
    """Encodes the pictures of one task at a time; the same picture of a tenant once."""

    def __init__(self, encoder: MediaEncoder, *, shared: bool = False) -> None:
        """With `shared`, tenants share the rows of equal pictures."""
        self._encoder = encoder
        self._cache = RowCache()
        self._shared = shared
        self._lock = threading.Lock()

    def perform(self, task: TokenizerTask) -> TokenizerAnswer:
        """Do a task; what is wrong with it comes back as a Failure, never as an exception."""
        try:
            if not isinstance(task, EncodeMedia):
                raise NotSupported("the media worker takes pictures only")
            check(len(task.pictures), MAX_PICTURES, "pictures", "messages", "send fewer")
            with self._lock:
                return self._encode(task)
        except CllmError as error:
            return Failure.of(error)

    def _encode(self, task: EncodeMedia) -> EncodedMedia:
        prompts: list[Prompt] = []
        rows: dict[str, bytes] = {}
        encoded = size = 0
        for number, given in enumerate(task.pictures, 1):
            data = read_file(given, number)
            key = ("" if self._shared else task.tenant, hashlib.sha256(data).digest())
            found = self._cache.get(key)
            if found is None:
                with self._encoder.tokenize([self._decode(data, number)], add_special=False) as tokenized:
                    values = self._encoder.encode([tokenized]) if task.rows else {}
                    found = CachedRows(
                        tokenized.prompt, {name: each.tobytes() for name, each in values.items()}
                    )
                encoded += task.rows
            if task.rows:
                self._cache.put(key, found)
                size += found.size * (not found.rows.keys() <= rows.keys())
                check(size, MAX_ROW_BYTES, "bytes of rows", "messages", "send fewer or smaller pictures")
                rows |= found.rows
            prompts.append(found.prompt)
        return EncodedMedia(tuple(prompts), rows, encoded)

    def _decode(self, data: bytes, number: int) -> Picture | Sound:
        if not is_sound(data):
            return decode_picture(data, number)
        sound = self._encoder.decode_sound(data)
        seconds = len(sound.samples) // self._encoder.sample_rate
        check(seconds, MAX_SOUND_S, "seconds of sound", "messages", "send a shorter one")
        return sound


def read_file(given: str, number: int) -> bytes:
    """The bytes of a picture in base64. Raises InvalidRequest for bad base64, and for too many or none."""
    check(len(given) * 3 // 4 - 2, MAX_PICTURE_BYTES, "bytes of a picture", "messages", "send a smaller one")
    try:
        data = base64.b64decode("".join(given.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"picture {number} is not valid base64", "messages") from None
    if not data:
        raise InvalidRequest(f"picture {number} has 0 bytes", "messages")
    return data


def is_sound(data: bytes) -> bool:
    """Whether a file begins as a WAV, FLAC or MP3 file does."""
    wave = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    return wave or data[:4] == b"fLaC" or data[:3] == b"ID3" or (data[:1] == b"\xff" and data[1:2] >= b"\xe0")


def decode_picture(data: bytes, number: int = 1) -> Picture:
    """The pixels of a file, turned as its EXIF data says; of an animation the first frame.

    Raises InvalidRequest: the header is checked before a pixel is decoded.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            pixels = opened.width * opened.height
            check(pixels, MAX_PIXELS, "pixels", "messages", "send a smaller picture")
            image = ImageOps.exif_transpose(opened).convert("RGB")
    except InvalidRequest:
        raise
    except Exception:  # Pillow raises errors of many types; their texts may hold a client's bytes
        raise InvalidRequest(
            f"picture {number} cannot be read: it must be a whole JPEG, PNG, WebP or GIF file", "messages"
        ) from None
    return Picture(*image.size, image.tobytes())


def serve_media(channel: Channel, config: EngineConfig) -> None:
    """Answer tasks until the parent closes its end."""
    library, frees = load(), DeferredFrees()
    model = LlamaModel(library, config, frees, weights=False)
    threads = config.threads or max(1, default_threads() // SHARE)
    encoder = MediaEncoder(library, model, Path(config.mmproj), frees, threads=threads)
    limit_memory()
    worker = MediaWorker(encoder, shared=config.share_prefixes_across_tenants)
    answer_tasks(channel, worker.perform, TokenBound())
