"""Objects that list their properties are closed, unless that could exclude what the schema allows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.errors import InvalidRequest
from cllm.limits import MAX_COMBINATIONS, MAX_OBJECT_PROPERTIES, MAX_PROPERTIES, MAX_REFERENCES
from cllm.testing import FakeVocabulary
from cllm.text import json_schema
from cllm.text.call_grammar import make_call_grammar
from cllm.text.chat_format import Tool
from cllm.text.json_schema import (
    check_end,
    check_schemas,
    close_objects,
    close_schemas,
    find_combined,
    get_text_expression,
    get_types,
    parse_schemas,
)
from cllm.text.structured_output import GrammarCompiler, MaskBuilder
from cllm.types import ConstraintKind, ConstraintSpec
from tests.driver.masks import takes_text
from tests.unit.text.formats import FORMATS

ROOT = Path(__file__).parents[3]
COMPILER, MASKS = GrammarCompiler(FakeVocabulary()), MaskBuilder(FakeVocabulary.size)
A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
OPEN = {"additionalProperties": True}
CLOSED_A, CLOSED_B = ({**each, "additionalProperties": False} for each in (A, B))


def fits(schema: Any, text: str) -> bool:
    return takes(ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(schema)), text)


def takes(spec: ConstraintSpec, text: str) -> bool:
    return takes_text(MASKS, COMPILER.compile(spec), text)


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
        ({"properties": {"x": {"items": A}}, **OPEN}, {"properties": {"x": {"items": CLOSED_A}}, **OPEN}),
        (  # names of properties may be those of keywords
            {"properties": {"properties": A, "allOf": {"type": "string"}, "a/b": A}, **OPEN},
            {"properties": {"properties": CLOSED_A, "allOf": {"type": "string"}, "a/b": CLOSED_A}, **OPEN},
        ),
    ],
    ids=str,
)
def test_what_is_closed(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert close_objects(schema) == expected
    assert json.dumps(schema) == before, "the client's own schema is left as it is"


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
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, "0.25", "0"),
        ({"type": "number", "exclusiveMinimum": -99.5, "exclusiveMaximum": -99}, "-99.25", "-99"),
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
    assert close(ConstraintSpec(ConstraintKind.TOOLS, source)) == closed
    for kind in (ConstraintKind.GRAMMAR, ConstraintKind.REGEX):
        assert close(ConstraintSpec(kind, source)) == source


def close(spec: ConstraintSpec) -> str:
    return close_schemas(spec, parse_schemas(spec))


@pytest.mark.parametrize("source", ['{"allOf": 3}', '{"properties": {}, "required": 3}'])
def test_what_is_no_schema_is_left_to_the_compiler(source: str) -> None:
    assert close(ConstraintSpec(ConstraintKind.JSON_SCHEMA, source)) == source


LONG_NUMBER = f'{{"maximum": {"9" * 5000}}}'  # Python's limit for integers is 4,300 digits


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *(("json_schema", source) for source in ("{", "[1] x", "", "{} {}", LONG_NUMBER)),
        *(("tools", f"start: %json {source}") for source in ("{", LONG_NUMBER)),
    ],
)
def test_a_schema_that_is_not_json_is_refused_before_native_code(kind: str, source: str) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_schemas(ConstraintSpec(ConstraintKind(kind), source))


def chain(count: int, nested: int = 0, reference: str = "$ref") -> str:
    """A schema whose references lead from one to the next, with arrays between them."""
    definitions: dict[str, Any] = {str(count): {"type": "string"}}
    for number in range(count):
        inner: dict[str, Any] = {reference: f"#/$defs/{number + 1}"}
        for _ in range(nested):
            inner = {"type": "array", "items": inner}
        definitions[str(number)] = inner
    return json.dumps({reference: "#/$defs/0", "$defs": definitions}, separators=(",", ":"))


def hide(source: str) -> str:
    """The same JSON, its references spelled with escapes."""
    return source.replace('"$ref"', r'"\u0024re\u0066"')


@pytest.mark.parametrize("kind", [ConstraintKind.JSON_SCHEMA, ConstraintKind.TOOLS, ConstraintKind.GRAMMAR])
@pytest.mark.parametrize("spell", [str, hide])
@pytest.mark.parametrize("reference", ["$ref", "$dynamicRef", "$recursiveRef"])
def test_references_are_counted_however_they_are_spelled(
    kind: ConstraintKind, spell: Callable[[str], str], reference: str
) -> None:
    before = "" if kind is ConstraintKind.JSON_SCHEMA else "start: %json "
    few, many = (spell(chain(count, reference=reference)) for count in (MAX_REFERENCES - 1, MAX_REFERENCES))
    assert parse_schemas(ConstraintSpec(kind, before + few))
    with pytest.raises(InvalidRequest, match=f"{MAX_REFERENCES + 1} references") as refused:
        parse_schemas(ConstraintSpec(kind, before + many))
    assert refused.value.field == kind.field
    with pytest.raises(InvalidRequest, match="the limit is"):
        COMPILER.check(ConstraintSpec(kind, before + many))


def test_references_of_all_tools_are_counted_together() -> None:
    half = chain(MAX_REFERENCES // 2)
    source = f"start: one | two\none: %json {half}\ntwo: %json {half}"
    with pytest.raises(InvalidRequest, match="references"):
        COMPILER.check(ConstraintSpec(ConstraintKind.TOOLS, source))


def test_references_in_a_literal_of_a_grammar_that_is_no_json_are_counted() -> None:
    source = 'start: "%json {" ' + "(" + " | ".join(['"$ref"'] * (MAX_REFERENCES + 1)) + ")"
    with pytest.raises(InvalidRequest, match="references"):
        COMPILER.check(ConstraintSpec(ConstraintKind.GRAMMAR, source))
    COMPILER.check(ConstraintSpec(ConstraintKind.GRAMMAR, 'start: "%json {"'))


def test_schemas_of_a_grammar_are_bounded_before_they_are_parsed() -> None:
    source = "start: " + "%json {" * (MAX_REFERENCES + 1)
    with pytest.raises(InvalidRequest, match="schemas"):
        parse_schemas(ConstraintSpec(ConstraintKind.GRAMMAR, source))


def find_combined_slowly(root: Any) -> set[int]:
    """The rule as it is said: look at everything again until nothing more is found."""
    combined: set[int] = set()

    def look(schema: Any, is_part: bool) -> None:
        if not isinstance(schema, dict):
            return
        is_part = is_part or json_schema._count_parts(schema) > 1 or id(schema) in combined
        if is_part and (target := json_schema._follow(root, schema.get("$ref", ""))) is not None:
            combined.add(id(target))
        json_schema._map_schemas(schema, lambda inner, same: look(inner, same and is_part))

    known = -1
    while known < len(combined):
        known = len(combined)
        look(root, False)
    return combined


NAMES = st.sampled_from(["a", "b", "x/y"])
REFERENCES = st.builds(lambda name: {"$ref": "#/$defs/" + name.replace("/", "~1")}, NAMES) | st.sampled_from(
    [{"$ref": "#"}, {"$ref": "#/properties/a"}, {"$ref": "#/allOf/0"}, {"$ref": "nowhere"}]
)
SCHEMAS = st.recursive(
    REFERENCES | st.just({"type": "string"}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=2),
            "allOf": st.lists(inner, max_size=2),
            "anyOf": st.lists(inner, max_size=2),
            "items": inner,
            "$defs": st.dictionaries(NAMES, inner, max_size=3),
            "$ref": st.just("#/$defs/a"),
        },
    ),
    max_leaves=12,
)


@given(SCHEMAS)
def test_combined_references_are_those_of_the_rule(schema: Any) -> None:
    schema = json.loads(json.dumps(schema))  # no object in two places
    assert find_combined(schema) == find_combined_slowly(schema)


def test_a_chain_of_references_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written backwards, a chain was looked at as often as it is long: 500 references took 20 seconds."""
    count, visits = 500, 0
    plain = json_schema._map_schemas

    def counted(*arguments: Any) -> Any:
        nonlocal visits
        visits += 1
        return plain(*arguments)

    monkeypatch.setattr(json_schema, "_map_schemas", counted)
    links = {str(number): {"$ref": f"#/$defs/{number - 1}"} for number in range(1, count)}
    last = {"type": "object", "properties": {"a": {"type": "string"}}}
    schema = {"$ref": f"#/$defs/{count - 1}", "properties": {"x": {}}, "$defs": {"0": last, **links}}
    assert "additionalProperties" not in close_objects(schema)["$defs"]["0"]
    assert visits < 4 * count


def test_a_schema_is_followed_once_however_it_is_referred_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each spelling of a reference was followed through the whole schema again."""
    count, visits = 200, 0
    plain = json_schema._map_schemas

    def counted(*arguments: Any) -> Any:
        nonlocal visits
        visits += 1
        return plain(*arguments)

    monkeypatch.setattr(json_schema, "_map_schemas", counted)
    close_objects({"allOf": [{"$ref": f"#{number}"} for number in range(count)]})
    assert visits < 4 * count


UNION = {"anyOf": [A, B, {"type": "object", "properties": {"c": {}}, "required": ["c"]}]}
SHARED = {"$ref": "#/$defs/x"}


def together(part: Any, count: int = 8) -> dict[str, Any]:
    return {"$defs": {"x": UNION}, "allOf": [part] * count}


@pytest.mark.parametrize(
    "schema",
    [
        together(SHARED),  # 464 bytes that were compiled for more than 20 s
        together(UNION),
        together({"anyOf": [SHARED]}),
        together({"properties": {"k": SHARED}}),
        together({"properties": {"k": {"properties": {"k": SHARED}}}}),
        together({"items": SHARED}),
        together({"additionalProperties": {"oneOf": [SHARED, {"type": "null"}]}}),
        {**together(SHARED, 3), **UNION, "properties": {"k": together(SHARED, 7)}, "$ref": "#"},
    ],
    ids=str,
)
def test_combinations_are_counted_before_native_code(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^tools: .*combinations, the limit is {MAX_COMBINATIONS}"):
        check_schemas([schema], "tools")
    tools = [Tool("a", "", {"$defs": {"x": UNION}, "properties": {"a": schema}})]
    with pytest.raises(InvalidRequest, match="combinations"):
        make_call_grammar(FORMATS["hermes"], tools, parallel=True)


@pytest.mark.parametrize(
    "schema",
    [
        together(SHARED, 4),
        {"properties": {f"p{n}": UNION for n in range(100)}, "required": ["p1"], "anyOf": [A, B]},
        {"properties": {"left": {"$ref": "#"}}, "allOf": [{"properties": {"left": {"$ref": "#"}}}], **UNION},
        {"allOf": [{"properties": {f"p{n}": {"anyOf": [A, {"type": "null"}]} for n in range(9)}}] * 2},
        {"allOf": 3, "anyOf": {}, "properties": [], "$ref": 7},
    ],
    ids=str,
)
def test_usual_combinations_are_not_refused(schema: Any) -> None:
    check_schemas([schema], "tools")


def test_properties_are_counted_before_native_code() -> None:
    """4,000 optional ones took 6.5 s to check, and were refused in mid-answer."""
    for count in (1, MAX_OBJECT_PROPERTIES, MAX_OBJECT_PROPERTIES + 1):
        schema: Any = {"properties": {f"p{number}": {} for number in range(count)}}
        few = count <= MAX_OBJECT_PROPERTIES
        with nullcontext() if few else pytest.raises(InvalidRequest, match="properties of one object"):
            check_schemas([schema], "tools")
    with pytest.raises(InvalidRequest, match=f" properties, the limit is {MAX_PROPERTIES}$") as refused:
        half: Any = {"properties": {f"p{number}": {} for number in range(MAX_OBJECT_PROPERTIES)}}
        parse_schemas(ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps({"anyOf": [half] * 5})))
    assert refused.value.field == "response_format"


def test_types_of_a_schema_are_found_in_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two references to the next of 60 schemas were 2^60 looks."""
    looks = 0
    plain = json_schema._find_types

    def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        assert looks < 1000
        return plain(*arguments)

    monkeypatch.setattr(json_schema, "_find_types", counted)
    definitions: dict[str, Any] = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(60)}
    root = {"$defs": {**definitions, "60": {"type": "string"}}}
    get_types({"$ref": "#/$defs/40"}, root)
    assert get_types({"$ref": "#/$defs/50"}, root) == {"string"}


_DEEPEST = """
from tests.unit.text.test_json_schema import COMPILER, chain, ConstraintKind, ConstraintSpec, InvalidRequest
for count, nested in ((511, 0), (250, 10), (511, 15)):
    try:
        COMPILER.check(ConstraintSpec(ConstraintKind.JSON_SCHEMA, chain(count, nested)))
    except InvalidRequest as error:
        print(error)
print("survived")
"""


def test_references_within_the_limits_do_not_overflow_the_native_stack() -> None:
    """In a process of its own: 250 references with ten arrays between each two ended it by SIGSEGV."""
    done = subprocess.run(
        [sys.executable, "-c", _DEEPEST], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0 and done.stdout.endswith("survived\n"), (done.returncode, done.stderr[-500:])


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
    assert takes(spec, f"{good}<end>")
    assert bad is None or not takes(spec, f"{bad}<end>")


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#/$defs/node"}, {"$ref": "#"}], "$defs": {"node": NODE}},
    ],
)
def test_a_schema_that_requires_itself_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="only endless values match it: a schema requires itself"):
        COMPILER.check(ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {
            "type": "object",
            "properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
            "required": ["a"],
        },
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}, "required": ["a"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}}},
        {"$ref": "#/$defs/node", "$defs": {"node": {**NODE, "required": []}}},
    ],
)
def test_a_recursive_schema_that_may_end_is_taken(schema: dict[str, Any]) -> None:
    COMPILER.check(ConstraintSpec(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))


def test_the_search_for_endless_values_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass over a chain written backwards finds one more reference that ends."""
    wide: dict[str, Any] = {f"p{number}": {"type": "null"} for number in range(100)}
    links = {}
    for number in range(400):
        properties = {**wide, "next": {"$ref": f"#/$defs/{number + 1}"}}
        links[str(number)] = {"type": "object", "properties": properties, "required": [*properties]}
    looks = Mock(side_effect=json_schema.get_values)
    monkeypatch.setattr(json_schema, "get_values", looks)
    check_end({"$defs": {**links, "400": {"type": "null"}}, "$ref": "#/$defs/0"}, "json_schema")
    assert json_schema.MAX_VISITS / 2 < looks.call_count <= json_schema.MAX_VISITS
