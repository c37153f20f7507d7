"""The size of JSON text, counted in its bytes before a decoder sees it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cllm.limits import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES, check

# What each byte of a JSON text opens or closes.
_BRACKETS = np.zeros(256, np.int8)
_BRACKETS[[ord("["), ord("{")]], _BRACKETS[[ord("]"), ord("}")]] = 1, -1


class Shape(NamedTuple):
    """The size of a JSON text, at least as large as that of what a decoder finds in it."""

    values: int
    containers: int
    depth: int


def measure(data: bytes) -> Shape:
    """Count the values, the objects and lists, and the levels of a JSON text. Linear, whatever it is.

    What is in strings counts only where that is too much. A text that is no JSON is counted as far as a
    decoder gets.
    """
    containers = data.count(b"[") + data.count(b"{")  # a picture is a long string, and quickly searched
    values = data.count(b",") + containers + 1
    if values <= MAX_VALUES and containers <= min(MAX_DEPTH, MAX_CONTAINERS):
        return Shape(values, containers, containers)
    if b"\\" in data:  # a quote that is escaped ends no string
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(data, np.uint8)
    text = text[~np.logical_xor.accumulate(text == ord('"'))]
    brackets = _BRACKETS[text]
    containers, commas = int(np.count_nonzero(brackets > 0)), int(np.count_nonzero(text == ord(",")))
    if containers <= MAX_DEPTH:
        return Shape(commas + containers + 1, containers, containers)
    levels = np.cumsum(brackets[brackets != 0], dtype=np.int32)
    return Shape(commas + containers + 1, containers, int(levels.max()))


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
