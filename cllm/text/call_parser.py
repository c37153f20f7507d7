"""Call parsers: read one tool call while it arrives; its arguments come out as JSON text."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from cllm.limits import MAX_NESTING
from cllm.text import chat_format
from cllm.text.detokenizer import count_possible
from cllm.text.json_schema import count_nesting, get_property, get_types, resolve

MAX_NAME = 256  # characters of a name, and of what stands between a name and its arguments
NAME_KEYS, ARGUMENT_KEYS = ("name", "function", "tool_name"), ("arguments", "parameters", "args")
KNOWN_KEYS = (*NAME_KEYS, *ARGUMENT_KEYS, "type", "id", "tool_call_id")
CDATA, CDATA_END = "<![CDATA[", "]]>"
Schemas = Mapping[str, Mapping[str, Any]]  # of parameters, by the tool's name
NO_VALUE: Any = object()  # where a text has none
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[nrt\\'\"])")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
# A string between quote tokens, one of JSON, or a name without quotes.
_GEMMA_PART = re.compile(
    r'<\|"\|>(.*?)<\|"\|>|("(?:\\.|[^"\\])*")|([{,]\s*)([^\s",:{}\[\]][^",:{}\[\]]*):', re.DOTALL
)
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class CallParser:
    """Incremental parser of one call.

    `feed` until `done` or `failed`. `name` is None until it is known. `take_arguments` returns the JSON text
    of the arguments since its last call, and nothing before the name is known: the name always comes first.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.done = self.failed = False
        self._arguments: list[str] = []  # not taken yet

    def feed(self, text: str) -> str:
        """Read text; returns what follows the call's end, or the text from where it is malformed."""
        raise NotImplementedError

    @property
    def raw(self) -> str:
        """The text read so far; whole while the name is not known."""
        raise NotImplementedError

    def end(self) -> None:
        """The answer has ended before the call's closing."""

    def take_arguments(self) -> str:
        if self.name is None:
            return ""
        new = "".join(self._arguments)
        self._arguments.clear()
        return new


# The next part of an object; a `key` may also be a comma or the closing brace.
_Wants = Literal["{", "key", "rest of a key", ":", "value", "rest of a value"]


class ObjectCallParser(CallParser):
    """A JSON object that holds name and arguments."""

    def __init__(self, name: str | None = None, form: chat_format.CallFormat | None = None) -> None:
        """With a known `name`, only the object of the arguments is read."""
        super().__init__(name)
        keys = form.keys if form is not None else ()
        self._name_keys = (*NAME_KEYS, *(key for key, slot in keys if slot == chat_format.Slot.NAME))
        self._name_is_key = any(key == chat_format.Slot.NAME for key, _ in keys)
        arguments = (key for key, slot in keys if slot == chat_format.Slot.ARGUMENTS != key)
        self._argument_keys = (*ARGUMENT_KEYS, *arguments)
        self._known = (*KNOWN_KEYS, *(key for key, _ in keys))
        self._arguments_only = name is not None
        self._wants: _Wants = "{" if name is None else "value"
        self._key = "" if name is None else ARGUMENT_KEYS[0]
        self.foreign = False  # it has a key that no tool call has
        self._part: list[str] = []  # the key or value being read; appending to a str would copy it
        self._nesting = 0  # inside the value
        self._wrapped = False  # it is in another object: {"function": {"name": …}}
        self._in_string = self._escaped = False
        self._raw: list[str] = []

    def feed(self, text: str) -> str:
        end = len(text)
        for index, character in enumerate(text):
            self._read(character)
            if self.done or self.failed:
                end = index + self.done
                break
        self._raw.append(text[:end])
        return text[end:]

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def _read(self, character: str) -> None:
        if (wants := self._wants) in ("rest of a key", "rest of a value"):
            self._read_part(character)
        elif character.isspace():
            return
        elif wants == "value":
            self._start_value(character)
        elif wants == "{" and character == "{":
            self._wants = "key"
        elif wants == ":" and character == ":":
            self._wants = "value"
        elif wants == "key" and character == '"':
            self._start_part(character, "rest of a key")
        elif wants == "key" and character == "}":
            self._end_object()
        elif not (wants == "key" and character == ","):
            self.failed = True

    def _start_value(self, character: str) -> None:
        if character == "{" and self._key in self._name_keys and not self._wrapped:
            self._wrapped, self._wants = True, "key"
        else:
            self._start_part(character, "rest of a value")

    def _start_part(self, character: str, wants: _Wants) -> None:
        self._part, self._nesting, self._wants = [], 0, wants
        self._read_part(character)

    def _read_part(self, character: str) -> None:
        """A character of a key or a value."""
        if not self._in_string and self._nesting == 0 and self._part and character in ",}":
            self._end_part()  # a literal or number ends before the character that follows it
            if character == "}":
                self._end_object()
            return
        self._part.append(character)
        closes = not self._in_string and character in "}]"
        if self._escaped or (self._in_string and character == "\\"):
            self._escaped = not self._escaped
        elif character == '"':
            closes, self._in_string = self._in_string, not self._in_string
        elif not self._in_string:
            self._nesting += (character in "{[") - (character in "}]")
        if self._wants == "rest of a value" and self._key in self._argument_keys and self._part[0] != '"':
            self._arguments.append(character)
        if closes and self._nesting <= 0:
            self._end_part()

    def _end_part(self) -> None:
        value = parse_json("".join(self._part))
        if self._wants == "rest of a key":
            self._key, self._wants = value if isinstance(value, str) else "", ":"
            if self._key and self._name_is_key and self.name is None:
                self.name, self._key = self._key, ARGUMENT_KEYS[0]
            self.foreign = self.foreign or self._key not in self._known
            return
        self._wants = "key"
        self.done = self._arguments_only
        if self._key in self._name_keys and isinstance(value, str):
            self.name = value
        elif self._key in self._argument_keys and isinstance(value, str):
            self._arguments.append(value)  # some models write the arguments as a string of JSON

    def _end_object(self) -> None:
        self.done = not self._wrapped
        self._wrapped = False


class NamedParser(CallParser):
    """A call that starts with its name. Subclasses read what follows it from the buffer."""

    def __init__(self, form: chat_format.CallFormat) -> None:
        super().__init__()
        after = form.after_name.strip() or form.key_opening.strip()
        ends = {"\n", after[:1], form.after_name[:1], form.closing.strip()[:1]}
        self._name_end = re.compile("|".join(map(re.escape, sorted(ends - {""}))))
        self._buffer = ""  # not read yet; short between two feeds

    @property
    def raw(self) -> str:
        return self._buffer

    def feed(self, text: str) -> str:
        self._buffer += text
        if self.name is None:
            start = len(self._buffer) - len(self._buffer.lstrip())
            end = self._name_end.search(self._buffer, start)
            name = self._buffer[start : end.start() if end else None]
            if len(name) > MAX_NAME or _NO_NAME.search(name) or (end and not name):
                self.failed = True
            elif end:
                self.name, self._buffer = name.rstrip(), self._buffer[end.start() :]
        while self.name is not None and not (self.done or self.failed) and self._step():
            pass
        if not (self.done or self.failed):
            return ""
        rest, self._buffer = self._buffer, ""
        return rest

    def _step(self) -> bool:
        """Read some of the buffer; False where more text is needed."""
        raise NotImplementedError


_NO_NAME = re.compile(r"""[{}<>"'`\[\]]""")


class NamedCallParser(NamedParser):
    """A name, a separator, and a JSON object of arguments."""

    def __init__(self, form: chat_format.CallFormat) -> None:
        super().__init__(form)
        self._closing = form.closing.strip()
        self._object: ObjectCallParser | None = None

    def _step(self) -> bool:
        if self._object is None:
            head = self._buffer[: MAX_NAME + 1]  # what is farther away does not count, however it arrives
            start, end = head.find("{"), head.find(self._closing) if self._closing else -1
            if 0 <= end < (start if start >= 0 else len(head)):
                self._buffer, self.done = self._buffer[end:], True  # a call without arguments
                return True
            self.failed = start < 0 and len(head) > MAX_NAME
            if start < 0:
                return False
            self._object, self._buffer = ObjectCallParser(self.name), self._buffer[start:]
        self._buffer = self._object.feed(self._buffer)
        self._arguments.append(self._object.take_arguments())
        self.done, self.failed = self._object.done, self._object.failed
        return False


class LiteralCallParser(NamedParser):
    """Arguments as literals: `f(a=1, b='text')`, or `f{a:1,b:<|"|>text<|"|>}`."""

    def __init__(self, form: chat_format.CallFormat) -> None:
        super().__init__(form)
        self._python = form.style is chat_format.CallStyle.PYTHON
        self._opens, self._closes, self._equals = "()=" if self._python else "{}:"
        self._name_end = re.compile(re.escape(self._opens))
        self._quotes = ("'", '"') if self._python else (chat_format.GEMMA_QUOTE, '"')  # the last one in JSON
        self._quote = ""  # the one that ends the string being read
        self._escaped = False
        self._nesting = 0
        self._key: str | None = None
        self._part: list[str] = []
        self._count = 0

    def _step(self) -> bool:
        text, at = self._buffer, 0
        while at < len(text) and not self.done:
            taken = next((quote for quote in self._quotes if text.startswith(quote, at)), text[at])
            waits = taken not in self._quotes and len(text) - at < len(chat_format.GEMMA_QUOTE)
            if waits and any(quote.startswith(text[at:]) for quote in self._quotes):
                break  # it may become a quote
            ends = taken == self._quote and not self._escaped
            if ends and self._python:
                if not (following := text[at + 1 :].lstrip()[:1]):
                    break
                ends = following in ",)]}:"  # a quote inside of a text is not always escaped
            at += len(taken)
            self._read_one(taken, ends)
        self._buffer = text[at:]
        return False

    def _read_one(self, taken: str, ends: bool) -> None:
        """A character or a quote; `ends`: the string."""
        if self._quote:
            self._part.append(taken)
            self._quote = "" if ends else self._quote
            self._escaped = taken == "\\" and not self._escaped and self._quote != chat_format.GEMMA_QUOTE
        elif taken in self._quotes:
            self._quote = taken
            self._part.append(taken)
        elif self._nesting == 0:
            self._nesting = 1
            self._arguments.append("{")
        elif self._nesting == 1 and taken in (",", self._closes):
            self._end_argument()
            self.done = taken == self._closes
            self._arguments += ["}"] if self.done else []
        elif self._key is None and taken == self._equals:
            self._key, self._part = "".join(self._part).strip(), []
        else:
            self._nesting += (taken in "{[(") - (taken in "}])")
            self._part.append(taken)

    def _end_argument(self) -> None:
        text, self._part = "".join(self._part).strip(), []
        if self._key is None:
            return
        value = parse_literal(text) if self._python else parse_gemma(text)
        comma = ", " if self._count else ""
        written = chat_format.dump_json(text if value is NO_VALUE else value)
        self._arguments.append(f"{comma}{chat_format.dump_json(self._key)}: {written}")
        self._key, self._count = None, self._count + 1


class TaggedCallParser(NamedParser):
    """A name, then arguments of a key and a value each, in tags."""

    def __init__(self, form: chat_format.CallFormat, schemas: Schemas) -> None:
        super().__init__(form)
        self._form = form
        self._schemas = schemas
        self._opening = form.key_opening.strip()
        ends = (form.closing, form.section_closing, form.opening, form.section_opening)
        self._ends = tuple(part for end in ends if (part := chat_format.first_piece(end)))
        self._typed = chat_format.Slot.TYPE in form.key_closing
        literals = chat_format.split_slots(form.key_closing)[::2]
        self._key_ends = [part for literal in literals if (part := literal.strip())]
        self._blank = form.key_closing[len(form.key_closing.rstrip()) :]  # before a value
        self._key: str | None = None
        self._closing = ""  # of the value
        self._types: frozenset[str] = frozenset()
        self._property: tuple[Any, Mapping[str, Any]] = {}, {}  # its schema, and the tool's
        self._value: list[str] | None = None  # being read
        self._streams = False  # the value is a string that is passed on as it comes
        self._count = 0

    def _step(self) -> bool:
        if self._value is not None:
            return self._read_value()
        return self._read_key() if self._key is not None else self._read_gap()

    def end(self) -> None:
        if self.name is not None and self._value is None and self._key is None:
            self._arguments.append("}" if self._count else "{}")

    def _read_gap(self) -> bool:
        """To the next key, or to the end of the call."""
        marks = (self._opening, *self._ends)
        found = [(at, -len(mark), mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
        if not found:
            self._buffer = self._buffer[len(self._buffer) - count_possible(self._buffer, marks) :]
            return False
        at, _, mark = min(found)
        self._buffer = rest = self._buffer[at:]
        if any(len(other) > len(mark) and other.startswith(rest) for other in marks):
            return False
        if mark == self._opening:
            self._buffer, self._key = rest[len(mark) :], ""
            return True
        self._arguments.append("}" if self._count else "{}")
        self.done = True
        return False

    def _read_key(self) -> bool:
        text, words = self._buffer, []
        for end in self._key_ends:
            word, found, text = text.partition(end)
            if not found:
                self.failed = len(text) + len(word) > 4 * MAX_NAME
                return False
            words.append(word.strip())
        if self._blank and (not text or (self._blank.startswith(text) and text != self._blank)):
            return False
        text = text.removeprefix(self._blank)
        if self._form.cdata and len(text) < len(CDATA) and CDATA.startswith(text):
            return False
        self._start_value(words[0], words[1] if self._typed and len(words) > 1 else "")
        self._buffer = text
        if self._form.cdata and text.startswith(CDATA):
            self._buffer, self._closing = text[len(CDATA) :], CDATA_END + self._closing
        return True

    def _start_value(self, key: str, word: str) -> None:
        self._key, self._value = key, []
        self._closing = self._form.value_closing.replace(chat_format.Slot.KEY, key).rstrip()
        kinds = frozenset(kind for kind, written in self._form.types if written == word)
        schema = self._schemas.get(self.name or "", {})
        self._property = get_property(schema, key), schema
        self._types = kinds or get_types(*self._property)
        self._streams = self._types == {"string"}
        comma = ", " if self._count else "{"
        self._arguments.append(f"{comma}{chat_format.dump_json(key)}: " + ('"' if self._streams else ""))
        self._count += 1

    def _read_value(self) -> bool:
        assert self._value is not None
        closing = self._closing.lstrip()
        text, found, rest = self._buffer.partition(closing)
        blanks = self._closing[: len(self._closing) - len(closing)]
        if found:
            text = text.removesuffix(blanks)
        else:
            kept = count_possible(text, [self._closing, closing])
            kept = max(kept, len(blanks) if blanks and text.endswith(blanks) else 0)
            text, rest = text[: len(text) - kept], text[len(text) - kept :]
        if found and not self._is_whole(text):
            self._value.append(self._buffer[: len(self._buffer) - len(rest)])
            self._buffer = rest
            return True
        self._buffer = rest
        if self._streams:
            self._arguments.append(chat_format.dump_json(text)[1:-1])
        else:
            self._value.append(text)
        if not found:
            return False
        written, nested, types = "".join(self._value), self._form.nested, self._types
        self._value = self._key = None
        if self._streams:
            self._arguments.append('"')
        elif nested and nested in written:
            value = parse_tags(written, nested, *self._property)
            self._arguments.append(chat_format.dump_json(written if value is NO_VALUE else value))
        else:
            value = _read_text(written, types if nested or written else types | {"string"})
            self._arguments.append(chat_format.dump_json(value))
        return True

    def _is_whole(self, text: str) -> bool:
        """True where the closing after this text ends the value.

        A closing may also stand in a string of JSON, or belong to a tag of the same name.
        """
        if "string" in self._types or not self._types:
            return True
        written, nested = "".join((*(self._value or ()), text)), self._form.nested
        if nested and nested in written:
            return written.count(f"{nested}<{self._key}>") <= written.count(self._closing.lstrip())
        quotes = re.findall(r'(?<!\\)(?:\\\\)*"', written)  # that begin or end a string
        return written.lstrip()[:1] not in '{["' or len(quotes) % 2 == 0


# Values: the literals that models write, as JSON values ----------------------------------------------


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
            return f"{before}{json.dumps(name, ensure_ascii=False)}:"
        literal = parse_literal(plain) if between is None else between
        return json.dumps(literal if isinstance(literal, str) else plain, ensure_ascii=False)

    return parse_literal(_GEMMA_PART.sub(quote, text))


def parse_tags(text: str, mark: str, schema: Any, root: Mapping[str, Any]) -> Any:
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
    return _read_tag(stack[0], schema, root) if len(stack) == 1 else NO_VALUE


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
    kind = chat_format.get_type(value)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return value if fits or "string" not in types else text
