"""The size of JSON text, counted in its bytes before a decoder sees it."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from cllm.limits import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES, check

# What each byte of a JSON text opens or closes.
_BRACKETS = np.zeros(256, np.int8)
_BRACKETS[[ord("["), ord("{")]], _BRACKETS[[ord("]"), ord("}")]] = 1, -1
PART = 1 << 18  # bytes
_SLASHES = re.compile(rb"\\*")


class Shape(NamedTuple):
    """The size of a JSON text, at least as large as that of what a decoder finds in it."""

    values: int
    containers: int
    depth: int


def measure(data: bytes) -> Shape:
    """Count the values, the objects and lists, and the levels of a JSON text, until one is beyond its limit.

    Part by part, since each native call holds the interpreter's lock. What is in strings counts only where
    that is too much. A text that is no JSON is counted as far as a decoder gets.
    """
    containers = data.count(b"[") + data.count(b"{")  # a picture is a long string, and quickly searched
    values = data.count(b",") + containers + 1
    if values <= MAX_VALUES and containers <= min(MAX_DEPTH, MAX_CONTAINERS):
        return Shape(values, containers, containers)
    values, containers, level, depth, quoted, end = 1, 0, 0, 0, False, 0
    while end < len(data) and values <= MAX_VALUES and containers <= MAX_CONTAINERS and depth <= MAX_DEPTH:
        begin, end = end, end + PART
        if data[end - 1 : end] == b"\\":  # with what it escapes
            end = _SLASHES.match(data, end).end() + 1  # type: ignore[union-attr]
        part = data[begin:end]
        if b"\\" in part:  # a quote that is escaped ends no string
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        text = np.frombuffer(part, np.uint8)
        inside = np.logical_xor.accumulate(text == ord('"')) ^ quoted
        quoted = bool(inside[-1]) if len(inside) else quoted
        brackets = _BRACKETS[text := text[~inside]]
        levels = level + np.cumsum(brackets[brackets != 0], dtype=np.int64)
        depth = max(depth, int(levels.max(initial=level)))
        level = int(levels[-1]) if len(levels) else level
        containers += (opened := int(np.count_nonzero(brackets > 0)))
        values += opened + int(np.count_nonzero(text == ord(",")))
    return Shape(values, containers, depth)


class ShapeSum:
    """Counts JSON texts that are decoded together, against the limits of one body."""

    def __init__(self, field: str, advice: str = "") -> None:
        """`field` names the texts in errors, with the `advice`."""
        self._field, self._advice = field, advice
        self._values = self._containers = 0

    def add(self, data: bytes) -> None:
        """Raises InvalidRequest."""
        shape = measure(data)
        self._values += shape.values
        self._containers += shape.containers
        check(shape.depth, MAX_DEPTH, "levels", self._field, self._advice)
        check(self._values, MAX_VALUES, "values", self._field, self._advice)
        check(self._containers, MAX_CONTAINERS, "objects and lists", self._field, self._advice)
