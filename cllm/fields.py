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
_KINDS = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}
_KINDS |= {"array": "a list", "object": "a table", "null": "nothing"}
_BOUNDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}


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
        raise InvalidRequest(shown + describe_reason(reason), field or None) from None


def describe_reason(reason: str) -> str:
    """Say msgspec's reason in words. A pattern's are its comment, `(?#…)`, or else its alternatives."""
    if found := re.fullmatch(r"Expected `str` matching regex '(.*)'", reason):
        if said := re.search(r"\(\?#(.*)\)", found[1]):
            return f"expected {said[1]}"
        if words := re.search(r"\(([\w|]+)\)", found[1]):
            return f"expected one of {words[1].replace('|', ', ')}"
    if found := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", reason):
        return f"{found[2]!r} is {'missing' if found[1].startswith('missing') else 'unknown'}"
    reason = re.sub(r"`([a-z| ]+)`", lambda kinds: kinds[1].replace(" | ", " or "), reason)
    reason = re.sub(r"\b(int|float|str|bool|array|object|null)\b", lambda kind: _KINDS[kind[1]], reason)
    reason = reason.replace(", got ", ", not ").replace("of length", "with a length")
    reason = re.sub(r" ([<>]=?) (\S+?)(\.0)?$", lambda found: f" {_BOUNDS[found[1]]} {found[2]}", reason)
    return reason[:1].lower() + reason[1:]


def check_finite(values: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a NaN or an infinity: bounds may let them through."""

    def finite(value: object) -> bool:
        if isinstance(value, list | tuple):
            return all(map(finite, value))
        return not isinstance(value, float) or math.isfinite(value)

    for name, value in values.items():
        if not finite(value):
            raise InvalidRequest(f"{name} is {reprlib.repr(value)}: expected a finite number", name)


def check_names(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a keyword argument that means nothing."""
    if unknown := sorted(set(given) - set(known)):
        named = describe_unknown(unknown[0], [*known, "sampling"])
        raise TypeError(f"{call}() got an unexpected keyword argument {named}")


def describe_unknown(name: str, known: Iterable[str]) -> str:
    """A name that means nothing, with the known one that was probably meant."""
    close = get_close_matches(name, known, n=1)
    return f"{name!r} (did you mean {close[0]!r}?)" if close else repr(name)
