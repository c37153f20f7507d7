"""Random JSON schemas on a large vocabulary: what ends with `stop` validates. `proof/schemas.py` has 200."""

from __future__ import annotations

import json

import jsonschema
import pytest

from proof.schemas import ask_all, check
from proof.shared.schema_maker import SchemaMaker
from tests.driver.server import Server, wait_for


def test_answers_validate(wide: Server) -> None:
    outcomes, _ = ask_all(wide.url, 8, seed=2, max_tokens=160)
    assert [outcome for outcome in outcomes if outcome.fault is not None] == []
    assert sum(outcome.finish_reason == "stop" for outcome in outcomes) >= 5, "too few ended to mean anything"
    wait_for(wide.idle)


def test_the_schemas_are_schemas_of_every_kind_and_always_the_same() -> None:
    maker = SchemaMaker(1)
    schemas = [maker.make() for _ in range(200)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert min(maker.used.values()) >= 20 and len(maker.used) == 15
    again = SchemaMaker(1)
    assert json.dumps(schemas) == json.dumps([again.make() for _ in range(200)])


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("time", "14:43:00.5-08:30", "14:43:00"),
        ("time", "23:59:60Z", "24:00:00Z"),
        ("date-time", "2024-02-29T01:02:03Z", "2023-02-29T01:02:03Z"),
        ("date", "2024-02-29", "2023-02-29"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567"),
        ("ipv4", "10.0.0.255", "10.0.0.256"),
    ],
)
def test_the_check_sees_what_does_not_fit(kind: str, good: str, bad: str) -> None:
    schema = {"type": "string", "format": kind}
    assert check(schema, json.dumps(good)) is None
    assert check(schema, json.dumps(bad)) is not None
    assert check(schema, good) is not None, "not even JSON"
