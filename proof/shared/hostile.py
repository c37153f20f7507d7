"""Hostile requests: every field of every route at and beyond its limits, nested, repeated, escaped.

The same number and seed give the same request. None is larger than a body may be.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec

from cllm.limits import LIMITS, MAX_CONTAINERS, MAX_DEPTH, MAX_INPUTS, MAX_SOURCE, MAX_VALUES
from cllm.server.dialect import Route
from cllm.server.dialects import DIALECTS
from cllm.server.examples import find_example

MAX_BYTES = 8 << 20  # the default of --max-body-mb
LARGE_EVERY = 50  # one request in this many may have megabytes
# These need an operator; if one of them were let through, the model would be gone.
LEFT_OUT = ("/admin/reload", "/api/pull", "/api/delete", "/api/copy")
SHORT: dict[str, Any] = {
    "max_tokens": 2,
    "n_predict": 2,
    "max_output_tokens": 2,
    "options": {"num_predict": 2, "timeout": 20},
    "timeout": 20,
}
SCHEMA_FIELDS = {
    "json_schema",
    "guided_json",
    "format",
    "response_format",
    "text",
    "structured_outputs",
    "tools",
}
GRAMMAR_FIELDS = {"grammar", "regex", "guided_grammar", "guided_regex"}
CHAIN = "previous_response_id"
EMBEDDED = {"input", "content", "documents", "text_2", "prompt"}
# Every other request has one of these.
COSTLY = {*SCHEMA_FIELDS, *GRAMMAR_FIELDS, "messages", "input", "prompt", "logit_bias", "content", CHAIN}
PREVIOUS = b"resp_previous"  # whoever sends a request puts the id of a stored response there
_REASONING = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 40}]}
_TEXT = {"type": "string"}


class HostileRequest(NamedTuple):
    """A request to send with a key."""

    method: str
    path: str
    body: bytes


def _object(*names: str) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(names, _TEXT), "required": list(names)}


def _optional(count: int) -> dict[str, Any]:
    return {"properties": {f"p{number}": _TEXT for number in range(count)}}


def _chain(count: int, *, backwards: bool = False) -> dict[str, Any]:
    """References that lead from one to the next."""
    order = range(count - 1, -1, -1) if backwards else range(count)
    links = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in order}
    return {"$ref": "#/$defs/0", "properties": {"x": {}}, "$defs": {**links, str(count): _object("a")}}


def _tree(width: int, depth: int) -> dict[str, Any]:
    """Alternatives of alternatives, by reference."""
    links = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * width} for n in range(depth)}
    return {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {**links, str(depth): _TEXT}}


def _make_call(field: str, arguments: str) -> list[dict[str, Any]]:
    """A conversation with an earlier tool call, whose arguments are JSON text."""
    call = {"name": "f", "arguments": arguments}
    if field == "input":
        return [{"type": "function_call", "call_id": "a", **call}, {"role": "user", "content": "x"}]
    return [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": call}]}]


SCHEMAS: tuple[Callable[[int], Any], ...] = (
    lambda n: _chain(n % 520),
    lambda n: _chain(3000, backwards=True),
    lambda n: _chain(500, backwards=True),
    lambda n: _tree(2 + n % 12, n % 60),
    lambda n: {"allOf": [{"anyOf": [_object("a"), _object("b"), _object("c")]}] * (n % 12)},
    lambda n: {"$defs": {"x": {"anyOf": [_object("a"), _TEXT]}}, "allOf": [{"$ref": "#/$defs/x"}] * (n % 14)},
    lambda n: {"allOf": [{"properties": {"k": {"anyOf": [_object("a"), _object("b")]}}}] * (n % 14)},
    lambda n: {
        "type": "object",
        "properties": {f"p{n}{i}": _TEXT for i in range((480, 1024, 1025, 4000)[n % 4])},
    },
    lambda n: {"type": "object", "properties": {f"p{i}": {"maxLength": n} for i in range(400)}},
    lambda n: {  # optional properties that no walk of a few tokens comes to
        "properties": {"a": {**_TEXT, "minLength": 60, "maxLength": 60}, "b": _optional(480 + n % 545)},
        "required": ["a", "b"],
    },
    lambda n: {"enum": [f"{n} {i}" for i in range(n % 9000)]},
    lambda n: {"anyOf": [_object(f"p{n}{i}") for i in range(n % 2000)]},
    lambda n: {"type": "string", "pattern": f"^(.{{1,{n % 900}}}x){{1,{n % 300}}}$"},
    lambda n: {"type": "array", "minItems": 10**n if n < 20 else n, "items": {"$ref": "#"}},
    lambda n: {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "anyOf": [{"$ref": "#"}] * (n % 9)},
    lambda n: {"$ref": f"#{'/a' * (n % 5000)}", "maximum": 10 ** (n % 400)},
    lambda n: [] if n % 2 else {"allOf": n, "properties": [], "required": {}, "$ref": {}, "anyOf": "x"},
)
SOURCES: tuple[Callable[[int], str], ...] = (
    lambda n: "(" * (MAX_DEPTH + n % 3) + "a" + ")" * (MAX_DEPTH + n % 3),
    lambda n: f"([a-z]{{1,{n % 200}}}[0-9a-f]{{1,{n % 200}}}){{1,{n % 200}}}",
    lambda n: f"(.{{0,{n % 999}}}a){{0,{n % 99}}}(.{{0,{n % 999}}}b){{0,{n % 99}}}",
    lambda n: "|".join(f"a{i}b*" for i in range(n % 9000)),
    lambda n: "root ::= " + " ".join(f'"{n}a{i}"?' for i in range(n % 5000)),
    lambda n: "start: " + " | ".join(f"r{i}" for i in range(500 + n % 30)) + "\nr0: start",
    lambda n: 'start: %json {"\\u0024ref": "#"} ' + "%json {" * (n % 600),
    lambda n: "x" * (MAX_SOURCE + n % 3 - 1),
)
TEXTS: tuple[Callable[[int], Any], ...] = (
    lambda n: "\0" * (n % 5),
    lambda n: "\ud800" + "x" * (n % 300),
    lambda n: "é\u202e\x1b[31m" * (n % 60),
    lambda n: "[{," * (n % 3000),
    lambda n: "word " * (n % 400),
)
NUMBERS = (-1, 0, 1, 1.5, 64.0, 2**31, 2**63, 2**64, -(2**63) - 1, 1e308, True, None, "1", "NaN")
RAW = (b"NaN", b"1e999", b"-Infinity", b"01", b"{", b'"', b'"\\ud83d"', b"[" * 300, b'{"a":' * 70, b"\xff")


def _write(value: Any, *, escaped: bool = False) -> bytes:
    """A value as JSON; `escaped` spells every character of its texts by its number."""
    text = json.dumps(value)
    if escaped and "\\" not in text and len(text) < 1 << 16:
        text = re.sub(r'(?<=")[^"]+(?="\s*[:,\]}]|"$)', lambda found: _spell(found[0]), text)
    return text.encode()


def _spell(text: str) -> str:
    return "".join(f"\\u{ord(each):04x}" for each in text)


@cache
def _many(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def _wrap(value: bytes, depth: int) -> bytes:
    return b"[" * depth + value + b"]" * depth


def _get_fields(route: Route) -> list[str]:
    assert route.body is not None
    names = [field.encode_name for field in msgspec.structs.fields(route.body)]  # type: ignore[arg-type]
    return [*names, *(name for names in route.body.ALIASES.values() for name in names), "unknown"]


ROUTES = [
    (route, _get_fields(route))
    for dialect in DIALECTS
    for route in dialect.routes
    if route.method == "POST" and route.body is not None and route.path not in LEFT_OUT
]


class HostileRequests:
    """Makes the requests of a seed, by their number."""

    def __init__(self, seed: int = 1) -> None:
        self._seed = seed

    def make(self, number: int) -> HostileRequest:
        draw = random.Random(f"{self._seed} {number}")
        route, fields = ROUTES[number % len(ROUTES)]
        turn = number // len(ROUTES)
        name = fields[turn // 2 % len(fields)]
        if turn % 2 and (costly := [field for field in fields if field in COSTLY]):
            name = draw.choice(costly)
        assert route.body is not None
        base: dict[str, Any] = {
            **find_example(route.body),
            **{key: SHORT[key] for key in SHORT if key in fields},
        }
        if name in SCHEMA_FIELDS and draw.random() < 0.1:  # what fails in mid-answer
            base.update({key: 100 for key in SHORT if key in fields and "_" in key})
        base.pop(name, None)
        if name == CHAIN:
            base["input"] = [_REASONING] * draw.choice((9, 900, 4000)) + [{"role": "user", "content": "hi"}]
        large = number % LARGE_EVERY == 0
        value = self._draw_large(draw) if large else self._draw(draw, name)
        pairs = [(key, _write(item)) for key, item in base.items()]
        pairs += [(name, value)] * (1 if large or draw.random() < 0.9 else draw.randrange(2, 50))
        spelled = [(_write(key, escaped=draw.random() < 0.1), item) for key, item in pairs]
        body = b"{" + b",".join(key + b":" + item for key, item in spelled) + b"}"
        path = route.path.replace("{id_slot}", "0").replace("{request_id}", "x")
        return HostileRequest(route.method, path, body[:MAX_BYTES])

    def _draw(self, draw: random.Random, name: str) -> bytes:
        """A value: of the field's own kind more often than not."""
        n = draw.randrange(10_000)
        if name in SCHEMA_FIELDS and draw.random() < 0.8:
            schema = draw.choice(SCHEMAS)(n)
            shaped: Mapping[str, Any] = {
                "tools": [
                    {
                        "type": "function",
                        "name": "f",
                        "function": {"name": "f", "parameters": schema},
                        "parameters": schema,
                        "input_schema": schema,
                    }
                ]
                * draw.choice((1, 1, 2)),
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
                "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
                "structured_outputs": {"json": schema},
            }
            found = shaped.get(name, schema)
            if name == "guided_json" and draw.random() < 0.5:
                found = _write(schema, escaped=True).decode()
            return _write(found, escaped=draw.random() < 0.2)
        if name in GRAMMAR_FIELDS:
            return _write(draw.choice(SOURCES)(n))
        if name == "logit_bias" and draw.random() < 0.8:
            texts = {f"{i}{'bias ' * (n % 40)}": draw.choice((1, -100, False)) for i in range(n % 1100)}
            return _write([[text, bias] for text, bias in texts.items()] if n % 2 else texts)
        if name in ("messages", "input") and draw.random() < 0.3:
            return _write(_make_call(name, json.dumps([[]] * 8 * n)))
        if name == CHAIN and draw.random() < 0.9:
            return _write(PREVIOUS.decode())
        if name in ("messages", "input", "prompt") and draw.random() < 0.5:
            parts = [{"type": "text", "text": draw.choice(TEXTS)(n)}] * draw.choice((1, 2, 64))
            return _write(
                [{"role": draw.choice(("user", "assistant", "system")), "content": parts}] * (n % 99)
            )
        kind = draw.randrange(6)
        if kind == 0:
            return draw.choice(RAW)
        if kind == 1:
            return _write(draw.choice(NUMBERS))
        if kind == 2:
            return _write(draw.choice(TEXTS)(n), escaped=draw.random() < 0.5)
        if kind == 3:
            return _wrap(_write(draw.choice(NUMBERS)), MAX_DEPTH + draw.randrange(-2, 3))
        if kind == 4:
            limit = draw.choice([limit.value for limit in LIMITS if limit.value <= 4096])
            if name in EMBEDDED:
                limit = draw.choice((16, MAX_INPUTS + 1))  # as many texts as are taken compute for long
            return _many(draw.choice((b"1", b'"a"', b"{}", b"[]", b"null")), limit + draw.randrange(-1, 2))
        return _write({f"{n} {i}": draw.choice(NUMBERS) for i in range(n % 300)})

    def _draw_large(self, draw: random.Random) -> bytes:
        """A value of many values, or of megabytes of text."""
        kind = draw.randrange(6)
        if kind == 0:
            return _many(
                draw.choice((b"[]", b"{}")), draw.choice((MAX_CONTAINERS - 9, MAX_CONTAINERS + 1, 2_700_000))
            )
        if kind == 1:
            return _many(
                draw.choice((b"1", b'"a"')), draw.choice((MAX_VALUES - 99, MAX_VALUES + 1, 1_900_000))
            )
        if kind == 2:
            part = b'{"type":"text","text":"a"}'
            message = b'{"role":"user","content":' + _many(part, draw.choice((1000, 4000, 4097))) + b"}"
            return _many(message, draw.choice((8, 60)))
        if kind == 3:
            return (
                b'"'
                + draw.choice((b"word ", b"[],", b'\\"', b"\\u00e9")) * draw.choice((40_000, 1_300_000))
                + b'"'
            )
        if kind == 4:
            tool = b'{"type":"function","name":"f","function":{"name":"f%d","parameters":{"required":["a"]}}}'
            return b"[" + b",".join(tool % i for i in range(draw.choice((200, 4096, 4097)))) + b"]"
        return _write({f"p{i}": i for i in range(draw.choice((60_000, MAX_VALUES + 1)))})

    def all(self, count: int) -> Iterator[HostileRequest]:
        return map(self.make, range(count))
