"""Output parser: splits a streamed answer into reasoning, content and tool calls by the chat format."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from cllm.text import call_parser
from cllm.text.chat_format import GENERIC, CallFormat, CallStyle, ChatFormat, Tool, first_piece, split_slots
from cllm.text.detokenizer import count_common, count_possible

# Written also by models whose calls have no opening.
PYTHON_LIST = CallFormat(style=CallStyle.PYTHON, section_opening="[", section_closing="]", between=", ")

MAX_SLOT = 256  # characters of an id
MAX_HELD = 4096  # characters by which a call may equal an earlier one before it is reported
MAX_REREAD = 1024  # characters that were wrongly taken for the start of a call


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
TextKind = type[ContentText] | type[ReasoningText]


class OutputParser:
    """Incremental parser of one answer: text in, events out. A returned event is never revoked.

    `thinking`: the prompt ends inside the reasoning. `forced`: the answer is calls, at most after reasoning;
    a call that equals an earlier one is then left out. With `reasoning` off, reasoning stays content.
    """

    def __init__(
        self,
        chat_format: ChatFormat = GENERIC,
        tools: Sequence[Tool] = (),
        *,
        thinking: bool = False,
        forced: bool = False,
        parallel: bool = True,
        reasoning: bool = True,
    ) -> None:
        self._format = chat_format
        self._tools = frozenset(tool.name for tool in tools)
        self._forced = forced
        self._markers = _TextMarkers(chat_format, calls=bool(tools), reasoning=reasoning)
        self._calls = CallReader(chat_format.calls, tools, parallel=parallel, distinct=forced)
        self._buffer = ""
        self._lead = chat_format.lead  # ends the prompt, and starts a marker
        self._run = _TextRun()
        self._events: list[OutputEvent] = []
        self._reasoned = self._cut = False
        # Reads an answer that may be a bare call.
        self._trial = call_parser.ObjectCallParser(form=chat_format.calls)
        self._tried = 0  # characters of the buffer that the trial has read
        self._read: Callable[[bool], bool] = self._read_start
        if thinking and reasoning:
            self._lead = ""
            self._enter_reasoning(chat_format.reasoning_openings[0])

    def feed(self, text: str) -> list[OutputEvent]:
        """Add text; returns the events that are now certain."""
        waits = self._buffer or self._lead or self._read != self._read_text
        if not waits and self._markers.first.search(text) is None:
            return self._run.add(text, ContentText)  # nearly every piece of an answer
        self._buffer += text
        return self._drain(final=False)

    def finish(self, *, cut: bool = False) -> list[OutputEvent]:
        """The answer has ended: returns the events of what was held back. `cut`: it ended by a limit."""
        self._cut = cut
        return self._drain(final=True)

    def _drain(self, *, final: bool) -> list[OutputEvent]:
        while self._read(final):
            pass
        events, self._events = self._events, []
        return events

    # States. Each reads what is certain from the buffer; True where another state goes on.

    def _read_start(self, final: bool) -> bool:
        """The start of an answer, or of what follows reasoning."""
        start = self._buffer.lstrip()
        if self._forced:
            openings = [] if self._reasoned else [mark.strip() for mark in self._format.reasoning_openings]
            start = self._lead + self._buffer if self._lead else start
            if any(start.startswith(mark) for mark in openings):
                return self._enter_text()
            if not final and any(mark.startswith(start) for mark in openings):
                return False
            self._buffer, self._lead = start, ""
            return self._enter_calls("", "")
        if not (self._tools and self._format.calls.bare):
            return self._enter_text()
        if not start and not final:
            return False
        return self._read_bare(final) if start[:1] in ("{", "[") else self._enter_text()

    def _read_bare(self, final: bool) -> bool:
        """Hold back an answer that starts like a call without an opening, until it is certain."""
        if found := re.match(r"\s*\[\s*([A-Za-z_][\w.-]*)(\s*\()?", self._buffer):
            if found[2] and found[1] in self._tools:
                self._calls.use(PYTHON_LIST)
                return self._enter_calls("", "")
            waits = found.end() == len(self._buffer) and not found[2] and not final
            return False if waits else self._enter_text()
        begin = len(self._buffer) - len(self._buffer.lstrip(" \t\r\n["))
        trial = self._trial
        trial.feed(self._buffer[max(self._tried, begin) :])
        self._tried = len(self._buffer)
        if trial.name in self._tools:
            return self._enter_calls("", "")
        if trial.name is not None or trial.foreign or trial.done or trial.failed or final:
            if final and self._cut and trial.name is None and not (trial.foreign or trial.done):
                self._buffer = ""  # the beginning of a call, as far as it can be known
            return self._enter_text()
        return False

    def _enter_text(self) -> bool:
        self._buffer = self._lead + self._buffer
        self._read = self._read_text
        return True

    def _read_text(self, final: bool) -> bool:
        if (found := self._markers.find(self._buffer, final)) is None:
            self._say(self._release(self._markers.count_kept, final), ContentText)
            if final:
                if not self._run.said and not self._reasoned and not self._calls.count:
                    self._run.said = bool(self._run.blanks)  # an answer of blanks alone
                self._buffer = ""
                self._events += self._run.end(ContentText, "" if self._cut else self._format.after_text)
            return False
        core, at = found[0], found.start()
        whole, kind = self._markers.by_core[core]
        self._say(self._buffer[:at], ContentText)
        self._buffer = self._buffer[at + len(core) :]
        strays = kind == "closing" and self._run.said
        # Reasoning starts an answer; once there was some, it may also start on a new line.
        opens = self._format.lead or self._format.text_openings or not self._run.said
        opens = opens or (self._reasoned and "\n" in self._run.blanks)
        if strays or (kind == "reasoning" and not opens):
            self._say(core, ContentText)
            return True
        self._lead = ""
        if kind == "calls":
            blanks = self._run.blanks
            said = self._run.end(ContentText, self._format.calls.before)
            self._events += said
            blanks = blanks[len(said[0].text) :] if said else blanks  # text again if no call follows
            return self._enter_calls(blanks + core, core)
        self._events += self._run.end(ContentText, _left(whole))
        if kind == "reasoning":
            return self._enter_reasoning(whole)
        self._run.skip = _right(whole)
        return True

    def _release(self, count_kept: Callable[[str], int], final: bool) -> str:
        """Take the text out of the buffer that no marker can start in."""
        at = len(self._buffer) - (count_kept(self._buffer) if not final or self._cut else 0)
        text, self._buffer = self._buffer[:at], self._buffer[at:]
        return text

    def _say(self, text: str, kind: TextKind) -> None:
        if self._lead and text:
            text, self._lead = text.removeprefix(self._lead), ""
        self._events += self._run.add(text, kind)

    def _enter_reasoning(self, opening: str) -> bool:
        self._run.skip = _right(opening) if self._format.exact else None
        self._reasoned, self._read = True, self._read_reasoning
        return True

    def _read_reasoning(self, final: bool) -> bool:
        closings = self._markers.reasoning_closings
        found = [(at, core) for core in closings if (at := self._buffer.find(core)) >= 0]
        if not found:
            text = self._release(lambda text: count_possible(text, list(closings)), final)
            self._events += self._run.add(text, ReasoningText)
            return False
        at, core = min(found)
        self._events += self._run.add(self._buffer[:at], ReasoningText)
        self._buffer = self._buffer[at + len(core) :]
        exact = self._format.exact
        self._events += self._run.end(ReasoningText, _left(closings[core]) if exact else None)
        self._run.skip = _right(closings[core]) if exact else None
        self._read = self._read_blanks
        return True

    def _read_blanks(self, final: bool) -> bool:
        """After reasoning: what follows the blanks decides how to go on."""
        rest = self._buffer.lstrip()
        self._events += self._run.add(self._buffer[: len(self._buffer) - len(rest)], ContentText)
        self._buffer = rest
        if not rest and not final:
            return False
        self._read, self._tried = self._read_start, 0
        return True

    def _enter_calls(self, opened: str, piece: str) -> bool:
        self._run.end(ContentText, None)  # blanks before bare calls
        self._calls.open(opened, piece)
        self._read = self._read_calls
        return True

    def _read_calls(self, final: bool) -> bool:
        self._buffer = self._calls.feed(self._buffer, self._events, final=final, cut=self._cut)
        if self._calls.rest is None:
            return False
        self._read = self._read_text
        text = self._calls.rest + self._calls.blanks
        if self._calls.rest and len(text) < MAX_REREAD and self._format.calls.style is not CallStyle.JSON:
            at = len(text) - len(text.lstrip()) + 1  # another marker may overlap
            text, self._buffer = text[:at], text[at:] + self._buffer
        self._events += self._run.add(text, ContentText)
        return bool(self._buffer) or final


class _TextRun:
    """Text or reasoning between two markers: without the blanks that belong to the markers."""

    def __init__(self) -> None:
        self.said = False  # some of it is out
        self.skip: str | None = ""  # blanks of the marker before it, not seen yet; None: any blanks
        self._held: list[str] = []  # blanks at its end so far

    @property
    def blanks(self) -> str:
        return "".join(self._held)

    def add(self, text: str, kind: TextKind) -> list[OutputEvent]:
        if self.skip is None:
            text = text.lstrip()
        elif self.skip:
            shared = count_common(text, self.skip)
            text, self.skip = text[shared:], self.skip[shared:]
        if not text:
            return []
        self.skip = ""
        said = text.rstrip()
        events: list[OutputEvent] = []
        if said:
            events.append(kind(self.blanks + said))
            self._held, self.said = [], True
        if len(said) < len(text):
            self._held.append(text[len(said) :])
        return events

    def end(self, kind: TextKind, left: str | None) -> list[ContentText | ReasoningText]:
        """A marker follows, with the blanks `left` before it; None stands for any blanks."""
        held, said = self.blanks, self.said
        self.said, self.skip, self._held = False, "", []
        if not said or left is None:
            return []
        belongs = next((left[at:] for at in range(len(left)) if held.endswith(left[at:])), "")
        rest = held[: len(held) - len(belongs)]
        return [kind(rest)] if rest else []


_Kind = Literal["reasoning", "closing", "calls", "dropped"]  # `closing` of reasoning that did not start


class _TextMarkers:
    """The markers that may stand in a text, and those that end reasoning.

    A marker is found by its core; blanks beside that belong to it.
    """

    def __init__(self, chat_format: ChatFormat, *, calls: bool, reasoning: bool) -> None:
        self.reasoning_closings = {mark.strip(): mark for mark in chat_format.reasoning_closings}
        kinds: dict[str, _Kind] = dict.fromkeys(get_entries(chat_format.calls), "calls") if calls else {}
        dropped = (*chat_format.text_openings, *chat_format.text_closings)
        if chat_format.lead and not reasoning:
            dropped += (*chat_format.reasoning_openings, *chat_format.reasoning_closings)
        kinds |= dict.fromkeys(dropped, "dropped")
        if reasoning:
            closings: dict[str, _Kind] = dict.fromkeys(chat_format.reasoning_closings, "closing")
            kinds |= closings | kinds
            kinds |= dict.fromkeys(chat_format.reasoning_openings, "reasoning")
        found = {whole.strip(): (whole, kind) for whole, kind in kinds.items()}
        self.by_core = dict(sorted(found.items(), key=lambda item: -len(item[0])))
        self._cores = list(self.by_core)
        self._pattern = re.compile("|".join(map(re.escape, self._cores)) or "(?!)")
        first = "".join(sorted({core[0] for core in self._cores}))
        self.first = re.compile(f"[{re.escape(first)}]" if first else "(?!)")  # what markers start with
        self._longest = max(map(len, self._cores), default=0)

    def find(self, text: str, final: bool) -> re.Match[str] | None:
        """The first marker; None also where a longer one may still come there."""
        if (found := self._pattern.search(text)) is None or final:
            return found
        core, rest = found[0], text[found.start() :]
        grows = any(len(other) > len(core) and other.startswith(rest) for other in self._cores)
        return None if grows else found

    def count_kept(self, text: str) -> int:
        """The characters at the end of a text that may start a marker."""
        if self.first.search(text, max(0, len(text) - self._longest)) is None:
            return 0
        found = self._pattern.search(text)
        return len(text) - found.start() if found is not None else count_possible(text, self._cores)


def _left(marker: str) -> str:
    return marker[: len(marker) - len(marker.lstrip())]


def _right(marker: str) -> str:
    return marker[len(marker.rstrip()) :]


# Calls ----------------------------------------------------------------------------------------------


def get_entries(form: CallFormat) -> list[str]:
    """The markers by which calls start in a text."""
    given = (form.section_opening, form.opening, _get_name_mark(form), *form.other_openings)
    pieces = (first_piece(marker) for marker in given)
    shown = {piece if piece.rstrip("[ ").isalnum() else piece.rstrip("[ ") for piece in pieces}
    return sorted(piece for piece in shown if len(piece) > 2 and not piece.isalnum())


def _get_name_mark(form: CallFormat) -> str:
    """The last piece before a name."""
    return split_slots(form.opening.rstrip())[-1].rpartition("\n")[2].strip()


def make_call_parser(form: CallFormat, schemas: call_parser.Schemas) -> call_parser.CallParser:
    """The parser of one call of this format, after its opening."""
    match form.style:
        case CallStyle.JSON:
            return call_parser.ObjectCallParser(form=form)
        case CallStyle.NAMED:
            return call_parser.NamedCallParser(form)
        case CallStyle.TAGGED:
            return call_parser.TaggedCallParser(form, schemas)
        case _:
            return call_parser.LiteralCallParser(form)


class CallReader:
    """Reads calls, one after the other, with the markers around them, until other text comes."""

    def __init__(self, form: CallFormat, tools: Sequence[Tool], *, parallel: bool, distinct: bool) -> None:
        self._schemas = {tool.name: tool.schema for tool in tools}
        self._parallel = parallel
        self._distinct = distinct
        self.count = 0  # reported
        self._parser: call_parser.CallParser | None = None
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
        named = self._form.style is not CallStyle.JSON
        if start[:1].isidentifier() and not self._name_mark if named else start[:1] == "{":
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
            same = [text for other, text in self._earlier if other == name and text.startswith(self._held)]
            may_be_same = self._held in same if complete else same and len(self._held) <= MAX_HELD
            if self._distinct and may_be_same:
                return
            events.append(ToolCallStart(self.count, name))
            self._started = True
            self.count += 1
        if complete and not any(self._arguments):
            self._held = "{}"
        if self._held:
            events.append(ToolCallArguments(self.count - 1, self._held))
            self._held = ""
