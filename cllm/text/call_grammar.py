"""Call grammar: tool calls of a chat format as a Lark grammar for llguidance, by the schemas of the tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cllm.limits import MAX_PROPERTIES, MAX_SOURCE, check
from cllm.text import chat_format as formats
from cllm.text import json_schema
from cllm.types import ConstraintKind, ConstraintSpec

MAX_CALLS = 16  # in one answer
MIN_CALLS = 4  # that a forced answer may have; more only where there are more tools
MAX_FREE = 8  # arguments of a tool that does not name them
_SLOTS = {formats.Slot.ID: "[a-zA-Z0-9]{9}", formats.Slot.INDEX: "[0-9]{1,2}"}
MAX_DEPTH = 8  # of values that are written as Gemma writes them
_COMMA = '","'
_FIELD = ConstraintKind.TOOLS.field


def make_call_grammar(
    chat_format: formats.ChatFormat, tools: Sequence[formats.Tool], *, parallel: bool, forced: bool = True
) -> ConstraintSpec | None:
    """The grammar of calls of these tools, with arguments by their schemas.

    Forced calls are the whole answer, or all that follows the reasoning. Others are constrained from their
    opening on; None where calls have none.
    """
    json_schema.check_schemas([tool.schema for tool in tools], _FIELD)
    form = chat_format.calls
    triggers: tuple[str, ...] = ()
    skipped = chat_format.lead
    if not forced:
        skipped = formats.first_piece(form.section_opening or form.opening).rstrip("[ ")
        triggers = tuple(mark.removeprefix(chat_format.lead) for mark in (skipped, *form.other_openings))
        others = (*chat_format.reasoning_openings, *chat_format.text_openings)
        if form.bare or any(mark.removeprefix(chat_format.lead).startswith(triggers) for mark in others):
            return None  # nothing tells the start of a call from that of a text
    count = min(MAX_CALLS, max(MIN_CALLS, len(tools))) if forced else MAX_CALLS
    source = _Grammar(chat_format, tools).write(
        skipped, count if parallel and not chat_format.one_call else 1, forced=forced
    )
    return ConstraintSpec(ConstraintKind.TOOLS, source, triggers)


class _Grammar:
    """The rules of one grammar, written tool by tool."""

    def __init__(self, chat_format: formats.ChatFormat, tools: Sequence[formats.Tool]) -> None:
        self._form = chat_format.calls
        closing = chat_format.reasoning_closings[0]
        self._blanks = closing[len(closing.rstrip()) :]  # after reasoning
        self._tokens = dict(chat_format.tokens)
        texts = sorted(self._tokens, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._tools = tools
        self._rules: list[str] = []
        self._size = self._values = 0  # characters of the rules, and values that were written

    def write(self, skipped: str, count: int, *, forced: bool) -> str:
        """The grammar of up to `count` calls; `skipped` is the text of the first opening that is there."""
        form = self._form
        if form.style is formats.CallStyle.JSON:  # only there, no opening has a name
            places = [f"/anyOf/{number}" for number in range(len(self._tools))]
            if len(self._tools) == 1:
                self._add("body", self._json(self._object(self._tools[0], ""), {}))
            else:  # of several, those that nothing satisfies are left out
                self._add("body", self._json({"anyOf": [*map(self._object, self._tools, places)]}, {}))
            calls = [("body", "")]
        else:
            calls = [(f"call_{number}", tool.name) for number, tool in enumerate(self._tools)]
            for (rule, _), tool in zip(calls, self._tools, strict=True):
                self._add(rule, self._call(rule, tool))
        blanks = f"({json.dumps(self._blanks)})?" if forced and self._blanks else ""
        section = self._text(form.section_opening.removeprefix(skipped))
        first = form.opening if form.section_opening else form.opening.removeprefix(skipped)
        more = ""
        if count > 1:
            between = self._text(form.between) if forced or form.between.strip() else r"/[ \n]{0,2}/"
            more = f"({between} more){{0,{count - 1}}}"
            self._add("more", self._frame(calls, form.opening))
        self._add("first", self._frame(calls, first))
        closing = self._text(form.section_closing)
        return "\n".join([f"start: {blanks} {section} first {more} {closing}", *self._rules])

    def _frame(self, calls: Sequence[tuple[str, str]], opening: str) -> str:
        """One of the calls with its opening and closing, both of which may have the tool's name."""
        text, closing = self._text, self._form.closing
        return _any(f"{text(opening, name)} {rule} {text(closing, name)}" for rule, name in calls)

    def _add(self, name: str, rule: str) -> None:
        self._rules.append(f"{name}: {rule}")
        self._size += len(rule)
        check(self._size, MAX_SOURCE, "characters", _FIELD)

    def _count_value(self) -> None:
        """Bound what schemas that refer to each other are written out to."""
        self._values += 1
        check(self._values, MAX_PROPERTIES, "properties", _FIELD)

    def _text(self, text: str, name: str = "", kind: str = "") -> str:
        """A marker: literals, control tokens and slots."""
        written: list[str] = []
        words = {slot: f"/{pattern}/" for slot, pattern in _SLOTS.items()}
        words |= {formats.Slot.NAME: json.dumps(name), formats.Slot.TYPE: json.dumps(kind)}
        for part in formats.split_slots(text):
            if part in words:
                written.append(words[part])
                continue
            at = 0
            for found in self._controls.finditer(part):
                written += [json.dumps(part[at : found.start()])] * (found.start() > at)
                written.append(f"<[{self._tokens[found[0]]}]>")
                at = found.end()
            written += [json.dumps(part[at:])] * (at < len(part))
        return " ".join(written)

    def _json(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """JSON by a part of a schema, which may refer to definitions.

        Only with the blanks that models were trained to write: free whitespace could go on without end.
        """
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        item, key = (",", ":") if self._form.compact else (", ", ": ")
        style = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
        return f"%json {json.dumps({**schema, **definitions, 'x-guidance': style})}"

    def _object(self, tool: formats.Tool, place: str) -> dict[str, Any]:
        """The schema, at this place, of a JSON object that holds name and arguments."""
        properties: dict[str, Any] = {}
        for key, slot in self._form.keys:
            name = tool.name if key == formats.Slot.NAME else key
            if slot == formats.Slot.ARGUMENTS:
                here = f"#{place}/properties/{json_schema.escape_name(name)}"
                properties[name] = relocate(forbid_extra_arguments(tool.schema), here)
            elif slot in _SLOTS:
                properties[name] = {"type": "string", "pattern": f"^{_SLOTS[slot]}$"}
            else:
                properties[name] = {"const": tool.name if slot == formats.Slot.NAME else json.loads(slot)}
        closed = {"required": list(properties), "additionalProperties": False}
        return {"type": "object", "properties": properties, **closed}

    def _call(self, rule: str, tool: formats.Tool) -> str:
        form = self._form
        name = json.dumps(tool.name)
        if form.style is formats.CallStyle.NAMED:
            self._add(f"{rule}_arguments", self._json(forbid_extra_arguments(tool.schema), {}))
            return f"{name} {self._text(form.after_name)} {rule}_arguments"
        arguments, required = self._arguments(rule, tool.schema)
        if form.style is formats.CallStyle.TAGGED:
            body = " ".join(each if key in required else f"({each})?" for key, each in arguments.items())
            closed = forbid_extra_arguments(tool.schema).get("additionalProperties") is False
            if not arguments and not closed:
                body = f"({self._free(rule)}){{0,{MAX_FREE}}}"
            return f"{name} {self._text(form.after_name)} {body}"
        python = form.style is formats.CallStyle.PYTHON
        opening, comma, closing = ('"("', '", "', '")"') if python else ('"{"', _COMMA, '"}"')
        body = join_optional([(rule, key in required) for key, rule in arguments.items()], comma)
        return f"{name} {opening} {body} {closing}"

    def _arguments(self, rule: str, schema: Mapping[str, Any]) -> tuple[dict[str, str], set[str]]:
        """A rule for each argument, and which of them are required."""
        listed = schema.get("properties")
        properties: Mapping[str, Any] = listed if isinstance(listed, Mapping) else {}
        keys = sorted(properties) if self._form.style is formats.CallStyle.GEMMA else list(properties)
        rules: dict[str, str] = {}
        for number, key in enumerate(keys):
            rules[key] = f"{rule}_{number}"
            self._add(rules[key], self._argument(rules[key], key, properties[key], schema))
        return rules, set(schema.get("required", ())) & set(rules)

    def _argument(self, rule: str, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        self._count_value()
        form = self._form
        schema = schema if isinstance(schema, Mapping) else {}
        types = json_schema.get_types(schema, root)
        if form.style is formats.CallStyle.PYTHON:
            return f"{json.dumps(key + '=')} {self._python(rule, schema, types, root)}"
        if form.style is formats.CallStyle.GEMMA:
            return f"{json.dumps(key + ':')} {self._gemma(rule, schema, root)}"
        if form.types and len(types) > 1:  # what is written before a value says its type
            resolved = json_schema.resolve(schema, root)
            options = get_options(resolved, 0) or [{"const": value} for value in resolved.get("enum", ())]
            each = [self._argument(f"{rule}_{n}", key, one, root) for n, one in enumerate(options)]
            if each:
                return f"({_any(each)})"
        kind = "string" if "string" in types else next(iter(sorted(types)), "string")
        word = dict(form.types).get(kind, "")
        opening = self._text(f"{form.key_opening}{key}{form.key_closing}", kind=word)
        closing = form.value_closing.replace(formats.Slot.KEY, key)
        return f"{opening} {self._tagged(rule, closing, schema, root)}"

    def _tagged(self, rule: str, closing: str, schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
        """A value up to its closing: a text as it is, another one as JSON, or in tags of its own."""
        self._count_value()
        mark, schema = self._form.nested, json_schema.resolve(schema, root)
        types = json_schema.get_types(schema, root)
        if options := get_options(schema, depth):
            rules = ((f"{rule}_{number}", option) for number, option in enumerate(options))
            each = (self._tagged(name, closing, option, root, depth + 1) for name, option in rules)
            return f"({_any(each)})"
        inner = _get_inner(schema, types)
        if mark and inner and depth <= MAX_DEPTH:
            parts = inner if types == {"object"} else {"item": inner}
            written: list[str] = []
            for number, (key, part) in enumerate(parts.items()):
                value = self._tagged(f"{rule}_{number}", f"{mark}</{key}>", part, root, depth + 1)
                self._add(f"{rule}_{number}", f"{self._text(f'{mark}<{key}>')} {value}")
                required = key in schema.get("required", ())
                count = _count(schema, "Items") if types == {"array"} else "" if required else "?"
                if schema.get("maxItems") != 0:
                    written.append(f"({rule}_{number}){count}" if count else f"{rule}_{number}")
            return f"{' '.join(written)} {self._text(closing)}"
        if "string" in types or not types:
            # In tags, up to the mark, and not to the whole closing: each mark starts a tag there.
            inside = depth and mark and not self._controls.search(mark)
            end = closing.removeprefix(mark) if inside else ""
            return f"{self._raw(rule, closing.removesuffix(end), schema)} {self._text(end)}"
        return f"{self._add_rule(rule, self._json(schema, root))} {self._text(closing)}"

    def _add_rule(self, rule: str, value: str) -> str:
        self._add(f"{rule}_value", value)
        return f"{rule}_value"

    def _raw(self, rule: str, closing: str, schema: Mapping[str, Any]) -> str:
        """A text up to its closing."""
        if (values := json_schema.get_values(schema)) is not None:
            shown = (value if isinstance(value, str) else json.dumps(value) for value in values)
            return f"({_any(map(json.dumps, shown))}) {self._text(closing)}"
        text = json_schema.get_text_expression(schema)
        control = self._controls.search(closing)
        plain = closing[: control.start()] if control else closing
        self._add(f"{rule}_text{'[lazy]' if plain else ''}", f"/{text}{json_schema.escape_regex(plain)}/")
        return f"{rule}_text {self._text(closing[len(plain) :])}"

    def _python(
        self, rule: str, schema: Mapping[str, Any], types: frozenset[str], root: Mapping[str, Any]
    ) -> str:
        schema = json_schema.resolve(schema, root)
        if (values := json_schema.get_values(schema)) is not None:
            return f"({_any(json.dumps(formats.write_python(value)) for value in values)})"
        value = self._json(schema, root)
        if types == {"string"} and not schema.keys() & {"pattern", "format", "anyOf", "oneOf", "allOf"}:
            value = rf"/'([^'\\\n]|\\[nt'\\]){_count(schema, 'Length')}'/"
        return self._add_rule(rule, _PYTHON.get(types, value))

    def _gemma(self, rule: str, schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
        """A value as Gemma writes it."""
        self._count_value()
        schema = json_schema.resolve(schema, root)
        types = json_schema.get_types(schema, root)
        if (values := json_schema.get_values(schema)) is not None:
            return f"({_any(self._text(formats.write_gemma(value)) for value in values)})"
        if options := get_options(schema, depth):
            each = (self._gemma(f"{rule}_{n}", one, root, depth + 1) for n, one in enumerate(options))
            return f"({_any(each)})"
        if "string" in types or not types:
            return f"{self._text(formats.GEMMA_QUOTE)} {self._raw(rule, formats.GEMMA_QUOTE, schema)}"
        if (inner := _get_inner(schema, types)) is None or depth > MAX_DEPTH:
            return self._add_rule(rule, self._json(schema, root))
        if types == {"array"}:
            self._add(f"{rule}_item", self._gemma(f"{rule}_item", inner, root, depth + 1))
            low, high = max(0, schema.get("minItems", 0) - 1), schema.get("maxItems")
            last = "" if high is None else high - 1
            more = f'("," {rule}_item){{{low},{last}}}' if high is None or high > 1 else ""
            some = f"{rule}_item {more}" if high != 0 else ""
            return f'"[" {some if schema.get("minItems") or not some else f"({some})?"} "]"'
        items: list[tuple[str, bool]] = []
        for number, key in enumerate(sorted(inner)):
            name = f"{rule}_{number}"
            self._add(name, f"{json.dumps(key + ':')} {self._gemma(name, inner[key], root, depth + 1)}")
            items.append((name, key in schema.get("required", ())))
        return f'"{{" {join_optional(items, comma=_COMMA)} "}}"'

    def _free(self, rule: str) -> str:
        """An argument of any name."""
        form = self._form
        opening, closing = self._text(form.key_opening), self._text(form.key_closing, kind="string")
        raw = self._raw(f"{rule}_free", form.value_closing.replace(formats.Slot.KEY, ""), {})
        return f"{opening} /[a-zA-Z0-9_]{{1,64}}/ {closing} {raw}"


def _any(rules: Iterable[str]) -> str:
    return " | ".join(rules)


def _get_inner(schema: Mapping[str, Any], types: frozenset[str]) -> Mapping[str, Any] | None:
    """The schemas of an object's properties, or that of a list's items."""
    inner = schema.get("properties") if types == {"object"} else schema.get("items")
    inner = inner if types in ({"object"}, {"array"}) else None
    return inner if isinstance(inner, Mapping) else None


def get_options(schema: Mapping[str, Any], depth: int) -> list[Any]:
    """The schemas of which one is enough, if it is no deeper than is followed."""
    found = schema.get("anyOf") or schema.get("oneOf")
    return found if isinstance(found, list) and depth <= MAX_DEPTH else []


def _count(schema: Mapping[str, Any], kind: str) -> str:
    """How often something is repeated, by `minItems` and `maxItems`, or by those of another kind."""
    return f"{{{schema.get(f'min{kind}', 0)},{schema.get(f'max{kind}', '')}}}"


_PYTHON = {frozenset(["boolean"]): '"True" | "False"', frozenset(["null"]): '"None"'}


def join_optional(items: Sequence[tuple[str, bool]], comma: str) -> str:
    """Rules in their order, some of them required, with a comma between those that are there."""
    rest = [f"{comma} {rule}" if required else f"({comma} {rule})?" for rule, required in items]
    starts: list[str] = []
    for at, (rule, required) in enumerate(items):
        starts.append(" ".join([rule, *rest[at + 1 :]]))
        if required:
            return f"({_any(starts)})"
    return f"({_any(starts)})?" if starts else ""


def forbid_extra_arguments(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Close the schema of a tool without parameters: otherwise any object of any length is valid."""
    empty = schema.get("properties") == {} and schema.keys() <= {"type", "properties", "required", "title"}
    return {**schema, "additionalProperties": False} if empty else schema


def relocate(schema: Any, place: str) -> Any:
    """Embed a schema at `place` of another one: its local references are adjusted."""
    if isinstance(schema, Mapping):
        moved = {key: relocate(value, place) for key, value in schema.items()}
        if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
            moved["$ref"] = place + reference[1:]
        return moved
    return [relocate(item, place) for item in schema] if isinstance(schema, list) else schema
