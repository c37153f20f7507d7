"""Decoding of pictures: what is no picture, or too much of one, is refused before it is decoded."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from PIL import Image

from cllm.errors import InvalidRequest
from cllm.workers.media import decode_picture, read_file
from tests.driver.media import make_file, make_picture


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims a size; it has no pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(head) - 4) + head + struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n" + chunk + make_file()[33:]


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
