"""Fields: values by name, checked by the bounds of a struct, with messages that name the field.

The command line, files of settings and keys, and the Python API are checked here.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
import numpy as np

from cllm.errors import InvalidRequest

StructKind = TypeVar("StructKind", bound=msgspec.Struct)


def to_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name; numbers of NumPy as Python's."""
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}


def parse_fields(values: Mapping[str, Any], kind: type[StructKind], *, strict: bool = True) -> StructKind:
    """A struct from values by name; those it has no field for are ignored. `strict`: a text is no number.

    Raises InvalidRequest, which names a field that is mistyped, out of bounds or not finite.
    """
    plain = to_plain(values)
    check_finite(plain)
    try:
        return msgspec.convert(plain, kind, strict=strict)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        field = re.split(r"\W", place)[0]
        shown = f"{field} is {reprlib.repr(plain[field])}: " if field else ""
        raise InvalidRequest(f"{shown}{reason[:1].lower()}{reason[1:]}", field or None) from None


def check_finite(values: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a NaN or an infinity: bounds may let them through."""

    def finite(value: object) -> bool:
        if isinstance(value, list | tuple):
            return all(map(finite, value))
        return not isinstance(value, float) or math.isfinite(value)

    for name, value in values.items():
        if not finite(value):
            raise InvalidRequest(f"{name} is {reprlib.repr(value)}: expected a finite number", name)


def describe_unknown(name: str, known: Iterable[str]) -> str:
    """A name that means nothing, with the known one that was probably meant."""
    close = get_close_matches(name, known, n=1)
    return f"{name!r} (did you mean {close[0]!r}?)" if close else repr(name)
