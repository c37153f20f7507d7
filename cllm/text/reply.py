"""An answer taken apart while it is written: thoughts, text, tool calls."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from cllm.text.calls import CallReader
from cllm.text.dialects.base import Dialect

THINK, THOUGHT = "<think>", "</think>"


class ReasoningText(msgspec.Struct, frozen=True):
    text: str


class AnswerText(msgspec.Struct, frozen=True):
    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """The index-th call of this answer is of this tool; its arguments follow."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


ReplyEvent = ReasoningText | AnswerText | CallBegun | CallArguments


class ReplyReader:
    """Turns the text of one answer into events. What has been returned is never taken back.

    `dialect` is None where no tools were offered. `thinking`: the prompt ended inside the model's thoughts.
    `calling`: the prompt ended with the opening of a call. With `reasoning` off, thoughts are plain text.
    """

    def __init__(
        self,
        dialect: Dialect | None = None,
        tools: Collection[str] = (),
        *,
        thinking: bool = False,
        calling: bool = False,
        parallel: bool = True,
        reasoning: bool = True,
    ) -> None:
        self._dialect = dialect
        self._tools = frozenset(tools)
        self._most_calls = None if parallel else 1
        self._buffer = ""
        self._call: CallReader | None = None
        self._begun = False  # the call being read has been told
        self._opening = ""  # what was read since the text, while no call has come: maybe none will
        self._trial = CallReader()  # of an answer that may be a bare call
        self._tried = 0  # how much of the buffer it has seen
        self._told = 0  # calls
        self._read = self._read_start
        if calling:
            self._read = self._read_calls
        elif thinking and reasoning:
            self._read = self._read_thoughts
        elif not reasoning:
            self._read = self._read_answer_start

    def feed(self, text: str) -> list[ReplyEvent]:
        """More of the answer; returns what is now certain."""
        if self._read == self._read_answer and self._dialect is None:
            return [AnswerText(text)] if text else []
        self._buffer += text
        return self._drain(final=False)

    def finish(self) -> list[ReplyEvent]:
        """The answer is over: returns what was held back."""
        return self._drain(final=True)

    def _drain(self, *, final: bool) -> list[ReplyEvent]:
        events: list[ReplyEvent] = []
        while True:
            before = (self._read, len(self._buffer), self._call)
            self._read(events, final)
            if before == (self._read, len(self._buffer), self._call):
                return events

    # Each reads from the buffer what it is sure of, then changes `_read` if something else follows.

    def _read_start(self, events: list[ReplyEvent], final: bool) -> None:
        opening = self._buffer.lstrip()
        if opening.startswith(THINK):
            self._buffer = opening[len(THINK) :]
            self._read = self._read_thoughts
        elif final or not THINK.startswith(opening):
            self._read = self._read_answer_start

    def _read_thoughts(self, events: list[ReplyEvent], final: bool) -> None:
        if not self._begun:
            self._buffer = self._buffer.lstrip()
        certain, mark = self._take_until(THOUGHT, final)
        if certain:
            self._begun = True
            events.append(ReasoningText(certain))
        if mark or final:
            self._begun = False
            self._read = self._read_after_thoughts

    def _read_after_thoughts(self, events: list[ReplyEvent], final: bool) -> None:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._read = self._read_answer_start

    def _read_answer_start(self, events: list[ReplyEvent], final: bool) -> None:
        """Where calls need no opening, an answer that begins like one is held until it is certain."""
        start = self._buffer.lstrip()
        if self._dialect is None or not self._dialect.bare:
            self._read = self._read_answer
        elif start[:1] in ("{", "["):
            self._read = self._read_bare_call
        elif start or final:
            self._read = self._read_answer

    def _read_bare_call(self, events: list[ReplyEvent], final: bool) -> None:
        trial = self._trial
        begin = len(self._buffer) - len(self._buffer.lstrip(" \t\r\n["))
        trial.feed(self._buffer[max(self._tried, begin) :])
        self._tried = len(self._buffer)
        if trial.name is not None and (not self._tools or trial.name in self._tools):
            self._read = self._read_calls
        elif trial.name is not None or trial.foreign or trial.done or trial.failed or final:
            self._read = self._read_answer

    def _read_answer(self, events: list[ReplyEvent], final: bool) -> None:
        opening = self._dialect.opening if self._dialect is not None else ""
        if not opening:
            text, self._buffer = self._buffer, ""
            if text:
                events.append(AnswerText(text))
            return
        certain, mark = self._take_until(opening, final)
        if certain:
            events.append(AnswerText(certain))
        if mark:
            self._opening = mark
            self._read = self._read_calls

    def _read_calls(self, events: list[ReplyEvent], final: bool) -> None:
        if self._call is None and not self._find_call(events, final):
            return
        call = self._call
        assert call is not None
        self._buffer = call.feed(self._buffer)
        wanted = self._most_calls is None or self._told < self._most_calls or self._begun
        if call.name is not None and wanted:  # known before it went wrong, if it did
            if not self._begun:
                events.append(CallBegun(self._told, call.name))
                self._begun = True
                self._told += 1
                self._opening = ""
            if arguments := call.take_arguments():
                events.append(CallArguments(self._told - 1, arguments))
        if call.done or call.failed or final:
            if not self._begun and wanted:  # no call after all: nothing may be lost
                events.append(AnswerText(self._opening + call.raw))
                self._read = self._read_answer
            self._call, self._begun, self._opening = None, False, ""

    def _find_call(self, events: list[ReplyEvent], final: bool) -> bool:
        """Begin the next call; without one, what comes is text again."""
        dialect = self._dialect
        assert dialect is not None
        self._skip(len(self._buffer) - len(self._buffer.lstrip()))
        for mark in (dialect.opening, dialect.closing, *dialect.separators):
            if mark and self._buffer.startswith(mark):
                self._skip(len(mark))
                return False
            if mark and not final and mark.startswith(self._buffer):
                return False
        if self._buffer.startswith("{"):
            self._call = CallReader()
            return True
        named = dialect.named_opening
        if named and (found := re.match(rf"([\w.-]+)\s*{re.escape(named)}\s*(?=\{{)", self._buffer)):
            self._call = CallReader(found[1])
            self._skip(found.end())
            return True
        waits = bool(named) and re.fullmatch(r"[\w.-]*\s*(\[[A-Z]*\]?)?\s*", self._buffer) is not None
        if final or (self._buffer and not waits):
            if self._opening:
                events.append(AnswerText(self._opening))  # it opened nothing: nothing may be lost
                self._opening = ""
            self._read = self._read_answer
        return False

    def _take_until(self, mark: str, final: bool) -> tuple[str, str]:
        """Take what is certain to stand before the mark; and the mark, with the blanks before it, if it came.

        Blanks before a mark belong to nobody: they wait until something else follows them.
        """
        text, found, rest = self._buffer.partition(mark)
        certain = text
        if found:
            certain = text.rstrip()
        elif not final:
            certain = text[: len(text) - len(_held_back(text, mark))].rstrip()
        self._buffer = rest if found else text[len(certain) :]
        return certain, text[len(certain) :] + mark if found else ""

    def _skip(self, count: int) -> None:
        """Leave out the buffer's first characters; they are remembered while they may turn out to be text."""
        if self._opening:
            self._opening += self._buffer[:count]
        self._buffer = self._buffer[count:]


def _held_back(text: str, mark: str) -> str:
    """The longest end of `text` that may be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return text[-length:]
    return ""
