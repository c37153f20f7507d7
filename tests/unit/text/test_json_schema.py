"""Objects that list their properties are closed, unless that could exclude what the schema allows."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from cllm.testing import FakeVocabulary
from cllm.text.json_schema import close_objects, close_schemas, get_text_expression
from cllm.text.structured_output import Constraint, GrammarCompiler
from cllm.types import ConstraintKind, ConstraintSpec

COMPILER = GrammarCompiler(FakeVocabulary())
A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
CLOSED_A, CLOSED_B = ({**each, "additionalProperties": False} for each in (A, B))


def compiled(schema: Any) -> Constraint:
    return COMPILER.compile(ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))


def fits(schema: Any, text: str) -> bool:
    return takes(compiled(schema), text)


def takes(constraint: Constraint, text: str) -> bool:
    """Whether an answer may be this text, and end there."""
    for byte in text.encode():
        if constraint.complete or not constraint.mask()[byte]:
            return False
        constraint.accept(byte)
    return constraint.complete or any(constraint.mask()[end] for end in FakeVocabulary.ends)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED_A),
        ({"type": "object"}, {"type": "object"}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "patternProperties": {"^x": B}}, {**A, "patternProperties": {"^x": CLOSED_B}}),
        ({**A, "unevaluatedProperties": False}, {**A, "unevaluatedProperties": False}),
        ({"type": "object", "additionalProperties": A}, {"type": "object", "additionalProperties": CLOSED_A}),
        ({"items": A}, {"items": CLOSED_A}),
        ({"prefixItems": [A, True], "items": False}, {"prefixItems": [CLOSED_A, True], "items": False}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"oneOf": [A, B]}, {"oneOf": [CLOSED_A, CLOSED_B]}),
        ({"allOf": [A]}, {"allOf": [CLOSED_A]}),
        ({"allOf": [A, B]}, {"allOf": [A, B]}),
        ({**A, "anyOf": [B, {}]}, {**A, "anyOf": [B, {}]}),
        ({"$ref": "#/$defs/x", "$defs": {"x": A}}, {"$ref": "#/$defs/x", "$defs": {"x": CLOSED_A}}),
        ({"enum": [A], "default": A, "const": A, "examples": [A]},) * 2,
        ({"not": A},) * 2,
        ({"properties": {"a": {}}, "required": ["b"]},) * 2,
        ({"properties": {"a": {}}, "minProperties": 2},) * 2,
        (True, True),
    ],
    ids=str,
)
def test_what_is_closed(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert close_objects(schema) == expected
    assert json.dumps(schema) == before, "the client's own schema is left as it is"


def test_nested_objects_are_closed() -> None:
    inner = close_objects({"type": "object", "properties": {"x": {"items": {"anyOf": [A]}}}})
    assert inner["properties"]["x"]["items"]["anyOf"] == [CLOSED_A]
    assert inner["additionalProperties"] is False


def test_a_property_may_be_called_like_a_keyword() -> None:
    schema = {"type": "object", "properties": {"properties": A, "allOf": {"type": "string"}, "a/b": A}}
    closed = close_objects(schema)["properties"]
    assert closed == {"properties": CLOSED_A, "allOf": {"type": "string"}, "a/b": CLOSED_A}


def test_what_parts_refer_to_stays_open() -> None:
    """Also through a reference to a reference, and whichever comes first."""
    definitions = {"base": {"$ref": "#/$defs/root"}, "root": A, "other": B}
    schema = {"$defs": definitions, "allOf": [{"$ref": "#/$defs/base"}, B]}
    assert close_objects(schema)["$defs"] == {**definitions, "other": CLOSED_B}
    assert fits(schema, '{"a":1,"b":2}') and not fits(schema, '{"a":1}')


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, '{"a":1}', '{"a":1,"z":2}'),
        ({"anyOf": [A, B]}, '{"b":1}', '{"b":1,"z":2}'),
        ({"allOf": [A, B]}, '{"a":1,"b":2}', '{"b":2}'),
        ({"type": "object", "properties": {}}, "{}", '{"z":1}'),
        ({"type": "object"}, '{"z":1}', "[]"),
        ({"properties": {"a": {}}, "required": ["b"]}, '{"b":1}', '{"a":1}'),
    ],
    ids=str,
)
def test_answers_under_a_schema(schema: Any, good: str, bad: str) -> None:
    assert fits(schema, good) and not fits(schema, bad)
    jsonschema.validate(json.loads(good), schema)


def test_the_schemas_of_tool_calls_are_closed_and_nothing_else() -> None:
    noted = {**A, "description": 'as in %json {"properties": {}}'}
    source = f'start: one two\none: %json {json.dumps(noted)}\ntwo: %json {json.dumps(B)} "%json x"'
    closed = f"start: one two\none: %json {json.dumps({**noted, 'additionalProperties': False})}\n"
    closed += f'two: %json {json.dumps(CLOSED_B)} "%json x"'
    assert close_schemas(ConstraintSpec(ConstraintKind.TOOLS, source)) == closed
    for kind in (ConstraintKind.GRAMMAR, ConstraintKind.REGEX):
        assert close_schemas(ConstraintSpec(kind, source)) == source


@pytest.mark.parametrize("source", ["{", "[1] x", '{"allOf": 3}', '{"properties": {}, "required": 3}'])
def test_what_is_no_schema_is_left_to_the_compiler(source: str) -> None:
    assert close_schemas(ConstraintSpec(ConstraintKind.JSON_SCHEMA, source)) == source


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, "any\ntext", None),
        ({"minLength": 2, "maxLength": 3}, "abc", "a"),
        ({"pattern": r"^\d{3}-[\w/]+$"}, "123-a_/", "12٣-a"),
        ({"pattern": "b/c"}, "ab/cd", "bc"),
        ({"pattern": "^(cat|dog)s?$"}, "cats", "cow"),
        ({"pattern": r"^[^[&~]+\$$"}, "ab$", "[$"),
        ({"pattern": "^a|b$", "maxLength": 2}, "cc", "ccc"),  # cannot be said: the length counts
        ({"pattern": "^(?!a).{2}$"}, "anything", None),
        ({"pattern": "^{x}$"}, "anything", None),
        ({"format": "date"}, "2026-02-28", "2026-02-30"),
        ({"format": "time"}, "23:59:59.5+01:00", "24:00:00Z"),
        ({"format": "date-time"}, "2026-01-01T00:00:00Z", "2026-01-01"),
        ({"format": "uuid"}, "01234567-89ab-cdef-0123-456789abcdef", "0123"),
        ({"format": "ipv4"}, "192.168.0.255", "256.1.1.1"),
        ({"format": "email"}, "a.b+c@d-e.org", "a@b"),
        ({"format": "no such format"}, "anything", None),
    ],
    ids=str,
)
def test_texts_as_an_expression(schema: Any, good: str, bad: str | None) -> None:
    """In llguidance's words, between two others, as a text in tags is written."""
    spec = ConstraintSpec(
        ConstraintKind.TOOLS, f"start: text\ntext[lazy]: /{get_text_expression(schema)}<end>/"
    )
    assert takes(COMPILER.compile(spec), f"{good}<end>")
    assert bad is None or not takes(COMPILER.compile(spec), f"{bad}<end>")
