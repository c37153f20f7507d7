"""Texts of the description of the API, and example answers made from the types and names of their fields."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

CREATED = 1767225600
VECTOR = [0.118, -0.042, 0.307]


class Texts(msgspec.Struct, frozen=True):
    """What `openapi.json` says of the API beside its types."""

    fields: dict[str, dict[str, list[Any]]]  # by struct ("" for any) and field: description, examples
    examples: dict[str, dict[str, Any]]  # of bodies, by struct
    values: dict[str, Any]  # in answers, by field, where that is their type; null: one that has a default
    answers: dict[str, list[Any]]  # and the events of streams, by struct
    forms: dict[str, dict[str, Any]]  # schemas of bodies that are forms, by route
    errors: dict[str, dict[int, tuple[str, str, str]]]  # by route ("" for all): code, message, when
    security: dict[str, Any]
    headers: dict[str, dict[str, Any]]


TEXTS = msgspec.json.decode(Path(__file__).with_name("openapi.json").read_bytes(), type=Texts)


def find_example(body: type) -> dict[str, Any]:
    """The example of a body: its own, or that of the body it is derived from."""
    names = (each.__name__ for each in body.__mro__)
    return next((TEXTS.examples[name] for name in names if name in TEXTS.examples), {})


def read_examples(*kinds: Any) -> list[Any]:
    """The answers of these structs that are written down, such as the events of a stream."""
    return [msgspec.convert(each, kind) for kind in kinds for each in TEXTS.answers[kind.__name__]]


def make_example(kind: Any, name: str = "") -> Any:
    """A value of a type. A struct has its required fields, and those of `TEXTS.values`."""
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer in (Annotated, Union, UnionType):
        return make_example(inner[0], name)
    if outer is Literal:
        return inner[0]
    if issubclass(outer, msgspec.Struct):
        shown = [each for each in msgspec.structs.fields(kind) if each.required or each.name in TEXTS.values]
        return kind(**{each.name: make_example(each.type, each.name) for each in shown})
    if issubclass(outer, Enum):
        return next(iter(outer))
    if isinstance(TEXTS.values.get(name), outer):
        return TEXTS.values[name]
    if outer in (list, tuple):
        item = make_example(inner[0])
        return outer([item] if isinstance(item, msgspec.Struct) else [])
    return outer()
