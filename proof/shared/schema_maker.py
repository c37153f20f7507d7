"""Random JSON schemas, the same for the same seed: everything structured output promises to honour."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Schema = dict[str, Any]

_KEYS = ("name", "id", "größe", "tags", "a b", "is_on", "x", "price", "when", 'say "hi"', "the/path", "日本")
_WORDS = ("red", "blue", "a", "", "two words", "naïve", "€5", 'quo"te', "back\\slash", "tab\there", "😀")
_PATTERNS = (
    r"^[a-z]{2,5}$",
    r"^\d{3}-\d{4}$",
    r"^(cat|dog|bird)s?$",
    r"^[A-Z][a-z]+ [A-Z]\.$",
    r"^#[0-9a-f]{6}$",
    r"^v\d+\.\d+(\.\d+)?$",
    r"^[^\s@]{1,8}@[a-z]{1,8}\.(com|org)$",
)
_FORMATS = ("date", "uuid", "ipv4", "time", "date-time")


class SchemaMaker:
    """Makes schemas whose answers end within a few hundred tokens, most of them."""

    def __init__(self, seed: int, deepest: int = 3, keys: Sequence[str] = _KEYS) -> None:
        self._keys = keys
        self._random = random.Random(f"schemas {seed}")
        self._deepest = deepest
        self.used: dict[str, int] = {}  # kind → how many there are in all

    def make(self) -> Schema:
        """A schema for a whole answer: an object or an array more often than not."""
        kind = self._random.choices(["object", "array", "any"], [6, 2, 2])[0]
        schema = self._of_kind(kind, 0) if kind != "any" else self._any(0)
        if self._random.random() < 0.15:
            schema = self._with_definitions(schema)
        return schema

    def make_parameters(self) -> Schema:
        """A schema for the arguments of a tool."""
        return self._of_kind("object", 0)

    @property
    def _kinds(self) -> Mapping[str, Callable[[int], Schema]]:
        return {
            "object": self._object,
            "array": self._array,
            "tuple": self._tuple,
            "anyOf": self._any_of,
            "types": self._types,
            "enum": self._enum,
            "const": self._const,
            "integer": self._integer,
            "number": self._number,
            "text": self._text,
            "pattern": self._pattern,
            "format": self._format,
            "boolean": lambda _: {"type": "boolean"},
            "null": lambda _: {"type": "null"},
        }

    def _of_kind(self, kind: str, depth: int) -> Schema:
        self.used[kind] = self.used.get(kind, 0) + 1
        return self._kinds[kind](depth)

    def _any(self, depth: int) -> Schema:
        names = list(self._kinds)
        if depth >= self._deepest:
            names = [name for name in names if name not in ("object", "array", "tuple", "anyOf")]
        return self._of_kind(self._random.choice(names), depth)

    def _object(self, depth: int) -> Schema:
        keys = self._random.sample(self._keys, self._random.randint(0 if depth else 1, 4))
        schema: Schema = {
            "type": "object",
            "properties": {key: self._any(depth + 1) for key in keys},
            "required": [key for key in keys if self._random.random() < 0.6],
            "additionalProperties": False,
        }
        if self._random.random() < 0.1:
            schema["additionalProperties"] = {"type": "boolean"}
        return schema

    def _array(self, depth: int) -> Schema:
        low = self._random.randint(0, 2)
        return {
            "type": "array",
            "items": self._any(depth + 1),
            "minItems": low,
            "maxItems": low + self._random.randint(0, 2),
        }

    def _tuple(self, depth: int) -> Schema:
        parts = [self._any(depth + 1) for _ in range(self._random.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth + 1) for _ in range(self._random.randint(2, 3))]}

    def _types(self, _: int) -> Schema:
        names = ["string", "integer", "boolean", "null"]
        return {"type": self._random.sample(names, 2), "maxLength": 10}

    def _enum(self, _: int) -> Schema:
        values: list[Any] = [*_WORDS, 7, -1.5, None, True, [1, "x"], {"k": 0}]
        return {"enum": self._random.sample(values, self._random.randint(1, 4))}

    def _const(self, _: int) -> Schema:
        return {"const": self._random.choice([*_WORDS, 42, False, None, {"a": [1, 2]}])}

    def _integer(self, _: int) -> Schema:
        low = self._random.choice([-1000, -7, 0, 1, 18, 255])
        high = low + self._random.choice([0, 3, 100, 99_999])
        exclusive = self._random.random() < 0.3 and high > low + 1
        schema: Schema = {"type": "integer"}
        schema.update({"exclusiveMinimum": low} if exclusive else {"minimum": low})
        schema.update({"exclusiveMaximum": high} if exclusive else {"maximum": high})
        if self._random.random() < 0.2 and not exclusive:
            schema.update({"minimum": 0, "maximum": 1000, "multipleOf": self._random.choice([2, 5, 10])})
        return schema

    def _number(self, _: int) -> Schema:
        low = self._random.choice([-99.5, -0.25, 0, 0.001, 3.14])
        high = low + self._random.choice([0.5, 1, 1000])
        exclusive = self._random.random() < 0.3
        names = ("exclusiveMinimum", "exclusiveMaximum") if exclusive else ("minimum", "maximum")
        return {"type": "number", names[0]: low, names[1]: high}

    def _text(self, _: int) -> Schema:
        low = self._random.choice([0, 0, 1, 5])
        return {"type": "string", "minLength": low, "maxLength": low + self._random.choice([0, 3, 20])}

    def _pattern(self, _: int) -> Schema:
        return {"type": "string", "pattern": self._random.choice(_PATTERNS)}

    def _format(self, _: int) -> Schema:
        return {"type": "string", "format": self._random.choice(_FORMATS)}

    def _with_definitions(self, schema: Schema) -> Schema:
        """The same, reached by reference, beside another of its kind."""
        self.used["$ref"] = self.used.get("$ref", 0) + 1
        return {
            "$defs": {"thing": schema, "flag": {"type": "boolean"}},
            "type": "object",
            "properties": {"one": {"$ref": "#/$defs/thing"}, "two": {"$ref": "#/$defs/flag"}},
            "required": ["one"],
            "additionalProperties": False,
        }
