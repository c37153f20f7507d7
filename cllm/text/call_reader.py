"""Call reader: the tool calls of an answer, one after the other, with the markers around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cllm.text.call_parser import (
    CallParser,
    LiteralCallParser,
    NamedCallParser,
    ObjectCallParser,
    Schemas,
    TaggedCallParser,
)
from cllm.text.chat_format import CallFormat, CallStyle, Tool, first_piece, split_slots

MAX_SLOT = 256  # characters of an id
MAX_HELD = 4096  # characters by which a call may equal an earlier one before it is reported


class ToolCallStart(msgspec.Struct, frozen=True):
    """The tool call number `index` of this answer starts; its arguments follow."""

    index: int
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of a tool call's arguments, as JSON text."""

    index: int
    text: str


def get_entries(form: CallFormat) -> list[str]:
    """The markers by which calls start in a text."""
    given = (form.section_opening, form.opening, _get_name_mark(form), *form.other_openings)
    pieces = (first_piece(marker) for marker in given)
    shown = {piece if piece.rstrip("[ ").isalnum() else piece.rstrip("[ ") for piece in pieces}
    return sorted(piece for piece in shown if len(piece) > 2 and not piece.isalnum())


def _get_name_mark(form: CallFormat) -> str:
    """The last piece before a name."""
    return split_slots(form.opening.rstrip())[-1].rpartition("\n")[2].strip()


def make_call_parser(form: CallFormat, schemas: Schemas) -> CallParser:
    """The parser of one call of this format, after its opening."""
    match form.style:
        case CallStyle.JSON:
            return ObjectCallParser(form=form)
        case CallStyle.NAMED:
            return NamedCallParser(form)
        case CallStyle.TAGGED:
            return TaggedCallParser(form, schemas)
        case _:
            return LiteralCallParser(form)


class CallReader:
    """Reads calls, one after the other, with the markers around them, until other text comes."""

    def __init__(self, form: CallFormat, tools: Sequence[Tool], *, parallel: bool, distinct: bool) -> None:
        self._schemas = {tool.name: tool.schema for tool in tools}
        self._parallel = parallel
        self._distinct = distinct
        self.count = 0  # reported
        self._parser: CallParser | None = None
        self._started = False  # the current call has been reported
        self._held = ""  # arguments of the current call that are not reported
        self._arguments: list[str] = []  # all of the current call
        self._earlier: list[tuple[str, str]] = []  # calls that are complete
        # Skipped since the text ended: text again if no call follows. None: there was a call.
        self._opened: list[str] | None = None
        self._blanks: list[str] = []  # after the last marker
        self.rest: str | None = None  # the calls have ended: what was wrongly taken for one
        self.use(form)

    @property
    def blanks(self) -> str:
        """The blanks after the last marker."""
        return "".join(self._blanks)

    def use(self, form: CallFormat) -> None:
        self._form = form
        self._name_mark = _get_name_mark(form)
        markers = (form.section_opening, form.opening, form.closing, form.between, form.section_closing)
        texts = (part for marker in (*markers, *form.other_openings) for part in split_slots(marker)[::2])
        pieces = {piece.strip() for text in texts for piece in text.split("\n")}
        if form.bare or form.section_opening.rstrip().endswith("["):
            pieces |= {"[", "]", ",", ";", first_piece(form.section_opening).rstrip("[ ")}
            pieces.add(form.section_closing.lstrip("\n] ").strip())
        self._pieces = sorted(pieces - {""}, key=len, reverse=True)
        literals = split_slots(form.opening)
        self._before_slot = literals[0].rpartition("\n")[2].strip() if len(literals) > 1 else ""
        self._in_slot = False

    def open(self, opened: str, piece: str) -> None:
        """Calls start, with a marker that has been read."""
        self._opened, self._blanks, self.rest = [opened], [], None
        self._after_piece(piece)

    def feed(self, text: str, events: list[Any], *, final: bool, cut: bool) -> str:
        """Read text; returns what is left of it. `rest` is set where other text follows."""
        while self.rest is None:
            parser, before = self._parser, len(text)
            if parser is not None:
                text = parser.feed(text)
                self._report(events, final=final and not text, cut=cut)
            else:
                text = self._find_call(text, final, cut)
            if self._parser is parser and (parser is not None or len(text) == before):
                break
        return text

    def _find_call(self, text: str, final: bool, cut: bool) -> str:
        """Skip markers up to the next call."""
        if self._in_slot:
            return self._skip_slot(text, final, cut)
        start = text.lstrip()
        self._blanks.append(text[: len(text) - len(start)])
        if self._starts_call(start):
            self._parser = make_call_parser(self._form, self._schemas)
            self._skip(self.blanks)
            return start
        longer = [piece for piece in self._pieces if len(piece) > len(start) and piece.startswith(start)]
        if (not start or longer) and not final:
            return start
        piece = next((piece for piece in self._pieces if start.startswith(piece)), "")
        if not piece or (longer and cut):
            self._give_up(cut)
            return "" if cut and (longer or self._opened) else start
        self._skip(self.blanks + piece)
        start = start[len(piece) :]
        self._after_piece(piece)
        return start

    def _skip_slot(self, text: str, final: bool, cut: bool) -> str:
        """An id stands before the name."""
        before, found, rest = text[:MAX_SLOT].partition(self._name_mark)  # farther away is none
        if not found and len(text) < MAX_SLOT and not final:
            return text
        self._in_slot = False
        if not found:
            self._give_up(cut)
            return "" if cut else text
        self._skip(before + found)
        self._after_piece(found)
        return rest + text[MAX_SLOT:]

    def _skip(self, text: str) -> None:
        self._blanks = []
        if self._opened is not None:
            self._opened.append(text)

    def _give_up(self, cut: bool, raw: str = "") -> None:
        """No call follows."""
        self.rest = "" if cut else "".join((*(self._opened or ()), raw))

    def _starts_call(self, text: str) -> bool:
        if self._form.style is CallStyle.JSON:
            return text.startswith("{")
        return not self._name_mark and text[:1].isidentifier()

    def _after_piece(self, piece: str) -> None:
        """The piece before a name starts a call; an id may come first."""
        form = self._form
        opens = piece == self._name_mark or piece in map(str.strip, form.other_openings)
        if piece and opens and form.style is not CallStyle.JSON:
            self._parser = make_call_parser(form, self._schemas)
        self._in_slot = bool(piece) and piece == self._before_slot

    def _report(self, events: list[Any], *, final: bool, cut: bool) -> None:
        parser = self._parser
        assert parser is not None
        ended = parser.done or parser.failed or final
        if final and not (cut or parser.done):
            parser.end()
        wanted = self._parallel or self.count == 0 or self._started
        if parser.name is None:
            if ended:
                self._parser = None
                self._give_up(cut, parser.raw)
            return
        new = parser.take_arguments()
        self._arguments.append(new)
        if wanted:
            self._pass_on(parser.name, new, events, complete=parser.done or (final and not cut))
        if ended:
            if parser.done:
                self._earlier.append((parser.name, "".join(self._arguments)))
            self._parser, self._started, self._held, self._arguments = None, False, "", []
            self._opened = None

    def _pass_on(self, name: str, new: str, events: list[Any], *, complete: bool) -> None:
        """Report a call, unless it may still turn out to be an earlier one again."""
        self._held += new
        if not self._started:
            if self._distinct and self._is_repeated(name, complete):
                return
            events.append(ToolCallStart(self.count, name))
            self._started = True
            self.count += 1
        if complete and not any(self._arguments):
            self._held = "{}"
        if self._held:
            events.append(ToolCallArguments(self.count - 1, self._held))
            self._held = ""

    def _is_repeated(self, name: str, complete: bool) -> bool:
        if complete:
            return (name, self._held) in self._earlier
        if len(self._held) > MAX_HELD:
            return False
        return any(name == other and text.startswith(self._held) for other, text in self._earlier)
