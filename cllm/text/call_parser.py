"""Call parsers: read one tool call while it arrives; its arguments come out as JSON text."""

from __future__ import annotations

import re
from enum import Enum

from cllm.text.argument_values import (
    GEMMA_QUOTE,
    NO_VALUE,
    dump,
    parse_gemma,
    parse_json,
    parse_literal,
)
from cllm.text.chat_format import CallFormat, CallStyle, Slot

MAX_NAME = 256  # characters of a name, and of what stands between a name and its arguments
NAME_KEYS, ARGUMENT_KEYS = ("name", "function", "tool_name"), ("arguments", "parameters", "args")
KNOWN_KEYS = (*NAME_KEYS, *ARGUMENT_KEYS, "type", "id", "tool_call_id")


class CallParser:
    """Incremental parser of one call.

    `feed` until `done` or `failed`. `name` is None until it is known. `take_arguments` returns the JSON text
    of the arguments since its last call, and nothing before the name is known: the name always comes first.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.done = False
        self.failed = False
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


class _Wants(Enum):
    """What the parser of an object expects next."""

    OBJECT = "{"
    KEY = "a key, a comma or }"
    KEY_END = "the rest of a key"
    COLON = ":"
    VALUE = "a value"
    VALUE_END = "the rest of a value"


class ObjectCallParser(CallParser):
    """A JSON object that holds name and arguments."""

    def __init__(self, name: str | None = None, form: CallFormat | None = None) -> None:
        """With a known `name`, only the object of the arguments is read."""
        super().__init__(name)
        keys = form.keys if form is not None else ()
        self._name_keys = (*NAME_KEYS, *(key for key, slot in keys if slot == Slot.NAME))
        self._name_is_key = any(key == Slot.NAME for key, _ in keys)
        self._argument_keys = (*ARGUMENT_KEYS, *(key for key, slot in keys if slot == Slot.ARGUMENTS != key))
        self._known = (*KNOWN_KEYS, *(key for key, _ in keys))
        self._arguments_only = name is not None
        self._wants, self._key = (_Wants.OBJECT, "") if name is None else (_Wants.VALUE, ARGUMENT_KEYS[0])
        self.foreign = False  # it has a key that no tool call has
        self._part: list[str] = []  # the key or value being read; appending to a str would copy it
        self._nesting = 0  # inside the value
        self._wrapped = 0  # objects around the one that is read: {"function": {"name": …}}
        self._in_string = False
        self._escaped = False
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
        if self._wants is _Wants.KEY_END:
            self._part.append(character)
            if self._string_ends(character):
                self._end_key(str(parse_json(self._part)))
        elif self._wants is _Wants.VALUE_END:
            self._read_value(character)
        elif character.isspace():
            return
        elif self._wants is _Wants.VALUE:
            self._start_value(character)
        elif self._wants is _Wants.OBJECT and character == "{":
            self._wants = _Wants.KEY
        elif self._wants is _Wants.COLON and character == ":":
            self._wants = _Wants.VALUE
        elif self._wants is _Wants.KEY and character == '"':
            self._part, self._in_string, self._wants = [character], True, _Wants.KEY_END
        elif self._wants is _Wants.KEY and character == "}":
            self._end_object()
        elif not (self._wants is _Wants.KEY and character == ","):
            self.failed = True

    def _end_key(self, key: str) -> None:
        self._key, self._wants = key, _Wants.COLON
        if self._name_is_key and self.name is None:
            self.name, self._key = key, ARGUMENT_KEYS[0]
        self.foreign = self.foreign or self._key not in self._known

    def _start_value(self, character: str) -> None:
        if character == "{" and self._key in self._name_keys and not self._wrapped:
            self._wrapped, self._wants = 1, _Wants.KEY
            return
        self._part, self._nesting, self._wants = [], 0, _Wants.VALUE_END
        self._read_value(character)

    def _read_value(self, character: str) -> None:
        if not self._in_string and self._nesting == 0 and self._part and character in ",}":
            self._end_value()  # a literal or number ends before the character that follows it
            if character == "}":
                self._end_object()
            return
        self._part.append(character)
        ended = False
        if self._in_string:
            ended = self._string_ends(character) and self._nesting == 0
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._nesting += 1
        elif character in "}]":
            self._nesting -= 1
            ended = self._nesting <= 0
        if self._key in self._argument_keys and self._part[0] != '"':
            self._arguments.append(character)
        if ended:
            self._end_value()

    def _end_value(self) -> None:
        self._wants = _Wants.KEY
        self.done = self._arguments_only
        value = parse_json(self._part)
        if self._key in self._name_keys and isinstance(value, str):
            self.name = value
        elif self._key in self._argument_keys and isinstance(value, str):
            self._arguments.append(value)  # some models write the arguments as a string of JSON

    def _end_object(self) -> None:
        self.done = not self._wrapped
        self._wrapped = 0

    def _string_ends(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return True
        return False


class NamedParser(CallParser):
    """A call that starts with its name. Subclasses read what follows it from the buffer."""

    def __init__(self, form: CallFormat) -> None:
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
            self._read_name()
        while self.name is not None and not (self.done or self.failed) and self._step():
            pass
        if not (self.done or self.failed):
            return ""
        rest, self._buffer = self._buffer, ""
        return rest

    def _read_name(self) -> None:
        start = len(self._buffer) - len(self._buffer.lstrip())
        end = self._name_end.search(self._buffer, start)
        name = self._buffer[start : end.start() if end else None]
        if len(name) > MAX_NAME or _NO_NAME.search(name) or (end and not name):
            self.failed = True
        elif end:
            self.name, self._buffer = name.rstrip(), self._buffer[end.start() :]

    def _step(self) -> bool:
        """Read some of the buffer; False where more text is needed."""
        raise NotImplementedError


_NO_NAME = re.compile(r"""[{}<>"'`\[\]]""")


class NamedCallParser(NamedParser):
    """A name, a separator, and a JSON object of arguments."""

    def __init__(self, form: CallFormat) -> None:
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

    def __init__(self, form: CallFormat) -> None:
        super().__init__(form)
        self._python = form.style is CallStyle.PYTHON
        self._opens, self._closes, self._equals = "()=" if self._python else "{}:"
        self._name_end = re.compile(re.escape(self._opens))
        self._quotes = ("'", '"') if self._python else (GEMMA_QUOTE, '"')  # the last one in JSON
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
            waits = taken not in self._quotes and len(text) - at < len(GEMMA_QUOTE)
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
            self._escaped = taken == "\\" and not self._escaped and self._quote != GEMMA_QUOTE
        elif taken in self._quotes:
            self._quote = taken
            self._part.append(taken)
        else:
            self._read_outside(taken)

    def _read_outside(self, character: str) -> None:
        if self._nesting == 0:
            self._nesting = 1
            self._arguments.append("{")
        elif self._nesting == 1 and character in (",", self._closes):
            self._end_argument()
            self.done = character == self._closes
            self._arguments += ["}"] if self.done else []
        elif self._key is None and character == self._equals:
            self._key, self._part = "".join(self._part).strip(), []
        else:
            self._nesting += (character in "{[(") - (character in "}])")
            self._part.append(character)

    def _end_argument(self) -> None:
        text, self._part = "".join(self._part).strip(), []
        if self._key is None:
            return
        value = parse_literal(text) if self._python else parse_gemma(text)
        comma = ", " if self._count else ""
        self._arguments.append(f"{comma}{dump(self._key)}: {dump(text if value is NO_VALUE else value)}")
        self._key, self._count = None, self._count + 1
