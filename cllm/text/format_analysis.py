"""Format analysis: derives the chat format of a model from what its chat template renders.

The template writes conversations of unmistakable words. What stands between the words are the markers.
Formats that no rendering shows are declared, and chosen by what the template renders.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from cllm.errors import InvalidRequest
from cllm.text.chat_format import DECLARED, DESCRIBED, CallFormat, CallStyle, ChatFormat, Slot, Tool
from cllm.text.detokenizer import count_common
from cllm.text.output_parser import OutputParser, ToolCallStart

Message = dict[str, Any]
Render = Callable[..., str]
USER, TEXT, REASON = "xquser", "xqtext", "xqreason"
NAMES, IDS = ("xqtoola", "xqtoolb"), ("xqcalla01", "xqcallb02")
KEYS, VALUES = ("xqkeya", "xqkeyb", "xqkeyc"), ("xqvala", "xqvalb", "xqvalc")
FIELDS = ("reasoning_content", "reasoning", "thinking")
# One value of each JSON type; nothing of them is a word of the markers.
TYPED: Mapping[str, Any] = {
    "string": VALUES[0],
    "integer": 90817,
    "number": 908.17,
    "boolean": True,
    "object": {"xqdeep": VALUES[1]},
    "array": [VALUES[1]],
    "null": None,
}

_MARK = r"(?:\]<\]\w+\[>\[)?"  # MiniMax M3 has one before each tag
_TAG = re.compile(rf"{_MARK}<[^<>\n\[\]]{{1,60}}>|\[/?[A-Z_]{{2,30}}\]")
_LAST_TAG = re.compile(r"(?:<[^<>\n]{1,60}>|\[/?[A-Z_]{2,30}\])[a-z]*\s*\Z")
PYTHON_TAG = "<|python_tag|>"  # of Llama 3: also starts calls
_replace = msgspec.structs.replace


class TemplateProbe:
    """Renders probe conversations; finds out on its way which messages the template takes."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.argument_text = False
        self._content: str | None = ""  # of messages that only call
        properties = {key: {"type": "string", "description": "d"} for key in KEYS}
        schema = {"type": "object", "properties": properties, "required": [KEYS[0]]}
        self.tools = [Tool(name, "d", schema) for name in NAMES]
        self._tools = tools = [tool.for_template() for tool in self.tools]
        self.prompt = self._tail([], add_generation_prompt=True)
        self.text = self.saying(TEXT)
        self.takes_tools = NAMES[0] in (self._try([], tools=tools) or "").replace(USER, "")
        self.call, self.calls = self._find_calls()
        self.one_call = not self.calls
        whole = self._try([], tools=tools, add_generation_prompt=True)
        # All that a declared format may be chosen by.
        self.rendered = "\n".join((whole, self.text, self.call, self.saying(TEXT, thinking=REASON)))

    def _find_calls(self) -> tuple[str, str]:
        for self.argument_text in (False, True):
            for self._content in ("", None):
                call = self.calling(1)
                if NAMES[0] in call and call.count('\\"') == 0:
                    calls = self.calling(2)
                    return call, calls if NAMES[1] in calls else ""
        self.argument_text, self._content = False, ""
        return "", ""

    def calling(self, count: int, **fields: Any) -> str:
        """A message of one or two calls."""
        arguments = ({KEYS[0]: VALUES[0], KEYS[1]: VALUES[1]}, {KEYS[2]: VALUES[2]})
        calls = [self._call(number, arguments[number]) for number in range(count)]
        return self.saying(**{"content": self._content, "tool_calls": calls, **fields})

    def calling_with(self, arguments: Mapping[str, Any]) -> str:
        """A message of one call with other arguments."""
        return self.saying(self._content, tool_calls=[self._call(0, arguments)])

    def saying(self, content: Any, **fields: Any) -> str:
        """A message of the assistant."""
        return self._tail([{"role": "assistant", "content": content, **fields}])

    def _call(self, number: int, arguments: Mapping[str, Any]) -> Message:
        given = json.dumps(arguments) if self.argument_text else dict(arguments)
        function = {"name": NAMES[number], "arguments": given}
        return {"id": IDS[number], "type": "function", "function": function}

    def _tail(self, messages: Sequence[Message], **options: Any) -> str:
        """The text after the user's word; empty where the template refuses."""
        rendered = self._try(messages, tools=self._tools, **options) or self._try(messages, **options) or ""
        return rendered.rpartition(USER)[2]

    def _try(self, messages: Sequence[Message], **options: Any) -> str:
        given = {"messages": [{"role": "user", "content": USER}, *messages], "tools": None, **options}
        given.setdefault("add_generation_prompt", False)
        switches = {"enable_thinking": True, "thinking": True}
        known = {"functions": json.dumps(given["tools"]), "datetime": "now", "date_string": "now"}
        try:
            return self._render(**{**known, **switches, **given})
        except InvalidRequest:
            return ""


def derive_format(
    render: Render, tokens: Mapping[str, int] | None = None, ends: Collection[str] = ()
) -> ChatFormat:
    """The format of the template that `render` renders.

    `tokens` are the control tokens by their text, `ends` the texts of those that end an answer.
    """
    probe = TemplateProbe(render)
    found = next((known for mark, known in DECLARED if mark in probe.rendered), None) or _derive(probe)
    found = _replace(found, takes_tools=probe.takes_tools)
    if found.calls.bare and PYTHON_TAG in (tokens or {}):
        found = _replace(found, calls=_replace(found.calls, other_openings=(PYTHON_TAG,)))
    closings = {"closing": found.calls.closing, "section_closing": found.calls.section_closing}
    for name, end in itertools.product(closings, ends):  # what ends an answer is no part of it
        closings[name] = closings[name].partition(end)[0]
    found = _replace(found, calls=_replace(found.calls, **closings))
    texts = found.marker_texts
    used = {text: token for text, token in (tokens or {}).items() if any(text in marker for marker in texts)}
    return _replace(found, tokens=tuple(sorted(used.items())))


def _derive(probe: TemplateProbe) -> ChatFormat:
    try:
        calls = derive_calls(probe)
    except (ValueError, LookupError):
        calls = None
    after = probe.text.partition(TEXT)[2]
    found = ChatFormat(writes_calls=bool(probe.call), after_text=after[: len(after) - len(after.lstrip())])
    if calls is None:
        known = [known for mark, known in DESCRIBED if probe.takes_tools and mark in probe.rendered]
        return _add_reasoning(probe, _replace(found, calls=known[0]) if known else found)
    found = _replace(found, calls=calls, one_call=probe.one_call)
    return _add_text(probe, _add_reasoning(probe, found))


# Calls ----------------------------------------------------------------------------------------------


def derive_calls(probe: TemplateProbe) -> CallFormat:
    """The format of calls. Raises ValueError or LookupError."""
    if not probe.call:
        raise ValueError("the template writes no calls")
    header = _common_prefix(probe.call, probe.text.partition(TEXT)[0])
    one = probe.call[len(header) :]
    two = probe.calls[len(header) :] if probe.calls.startswith(header) else ""
    at = one.index(NAMES[0])
    if (span := _find_object(one, at)) is not None:
        found = _derive_json(one, two, span)
    elif 0 <= one.find('{"' + KEYS[0], at) < one.find(KEYS[0], at):
        found = _derive_named(one, two)
    else:
        found = _derive_tagged(probe, one, two)
    found = _move_blanks(_cut_turn_end(found, probe.text.partition(TEXT)[2]))
    found = _replace(found, section_opening=_without_reasoning(probe, found.section_opening))
    found = _replace(found, before=_find_before(probe, found))
    parser = OutputParser(ChatFormat(calls=found), probe.tools)
    events = (*parser.feed((two or one).lstrip()), *parser.finish())
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    if not names or names != list(NAMES[: len(names)]):
        raise ValueError("the format does not read what it was derived from")
    return found


def _find_object(text: str, at: int) -> tuple[int, int] | None:
    """The JSON object around a place."""
    decoder = json.JSONDecoder()
    start = text.rfind("{", 0, at)
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            end = 0
        if end > at and isinstance(value, dict):
            return start, end
        start = text.rfind("{", 0, start)
    return None


def _derive_json(one: str, two: str, span: tuple[int, int]) -> CallFormat:
    objects = [one[slice(*span)]]
    pieces = [one[: span[0]], one[span[1] :]]
    if two and (second := _find_object(two, two.index(NAMES[1]))) and two.startswith(pieces[0]):
        first = _find_object(two, two.index(NAMES[0]))
        assert first is not None
        objects = [two[slice(*first)], two[slice(*second)]]
        pieces = [two[: first[0]], two[first[1] : second[0]], two[second[1] :]]
    parsed = [json.loads(text) for text in objects]
    keys = tuple((Slot.NAME if key in NAMES else key, _find_slot(key, parsed)) for key in parsed[0])
    if not {Slot.NAME, Slot.ARGUMENTS} <= {part for pair in keys for part in pair}:
        raise ValueError("the object lacks a name or arguments")
    compact = objects[0] == json.dumps(parsed[0], separators=(",", ":"))
    return CallFormat(style=CallStyle.JSON, keys=keys, compact=compact, **_frame(pieces))


def _find_slot(key: str, objects: Sequence[Mapping[str, Any]]) -> str:
    if (value := objects[0][key]) == NAMES[0]:
        return Slot.NAME
    if isinstance(value, Mapping) and KEYS[0] in value:
        return Slot.ARGUMENTS
    if value == IDS[0]:
        return Slot.ID
    if len(objects) > 1 and (second := objects[1].get(key)) != value:
        if str(value).isdigit() and str(second).isdigit():
            return Slot.INDEX
        raise ValueError("a key differs from call to call")
    return json.dumps(value)


def _derive_named(one: str, two: str) -> CallFormat:
    decoder = json.JSONDecoder()
    pieces: list[str] = []
    names: list[str] = []
    text, rest = two or one, two or one
    for name, key in ((NAMES[0], KEYS[0]), (NAMES[1], KEYS[2]))[: 1 + bool(two)]:
        before, _, rest = rest.partition(name)
        separator = rest[: rest.index('{"' + key)]
        _, end = decoder.raw_decode(rest, len(separator))
        pieces.append(before)
        names.append(separator)
        rest = rest[end:]
    arguments = text[text.index('{"') :]
    compact = arguments.startswith(f'{{"{KEYS[0]}":"')
    frame = _frame([*pieces, rest])
    return CallFormat(style=CallStyle.NAMED, after_name=_join(names), compact=compact, **frame)


def _derive_tagged(probe: TemplateProbe, one: str, two: str) -> CallFormat:
    """Arguments with a key and a value each, in any tags."""
    to_key = _between(one, NAMES[0], KEYS[0])
    to_value = _between(one, KEYS[0], VALUES[0])
    to_next = _between(one, VALUES[0], KEYS[1])
    end = one.partition(VALUES[1])[2]
    if to_key.strip() == "(" and to_value.strip() in ("='", '="'):
        return CallFormat(style=CallStyle.PYTHON, **_frame(re.split(r"xqtool[ab]\([^()]*\)", two or one)))
    if to_key.strip() == "{" and to_value.startswith(":"):
        return CallFormat(style=CallStyle.GEMMA, **_frame(re.split(r"xqtool[ab]\{[^{}]*\}", two or one)))
    keyed = [part.replace(key, Slot.KEY) for part, key in ((to_next, KEYS[0]), (end, KEYS[1]))]
    nested = keyed[0].partition(f"</{Slot.KEY}>")[0] if Slot.KEY in keyed[0] else ""
    value_closing = _common_prefix(*keyed)
    key_opening = _common_suffix(to_key, keyed[0][len(value_closing) :])
    if not value_closing.strip() or not key_opening.strip():
        raise ValueError("no tags stand around the arguments")
    closing, types = _find_types(probe, to_value)
    ends = [end]
    after_name = to_key[: len(to_key) - len(key_opening)]
    if two:
        ends = [_between(two, VALUES[1], NAMES[1]), two.partition(VALUES[2])[2]]
        second = _between(two, NAMES[1], KEYS[2])
        after_name = _join([after_name, second[: len(second) - len(key_opening)]])
    keyed_ends = (each.replace(key, Slot.KEY) for each, key in zip(ends, KEYS[1:], strict=False))
    pieces = [(two or one).partition(NAMES[0])[0], *(each[len(value_closing) :] for each in keyed_ends)]
    return CallFormat(
        style=CallStyle.TAGGED,
        after_name=after_name,
        key_opening=key_opening,
        key_closing=closing,
        value_closing=value_closing,
        between_values=keyed[0][len(value_closing) : len(keyed[0]) - len(key_opening)],
        types=types,
        nested=nested,
        cdata="<![CDATA[" in probe.calling_with({KEYS[0]: f"{VALUES[0]}\n<&>"}),
        **_frame(pieces),
    )


def _find_types(probe: TemplateProbe, to_value: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The marker between key and value, with a slot where it names the value's type."""
    closings: dict[str, str] = {}
    for kind, value in TYPED.items():
        _, _, rest = probe.calling_with({KEYS[0]: value}).partition(KEYS[0])
        compact = json.dumps(value, separators=(",", ":"))
        spellings = [value] if isinstance(value, str) else [json.dumps(value), compact, str(value)]
        shown = next((shown for shown in spellings if shown in rest), None)
        if shown is not None:
            closings[kind] = rest.partition(shown)[0]
    if len(set(closings.values())) < 2 or "string" not in closings:
        return to_value, ()
    other = next(text for text in closings.values() if text != closings["string"])
    start = count_common(closings["string"], other)
    start = to_value.rfind('"', 0, start) + 1 or start
    end = to_value.index('"', start)
    before, after = to_value[:start], to_value[end:]
    words = {
        kind: text[len(before) : len(text) - len(after)]
        for kind, text in closings.items()
        if text.startswith(before) and text.endswith(after)
    }
    return before + Slot.TYPE + after, tuple(words.items())


def _frame(pieces: Sequence[str]) -> dict[str, Any]:
    """The markers around calls, from the text before the first call, between two, and after the last."""
    first, *middle, last = (piece.replace(IDS[0], Slot.ID).replace(IDS[1], Slot.ID) for piece in pieces)
    first, last = first.replace(NAMES[0], Slot.NAME), last.replace(NAMES[1], Slot.NAME)
    if not middle:
        return {"opening": first, "closing": last, "between": ""}
    between = middle[0].replace(NAMES[1], Slot.NAME)
    closing = _common_prefix(between, last)
    opening = _common_suffix(first, between[len(closing) :])
    return {
        "section_opening": first[: len(first) - len(opening)],
        "opening": opening,
        "between": between[len(closing) : len(between) - len(opening)],
        "closing": closing,
        "section_closing": last[len(closing) :],
    }


def _cut_turn_end(found: CallFormat, turn_end: str) -> CallFormat:
    """Markers without the end of the turn, which is no part of the calls."""
    name = "section_closing" if found.section_closing or found.section_opening else "closing"
    closing: str = getattr(found, name)
    closing = closing[: len(closing) - len(_common_suffix(closing, turn_end))]
    for end in _TAG.findall(turn_end):
        closing = closing.partition(end)[0]
    if name == "section_closing":  # what closes without an opening is the end of the turn
        closing = closing.rstrip() if found.section_opening.strip() else ""
    return _replace(found, **{name: closing})


def _move_blanks(found: CallFormat) -> CallFormat:
    """Markers without blanks before the first: `before` has those after a text."""
    if found.section_opening.strip():
        return _replace(found, section_opening=found.section_opening.lstrip())
    opening = found.opening.lstrip()
    between = found.between + found.opening[: len(found.opening) - len(opening)]
    return _replace(found, section_opening="", opening=opening, between=between)


def _without_reasoning(probe: TemplateProbe, text: str) -> str:
    """The start of a message that calls, without the markers of no reasoning."""
    for field in FIELDS:
        before, found, after = probe.calling(1, **{field: REASON}).partition(REASON)
        opening, closing = _LAST_TAG.search(before), _TAG.match(after)
        if found and opening and closing:
            return text.removeprefix(opening.group().strip() + closing.group())
    return text


def _find_before(probe: TemplateProbe, found: CallFormat) -> str:
    """The blanks between a text and the calls after it."""
    _, said, rest = probe.calling(1, content=TEXT).partition(TEXT)
    start = found.start.strip()
    between = rest.partition(start)[0] if start and start in rest else "x"
    return between if said and not between.strip() else ""


# Reasoning and text ---------------------------------------------------------------------------------


def _add_reasoning(probe: TemplateProbe, found: ChatFormat) -> ChatFormat:
    for field in FIELDS:
        for rendered in (probe.saying(TEXT, **{field: REASON}), probe.calling(1, **{field: REASON})):
            if REASON in rendered:
                return _with_reasoning(probe, _replace(found, reasoning_field=field), rendered)
    rendered = probe.saying([{"type": "thinking", "thinking": REASON}, {"type": "text", "text": TEXT}])
    if REASON in rendered and "thinking'" not in rendered and '"thinking"' not in rendered:
        return _with_reasoning(probe, _replace(found, reasoning_field="parts"), rendered)
    return found


def _with_reasoning(probe: TemplateProbe, found: ChatFormat, rendered: str) -> ChatFormat:
    before, _, after = rendered.partition(REASON)
    plain = probe.text.partition(TEXT)[0]
    opening = match.group() if (match := _LAST_TAG.search(before)) else ""
    plain_tag = _LAST_TAG.search(plain)
    if not opening or (plain_tag and plain_tag.group().strip() == opening.strip()):
        header = _common_prefix(probe.prompt, rendered)
        opening = probe.prompt[len(header) :]  # the template itself opens the reasoning
    ends = [after.partition(TEXT)[0]] if TEXT in after else []
    start = found.calls.start.strip() if found.writes_calls else ""
    fields = {found.reasoning_field: REASON} if found.reasoning_field != "parts" else {}
    called = probe.calling(1, **fields).partition(REASON)[2]
    if start and start in called:
        ends.append(called.partition(start)[0])
    closing = ends[0] if ends else ""
    if len(ends) > 1 and ends[0].strip() != ends[1].strip():  # else those before a text count
        closing = _common_prefix(*ends)
    if not closing.strip() or not opening.strip():
        return found
    return _replace(found, reasoning_openings=(opening,), reasoning_closings=(closing,), exact=True)


def _add_text(probe: TemplateProbe, found: ChatFormat) -> ChatFormat:
    """Markers around text, where the template writes them."""
    header = _common_prefix(probe.call, probe.text.partition(TEXT)[0])
    before, _, end = probe.text.partition(TEXT)
    opening = before[len(header) :]
    for closing in found.reasoning_closings:
        if closing.strip() in opening:
            opening = opening.rpartition(closing.strip())[2]
    if not opening.strip() or any(opening.strip() == mark.strip() for mark in found.reasoning_openings):
        return found
    closing = end[: len(end) - len(_common_suffix(end, probe.call))]
    closings = (closing,) if closing.strip() else ()
    return _replace(found, text_openings=(opening,), text_closings=closings)


# Texts ----------------------------------------------------------------------------------------------


def _between(text: str, first: str, second: str) -> str:
    """The text between two words. Raises ValueError."""
    rest = text.partition(first)[2]
    return rest[: rest.index(second)]


def _join(markers: Sequence[str]) -> str:
    """One marker for several calls: what differs becomes a slot. Raises ValueError."""
    slots = [marker.replace(call_id, Slot.ID) for marker, call_id in zip(markers, IDS, strict=False)]
    if len(set(slots)) == 1:
        return slots[0]
    numbers = [re.sub(r"\d+", Slot.INDEX, marker) for marker in slots]
    if len(set(numbers)) > 1:
        raise ValueError("a marker differs from call to call")
    return numbers[0]


def _common_prefix(first: str, second: str) -> str:
    """The common beginning of two texts, without half a tag."""
    length = count_common(first, second)
    return first[: min(_span_tag(text, length)[0] for text in (first, second))]


def _common_suffix(first: str, second: str) -> str:
    """The common end of two texts, without half a tag."""
    length = count_common(first[::-1], second[::-1])
    length = min(len(text) - _span_tag(text, len(text) - length)[1] for text in (first, second))
    return first[len(first) - length :]


def _span_tag(text: str, at: int) -> tuple[int, int]:
    """Start and end of the tag that a place is inside of, or twice the place."""
    return next((tag.span() for tag in _TAG.finditer(text) if tag.start() < at < tag.end()), (at, at))
