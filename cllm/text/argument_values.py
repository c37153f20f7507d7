"""Values of arguments: the literals that models write, read as JSON values by the types a schema allows."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from cllm.text.chat_format import dump_json, get_type
from cllm.text.json_schema import MAX_NESTING, count_nesting, get_property, get_types, resolve

NO_VALUE: Any = object()  # where a text has none
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[nrt\\'\"])")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
# A string between quote tokens, one of JSON, or a name without quotes.
_GEMMA_PART = re.compile(
    r'<\|"\|>(.*?)<\|"\|>|("(?:\\.|[^"\\])*")|([{,]\s*)([^\s",:{}\[\]][^",:{}\[\]]*):', re.DOTALL
)
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def parse_json(text: str) -> Any:
    """The value of a JSON text, or `NO_VALUE`."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return NO_VALUE


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def parse_literal(text: str) -> Any:
    """The value of a JSON or Python literal, or `NO_VALUE`."""
    text = text.strip()
    if (value := parse_json(text)) is not NO_VALUE:
        return value
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return _ESCAPE.sub(_unescape, text[1:-1])
    if count_nesting(text) > MAX_NESTING:
        return NO_VALUE
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd escapes
            return _evaluate(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return NO_VALUE


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code[1:], 16)) if code[0] in "xu" else _ESCAPED.get(code, code)


def _evaluate(node: ast.expr) -> Any:
    """The value of a literal; Python's names and JSON's."""
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, str | int | float | bool):
            return value
        case ast.Name(id=name) if name.lower() in _WORDS:
            return _WORDS[name.lower()]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = [(key, value) for key, value in zip(keys, values, strict=True) if key is not None]
            return {str(_evaluate(key)): _evaluate(value) for key, value in pairs}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise ValueError("no literal")


def parse_gemma(text: str) -> Any:
    """Gemma's literals: names without quotes, strings between quote tokens."""
    if (value := parse_json(text)) is not NO_VALUE:
        return value

    def quote(match: re.Match[str]) -> str:
        between, plain, before, name = match.groups()
        if name is not None:
            return f"{before}{json.dumps(name)}:"
        literal = parse_literal(plain) if between is None else between
        return json.dumps(literal if isinstance(literal, str) else plain)

    return parse_literal(_GEMMA_PART.sub(quote, text))


def parse_tags(text: str, mark: str, schema: Any = None, root: Mapping[str, Any] | None = None) -> Any:
    """Objects and lists that are written in tags, each after `mark`, by a schema."""
    pieces = re.split(re.escape(mark) + r"<(/?[^<>]+)>", text)
    stack: list[_Tag] = [("", [], pieces[0])]
    for tag, after in zip(pieces[1::2], pieces[2::2], strict=True):
        if not tag.startswith("/"):
            stack.append((tag, [], after))
            continue
        if len(stack) < 2 or stack[-1][0] != tag[1:]:
            return NO_VALUE
        inner = stack.pop()
        stack[-1][1].append(inner)
    return _read_tag(stack[0], schema, root or {}) if len(stack) == 1 else NO_VALUE


_Tag = tuple[str, list[Any], str]  # its name, the tags in it, the text before them


def _read_tag(tag: _Tag, schema: Any, root: Mapping[str, Any]) -> Any:
    _, inner, text = tag
    schema = resolve(schema, root)
    types = get_types(schema, root)
    if not inner:
        return _read_text(text, types)
    if types == {"array"} or ("object" not in types and all(name == "item" for name, *_ in inner)):
        return [_read_tag(each, schema.get("items"), root) for each in inner]
    return {each[0]: _read_tag(each, get_property(schema, each[0]), root) for each in inner}


def _read_text(text: str, types: frozenset[str]) -> Any:
    """A value in tags that has no others in it, by the types it may have."""
    if not text and types and "string" not in types:
        return [] if "array" in types else {} if "object" in types else None
    value = NO_VALUE if types == {"string"} else parse_literal(text)
    if value is NO_VALUE or isinstance(value, str):
        return text
    kind = get_type(value)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return value if fits or "string" not in types else text


def convert(text: str, types: frozenset[str], nested: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON text of a value that is not certainly a string, by its schema and the types it may have."""
    if nested and nested in text:
        value = parse_tags(text, nested, schema, root)
        return dump_json(text if value is NO_VALUE else value)
    return dump_json(_read_text(text, types if nested or text else types | {"string"}))
