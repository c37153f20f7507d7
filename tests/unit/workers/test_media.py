"""Decoding of pictures: what is no picture, or too much of one, is refused before it is decoded."""

from __future__ import annotations

import hashlib
import io
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from cllm.backend.llama.media import MediaEncoder, Picture
from cllm.core.kv_cache.disk_folder import CacheFolder
from cllm.errors import InvalidRequest
from cllm.messages import EncodedMedia, EncodeMedia
from cllm.types import Prompt
from cllm.workers.media import CachedRows, MediaWorker, RowCache, decode_picture, read_file
from tests.driver.media import make_file, make_picture, make_text
from tests.driver.server import wait_for


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims a size; it has no pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(head) - 4) + head + struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n" + chunk + make_file()[33:]


class FakeEncoder:
    """Takes two pictures at a time; each has one chunk, and says it when one is encoded."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []  # pictures, threads
        self.may_go_on = threading.Event()
        self.closed = 0

    def tokenize(self, parts: list[Picture], *, add_special: bool) -> Any:
        name = hashlib.sha256(parts[0].rgb).hexdigest()
        return SimpleNamespace(prompt=Prompt((1,)), chunks={name: name}, close=self._close)

    def _close(self) -> None:
        self.closed += 1

    def encode_batch(self, chunks: dict[Any, Any], threads: int) -> dict[Any, Any]:
        taken = [*chunks][:2]
        self.batches.append((len(taken), threads))
        assert self.may_go_on.wait(10)
        return {name: np.zeros(4, np.float32) for name in taken}


def test_pictures_of_several_requests_are_encoded_together() -> None:
    encoder = FakeEncoder()
    worker = MediaWorker(cast(MediaEncoder, encoder), threads=4)
    with ThreadPoolExecutor(6) as pool:
        texts = [make_text(make_file(number)) for number in range(5)]
        tasks = [EncodeMedia((text,), "a", streams=number == 0) for number, text in enumerate(texts)]
        asked = [pool.submit(worker.perform, tasks[0])]
        wait_for(lambda: len(encoder.batches) == 1)
        asked += [pool.submit(worker.perform, task) for task in (*tasks[1:], tasks[1])]
        wait_for(lambda: len(worker._waiting) == 5)
        encoder.may_go_on.set()
        answers = [future.result(10) for future in asked]
    assert encoder.batches == [(1, 2), (2, 4), (2, 4)], "with half of the threads beside streams"
    assert sum(each.encoded for each in answers if isinstance(each, EncodedMedia)) == encoder.closed == 5


def test_the_row_cache_keeps_its_byte_limit() -> None:
    cache = RowCache(100)
    for number in range(4):
        cache.put(("a", bytes([number])), CachedRows(Prompt(), {"x": bytes(40)}))
        assert cache.get(("a", b"\0")) is not None, "used again and again"
        assert cache.size <= 100
    assert cache.get(("a", b"\1")) is None and cache.get(("b", b"\0")) is None
    cache.put(("a", b"large"), CachedRows(Prompt(), {"x": bytes(101)}))
    assert cache.get(("a", b"large")) is None and cache.size == 80


def test_rows_on_disk_are_private_and_checked(tmp_path: Path) -> None:
    def open_cache() -> RowCache:
        return RowCache(1 << 20, CacheFolder(tmp_path, lambda: "model"), 1)

    digest, rows = bytes(range(32)), CachedRows(Prompt((5, -7)), {"x": bytes(300_000)})
    cache, again = open_cache(), open_cache()
    cache.put(("a", digest), rows)
    (file,) = tmp_path.glob("kv/*/*.kv")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert again.get(("a", digest)) == rows and again.get(("b", digest)) is None
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert open_cache().get(("a", digest)) is None
    for number in range(5):
        cache.put(("a", bytes([number]) * 32), rows)
    assert sum(each.stat().st_size for each in tmp_path.glob("kv/*/*.kv")) <= 1 << 20
    cache.clear()
    assert not list(tmp_path.glob("kv/*/*.kv")) and cache.get(("a", digest)) is None


HOSTILE = {
    "truncated": (make_file(kind="JPEG", width=300, height=300)[:900], "cannot be read"),
    "bomb": (bomb(60_000, 60_000), "3600000000 pixels, the limit is 67108864"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "must be a whole JPEG, PNG, WebP or GIF"),
    "other type": (make_file(kind="BMP"), "must be a whole JPEG, PNG, WebP or GIF"),
    "false size": (bomb(4000, 4000), "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pictures_are_refused_by_name(name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(InvalidRequest, match=reason):
        decode_picture(data)


def test_a_file_is_checked_before_it_is_opened() -> None:
    with pytest.raises(InvalidRequest, match="picture 3 has 0 bytes"):
        read_file("", 3)
    with pytest.raises(InvalidRequest, match="picture 1 is not valid base64"):
        read_file("%%%", 1)
    with pytest.raises(InvalidRequest, match="bytes of a picture, the limit is"):
        read_file("A" * (28 << 20), 1)
    for address in ("https://example.org/cat.png", "file:///etc/passwd"):
        with pytest.raises(InvalidRequest, match="picture 2 is an address, and this server fetches nothing"):
            read_file(address, 2)
    assert read_file("aGk=\n", 1) == b"hi"


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_pixels_are_those_of_the_file(kind: str, options: dict[str, bool]) -> None:
    assert decode_picture(make_file(3, kind, **options)) == make_picture(3)


def test_an_animation_shows_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    assert decode_picture(file.getvalue()).rgb[:3] == b"\xff\x00\x00"


def test_exif_orientation_turns_a_picture() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    turned = decode_picture(make_file(kind="JPEG", exif=exif))
    assert (turned.width, turned.height) == (32, 48)
