"""JSON schemas of structured output: objects that list their properties are closed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from cllm.types import ConstraintKind, ConstraintSpec

# Keywords that hold schemas: of the same value as the schema they stand in, and of parts of that value.
_SAME_VALUE = {"allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas"}
_INNER_VALUE = {"items", "prefixItems", "additionalItems", "additionalProperties", "contains"}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_OTHERS = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}


def close_schemas(spec: ConstraintSpec) -> str:
    """The source with the objects of its schema, or of the schemas of tool calls, closed."""

    def close(source: str, begin: int = 0) -> tuple[str, int]:
        schema, end = json.JSONDecoder().raw_decode(source, begin)
        return json.dumps(close_objects(schema)), end

    try:
        if spec.kind is ConstraintKind.JSON_SCHEMA:
            closed, end = close(spec.source)
            return closed if end == len(spec.source) else spec.source
        if spec.kind is ConstraintKind.TOOLS:
            parts, done = [], 0
            for found in re.finditer(r"%json\s*(?=\{)", spec.source):
                if found.start() >= done:  # not inside the schema before
                    closed, end = close(spec.source, found.end())
                    parts += [spec.source[done : found.end()], closed]
                    done = end
            return "".join(parts) + spec.source[done:]
    except (ValueError, TypeError, RecursionError):
        pass  # refused where it is compiled
    return spec.source


def close_objects(schema: Any) -> Any:
    """The schema with those objects closed that list `properties` and say nothing of others, as in llama.cpp.

    An object without `properties` stays a free map. What is combined (by `allOf`, or as `properties` beside a
    reference or a union) stays open, and so does what it refers to: closed parts would exclude each other.
    """
    combined: set[str] = set()  # references
    known = -1
    while known < len(combined):
        known = len(combined)
        closed = _close(schema, "#", False, combined)
    return closed


def _close(schema: Any, place: str, is_part: bool, combined: set[str]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    all_of = schema.get("allOf", ())
    parts = len(schema.keys() & ((_SAME_VALUE - {"allOf"}) | {"properties", "$ref"})) + len(all_of)
    is_part = is_part or parts > 1 or place in combined
    if is_part and isinstance(schema.get("$ref"), str):
        combined.add(schema["$ref"])

    def close(inner: Any, path: str, same: bool) -> Any:
        return _close(inner, f"{place}/{path}", same and is_part, combined)

    closed = _map_schemas(schema, close)
    listed = schema.get("properties")
    if is_part or not isinstance(listed, Mapping) or schema.keys() & _OTHERS:
        return closed
    required = schema.get("required", ())
    if all(name in listed for name in required) and schema.get("minProperties", 0) <= len(listed):
        closed["additionalProperties"] = False
    return closed


def _map_schemas(schema: Mapping[str, Any], change: Callable[[Any, str, bool], Any]) -> dict[str, Any]:
    """A copy in which `change` replaces each schema inside: given its path, and if its value is the same."""
    changed = dict(schema)
    for key in schema.keys() & (_SAME_VALUE | _INNER_VALUE | _BY_NAME):
        value, same = schema[key], key in _SAME_VALUE
        if isinstance(value, list):
            changed[key] = [change(each, f"{key}/{number}", same) for number, each in enumerate(value)]
        elif key in _BY_NAME and isinstance(value, Mapping):
            escaped = {name: name.replace("~", "~0").replace("/", "~1") for name in value}
            changed[key] = {
                name: change(each, f"{key}/{escaped[name]}", same) for name, each in value.items()
            }
        else:
            changed[key] = change(value, key, same)
    return changed
