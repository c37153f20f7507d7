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
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from PIL import Image, ImageOps

from cllm import limits
from cllm.backend.llama.fingerprint import sample_digest, state_fingerprint
from cllm.backend.llama.library import DeferredFrees, load
from cllm.backend.llama.media import MediaEncoder, MediaPrompt, Picture, Sound
from cllm.backend.llama.model import LlamaModel
from cllm.backend.llama.placement import encoder_device, wants_gpu
from cllm.backend.llama.threads import compute_threads, encoder_threads
from cllm.config import EngineConfig, split_list
from cllm.core.kv_cache.disk_folder import CacheFolder, DiskEntry, get_cache_folder, touch
from cllm.core.kv_cache.prefix_index import CachedPrefix
from cllm.core.kv_cache.tiers import Entry
from cllm.errors import CllmError, InvalidRequest, NotSupported, StorageFailed
from cllm.messages import EncodedMedia, EncodeMedia, TokenizerAnswer, TokenizerTask
from cllm.names import is_address
from cllm.types import Failure, Prompt, TokenBound
from cllm.workers.channel import Channel
from cllm.workers.executor import MEDIA_AT_ONCE
from cllm.workers.tokenizer import answer_tasks, limit_memory

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
NICENESS = 10
REMOTE = "is an address, and this server fetches nothing: send the picture itself, as data:image/png;base64,…"
CACHE_BYTES = 256 << 20  # of rows: some hundred pictures of a usual model
RowKey = tuple[str, bytes]  # a tenant, and the digest of a picture's file
Image.MAX_IMAGE_PIXELS = None  # `decode_picture` has a limit of its own, and says which


class CachedRows(NamedTuple):
    """A picture as a part of a prompt, and the rows of its spans."""

    prompt: Prompt
    rows: dict[str, bytes]

    @property
    def size(self) -> int:
        return sum(map(len, self.rows.values()))


class RowCache:
    """Rows of pictures by tenant and file, least recently used out; at most `limit` bytes.

    With a `folder` also there, within the limit of the disk cache: entries whose tokens are a file's digest.
    """

    def __init__(self, limit: int = CACHE_BYTES, folder: CacheFolder | None = None, disk_mb: int = 0) -> None:
        self.limit = limit
        self.size = 0
        self._entries: OrderedDict[RowKey, CachedRows] = OrderedDict()
        self._folder, self._disk_limit = folder, disk_mb << 20

    def get(self, key: RowKey) -> CachedRows | None:
        if key not in self._entries and self._folder is not None:
            prefix = CachedPrefix(key[0], array("i", key[1]))
            path = self._folder.get_path(prefix)
            with suppress(CllmError, msgspec.MsgspecError):  # damaged files are misses
                state = self._folder.read(DiskEntry(prefix, path, 0)).state
                self._keep(key, msgspec.msgpack.decode(state, type=CachedRows))
                touch(path)
        if (found := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: RowKey, rows: CachedRows) -> None:
        """Keep rows that are not here yet, unless they are larger than the whole cache."""
        if key not in self._entries and self._folder is not None:
            entry = Entry(key[0], array("i", key[1]), msgspec.msgpack.encode(rows))
            with suppress(StorageFailed):
                deque(self._folder.write(entry, self._disk_limit), 0)
        self._keep(key, rows)

    def _keep(self, key: RowKey, rows: CachedRows) -> None:
        if rows.size <= self.limit and key not in self._entries:
            self._entries[key] = rows
            self.size += rows.size
        while self.size > self.limit:
            self.size -= self._entries.popitem(last=False)[1].size

    def clear(self) -> None:
        self._entries.clear()
        self.size = 0
        if self._folder is not None:
            self._folder.clear()


class _Waiting(NamedTuple):
    """A picture that is to be encoded, or is in part."""

    media: MediaPrompt
    found: Future[CachedRows]
    rows: dict[str, bytes]


class MediaWorker:
    """Encodes pictures of several tasks, together where the projector can; a tenant's equal pictures once."""

    def __init__(
        self,
        encoder: MediaEncoder,
        *,
        cache: RowCache | None = None,
        shared: bool = False,
        threads: int = 1,
        fetch: Callable[[str, int, float], bytes] | None = None,
    ) -> None:
        """With `shared`, tenants share the rows of equal pictures. Without `fetch`, addresses are refused."""
        self._encoder = encoder
        self._cache = cache or RowCache()
        self._fetch = fetch
        self._shared = shared
        self._threads = threads
        self._lock = threading.Lock()  # of what is cached and pending
        self._decoding = threading.Lock()  # a picture takes most memory then
        self._encoding = threading.Lock()
        self._pending: dict[RowKey, Future[CachedRows]] = {}
        self._waiting: list[_Waiting] = []  # first come, first encoded
        # Without streams the encoder has all cores, but gives way: the engine may begin to compute meanwhile.
        gentle = ThreadPoolExecutor(1, initializer=os.nice, initargs=(NICENESS,))
        self._lanes = {True: ThreadPoolExecutor(1), False: gentle}

    def perform(self, task: TokenizerTask) -> TokenizerAnswer:
        """Do a task; what is wrong with it comes back as a Failure, never as an exception."""
        try:
            if not isinstance(task, EncodeMedia):
                raise NotSupported("the media worker takes pictures only")
            limits.check(len(task.pictures), limits.MAX_PICTURES, "pictures", "messages", "send fewer")
            if task.forget:
                with self._lock:
                    self._cache.clear()
            return self._encode(task)
        except CllmError as error:
            return Failure.of(error)

    def _encode(self, task: EncodeMedia) -> EncodedMedia:
        prompts: list[Prompt] = []
        rows: dict[str, bytes] = {}
        encoded, size, deadline = 0, 0, time.monotonic() + limits.MAX_FETCH_S
        for begin in range(0, len(task.pictures), MEDIA_AT_ONCE):  # what waits is in memory
            given = enumerate(task.pictures[begin : begin + MEDIA_AT_ONCE], begin + 1)
            for future, new in [self._start(task, each, number, deadline) for number, each in given]:
                found = future.result()
                encoded += new
                size += found.size * (not found.rows.keys() <= rows.keys())
                advice = "send fewer or smaller pictures"
                limits.check(size, limits.MAX_ROW_BYTES, "bytes of rows", "messages", advice)
                rows |= found.rows
                prompts.append(found.prompt)
        return EncodedMedia(tuple(prompts), rows, encoded)

    def _start(
        self, task: EncodeMedia, given: str, number: int, deadline: float
    ) -> tuple[Future[CachedRows], bool]:
        """The rows of a picture, as soon as they are there; and whether they are encoded for this task."""
        fetch = self._fetch if is_address(given) else None
        data = fetch(given, number, deadline) if fetch else read_file(given, number)  # refuses addresses
        key = ("" if self._shared else task.tenant, hashlib.sha256(data).digest())
        future = Future[CachedRows]()
        with self._lock:
            if task.rows and key in self._pending:
                return self._pending[key], False
            if (cached := self._cache.get(key)) is not None:
                future.set_result(cached)
                return future, False
            if task.rows:
                self._pending[key] = future
                future.add_done_callback(partial(self._keep, key))
        try:
            with self._decoding:
                media = self._encoder.tokenize([self._decode(data, number)], add_special=False)
        except BaseException as error:
            future.set_exception(error)
            raise
        if not (task.rows and media.chunks):
            future.set_result(CachedRows(media.prompt, {}))
            media.close()
            return future, False
        self._waiting.append(_Waiting(media, future, {}))
        threads = encoder_threads(self._threads) if task.streams else self._threads
        for _ in media.chunks:  # each call encodes one at least
            self._lanes[task.streams].submit(self._encode_waiting, threads)
        return future, True

    def _keep(self, key: RowKey, found: Future[CachedRows]) -> None:
        with self._lock:
            del self._pending[key]
            if found.exception() is None:
                self._cache.put(key, found.result())

    def _encode_waiting(self, threads: int) -> None:
        """Encode chunks of the pictures that wait, whichever task's, as many as go together."""
        with self._encoding:
            waiting = self._waiting[:]
            parts = ((each, *chunk) for each in waiting for chunk in each.media.chunks.items())
            left = {(id(each), name): chunk for each, name, chunk in parts if name not in each.rows}
            if not left:
                return  # they were encoded with others
            places = {id(each): each for each in waiting}
            try:
                for (place, name), values in self._encoder.encode_batch(left, threads).items():
                    places[place].rows[name] = values.tobytes()
            except Exception as error:  # the others are tried again
                waiting[0].found.set_exception(error)
            for each in waiting:
                if len(each.rows) == len(each.media.chunks):
                    each.found.set_result(CachedRows(each.media.prompt, each.rows))
                if each.found.done():
                    self._waiting.remove(each)
                    each.media.close()

    def _decode(self, data: bytes, number: int) -> Picture | Sound:
        if not is_sound(data):
            return decode_picture(data, number)
        sound = self._encoder.decode_sound(data)
        seconds = len(sound.samples) // self._encoder.sample_rate
        limits.check(seconds, limits.MAX_SOUND_S, "seconds of sound", "messages", "send a shorter one")
        return sound


def read_file(given: str, number: int) -> bytes:
    """The bytes of a picture in base64. Raises InvalidRequest for bad base64, and for too many or none."""
    if is_address(given):
        raise InvalidRequest(f"picture {number} {REMOTE}", "messages")
    size = len(given) * 3 // 4 - 2  # at least
    limits.check(size, limits.MAX_PICTURE_BYTES, "bytes of a picture", "messages", "send a smaller one")
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
            limits.check(pixels, limits.MAX_PIXELS, "pixels", "messages", "send a smaller picture")
            image = ImageOps.exif_transpose(opened).convert("RGB")
    except InvalidRequest:
        raise
    except Exception:  # Pillow raises errors of many types; their texts may hold a client's bytes
        raise InvalidRequest(
            f"picture {number} cannot be read: it must be a whole JPEG, PNG, WebP or GIF file", "messages"
        ) from None
    return Picture(*image.size, image.tobytes())


def fingerprint(config: EngineConfig) -> str:
    """What rows on disk depend on: the projector, and the model whose tokens stand around them."""
    return f"rows of {sample_digest(Path(config.mmproj))}\n{state_fingerprint(config, unified=False)}"


def serve_media(channel: Channel, config: EngineConfig) -> None:
    """Answer tasks until the parent closes its end."""
    library, frees = load(gpu=wants_gpu(config)), DeferredFrees()
    model = LlamaModel(library, config, frees, weights=False)
    threads, device = compute_threads(config), encoder_device(config)
    encoder = MediaEncoder(library, model, Path(config.mmproj), frees, threads=threads, device=device)
    fetch = None
    if config.media_hosts:
        from cllm.workers.media_fetcher import MediaFetcher  # with httpx

        fetch = MediaFetcher(split_list(config.media_hosts))
    limit_memory()
    kept, shared = config.prefix_cache and config.cache_disk_mb, config.share_prefixes_across_tenants
    folder = CacheFolder(get_cache_folder(config.cache_dir), partial(fingerprint, config)) if kept else None
    cache = RowCache(CACHE_BYTES, folder, kept or 0)
    worker = MediaWorker(encoder, cache=cache, shared=shared, threads=threads, fetch=fetch)
    answer_tasks(channel, worker.perform, TokenBound(), threads=MEDIA_AT_ONCE)
