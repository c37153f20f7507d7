"""Media worker: decodes pictures and sound, and encodes them to rows, for a model with an mmproj.

It runs in a process of its own: a client's bytes may crash the decoders (invariant: survives native death).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.media import MediaEncoder, MediaPrompt, Picture, Sound
from cllm.backend.llama.model import LlamaModel
from cllm.backend.llama.placement import encoder_device, wants_gpu
from cllm.backend.llama.threads import compute_threads
from cllm.config import EngineConfig, split_list
from cllm.errors import CllmError, InvalidRequest, NotSupported
from cllm.limits import MAX_PICTURE_BYTES, MAX_PICTURES, MAX_PIXELS, MAX_ROW_BYTES, MAX_SOUND_S, check
from cllm.messages import EncodedMedia, EncodeMedia, TokenizerAnswer, TokenizerTask
from cllm.names import is_address
from cllm.types import Failure, TokenBound
from cllm.workers.channel import Channel
from cllm.workers.executor import MEDIA_AT_ONCE
from cllm.workers.row_cache import CachedRows, DiskRows, RowCache, RowKey
from cllm.workers.tokenizer import answer_tasks, limit_memory

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
BESIDE_STREAMS = 2  # half of the cores are the encoder's, while streams are computed
NICENESS = 10
REMOTE = "is an address, and this server fetches nothing: send the picture itself, as data:image/png;base64,…"
Fetch = Callable[[str, int], bytes]
Image.MAX_IMAGE_PIXELS = None  # `decode_picture` has a limit of its own, and says which


class MediaWorker:
    """Encodes pictures of several tasks, those together that the projector takes together.

    A tenant's picture is encoded once, also where several of its requests wait for it.
    """

    def __init__(
        self,
        encoder: MediaEncoder,
        *,
        shared: bool = False,
        threads: int = 1,
        disk: DiskRows | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        """With `shared`, tenants share the rows of equal pictures. Addresses are refused without `fetch`."""
        self._encoder = encoder
        self._cache = RowCache()
        self._disk = disk
        self._fetch = fetch
        self._shared = shared
        self._threads = threads
        self._lock = threading.Lock()  # of what is cached and what is on its way
        self._decoding = threading.Lock()  # a picture that is decoded takes most memory
        self._encoding = threading.Lock()
        self._pending: dict[RowKey, Future[CachedRows]] = {}
        self._waiting: dict[RowKey, _Picture] = {}  # first come, first encoded
        # Without streams the encoder has all cores, but the engine goes first, should it compute meanwhile.
        self._lanes = {True: ThreadPoolExecutor(1), False: ThreadPoolExecutor(1, initializer=_give_way)}

    def perform(self, task: TokenizerTask) -> TokenizerAnswer:
        """Do a task; what is wrong with it comes back as a Failure, never as an exception."""
        try:
            if not isinstance(task, EncodeMedia):
                raise NotSupported("the media worker takes pictures only")
            check(len(task.pictures), MAX_PICTURES, "pictures", "messages", "send fewer")
            if task.forget:
                self._forget()
            return self._encode(task)
        except CllmError as error:
            return Failure.of(error)

    def _encode(self, task: EncodeMedia) -> EncodedMedia:
        found: list[CachedRows] = []
        rows: dict[str, bytes] = {}
        encoded = size = 0
        for begin in range(0, len(task.pictures), MEDIA_AT_ONCE):  # what is decoded takes memory until then
            given = task.pictures[begin : begin + MEDIA_AT_ONCE]
            started = [self._start(task, each, begin + index) for index, each in enumerate(given, 1)]
            encoded += sum(new for _, new in started)
            for each in (future.result() for future, _ in started):
                found.append(each)
                size += each.size * (not each.rows.keys() <= rows.keys())
                check(size, MAX_ROW_BYTES, "bytes of rows", "messages", "send fewer or smaller pictures")
                rows |= each.rows
        return EncodedMedia(tuple(each.prompt for each in found), rows, encoded)

    def _start(self, task: EncodeMedia, given: str, number: int) -> tuple[Future[CachedRows], bool]:
        """The rows of a picture, as soon as they are there; and whether they are encoded for this task."""
        data = self._fetch(given, number) if self._fetch and is_address(given) else read_file(given, number)
        key = RowKey("" if self._shared else task.tenant, hashlib.sha256(data).digest())
        with self._lock:
            if task.rows and (pending := self._pending.get(key)) is not None:
                return pending, False
            pending, cached = Future[CachedRows](), self._cache.get(key)
            if task.rows and cached is None:
                self._pending[key] = pending
        try:
            if cached is None and self._disk is not None:
                cached = self._disk.get(key)
            if cached is None:
                with self._decoding:
                    media = self._encoder.tokenize([self._decode(data, number)], add_special=False)
                if task.rows:
                    self._wait(_Picture(media, pending), key, streams=task.streams)
                    return pending, True
                with media:
                    cached = CachedRows(media.prompt, {})
        except BaseException as error:
            self._settle(key, pending, error)
            raise
        self._settle(key, pending, cached)
        return pending, False

    def _wait(self, picture: _Picture, key: RowKey, *, streams: bool) -> None:
        with self._lock:
            self._waiting[key] = picture
        threads = max(1, self._threads // BESIDE_STREAMS) if streams else self._threads
        for _ in picture.media.chunks:  # each call encodes one at least
            self._lanes[streams].submit(self._encode_waiting, threads)

    def _encode_waiting(self, threads: int) -> None:
        """Encode chunks of the pictures that wait, whichever task's, as many as go together."""
        with self._encoding:
            with self._lock:
                waiting = dict(self._waiting)
            chunks = {(key, name): chunk for key, each in waiting.items() for name, chunk in each.left()}
            if not chunks:
                return
            try:
                rows = self._encoder.encode_batch(chunks, threads)
                for (key, name), values in rows.items():
                    waiting[key].rows[name] = values.tobytes()
                done = [key for key, each in waiting.items() if not any(each.left())]
                ended: dict[RowKey, CachedRows | BaseException] = {key: waiting[key].finish() for key in done}
            except Exception as error:  # others of the batch are tried again
                ended = {next(iter(waiting)): error}
            for key, result in ended.items():
                with self._lock:
                    picture = self._waiting.pop(key)
                picture.media.close()
                self._settle(key, picture.found, result)
                if self._disk is not None and isinstance(result, CachedRows):
                    self._disk.put(key, result)

    def _settle(self, key: RowKey, pending: Future[CachedRows], result: CachedRows | BaseException) -> None:
        """Give a picture's rows, or what went wrong, to all that wait for them."""
        with self._lock:
            if isinstance(result, CachedRows) and result.rows:
                self._cache.put(key, result)
            if self._pending.get(key) is pending:
                del self._pending[key]
        if isinstance(result, CachedRows):
            pending.set_result(result)
        else:
            pending.set_exception(result)

    def _forget(self) -> None:
        with self._lock:
            self._cache = RowCache()
        if self._disk is not None:
            self._disk.clear()

    def _decode(self, data: bytes, number: int) -> Picture | Sound:
        if not is_sound(data):
            return decode_picture(data, number)
        sound = self._encoder.decode_sound(data)
        seconds = len(sound.samples) // self._encoder.sample_rate
        check(seconds, MAX_SOUND_S, "seconds of sound", "messages", "send a shorter one")
        return sound


class _Picture:
    """A picture whose rows are being encoded."""

    def __init__(self, media: MediaPrompt, found: Future[CachedRows]) -> None:
        self.media, self.found = media, found
        self.rows: dict[str, bytes] = {}

    def left(self) -> Iterator[tuple[str, Any]]:
        return (item for item in self.media.chunks.items() if item[0] not in self.rows)

    def finish(self) -> CachedRows:
        return CachedRows(self.media.prompt, self.rows)


def _give_way() -> None:
    if hasattr(os, "nice"):
        os.nice(NICENESS)  # of this thread, and of those that it starts


def read_file(given: str, number: int) -> bytes:
    """The bytes of a picture in base64. Raises InvalidRequest for bad base64, and for too many or none."""
    if is_address(given):
        raise InvalidRequest(f"picture {number} {REMOTE}", "messages")
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
    library, frees = load(gpu=wants_gpu(config)), DeferredFrees()
    model = LlamaModel(library, config, frees, weights=False)
    threads = compute_threads(config)
    device = encoder_device(config)
    encoder = MediaEncoder(library, model, Path(config.mmproj), frees, threads=threads, device=device)
    fetch = None
    if config.media_hosts:
        from cllm.workers.media_fetcher import MediaFetcher  # with httpx

        fetch = MediaFetcher(split_list(config.media_hosts))
    limit_memory()
    worker = MediaWorker(
        encoder,
        shared=config.share_prefixes_across_tenants,
        threads=threads,
        disk=DiskRows.of(config),
        fetch=fetch,
    )
    answer_tasks(channel, worker.perform, TokenBound(), threads=MEDIA_AT_ONCE)
