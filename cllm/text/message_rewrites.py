"""Message rewrites: the messages of a conversation in the shape that a chat template takes.

Templates refuse what others take: a system role, a later system message, equal roles in a row, two calls in a
message. A rewrite changes one such thing, and only the messages that have it. What comes before them stays,
so that the prompt of a conversation that grows begins with its former prompt. Probes, which are short
conversations, show the rewrites that a template needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from cllm.text.call_parser import parse_object
from cllm.text.chat_format import GENERIC, CallFormat, WrittenCall, dump_json, write_calls

Message = dict[str, Any]
Rewrite = Callable[[list[Message]], list[Message]]
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")  # as templates name them
JOINT = "\n\n"  # between messages that become one
ID_LENGTH = 9  # of a call's id, where a template takes only short ones
INSTRUCTIONS = """\
You can call these tools, described as JSON:
{tools}
To call one, answer with nothing but {form}. If no tool is needed, answer in words."""
GENERIC_FORM = """\
a JSON object on a line of its own: {"name": "the tool's name", "arguments": {its arguments}}"""


def prepare(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Messages as Transformers takes them: text content, arguments as objects, results with a tool's name.

    The reasoning is given under each name that a template may read. Calls without an id get one; results
    without one answer the calls in their order.
    """
    prepared: list[Message] = []
    names: dict[str, str] = {}
    open_calls: list[str] = []
    for given in messages:
        message = {key: given[key] for key in given if given[key] is not None and key not in REASONING_FIELDS}
        message["content"] = message.get("content") or ""
        reasoning = next(filter(None, map(given.get, REASONING_FIELDS)), None)
        if message["role"] == "assistant" and reasoning:
            message |= dict.fromkeys(REASONING_FIELDS, reasoning)
        calls = message.pop("tool_calls", None)
        if calls and message["role"] == "assistant":
            message["tool_calls"] = [_prepare_call(call, f"call{len(names):05}", names) for call in calls]
            open_calls = [call["id"] for call in message["tool_calls"]]
        elif message["role"] == "tool":
            call_id = message.get("tool_call_id") or (open_calls[0] if open_calls else "")
            if call_id in open_calls:
                open_calls.remove(call_id)
            message["tool_call_id"] = call_id
            message["name"] = names.get(call_id) or message.get("name") or "tool"
        prepared.append(message)
    return prepared


def _prepare_call(call: Mapping[str, Any], default_id: str, names: dict[str, str]) -> Message:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    parsed = parse_object(arguments) if isinstance(arguments, str) else arguments
    call_id = call.get("id") or default_id
    names[call_id] = function["name"]
    called = {"name": function["name"], "arguments": arguments if parsed is None else parsed}
    return {"id": call_id, "type": "function", "function": called}


def describe_tools(
    messages: list[Message], tools: Sequence[Mapping[str, Any]], form: CallFormat
) -> list[Message]:
    """Tools in words, in the system message, for templates that take none; calls as the model writes them."""
    example = write_calls(form, [WrittenCall("the tool's name", {"argument": "value"}, "000000000")])
    shown = GENERIC_FORM if form == GENERIC.calls else f"a call of this form: {example}"
    text = INSTRUCTIONS.format(tools="\n".join(dump_json(tool["function"]) for tool in tools), form=shown)
    if messages and messages[0]["role"] == "system":
        return [_join(messages[0], text), *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def write_calls_as_text(messages: list[Message], form: CallFormat) -> list[Message]:
    """Calls in the assistant's text, as the model writes them; results stay messages of their own."""
    written: list[Message] = []
    for message in arguments_as_object(messages):
        if "tool_calls" in message:
            functions = [(call["function"], call["id"]) for call in message["tool_calls"]]
            calls = [WrittenCall(each["name"], each["arguments"], call_id) for each, call_id in functions]
            before = form.before if message["content"] else ""
            text = f"{message['content']}{before}{write_calls(form, calls)}"
            message = {**_without_calls(message), "content": text}
        written.append(message)
    return written


def _without_calls(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _join(message: Message, text: str, *, before: bool = False) -> Message:
    """The message with a text added to its content."""
    texts = (text, message["content"]) if before else (message["content"], text)
    return {**message, "content": JOINT.join(filter(None, texts))}


def _turns(messages: Iterable[Message]) -> list[list[Message]]:
    """Runs of messages of the assistant, and of the others."""
    return [list(run) for _, run in groupby(messages, lambda message: message["role"] == "assistant")]


def _count_system(messages: list[Message]) -> int:
    """The number of system messages at the beginning."""
    return next((index for index, one in enumerate(messages) if one["role"] != "system"), len(messages))


# Rewrites, in the order in which they are applied --------------------------------------------------------


def _each_message(change: Callable[[Message], Message]) -> Rewrite:
    """Make a rewrite of a function that changes one message."""

    @wraps(change)
    def rewrite(messages: list[Message]) -> list[Message]:
        return [change(message) for message in messages]

    return rewrite


def _change_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


@_each_message
def arguments_as_text(message: Message) -> Message:
    """Arguments as JSON text."""
    return _change_arguments(message, lambda given: given if isinstance(given, str) else dump_json(given))


@_each_message
def arguments_as_object(message: Message) -> Message:
    """Arguments that are no JSON object, in one."""
    return _change_arguments(message, lambda given: {"arguments": given} if isinstance(given, str) else given)


def split_calls(messages: list[Message]) -> list[Message]:
    """One call a message, followed by its result."""
    split: list[Message] = []
    waiting: list[Message] = []  # calls of the last assistant message that are still to come
    for message in messages:
        if message["role"] == "tool":
            asked = [call for call in waiting if call["id"] == message["tool_call_id"]][:1]
            split += _as_messages(asked)
            waiting = [call for call in waiting if call not in asked]
        else:
            split += _as_messages(waiting)
            if waiting := message.get("tool_calls", [])[1:]:
                message = {**message, "tool_calls": message["tool_calls"][:1]}
        split.append(message)
    return split + _as_messages(waiting)


def _as_messages(calls: list[Message]) -> list[Message]:
    return [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]


@_each_message
def shorten_ids(message: Message) -> Message:
    """Ids of nine letters or digits."""
    if calls := message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "id": _shorten(call["id"])} for call in calls]}
    if message["role"] == "tool":
        return {**message, "tool_call_id": _shorten(message["tool_call_id"])}
    return message


def _shorten(call_id: str) -> str:
    if len(call_id) == ID_LENGTH and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:ID_LENGTH]


@_each_message
def text_as_reasoning(message: Message) -> Message:
    """Text beside reasoning and calls becomes a part of the reasoning."""
    if not message["content"] or "tool_calls" not in message or REASONING_FIELDS[0] not in message:
        return message
    reasoning = JOINT.join((message[REASONING_FIELDS[0]], message["content"]))
    return {**message, **dict.fromkeys(REASONING_FIELDS, reasoning), "content": ""}


def text_before_calls(messages: list[Message]) -> list[Message]:
    """Text in a message of its own, before that of the calls."""
    split: list[Message] = []
    for message in messages:
        if message["content"] and "tool_calls" in message:
            split.append(_without_calls(message))
            message = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
        split.append(message)
    return split


def open_calls_as_text(messages: list[Message]) -> list[Message]:
    """Calls without a result as text; what was answered stays as it is."""
    turns = _turns(messages)
    written: list[Message] = []
    for turn, following in zip(turns, [*turns[1:], []], strict=True):
        answered = {each["tool_call_id"] for each in following if each["role"] == "tool"}
        for message in turn:
            calls = message.get("tool_calls", ())
            if unanswered := [call for call in calls if call["id"] not in answered]:
                (said,) = calls_as_text([{**message, "tool_calls": unanswered}])
                rest = [call for call in calls if call["id"] in answered]
                message = {**said, "tool_calls": rest} if rest else said
            written.append(message)
    return written


def calls_as_text(messages: list[Message]) -> list[Message]:
    """Calls as lines of JSON in the assistant's text, results as messages of the user."""
    written: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"Result of {message['name']}: {message['content']}"
            if after_result:
                text = f"{written.pop()['content']}\n{text}"
            message = {"role": "user", "content": text}
        elif "tool_calls" in message:
            lines = [dump_json(call["function"]) for call in message["tool_calls"]]
            text = "\n".join(filter(None, (message["content"], *lines)))
            message = {**_without_calls(message), "content": text}
        written.append(message)
        after_result = is_result
    return written


def stray_results_as_text(messages: list[Message]) -> list[Message]:
    """Results without a call become messages of the user."""
    written: list[Message] = []
    open_calls: set[str] = set()
    for message in messages:
        if message["role"] == "assistant":
            open_calls = {call["id"] for call in message.get("tool_calls", ())}
        stray = message["role"] == "tool" and message["tool_call_id"] not in open_calls
        written += calls_as_text([message]) if stray else [message]
    return written


def results_first(messages: list[Message]) -> list[Message]:
    """Results right after their calls, before other messages."""
    ordered: list[Message] = []
    for turn in _turns(messages):
        if ordered and "tool_calls" in ordered[-1]:
            turn = sorted(turn, key=lambda message: message["role"] != "tool")
        ordered += turn
    return ordered


def drop_empty_answers(messages: list[Message]) -> list[Message]:
    """Without messages of the assistant that say nothing."""
    kept = ("tool_calls", REASONING_FIELDS[0])
    return [
        message
        for message in messages
        if message["role"] != "assistant" or message["content"] or any(key in message for key in kept)
    ]


def merge_system(messages: list[Message]) -> list[Message]:
    """System messages at the beginning go into the first message of the user."""
    count = _count_system(messages)
    text = JOINT.join(message["content"] for message in messages[:count])
    if messages[count:] and messages[count]["role"] == "user":
        return [_join(messages[count], text, before=True), *messages[count + 1 :]]
    return [{"role": "user", "content": text}, *messages[count:]] if count else messages


def merge_later_system(messages: list[Message]) -> list[Message]:
    """Later system messages go into the first one, or into the next or the last message of the user."""
    count = _count_system(messages)
    first = {"role": "system", "content": JOINT.join(message["content"] for message in messages[:count])}
    merged = [first] if count else []
    for turn in _turns(messages[count:]):
        pending = ""  # text for the next message of the user
        for message in turn:
            if message["role"] == "system":
                pending = JOINT.join(filter(None, (pending, message["content"])))
                continue
            if message["role"] == "user":
                message, pending = _join(message, pending, before=True), ""
            merged.append(message)
        if pending and turn[0]["role"] != "system" and merged[-1]["role"] == "user":
            merged[-1] = _join(merged[-1], pending)
        elif pending:
            merged.append({"role": "user", "content": pending})
    return merged


def user_first(messages: list[Message]) -> list[Message]:
    """A message of the user, maybe an empty one, comes first, or right after the system's."""
    count = _count_system(messages)
    if messages[count:] and messages[count]["role"] == "user":
        return messages
    return [*messages[:count], {"role": "user", "content": ""}, *messages[count:]]


def merge_user_into_result(messages: list[Message]) -> list[Message]:
    """Text of the user right after a result becomes a part of it."""
    merged: list[Message] = []
    for message in messages:
        if message["role"] == "user" and merged and merged[-1]["role"] == "tool":
            message = _join(merged.pop(), message["content"])
        merged.append(message)
    return merged


def merge_roles(messages: list[Message]) -> list[Message]:
    """Messages of equal roles in a row become one."""
    merged: list[Message] = []
    for message in messages:
        if not merged or merged[-1]["role"] != message["role"] or message["role"] == "tool":
            merged.append(message)
            continue
        last = merged[-1] = _join(merged[-1], message["content"])
        for name in REASONING_FIELDS:
            if reasoning := JOINT.join(filter(None, (last.get(name), message.get(name)))):
                last[name] = reasoning
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            last["tool_calls"] = calls
    return merged


@_each_message
def reasoning_as_part(message: Message) -> Message:
    """Reasoning as a part of the content."""
    if not (reasoning := message.get(REASONING_FIELDS[0])):
        return message
    text = [{"type": "text", "text": message["content"]}] if message["content"] else []
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *text]}


@_each_message
def null_content(message: Message) -> Message:
    """No content, instead of an empty one, beside calls."""
    return {**message, "content": None} if "tool_calls" in message and not message["content"] else message


ROLE_REWRITES: tuple[Rewrite, ...] = (  # those that change roles and their order
    *(stray_results_as_text, results_first, drop_empty_answers, merge_system, merge_later_system),
    *(user_first, merge_user_into_result, merge_roles),
)
REWRITES: tuple[Rewrite, ...] = (
    *(arguments_as_text, split_calls, shorten_ids, arguments_as_object, text_as_reasoning, text_before_calls),
    *(open_calls_as_text, calls_as_text, *ROLE_REWRITES, reasoning_as_part, null_content),
)


def rewrite_messages(messages: list[Message], chosen: set[Rewrite]) -> list[Message]:
    """The messages after these rewrites, always in the order of REWRITES."""
    for rewrite in REWRITES:
        if rewrite in chosen:
            messages = rewrite(messages)
    return messages


# Probes ---------------------------------------------------------------------------------------------


class Probe(msgspec.Struct, frozen=True):
    """Messages by name, and the words that their rendering must have; in this order, if `ordered`."""

    rewrites: str
    talk: str
    words: str
    ordered: bool = True


class Probes(msgspec.Struct, frozen=True):
    """What `probes.toml` declares."""

    plain: tuple[Probe, ...]
    with_tools: tuple[Probe, ...]
    messages: dict[str, Message]


_PROBES = msgspec.toml.decode(Path(__file__).with_name("probes.toml").read_bytes(), type=Probes)
_BY_NAME = {rewrite.__name__: rewrite for rewrite in REWRITES}
_USER = [_PROBES.messages["user"]]
_OBJECTS = ("{'city", "{'type", '{"type": "thinking')  # where the template expects text
Render = Callable[[list[Message], Any], str | None]
"""Renders messages with a value of `tools`; None where the template refuses them."""


class TemplateRewrites:
    """The rewrites that one template needs, found by rendering probes with it."""

    def __init__(self, render: Render) -> None:
        self.no_tools: list[Any] | None = None  # stands for no tools; some templates need a list
        if render(_USER, None) is None:
            self.no_tools = []
        self._needed = self._find(_PROBES.plain, render, set())
        self._with_tools = self._find(_PROBES.with_tools, render, self._needed)

    def _find(self, probes: Iterable[Probe], render: Render, needed: set[Rewrite]) -> set[Rewrite]:
        for probe in probes:
            more = needed | {_BY_NAME[name] for name in probe.rewrites.split()}
            if not self._passes(probe, render, needed) and self._passes(probe, render, more):
                needed = more
        return needed

    def __str__(self) -> str:
        return ", ".join(rewrite.__name__ for rewrite in REWRITES if rewrite in self._with_tools) or "none"

    def shapes(
        self, messages: list[Message], *, tools: bool = False, as_text: bool = False
    ) -> Iterator[list[Message]]:
        """The messages with the rewrites that the template needs; then, should it refuse, with others too.

        Set `tools` for a request that has some. With `as_text` calls are text in any case.
        """
        needed = self._with_tools if tools else self._needed
        needed = needed | {calls_as_text} if as_text else needed
        tried: list[list[Message]] = []
        roles = set(ROLE_REWRITES)
        last = (roles, {*roles, open_calls_as_text}, {*roles, calls_as_text})
        for extra in (set(), *({rewrite} for rewrite in REWRITES), *last):
            shape = rewrite_messages(messages, needed | extra)
            if shape not in tried:
                tried.append(shape)
                yield shape

    def _passes(self, probe: Probe, render: Render, rewrites: set[Rewrite]) -> bool:
        messages = [_PROBES.messages[name] for name in probe.talk.split()]
        rendered = render(rewrite_messages(messages, rewrites), self.no_tools)
        if rendered is None or any(written in rendered for written in _OBJECTS):
            return False
        places = [rendered.find(word) for word in probe.words.split()]
        return min(places) >= 0 and (not probe.ordered or places == sorted(places))
