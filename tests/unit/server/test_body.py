"""Bodies are read leniently where clients need it, and refused with the name of the field."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from cllm.errors import InvalidRequest
from cllm.limits import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES
from cllm.server.body import NO_NUL, Body, decode
from cllm.text import json_shape
from cllm.text.json_shape import measure


class Part(msgspec.Struct, Body, kw_only=True):
    text: str
    size: int = 0

    def __post_init__(self) -> None:
        if self.text == "wrong":
            raise ValueError("it is wrong")


class First(msgspec.Struct, Body, kw_only=True, tag_field="type", tag="first"):
    count: int = 1


class Second(msgspec.Struct, Body, kw_only=True, tag_field="type", tag="second"):
    parts: list[Part] = []


class Whole(msgspec.Struct, Body, kw_only=True):
    ALIASES = {"limit": ("max_limit", "limit")}
    NULLS = frozenset({"meant"})

    name: Annotated[str, Meta(pattern=NO_NUL, max_length=8)]
    limit: Annotated[int, Meta(ge=0)] = 4
    meant: int | None = 7
    parts: str | list[Part] = ""
    choice: str | First | Second = ""
    free: dict[str, Any] = {}

    @classmethod
    def prepare(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.get("name") == "refused":
            raise ValueError("name: not this one")
        return value


def test_null_is_a_field_left_out_unless_it_has_a_meaning() -> None:
    body = Whole.parse({"name": "a", "limit": None, "meant": None, "parts": [{"text": "b", "size": None}]})
    assert (body.limit, body.meant, body.parts) == (4, None, [Part(text="b")])


def test_whole_floats_are_integers_down_to_nested_bodies() -> None:
    body = Whole.parse({"name": "a", "limit": 64.0, "choice": {"type": "first", "count": 2.0}})
    assert body.limit == 64 and body.choice == First(count=2)
    with pytest.raises(InvalidRequest, match=r"^limit: expected `int`, got `float`"):
        Whole.parse({"name": "a", "limit": 64.5})


def test_the_first_alias_that_is_given_counts() -> None:
    assert Whole.parse({"name": "a", "limit": 1, "max_limit": 2}).limit == 2
    assert Whole.parse({"name": "a", "limit": 1, "max_limit": None}).limit == 1


def test_free_objects_and_unknown_fields_stay_as_they_are() -> None:
    body = Whole.parse({"name": "a", "free": {"x": None, "y": 1.0}, "unknown": object()})
    assert body.free == {"x": None, "y": 1.0} and type(body.free["y"]) is float


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({}, "name", "name: this field is required"),
        ({"name": 1}, "name", "name: expected `str`, got `int`"),
        ({"name": "\0"}, "name", "name: must not contain NUL"),
        ({"name": "a", "limit": True}, "limit", "limit: expected `int`, got `bool`"),
        ({"name": "a", "parts": [{"size": 1}]}, "parts", "parts[0]: 'text' is missing"),
        ({"name": "a", "parts": [{"text": "wrong"}]}, "parts", "parts[0]: it is wrong"),
        ({"name": "a", "choice": {"type": "third"}}, "choice", "choice.type: invalid value 'third'"),
        ({"name": "refused"}, "name", "name: not this one"),
        ([], None, "the body is not a JSON object"),
        ("x", None, "the body is not a JSON object"),
    ],
)
def test_a_refusal_names_the_field(given: Any, field: str | None, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Whole.parse(given)
    assert (caught.value.field, caught.value.message) == (field, message)


class Wider(Whole, kw_only=True):
    ALIASES = {"free": ("open", "free")}


def test_a_refusal_names_an_alias_of_a_base_class() -> None:
    for name in ("max_limit", "open"):
        with pytest.raises(InvalidRequest, match=f"^{name}: expected") as caught:
            Wider.parse({"name": "a", name: True})
        assert caught.value.field == name


def count(value: Any) -> tuple[int, int, int]:
    """Values, objects and lists, and levels of a JSON value, as the rule says."""
    if not isinstance(value, dict | list):
        return 1, 0, 0
    inner = [count(each) for each in (value.values() if isinstance(value, dict) else value)]
    values, containers, depths = zip(*inner, strict=True) if inner else ((), (), ())
    return 1 + sum(values), 1 + sum(containers), 1 + max(depths, default=0)


TEXTS = st.text(st.sampled_from('[]{},"\\:a\n\u00e9'))
JSON = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=30,
)


@given(
    JSON,
    st.sampled_from([msgspec.json.encode, lambda value: json.dumps(value, indent=1).encode()]),
    st.integers(1, 8) | st.just(json_shape.PART),
)
def test_values_and_levels_are_counted_whatever_is_in_strings(value: Any, write: Any, part: int) -> None:
    padded = [value, [[]] * (MAX_DEPTH + 1)]  # enough of them, so that strings are told apart
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_shape, "PART", part)
        found = measure(write(padded))
    values, containers, depth = count(padded)
    assert (found.containers, found.depth) == (containers, depth)
    assert values <= found.values <= values + containers, "a list without values counts as two"


def make_body(free: bytes) -> bytes:
    return b'{"name": "a", "free": {"x": %b}}' % free


def test_a_body_nested_too_deep_is_refused() -> None:
    levels = MAX_DEPTH - 2
    decode(make_body(b"[" * levels + b"]" * levels), Whole)
    for deep in (b"[" * (levels + 1) + b"]" * (levels + 1), b'{"a":' * 100_000, b"[" * 1_000_000):
        with pytest.raises(InvalidRequest, match=f"nested deeper than {MAX_DEPTH}"):
            decode(make_body(deep), Whole)


@pytest.mark.parametrize(
    ("item", "limit", "what"),
    [
        (b"1", MAX_VALUES, "values"),
        (b'"]["', MAX_VALUES, "values"),
        (b"[]", MAX_CONTAINERS, "objects and lists"),
        (b'{"a\\"[":"\\\\"}', MAX_CONTAINERS, "objects and lists"),
    ],
)
def test_values_are_counted_before_a_body_is_decoded(
    item: bytes, limit: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode(make_body(b"[" + b",".join([item] * (limit - 10)) + b"]"), Whole)
    decode(make_body(b'"' + b"[{," * limit + b'"'), Whole)
    monkeypatch.setattr(Whole, "parse", None)
    with pytest.raises(InvalidRequest, match=rf"^free: \d+ {what}, the limit is {limit}$") as caught:
        decode(make_body(b"[" + b",".join([item] * (limit + 1)) + b"]"), Whole)
    assert caught.value.field == "free"


def test_a_body_that_is_no_json_is_counted_as_far_as_it_is() -> None:
    lists = b",".join([b"[]"] * (MAX_CONTAINERS + 1))
    for start, reason in ((b"[NaN,", "the limit is"), (b'[\\"', "the limit is"), (b'["', "not valid JSON")):
        with pytest.raises(InvalidRequest, match=reason):
            decode(make_body(start + lists), Whole)
