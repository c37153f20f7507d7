"""Tagged calls: the parser of tool calls whose arguments stand in tags, one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cllm.text.argument_values import convert, dump, get_property, get_types
from cllm.text.call_parser import MAX_NAME, NamedParser
from cllm.text.chat_format import CallFormat, Slot, first_piece, split_slots
from cllm.text.detokenizer import count_possible

CDATA, CDATA_END = "<![CDATA[", "]]>"
Schemas = Mapping[str, Mapping[str, Any]]  # of parameters, by the tool's name


class TaggedCallParser(NamedParser):
    """A name, then arguments of a key and a value each, in tags."""

    def __init__(self, form: CallFormat, schemas: Schemas) -> None:
        super().__init__(form)
        self._form = form
        self._schemas = schemas
        self._opening = form.key_opening.strip()
        ends = (form.closing, form.section_closing, form.opening, form.section_opening)
        self._ends = tuple(part for end in ends if (part := first_piece(end)))
        self._typed = Slot.TYPE in form.key_closing
        literals = split_slots(form.key_closing)[::2]
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
        self._closing = self._form.value_closing.replace(Slot.KEY, key).rstrip()
        kinds = frozenset(kind for kind, written in self._form.types if written == word)
        schema = self._schemas.get(self.name or "", {})
        self._property = get_property(schema, key), schema
        self._types = kinds or get_types(*self._property)
        self._streams = self._types == {"string"}
        comma = ", " if self._count else "{"
        self._arguments.append(f"{comma}{dump(key)}: " + ('"' if self._streams else ""))
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
            self._arguments.append(dump(text)[1:-1])
        else:
            self._value.append(text)
        if not found:
            return False
        written = "".join(self._value)
        value = '"' if self._streams else convert(written, self._types, self._form.nested, *self._property)
        self._arguments.append(value)
        self._value = self._key = None
        return True

    def _is_whole(self, text: str) -> bool:
        """Whether the closing after this text ends the value. It may also stand in a string of JSON in it, or
        belong to a tag of the same name."""
        if "string" in self._types or not self._types:
            return True
        written, nested = "".join((*(self._value or ()), text)), self._form.nested
        if nested and nested in written:
            return written.count(f"{nested}<{self._key}>") <= written.count(self._closing.lstrip())
        return written.lstrip()[:1] not in '{["' or _count_quotes(written) % 2 == 0


def _count_quotes(text: str) -> int:
    """How many quotes begin or end a string in a JSON text."""
    return len(re.findall(r'(?<!\\)(?:\\\\)*"', text))
