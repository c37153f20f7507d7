"""One tool call, read while it is being written: `{"name": …, "arguments": {…}}`."""

from __future__ import annotations

import json
from enum import Enum

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters", "args")


class _Wants(Enum):
    OBJECT = "{"
    KEY = "a key, a comma or }"
    KEY_END = "the rest of a key"
    COLON = ":"
    VALUE = "a value"
    VALUE_END = "the rest of a value"


class CallReader:
    """Reads one JSON object character by character and lets its arguments through as they come.

    `feed` until `done` or `failed`. `name` is None until it is known; `take_arguments` gives the JSON text
    of the arguments that came since it was last asked, and nothing before the name is known: a client
    always hears the name first.
    """

    def __init__(self, name: str | None = None) -> None:
        """With a `name` that is known already, just the object of its arguments is read."""
        self.raw = ""
        self.name = name
        self._arguments_only = name is not None
        self.done = False
        self.failed = False
        self._wants = _Wants.OBJECT if name is None else _Wants.VALUE
        self._key = "" if name is None else ARGUMENT_KEYS[0]
        self._part = ""  # the key or value being read
        self._nesting = 0  # inside the value
        self._in_string = False
        self._escaped = False
        self._arguments = ""
        self._given = 0  # characters of the arguments that were taken

    def feed(self, text: str) -> str:
        """Read on; returns what comes after the object's end."""
        for index, character in enumerate(text):
            self.raw += character
            self._read(character)
            if self.done or self.failed:
                return text[index + 1 :]
        return ""

    def take_arguments(self) -> str:
        if self.name is None:
            return ""
        new, self._given = self._arguments[self._given :], len(self._arguments)
        return new

    def _read(self, character: str) -> None:
        if self._wants is _Wants.KEY_END:
            self._part += character
            if self._string_ends(character):
                self._key = str(_parsed(self._part))
                self._wants = _Wants.COLON
        elif self._wants is _Wants.VALUE_END:
            self._read_value(character)
        elif character.isspace():
            return
        elif self._wants is _Wants.VALUE:
            self._part, self._nesting, self._wants = "", 0, _Wants.VALUE_END
            self._read_value(character)
        elif self._wants is _Wants.OBJECT and character == "{":
            self._wants = _Wants.KEY
        elif self._wants is _Wants.COLON and character == ":":
            self._wants = _Wants.VALUE
        elif self._wants is _Wants.KEY and character == '"':
            self._part, self._in_string, self._wants = character, True, _Wants.KEY_END
        elif self._wants is _Wants.KEY and character == "}":
            self.done = True
        elif not (self._wants is _Wants.KEY and character == ","):
            self.failed = True

    def _read_value(self, character: str) -> None:
        if not self._in_string and self._nesting == 0 and self._part and character in ",}":
            self._end_value()  # a bare word or number ends before what follows it
            self.done = character == "}"
            return
        self._part += character
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
        if self._key in ARGUMENT_KEYS and self._part[0] != '"':
            self._arguments = self._part
        if ended:
            self._end_value()

    def _end_value(self) -> None:
        self._wants = _Wants.KEY
        self.done = self._arguments_only
        value = _parsed(self._part)
        if self._key in NAME_KEYS and isinstance(value, str):
            self.name = value
        elif self._key in ARGUMENT_KEYS and isinstance(value, str):
            self._arguments = value  # some models write the arguments as a string that holds JSON

    def _string_ends(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return True
        return False


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
