"""Output parser: splits a streamed answer into reasoning, content and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum

import msgspec

from cllm.text.detokenizer import count_possible
from cllm.text.tool_formats import ToolFormat

THINK_START, THINK_END = "<think>", "</think>"


class ReasoningText(msgspec.Struct, frozen=True):
    """More of the model's reasoning, from between the reasoning tags."""

    text: str


class ContentText(msgspec.Struct, frozen=True):
    """More of the answer itself."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """The tool call number `index` of this answer starts; its arguments follow."""

    index: int
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of a tool call's arguments, as JSON text."""

    index: int
    text: str


OutputEvent = ReasoningText | ContentText | ToolCallStart | ToolCallArguments


class OutputParser:
    """Incremental parser of one answer: text in, events out. A returned event is never revoked.

    `tool_format` is None where the request has no tools. `thinking`: the prompt ends inside the reasoning.
    `calling`: the prompt ends with the opening of a tool call. With `reasoning` off, reasoning stays content.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None = None,
        tools: Collection[str] = (),
        *,
        thinking: bool = False,
        calling: bool = False,
        parallel: bool = True,
        reasoning: bool = True,
    ) -> None:
        self._tool_format = tool_format
        self._tools = frozenset(tools)
        self._parallel = parallel
        self._buffer = ""
        self._call: ToolCallParser | None = None
        self._started = False  # the start of the current call or reasoning has been reported
        self._opening = ""  # skipped since the content ended; becomes content again if no call follows
        self._trial = ToolCallParser()  # reads an answer that may be a bare call
        self._tried = 0  # characters of the buffer that the trial has read
        self._calls = 0  # reported so far
        self._read = self._read_start
        if calling:
            self._read = self._read_calls
        elif thinking and reasoning:
            self._read = self._read_reasoning
        elif not reasoning:
            self._read = self._read_content_start

    def feed(self, text: str) -> list[OutputEvent]:
        """Add text; returns the events that are now certain."""
        if self._read == self._read_content and self._tool_format is None:
            return [ContentText(text)] if text else []
        self._buffer += text
        return self._drain(final=False)

    def finish(self) -> list[OutputEvent]:
        """The answer has ended: returns the events of what was held back."""
        return self._drain(final=True)

    def _drain(self, *, final: bool) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        while True:
            before = (self._read, len(self._buffer), self._call)
            self._read(events, final)
            if before == (self._read, len(self._buffer), self._call):
                return events

    # States. Each consumes what is certain from the buffer and sets `_read` when another state follows.

    def _read_start(self, events: list[OutputEvent], final: bool) -> None:
        opening = self._buffer.lstrip()
        if opening.startswith(THINK_START):
            self._buffer = opening[len(THINK_START) :]
            self._read = self._read_reasoning
        elif final or not THINK_START.startswith(opening):
            self._read = self._read_content_start

    def _read_reasoning(self, events: list[OutputEvent], final: bool) -> None:
        if not self._started:
            self._buffer = self._buffer.lstrip()
        certain, mark = self._take_until(THINK_END, final)
        if certain:
            self._started = True
            events.append(ReasoningText(certain))
        if mark or final:
            self._started = False
            self._read = self._read_after_reasoning

    def _read_after_reasoning(self, events: list[OutputEvent], final: bool) -> None:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._read = self._read_content_start

    def _read_content_start(self, events: list[OutputEvent], final: bool) -> None:
        """Where calls have no opening, an answer that starts like a call is held back until it is certain."""
        start = self._buffer.lstrip()
        if self._tool_format is None or not self._tool_format.bare:
            self._read = self._read_content
        elif start[:1] in ("{", "["):
            self._read = self._read_bare_call
        elif start or final:
            self._read = self._read_content

    def _read_bare_call(self, events: list[OutputEvent], final: bool) -> None:
        trial = self._trial
        begin = len(self._buffer) - len(self._buffer.lstrip(" \t\r\n["))
        trial.feed(self._buffer[max(self._tried, begin) :])
        self._tried = len(self._buffer)
        if trial.name is not None and (not self._tools or trial.name in self._tools):
            self._read = self._read_calls
        elif trial.name is not None or trial.foreign or trial.done or trial.failed or final:
            self._read = self._read_content

    def _read_content(self, events: list[OutputEvent], final: bool) -> None:
        opening = self._tool_format.opening if self._tool_format is not None else ""
        certain, mark = self._take_until(opening, final)
        if certain:
            events.append(ContentText(certain))
        if mark:
            self._opening = mark
            self._read = self._read_calls

    def _read_calls(self, events: list[OutputEvent], final: bool) -> None:
        if self._call is None and not self._find_call(events, final):
            return
        call = self._call
        assert call is not None
        self._buffer = call.feed(self._buffer)
        wanted = self._parallel or self._calls == 0 or self._started
        if call.name is not None and wanted:  # also where the object turns out malformed after its name
            if not self._started:
                events.append(ToolCallStart(self._calls, call.name))
                self._started = True
                self._calls += 1
                self._opening = ""
            if arguments := call.take_arguments():
                events.append(ToolCallArguments(self._calls - 1, arguments))
        if call.done or call.failed or final:
            if not self._started and wanted:  # no call after all: it is content
                events.append(ContentText(self._opening + call.raw))
                self._read = self._read_content
            self._call, self._started, self._opening = None, False, ""

    def _find_call(self, events: list[OutputEvent], final: bool) -> bool:
        """Start reading the next call; True if there is one. Other text returns to the content state."""
        tool_format = self._tool_format
        assert tool_format is not None
        self._skip(len(self._buffer) - len(self._buffer.lstrip()))
        for mark in (tool_format.opening, tool_format.closing, *tool_format.separators):
            if mark and self._buffer.startswith(mark):
                self._skip(len(mark))
                return False
            if mark and not final and mark.startswith(self._buffer):
                return False
        if self._buffer.startswith("{"):
            self._call = ToolCallParser()
            return True
        named = tool_format.named_opening
        if named and (found := re.match(rf"([\w.-]+)\s*{re.escape(named)}\s*(?=\{{)", self._buffer)):
            self._call = ToolCallParser(found[1])
            self._skip(found.end())
            return True
        waits = bool(named) and re.fullmatch(r"[\w.-]*\s*(\[[A-Z]*\]?)?\s*", self._buffer) is not None
        if final or (self._buffer and not waits):
            if self._opening:
                events.append(ContentText(self._opening))  # no call after all: it is content
                self._opening = ""
            self._read = self._read_content
        return False

    def _take_until(self, mark: str, final: bool) -> tuple[str, str]:
        """Take the text that certainly precedes the mark; then, if it is there, blanks and mark.

        Blanks before a mark are dropped, so they are held back until other text follows. Without a mark
        all text is certain.
        """
        text, found, rest = self._buffer.partition(mark) if mark else (self._buffer, "", "")
        certain = text
        if found:
            certain = text.rstrip()
        elif mark and not final:
            certain = text[: len(text) - count_possible(text, [mark])].rstrip()
        self._buffer = rest if found else text[len(certain) :]
        return certain, text[len(certain) :] + mark if found else ""

    def _skip(self, count: int) -> None:
        """Drop the buffer's first characters; they are kept in `_opening` while they may still be content."""
        if self._opening:
            self._opening += self._buffer[:count]
        self._buffer = self._buffer[count:]


NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters", "args")
KNOWN_KEYS = (*NAME_KEYS, *ARGUMENT_KEYS, "type", "id")


class _Wants(Enum):
    """What the tool call parser expects next."""

    OBJECT = "{"
    KEY = "a key, a comma or }"
    KEY_END = "the rest of a key"
    COLON = ":"
    VALUE = "a value"
    VALUE_END = "the rest of a value"


class ToolCallParser:
    """Incremental parser of one tool call, a JSON object; its arguments are available while they arrive.

    `feed` until `done` or `failed`. `name` is None until it is known. `take_arguments` returns the JSON text
    of the arguments since its last call, and nothing before the name is known: the name always comes first.
    """

    def __init__(self, name: str | None = None) -> None:
        """With a known `name`, only the object of the arguments is read."""
        self._raw: list[str] = []
        self.name = name
        self._arguments_only = name is not None
        self.done = False
        self.failed = False
        self._wants = _Wants.OBJECT if name is None else _Wants.VALUE
        self._key = "" if name is None else ARGUMENT_KEYS[0]
        self.foreign = False  # it has a key that no tool call has
        self._part: list[str] = []  # the key or value being read; appending to a str would copy it
        self._nesting = 0  # inside the value
        self._in_string = False
        self._escaped = False
        self._arguments: list[str] = []  # not taken yet

    def feed(self, text: str) -> str:
        """Read text; returns what follows the object's end, or the text from where it is malformed."""
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
        """All text read so far."""
        return "".join(self._raw)

    def take_arguments(self) -> str:
        if self.name is None:
            return ""
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

    def _read(self, character: str) -> None:
        if self._wants is _Wants.KEY_END:
            self._part.append(character)
            if self._string_ends(character):
                self._key = str(_parsed(self._part))
                self.foreign = self.foreign or self._key not in KNOWN_KEYS
                self._wants = _Wants.COLON
        elif self._wants is _Wants.VALUE_END:
            self._read_value(character)
        elif character.isspace():
            return
        elif self._wants is _Wants.VALUE:
            self._part, self._nesting, self._wants = [], 0, _Wants.VALUE_END
            self._read_value(character)
        elif self._wants is _Wants.OBJECT and character == "{":
            self._wants = _Wants.KEY
        elif self._wants is _Wants.COLON and character == ":":
            self._wants = _Wants.VALUE
        elif self._wants is _Wants.KEY and character == '"':
            self._part, self._in_string, self._wants = [character], True, _Wants.KEY_END
        elif self._wants is _Wants.KEY and character == "}":
            self.done = True
        elif not (self._wants is _Wants.KEY and character == ","):
            self.failed = True

    def _read_value(self, character: str) -> None:
        if not self._in_string and self._nesting == 0 and self._part and character in ",}":
            self._end_value()  # a literal or number ends before the character that follows it
            self.done = character == "}"
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
        if self._key in ARGUMENT_KEYS and self._part[0] != '"':
            self._arguments.append(character)
        if ended:
            self._end_value()

    def _end_value(self) -> None:
        self._wants = _Wants.KEY
        self.done = self._arguments_only
        value = _parsed(self._part)
        if self._key in NAME_KEYS and isinstance(value, str):
            self.name = value
        elif self._key in ARGUMENT_KEYS and isinstance(value, str):
            self._arguments.append(value)  # some models write the arguments as a string of JSON

    def _string_ends(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return True
        return False


def _parsed(part: list[str]) -> object:
    try:
        return json.loads("".join(part))
    except ValueError:
        return None
