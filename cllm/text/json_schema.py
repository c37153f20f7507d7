"""JSON schemas: the types and texts that they allow, their references, and objects closed for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from cllm import limits
from cllm.errors import InvalidRequest
from cllm.text.chat_format import get_type
from cllm.types import ConstraintKind, ConstraintSpec

# Keywords that hold schemas: of the same value as the schema they stand in, and of parts of that value.
_SAME_VALUE = {"allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas"}
_INNER_VALUE = {"items", "prefixItems", "additionalItems", "additionalProperties", "contains"}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_OTHERS = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}

MAX_CHAIN = 8  # references that lead from one to the next
MAX_VISITS = 20_000  # schemas that the search for endless values looks at
MAX_STEPS = 1 << 16  # of counting combinations
_REFERENCES = {"$ref", "$dynamicRef", "$recursiveRef"}
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)"')
MAX_EXACT = 1 << 53  # beyond it llguidance writes another number, or overflows its stack
_MIN_NUMBER = -(1 << 63)

_DAY = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": r"[A-Za-z0-9_]+([.+-][A-Za-z0-9_]+)*@[A-Za-z0-9]+(-[A-Za-z0-9]+)*(\.[A-Za-z]{2,})+",
}
_ASCII = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}  # as in JSON schemas; in other dialects they mean more
# What not every dialect has, or writes in this way.
_ODD = re.compile(r"\\[0-9bBkpPuxc]|\(\?(?!:)|[*+?}]\+|(?<!\\)\{(?![0-9]+(,[0-9]*)?\})")


def get_types(
    schema: Any, root: Mapping[str, Any], depth: int = 0, known: dict[int, frozenset[str]] | None = None
) -> frozenset[str]:
    """The JSON types that a schema allows; an empty set stands for any. Each schema is looked at once."""
    if not isinstance(schema, Mapping) or depth > limits.MAX_NESTING:
        return frozenset()
    known = {} if known is None else known
    if id(schema) not in known:
        known[id(schema)] = _find_types(schema, root, depth, known)
    return known[id(schema)]


def _find_types(
    schema: Mapping[str, Any], root: Mapping[str, Any], depth: int, known: dict[int, frozenset[str]]
) -> frozenset[str]:
    if isinstance(schema.get("$ref"), str):
        return get_types(resolve(schema, root), root, depth + 1, known)
    if "type" in schema:
        given = schema["type"]
        return frozenset(given if isinstance(given, list) else [given])
    if (values := get_values(schema)) is not None:
        return frozenset(map(get_type, values))
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            types = [get_types(option, root, depth + 1, known) for option in schema[key]]
            return frozenset().union(*types) if all(types) else frozenset()
    return frozenset()


def resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a local reference means."""
    for _ in range(MAX_CHAIN):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = _follow(root, reference) if "/" in reference else {}
    return schema if isinstance(schema, Mapping) else {}


def get_property(schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return schema.get("additionalProperties") if found is None else found


def get_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of `const` or `enum`; None where a schema has neither."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def count_nesting(source: str) -> int:
    """How deep brackets are nested in a text."""
    changes = ((character in "([{") - (character in ")]}") for character in source)
    return max(accumulate(changes, initial=0))


def escape_name(name: str) -> str:
    """A name as it stands in a reference."""
    return name.replace("~", "~0").replace("/", "~1")


def escape_regex(text: str) -> str:
    """A regular expression of exactly this text."""
    return re.sub(r"([\\.^$*+?{}\[\]|()/\-&~#\"'@!])", r"\\\1", text).replace("\n", "\\n")


def get_text_expression(schema: Mapping[str, Any]) -> str:
    """A regular expression of the texts that the schema of a string allows, as far as it can be said."""
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    length = f"(?s:.){{{low},{high}}}" if low or high != "" else "(?s:.*)"
    pattern = schema.get("pattern")
    found = _read_pattern(pattern) if isinstance(pattern, str) else _FORMATS.get(schema.get("format", ""))
    return found or length


def _read_pattern(pattern: str) -> str | None:
    """The pattern as an expression of a whole text; None where it cannot be said here."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$\Z", pattern) is not None
    body = pattern[begins : len(pattern) - ends]
    if _ODD.search(body):
        return None
    written: list[str] = []
    depth, inside, negated = 0, False, False
    for part in re.findall(r"\\.|.", body, re.DOTALL):
        if part in _ASCII:
            part = _ASCII[part] if inside else f"[{_ASCII[part]}]"
        elif part == r"\s" and negated:
            part = r"\s\x1c-\x1f"  # blanks in Python
        elif not inside and part in "^$|" and not (part == "|" and depth):
            return None  # another anchor, or one that belongs to one of two cases
        elif not inside:
            depth += (part == "(") - (part == ")")
        escaped = part == "/" or (inside and part in "[&~")
        inside = (inside and part != "]") or part == "["
        negated = inside and (negated or (part == "^" and written[-1:] == ["["]))
        written.append(f"\\{part}" if escaped else part)
    text = "".join(written)
    return f"{'' if begins else '(?s:.*)'}({text}){'' if ends else '(?s:.*)'}"


class EmbeddedSchema(NamedTuple):
    """A JSON schema in the source of a constraint, parsed, and where it stands there."""

    begin: int
    end: int
    schema: Any


def parse_schemas(spec: ConstraintSpec) -> list[EmbeddedSchema]:
    """Parse the schemas in a source: the source itself, or what follows each `%json` of a grammar.

    Raises InvalidRequest for a schema that is no JSON, refers too often, or has numbers that cannot be
    written. In a grammar of a client `%json` may also stand in a literal, so what is no JSON there is left
    to the compiler, and its references are counted as text.
    """
    field, source, found = spec.field, spec.source, list[EmbeddedSchema]()
    places = [len(source) - len(source.lstrip())]
    if spec.kind is not ConstraintKind.JSON_SCHEMA:
        embeds = spec.kind in (ConstraintKind.TOOLS, ConstraintKind.GRAMMAR)
        places = [match.end() for match in re.finditer(r"%json\s*(?=\{)", source)] if embeds else []
    if spec.kind is ConstraintKind.GRAMMAR:
        limits.check(len(places), limits.MAX_REFERENCES, "schemas (%json)", field)
    for begin in places:
        if found and begin < found[-1].end:
            continue  # inside the schema before
        try:
            schema, end = json.JSONDecoder().raw_decode(source, begin)
        except (ValueError, RecursionError) as error:
            if spec.kind is ConstraintKind.GRAMMAR:
                continue
            raise InvalidRequest(f"{field}: the schema is not valid JSON: {error}", field) from None
        found.append(EmbeddedSchema(begin, end, schema))
    if spec.kind is ConstraintKind.JSON_SCHEMA and source[found[0].end :].strip():
        raise InvalidRequest(f"{field}: the schema is not valid JSON: text follows it", field)
    if spec.kind is ConstraintKind.GRAMMAR:
        plain = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), source)
        limits.check(len(_REFERENCE.findall(plain)), limits.MAX_REFERENCES, "references", field)
    check_schemas([each.schema for each in found], field)
    return found


def check_schemas(schemas: Sequence[Any], field: str) -> None:
    """Count what is in the parsed schemas of one request, however it was spelled, before native code does.

    Raises InvalidRequest for what exceeds a limit, and for a number that llguidance cannot write as it is.
    """
    references = properties = 0
    steps = iter(range(MAX_STEPS))
    for root in schemas:
        left, combined = [(root, False)], []
        while left:
            value, written = left.pop()  # a value, and if answers may have it
            if isinstance(value, Mapping):
                references += len(value.keys() & _REFERENCES)
                combined += [value] * (_count_parts(value) > 1)
                for key in value.keys() & {"properties", "patternProperties"}:
                    count = len(value[key]) if isinstance(value[key], Mapping) else 0
                    limits.check(count, limits.MAX_OBJECT_PROPERTIES, "properties of one object", field)
                    properties += count
                left += [(inner, written or key in ("const", "enum")) for key, inner in value.items()]
            elif isinstance(value, list):
                left += [(inner, written) for inner in value]
            elif isinstance(value, int | float) and (
                value <= _MIN_NUMBER or (written and abs(value) > MAX_EXACT)
            ):
                message = f"{field}: {value} is beyond the numbers that can be written exactly"
                raise InvalidRequest(message, field)
        limits.check(references, limits.MAX_REFERENCES, "references", field, "write some of them out")
        limits.check(properties, limits.MAX_PROPERTIES, "properties", field)
        for value in combined:
            ways = count_combinations([value], root, steps)
            advice = "combine fewer alternatives (allOf)"
            limits.check(ways, limits.MAX_COMBINATIONS, "combinations", field, advice)


def count_combinations(
    parts: Sequence[Any], root: Any, steps: Iterator[int], above: frozenset[Any] = frozenset()
) -> int:
    """Count the ways in which the alternatives of schemas for one value combine, or more than the limit.

    llguidance writes them all out. Where several parts have a property of the same name, its schemas combine
    as well. What takes more than the `steps` that are left combines too much; so does what nests too deep.
    `above` has the parts of the values that these are inside of: recursion adds no way.
    """
    key = frozenset(id(_get_target(part, root)) for part in parts)
    if key in above or len(above) > limits.MAX_NESTING:
        return 1 if key in above else limits.MAX_COMBINATIONS + 1
    above |= {key}
    ways, named = 1, dict[str, list[Any]]()
    waiting = [(part, frozenset[int](), True) for part in parts]
    while waiting and ways <= limits.MAX_COMBINATIONS:
        part, chain, counts = waiting.pop()
        if next(steps, None) is None:
            return limits.MAX_COMBINATIONS + 1
        if not isinstance(part, Mapping) or id(part) in chain:
            continue
        chain |= {id(part)}
        waiting += [(each, chain, counts) for each in (*_get_list(part, "allOf"), _get_target(part, root))]
        for options in filter(None, (_get_list(part, "anyOf"), _get_list(part, "oneOf"))):
            if counts and len(options) > 1:
                ways *= sum(count_combinations([option], root, steps, above) for option in options)
            waiting += [(option, chain, counts and len(options) == 1) for option in options]
        for name, inner in _list_inner(part):
            named.setdefault(name, []).append(inner)
    shared = [each for each in named.values() if len(each) > 1]
    return ways * max((count_combinations(each, root, steps, above) for each in shared), default=1)


def _get_target(schema: Any, root: Any) -> Any:
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    return _follow(root, reference) if isinstance(reference, str) else schema


def _get_list(schema: Mapping[str, Any], key: str) -> list[Any]:
    return list(schema[key]) if isinstance(schema.get(key), list) else []


def _list_inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas of parts of a value, by a name that schemas of the same part share."""
    for key in schema.keys() & _INNER_VALUE:
        yield f"/{key}", schema[key]
    for key in schema.keys() & {"properties", "patternProperties"}:
        yield from schema[key].items() if isinstance(schema[key], Mapping) else ()


def check_end(root: Any, field: str) -> None:
    """Raise InvalidRequest for a schema that only endless values match, such as one that requires itself.

    A reference is known to end once a value without unknown references matches it. A schema that is too
    large for this passes.
    """
    ending: set[str] = set()
    visits = 0

    def ends(schema: Any) -> bool:
        nonlocal visits
        visits += 1
        if visits > MAX_VISITS or not isinstance(schema, Mapping) or get_values(schema) is not None:
            return True
        reference, union = schema.get("$ref"), schema.get("anyOf", schema.get("oneOf"))
        if isinstance(reference, str) and reference in references and reference not in ending:
            return False
        if isinstance(union, list) and union and not any(map(ends, union)):
            return False
        parts = [*(schema.get("allOf") or ())]
        if schema.get("type") in ("object", ["object"]):
            parts += [get_property(schema, name) for name in schema.get("required") or ()]
        elif schema.get("type") in ("array", ["array"]) and schema.get("minItems"):
            parts.append((schema.get("prefixItems") or [schema.get("items")])[0])
        return all(map(ends, parts))

    references = {each for each in _list_references(root) if each.startswith("#")}
    while new := {each for each in references - ending if ends(_follow(root, each))}:
        ending |= new
    if not ends(root):
        message = "only endless values match it: a schema requires itself ($ref); make that part optional"
        raise InvalidRequest(f"{field}: {message}", field)


def _list_references(schema: Any) -> list[str]:
    """The `$ref` of a schema and of all in it."""
    found, left = list[str](), [schema]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            left += value.values()
            found += [reference] if isinstance(reference := value.get("$ref"), str) else []
        elif isinstance(value, list):
            left += value
    return found


def close_schemas(spec: ConstraintSpec, schemas: Sequence[EmbeddedSchema]) -> str:
    """The source with the objects of its schema, or of the schemas of tool calls, closed."""
    if spec.kind not in (ConstraintKind.JSON_SCHEMA, ConstraintKind.TOOLS):
        return spec.source
    parts, done = [], 0
    try:
        for each in schemas:
            parts += [spec.source[done : each.begin], json.dumps(close_objects(each.schema))]
            done = each.end
    except (ValueError, TypeError):
        return spec.source  # no schema: the compiler says why
    return "".join(parts) + spec.source[done:]


def close_objects(schema: Any) -> Any:
    """The schema with those objects closed that list `properties` and say nothing of others, as in llama.cpp.

    An object without `properties` stays a free map. What is combined (by `allOf`, or as `properties` beside a
    reference or a union) stays open, and so does what it refers to: closed parts would exclude each other.
    """
    return _close(schema, False, find_combined(schema))


def find_combined(root: Any) -> set[int]:
    """Find the schemas that others are combined with by reference, however long a chain leads there, by id.

    Each schema is visited twice at most, as a part of a combination and by itself, however references to it
    are spelled. No object may stand in two places of `root`.
    """
    combined: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    waiting: list[tuple[Any, bool]] = [(root, False)]

    def follow(inner: Any, same: bool) -> None:
        waiting.append((inner, same and is_part))

    while waiting:
        schema, is_part = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        is_part = is_part or _count_parts(schema) > 1 or id(schema) in combined
        if (id(schema), is_part) in seen:
            continue
        seen.add((id(schema), is_part))
        reference = schema.get("$ref")
        if is_part and isinstance(reference, str) and (target := _follow(root, reference)) is not None:
            combined.add(id(target))
            waiting.append((target, True))
        _map_schemas(schema, follow)
    return combined


def _follow(root: Any, reference: str) -> Any:
    """The schema at a local reference; None where there is none."""
    found = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isascii() and name.isdigit() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found if reference.startswith("#") else None


def _count_parts(schema: Mapping[str, Any]) -> int:
    """The parts that a schema combines for one value."""
    same = (_SAME_VALUE - {"allOf"}) | {"properties", "$ref"}
    together = schema.get("allOf")
    return len(schema.keys() & same) + (len(together) if isinstance(together, list) else 0)


def _close(schema: Any, is_part: bool, combined: set[int]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    is_part = is_part or _count_parts(schema) > 1 or id(schema) in combined

    closed = _map_schemas(schema, lambda inner, same: _close(inner, same and is_part, combined))
    _tighten(closed)
    listed = schema.get("properties")
    if is_part or not isinstance(listed, Mapping) or schema.keys() & _OTHERS:
        return closed
    required = schema.get("required", ())
    if all(name in listed for name in required) and schema.get("minProperties", 0) <= len(listed):
        closed["additionalProperties"] = False
    return closed


def _tighten(schema: dict[str, Any]) -> None:
    """Exclusive bounds of numbers that are whole, as bounds beside them.

    llguidance takes 0 for a number between 0 and 0.5, both excluded.
    """
    for excluded, bound, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        limit = schema.get(excluded)
        if not isinstance(limit, int | float) or isinstance(limit, bool) or limit != limit // 1:
            continue
        if schema.get("type") == "number" and bound not in schema:
            del schema[excluded]
            schema[bound] = limit + sign * max(1e-6, abs(limit) * 1e-12)


def _map_schemas(schema: Mapping[str, Any], change: Callable[[Any, bool], Any]) -> dict[str, Any]:
    """A copy in which `change` replaces each schema inside: given it, and if its value is the same."""
    changed = dict(schema)
    for key in schema.keys() & (_SAME_VALUE | _INNER_VALUE | _BY_NAME):
        value, same = schema[key], key in _SAME_VALUE
        if isinstance(value, list):
            changed[key] = [change(each, same) for each in value]
        elif key in _BY_NAME and isinstance(value, Mapping):
            changed[key] = {name: change(each, same) for name, each in value.items()}
        else:
            changed[key] = change(value, same)
    return changed
