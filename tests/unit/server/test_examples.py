"""Examples are made from types: required fields and those with a known value, nothing else."""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

from cllm.server.examples import CREATED, TEXTS, make_example


class Colour(Enum):
    RED = "red"


class Part(msgspec.Struct):
    model: str
    created: int | None = None
    note: str = "none"


class Whole(msgspec.Struct, kw_only=True):
    parts: list[Part]
    colour: Colour
    form: Literal["a", "b"]
    model: int
    left_out: str | msgspec.UnsetType = msgspec.UNSET


def test_a_struct_has_required_fields_and_those_with_a_known_value() -> None:
    assert make_example(Part) == Part(TEXTS.values["model"], CREATED, "none")


def test_a_known_value_of_another_type_is_not_taken() -> None:
    assert make_example(Whole) == Whole(
        parts=[Part(TEXTS.values["model"], CREATED)], colour=Colour.RED, form="a", model=0
    )
