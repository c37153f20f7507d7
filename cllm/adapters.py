"""LoRA adapters by name, and the sets of them that requests are computed with.

A set has a key: the digests of its files with their scales. So whatever is computed is kept under what it was
computed with, whichever names that had. The key of the model as it is (the base) is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated
from zlib import crc32

import msgspec
from msgspec import Meta

from cllm.errors import ConfigError

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?#up to 64 letters, digits, '.', '-' and '_')"
MAX_SCALE = 100.0
AdapterName = Annotated[str, Meta(pattern=NAME)]
AdapterScale = Annotated[float, Meta(ge=-MAX_SCALE, le=MAX_SCALE)]


class Adapter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GGUF file of small matrices whose products are added to those of a model's weights."""

    name: AdapterName
    file: str
    scale: AdapterScale = 1.0
    digest: str = ""  # of the file, once it was read
    size: int = 0  # bytes of it
    invocation: tuple[int, ...] = ()  # of an aLoRA: the base computes what stands before these tokens


def parse_adapter(text: str) -> Adapter:
    """Parse NAME=FILE or NAME=FILE:SCALE. Raises ConfigError."""
    name, equals, file = text.partition("=")
    head, colon, scale = file.rpartition(":")
    fields: dict[str, object] = {"name": name, "file": file}
    try:
        if colon:
            fields = {"name": name, "file": head, "scale": float(scale)}
    except ValueError:  # a part of the reference
        pass
    try:
        if not equals or not fields["file"]:
            raise msgspec.ValidationError("there is no file")
        return msgspec.convert(fields, Adapter)
    except msgspec.ValidationError as error:
        reason = str(error).partition(" - ")[0]
        raise ConfigError(f"adapter {text!r}: write NAME=FILE or NAME=FILE:SCALE ({reason})") from None


def join_key(scales: Iterable[tuple[str, float]]) -> str:
    """Key of a set of adapters, by digest; those of scale 0 are not part of it."""
    return ",".join(f"{digest}:{scale!r}" for digest, scale in sorted(scales) if scale)


def split_key(key: str) -> dict[str, float]:
    """Scales by digest of the set with this key."""
    pairs = (part.split(":") for part in key.split(",") if part)
    return {digest: float(scale) for digest, scale in pairs}


def make_salt(key: str) -> int:
    """31 bits of a key, never those of a token id: they are in none of a vocabulary's first 2^30 ids."""
    return 1 << 30 | crc32(key.encode()) & (1 << 30) - 1


def find_invocation(items: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Where the last occurrence of an aLoRA's invocation tokens begins; None without one."""
    wanted = tuple(invocation)
    places = range(len(items) - len(wanted), -1, -1)
    return next((at for at in places if tuple(items[at : at + len(wanted)]) == wanted), None)
