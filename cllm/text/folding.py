"""Folding: the messages of a conversation in the shape that a chat template takes.

Templates refuse what others take: a system role, a later system message, equal roles in a row, two calls in a
message. A fold changes one such thing, and only the messages that have it. What comes before them stays, so
that the prompt of a conversation that grows begins with its former prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from cllm.text.chat_format import GENERIC, CallFormat, WrittenCall, write_calls

Message = dict[str, Any]
Fold = Callable[[list[Message]], list[Message]]
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")  # what templates call the reasoning
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
        message = {key: value for key, value in given.items() if value is not None and key not in THOUGHTS}
        message["content"] = message.get("content") or ""
        thoughts = next(filter(None, map(given.get, THOUGHTS)), None)
        if message["role"] == "assistant" and thoughts:
            message |= dict.fromkeys(THOUGHTS, thoughts)
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


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def describe_tools(
    messages: list[Message], tools: Sequence[Mapping[str, Any]], form: CallFormat
) -> list[Message]:
    """Tools in words, in the system message, for templates that take none; calls as the model writes them."""
    example = write_calls(form, [WrittenCall("the tool's name", {"argument": "value"}, "000000000")])
    shown = GENERIC_FORM if form == GENERIC.calls else f"a call of this form: {example}"
    text = INSTRUCTIONS.format(tools="\n".join(_dump(tool["function"]) for tool in tools), form=shown)
    if messages and messages[0]["role"] == "system":
        return [_join(messages[0], text), *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def write_calls_as_text(messages: list[Message], form: CallFormat) -> list[Message]:
    """Calls in the assistant's text, as the model writes them; results stay messages of their own."""
    written: list[Message] = []
    for message in messages:
        if "tool_calls" in message:
            given = arguments_as_object([message])[0]["tool_calls"]
            calls = [
                WrittenCall(call["function"]["name"], call["function"]["arguments"], call["id"])
                for call in given
            ]
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            before = form.before if message["content"] else ""
            message["content"] += before + write_calls(form, calls)
        written.append(message)
    return written


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


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


# Folds, in the order in which they are applied -----------------------------------------------------------


def _change_arguments(messages: list[Message], change: Callable[[Any], Any]) -> list[Message]:
    def changed(call: Message) -> Message:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return [
        {**message, "tool_calls": [*map(changed, message["tool_calls"])]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def arguments_as_text(messages: list[Message]) -> list[Message]:
    """Arguments as JSON text."""
    return _change_arguments(messages, lambda given: given if isinstance(given, str) else _dump(given))


def arguments_as_object(messages: list[Message]) -> list[Message]:
    """Arguments that are no JSON object, in one."""
    return _change_arguments(
        messages, lambda given: {"arguments": given} if isinstance(given, str) else given
    )


def one_call(messages: list[Message]) -> list[Message]:
    """One call a message, followed by its result."""
    folded: list[Message] = []
    waiting: list[Message] = []  # calls of the last assistant message that are still to come
    for message in messages:
        if message["role"] == "tool":
            asked = [call for call in waiting if call["id"] == message["tool_call_id"]][:1]
            folded += _as_messages(asked)
            waiting = [call for call in waiting if call not in asked]
        else:
            folded += _as_messages(waiting)
            waiting = message.get("tool_calls", [])[1:]
            if waiting:
                message = {**message, "tool_calls": message["tool_calls"][:1]}
        folded.append(message)
    return folded + _as_messages(waiting)


def _as_messages(calls: list[Message]) -> list[Message]:
    return [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]


def short_ids(messages: list[Message]) -> list[Message]:
    """Ids of nine letters or digits."""
    folded: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [{**call, "id": _shorten(call["id"])} for call in calls]}
        elif message["role"] == "tool":
            message = {**message, "tool_call_id": _shorten(message["tool_call_id"])}
        folded.append(message)
    return folded


def _shorten(call_id: str) -> str:
    if len(call_id) == ID_LENGTH and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:ID_LENGTH]


def thoughts_for_text(messages: list[Message]) -> list[Message]:
    """Text beside reasoning and calls becomes a part of the reasoning."""
    folded: list[Message] = []
    for message in messages:
        if message["content"] and "tool_calls" in message and THOUGHTS[0] in message:
            thoughts = JOINT.join((message[THOUGHTS[0]], message["content"]))
            message = {**message, **dict.fromkeys(THOUGHTS, thoughts), "content": ""}
        folded.append(message)
    return folded


def text_before_calls(messages: list[Message]) -> list[Message]:
    """Text in a message of its own, before that of the calls."""
    folded: list[Message] = []
    for message in messages:
        if message["content"] and "tool_calls" in message:
            folded.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
        folded.append(message)
    return folded


def open_calls_as_text(messages: list[Message]) -> list[Message]:
    """Calls without a result as text; what was answered stays as it is."""
    turns = _turns(messages)
    folded: list[Message] = []
    for turn, following in zip(turns, [*turns[1:], []], strict=True):
        answered = {each["tool_call_id"] for each in following if each["role"] == "tool"}
        for message in turn:
            calls = message.get("tool_calls", ())
            if unanswered := [call for call in calls if call["id"] not in answered]:
                (said,) = calls_as_text([{**message, "tool_calls": unanswered}])
                rest = [call for call in calls if call["id"] in answered]
                message = {**said, "tool_calls": rest} if rest else said
            folded.append(message)
    return folded


def calls_as_text(messages: list[Message]) -> list[Message]:
    """Calls as lines of JSON in the assistant's text, results as messages of the user."""
    folded: list[Message] = []
    after_result = False
    for message in messages:
        text = message["content"]
        is_result = message["role"] == "tool"
        if is_result:
            text = f"Result of {message['name']}: {text}"
        if is_result and after_result:
            folded[-1] = {**folded[-1], "content": f"{folded[-1]['content']}\n{text}"}
        elif is_result:
            folded.append({"role": "user", "content": text})
        elif "tool_calls" in message:
            lines = [_dump(call["function"]) for call in message["tool_calls"]]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            folded.append({**rest, "content": "\n".join(filter(None, (text, *lines)))})
        else:
            folded.append(message)
        after_result = is_result
    return folded


def stray_results(messages: list[Message]) -> list[Message]:
    """Results without a call become messages of the user."""
    folded: list[Message] = []
    open_calls: set[str] = set()
    for message in messages:
        if message["role"] == "assistant":
            open_calls = {call["id"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and message["tool_call_id"] not in open_calls:
            folded += calls_as_text([message])
        else:
            folded.append(message)
    return folded


def results_first(messages: list[Message]) -> list[Message]:
    """Results right after their calls, before other messages."""
    folded: list[Message] = []
    for turn in _turns(messages):
        if folded and "tool_calls" in folded[-1]:
            turn = sorted(turn, key=lambda message: message["role"] != "tool")
        folded += turn
    return folded


def no_empty_answers(messages: list[Message]) -> list[Message]:
    """Without messages of the assistant that say nothing."""
    kept = ("tool_calls", THOUGHTS[0])
    return [
        message
        for message in messages
        if message["role"] != "assistant" or message["content"] or any(key in message for key in kept)
    ]


def no_system(messages: list[Message]) -> list[Message]:
    """System messages at the beginning go into the first message of the user."""
    count = _count_system(messages)
    text = JOINT.join(message["content"] for message in messages[:count])
    if messages[count:] and messages[count]["role"] == "user":
        return [_join(messages[count], text, before=True), *messages[count + 1 :]]
    return [{"role": "user", "content": text}, *messages[count:]] if count else messages


def no_later_system(messages: list[Message]) -> list[Message]:
    """Later system messages go into the first one, or into the next or the last message of the user."""
    count = _count_system(messages)
    first = {"role": "system", "content": JOINT.join(message["content"] for message in messages[:count])}
    folded = [first] if count else []
    for turn in _turns(messages[count:]):
        pending = ""  # text for the next message of the user
        for message in turn:
            if message["role"] == "system":
                pending = JOINT.join(filter(None, (pending, message["content"])))
            elif message["role"] == "user":
                folded.append(_join(message, pending, before=True))
                pending = ""
            else:
                folded.append(message)
        if pending and turn[0]["role"] != "system" and folded[-1]["role"] == "user":
            folded[-1] = _join(folded[-1], pending)
        elif pending:
            folded.append({"role": "user", "content": pending})
    return folded


def user_first(messages: list[Message]) -> list[Message]:
    """A message of the user, maybe an empty one, comes first, or right after the system's."""
    count = _count_system(messages)
    if messages[count:] and messages[count]["role"] == "user":
        return messages
    return [*messages[:count], {"role": "user", "content": ""}, *messages[count:]]


def no_user_after_result(messages: list[Message]) -> list[Message]:
    """What the user says right after a result becomes a part of it."""
    folded: list[Message] = []
    for message in messages:
        if message["role"] == "user" and folded and folded[-1]["role"] == "tool":
            folded[-1] = _join(folded[-1], message["content"])
        else:
            folded.append(message)
    return folded


def alternate(messages: list[Message]) -> list[Message]:
    """Messages of equal roles in a row become one."""
    folded: list[Message] = []
    for message in messages:
        if not folded or folded[-1]["role"] != message["role"] or message["role"] == "tool":
            folded.append(message)
            continue
        merged = {**_join(folded[-1], message["content"])}
        for name in THOUGHTS:
            if thoughts := JOINT.join(filter(None, (merged.get(name), message.get(name)))):
                merged[name] = thoughts
        if calls := [*merged.get("tool_calls", ()), *message.get("tool_calls", ())]:
            merged["tool_calls"] = calls
        folded[-1] = merged
    return folded


def thoughts_as_parts(messages: list[Message]) -> list[Message]:
    """Reasoning as a part of the content."""
    folded: list[Message] = []
    for message in messages:
        if thoughts := message.get(THOUGHTS[0]):
            text = message["content"]
            parts = [
                {"type": "thinking", "thinking": thoughts},
                *([{"type": "text", "text": text}] * bool(text)),
            ]
            message = {**message, "content": parts}
        folded.append(message)
    return folded


def null_content(messages: list[Message]) -> list[Message]:
    """No content, instead of an empty one, beside calls."""
    return [
        {**message, "content": None} if "tool_calls" in message and not message["content"] else message
        for message in messages
    ]


FOLDS: tuple[Fold, ...] = (
    arguments_as_text,
    one_call,
    short_ids,
    arguments_as_object,
    thoughts_for_text,
    text_before_calls,
    open_calls_as_text,
    calls_as_text,
    stray_results,
    results_first,
    no_empty_answers,
    no_system,
    no_later_system,
    user_first,
    no_user_after_result,
    alternate,
    thoughts_as_parts,
    null_content,
)
# Those that change who speaks, and in which order.
ROLE_FOLDS = FOLDS[FOLDS.index(stray_results) : FOLDS.index(thoughts_as_parts)]


def apply_folds(messages: list[Message], folds: Iterable[Fold]) -> list[Message]:
    """The messages folded, always in the order of FOLDS."""
    chosen = set(folds)
    for fold in FOLDS:
        if fold in chosen:
            messages = fold(messages)
    return messages
