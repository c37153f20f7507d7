"""Generated assistant turns, written by a chat template, and what an output parser makes of them."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from cllm.errors import InvalidRequest
from cllm.text.chat_format import ChatFormat, Tool
from cllm.text.chat_template import ChatTemplate
from cllm.text.detokenizer import count_common
from cllm.text.format_analysis import TemplateProbe, derive_format
from cllm.text.output_parser import (
    ContentText,
    OutputEvent,
    OutputParser,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from tests.driver.corpus import template_files

Message = dict[str, Any]
PARAMETERS = {
    "city": {"type": "string", "description": "Any."},
    "note": {"type": "string", "description": "Any."},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "exact": {"type": "boolean"},
    "filter": {"type": "object"},
    "items": {"type": "array"},
}
TOOLS = tuple(
    Tool(name, f"It {name}s.", {"type": "object", "properties": PARAMETERS, "required": ["city"]})
    for name in ("get_weather", "search-web", "files.read")
)
WORDS = (
    *("sun", "rain", "Zürich", "東京", "naïve", "42", "3.14", "it's", '"quoted"', "back\\slash"),
    *("<b>bold</b>", "a&b", "{x}", "[y]", "null", "true", "tab\tbed", "new\nline", "two\n\nlines", "$5"),
    *("100%", "émoji🙂", "f(x)", "key:", "value;", "--flag", "/path/to/file.txt"),
)
# Tokens that end an answer, so that they are no part of it; some families use the last ones inside of it.
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<EOS>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>"),
    *("<end_of_turn>", "<SPECIAL_12>", "<|end_of_text|>", "<|return|>", "<|call|>", "<|calls|>", "<turn|>"),
    *("<seed:eos>", "<end_of_sentence>", "[e~[", "</assistant>", "<sep>", "<｜hy_eos:opensource｜>"),
    *("<|eot|>", "<|user_end|>", "<|role_end|>", "<|START_OF_TURN_TOKEN|>", "<|end_of_msg|>"),
    "<|tool_response>",
)
LAST_ENDS = ("<|end|>", "<|message_sep|>")
_END = re.compile("|".join(map(re.escape, ENDS)))
_LAST_END = re.compile(rf"({'|'.join(map(re.escape, LAST_ENDS))})\s*\Z")


class Parts(NamedTuple):
    """An answer, taken apart."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[tuple[str, Any], ...] = ()


@dataclass(slots=True)
class Family:
    """A chat template with the format derived from it."""

    name: str
    source: str
    template: ChatTemplate = field(init=False)
    format: ChatFormat = field(init=False)
    argument_text: bool = field(init=False)  # arguments as JSON text; else as an object

    def __post_init__(self) -> None:
        self.template = ChatTemplate(self.source)
        self.format = derive_format(self.render, ends=ENDS)
        self.argument_text = TemplateProbe(self.render).argument_text

    def render(self, **variables: Any) -> str:
        return self.template.render(**{"bos_token": "<BOS>", "eos_token": "<EOS>", **variables})

    def write(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        tools = [tool.for_template() for tool in TOOLS]
        known = {"functions": json.dumps(tools), "datetime": "now", "date_string": "now"}
        options = {"enable_thinking": True, "thinking": True, **known}
        given = {"messages": list(messages), "add_generation_prompt": prompt, **options}
        for shown in (tools, [_only_texts(tool) for tool in tools]):
            with contextlib.suppress(InvalidRequest):
                return self.render(tools=shown, **given)
        return self.render(tools=None, **given)


def _only_texts(tool: Message) -> Message:
    """For templates that fail on other types."""
    parameters = {"type": "object", "properties": {"city": PARAMETERS["city"]}, "required": ["city"]}
    function = {**tool["function"], "parameters": parameters}
    return {**tool, "function": function}


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant's turn as the model would have written it."""

    written: str
    thinking: bool
    wanted: Parts


@cache
def get_family(name: str) -> Family:
    """The family of a template of the corpus; derived once."""
    return Family(name, template_files()[name].read_text(encoding="utf-8"))


def make_turns(family: Family, seed: int, count: int) -> Iterator[Turn]:
    """Turns that the template writes; a conversation that it refuses is left out."""
    rng = random.Random(f"{family.name}:{seed}")
    for _ in range(count):
        history = _make_history(rng, family)
        message = _make_message(rng, family)
        turn = _write_turn(family, history, message)
        if turn is not None:
            yield turn


def _make_history(rng: random.Random, family: Family) -> list[Message]:
    messages: list[Message] = []
    for _ in range(rng.choice((0, 0, 1))):
        messages.append({"role": "user", "content": _text(rng)})
        if family.format.writes_calls and rng.random() < 0.5:
            calls = [_make_call(rng, family)]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            name = calls[0]["function"]["name"]
            result = {"role": "tool", "tool_call_id": calls[0]["id"], "name": name, "content": _text(rng)}
            messages.append(result)
        messages.append({"role": "assistant", "content": _text(rng)})
    return [*messages, {"role": "user", "content": _text(rng)}]


def _make_message(rng: random.Random, family: Family) -> Message:
    known = family.format
    message: Message = {"role": "assistant", "content": ""}
    if rng.random() < 0.6 and known.reasoning_field not in ("", "parts"):
        message[known.reasoning_field] = "Ok " + _text(rng)
    if known.writes_calls and rng.random() < 0.7:
        count = 1 if known.one_call else rng.choice((1, 1, 2, 3))
        message["tool_calls"] = [_make_call(rng, family) for _ in range(count)]
    if "tool_calls" not in message or rng.random() < 0.4:
        message["content"] = "Well " + _text(rng)
    if known.reasoning_field == "parts" and message["content"] and rng.random() < 0.6:
        thinking = {"type": "thinking", "thinking": "Ok " + _text(rng)}
        message["content"] = [thinking, {"type": "text", "text": message["content"]}]
    if known.lead and known.reasoning_field == "thinking" and "tool_calls" in message:
        message["content"] = ""  # gpt-oss writes it as reasoning
    return message


def _make_call(rng: random.Random, family: Family) -> Message:
    keys = rng.sample(sorted(PARAMETERS), rng.randint(1 if rng.random() < 0.9 else 0, 4))
    arguments = {key: _make_value(rng, PARAMETERS[key]["type"], family) for key in keys}
    given = json.dumps(arguments) if family.argument_text else arguments
    call_id = "".join(rng.choices("abcdefghijk0123456789", k=9))
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": rng.choice(TOOLS).name, "arguments": given},
    }


def _make_value(rng: random.Random, kind: str, family: Family, depth: int = 0) -> Any:
    match kind:
        case "string":
            inside = family.format.calls.nested and depth  # there, all that reads as JSON is JSON
            return f"so {_text(rng)}" if inside or rng.random() < 0.9 else ""
        case "integer":
            return rng.randint(-1000, 1000)
        case "number":
            return rng.choice((0.5, -2.25, 1e-3, 17.0))
        case "boolean":
            return rng.random() < 0.5
        case "array":
            kinds = ("string", "integer", "boolean", *(("object", "array") if depth < 2 else ()))
            count = rng.randint(bool(family.format.calls.nested), 3)  # tags cannot say that a list is empty
            return [_make_value(rng, rng.choice(kinds), family, depth + 1) for _ in range(count)]
        case _:
            kinds = ("string", "integer", "number", *(("object", "array") if depth < 2 else ()))
            count = rng.randint(bool(family.format.calls.nested), 3)
            keys = rng.sample(("alpha", "beta", "gamma", "delta"), count)
            return {key: _make_value(rng, rng.choice(kinds), family, depth + 1) for key in keys}


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))


def _write_turn(family: Family, history: Sequence[Message], message: Message) -> Turn | None:
    try:
        prompt = family.write(history, prompt=True)
        whole = family.write([*history, message])
    except InvalidRequest:
        return None
    form = family.format
    opening, closing = form.reasoning_openings[0].strip(), form.reasoning_closings[0].strip()
    shared = _turn_start(prompt, whole)
    started = whole[shared:].removeprefix("<|CHATBOT_TOKEN|>")  # Command R+ has its prompt after the turn
    written = _LAST_END.sub("", _END.split(started)[0])
    opened = prompt.rstrip().endswith(opening) or whole[:shared].rstrip().endswith(opening)
    thinking = opened and closing in written and opening not in written
    return Turn(written, thinking, _wanted(message, written))


def _turn_start(prompt: str, whole: str) -> int:
    """Where the turn starts: the prompt may go on in a way that this turn does not. Not inside a tag."""
    shared = count_common(prompt, whole)
    tag = whole.rfind("<", 0, shared)
    return tag if shared < len(prompt) and tag >= 0 and ">" not in whole[tag:shared] else shared


def _wanted(message: Message, written: str) -> Parts:
    """What the turn must be read as: those parts of the message that the template wrote."""
    content, fields = message["content"], ("reasoning_content", "reasoning", "thinking")
    reasoning = next((message[field] for field in fields if field in message), "")
    if isinstance(content, list):
        reasoning, content = content[0]["thinking"], content[1]["text"]
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        if call["function"]["name"] in written:
            calls.append((call["function"]["name"], parsed))
    reasoning, content = (text if text.strip() in written else "" for text in (reasoning, content))
    return Parts(reasoning, content, tuple(calls))


def read_turn(family: Family, turn: Turn, rng: random.Random, *, single: bool = False) -> Parts:
    """What the parser makes of a turn that comes in random pieces, or by single characters."""
    parser = OutputParser(family.format, TOOLS, thinking=turn.thinking)
    events: list[Any] = []
    at = 0
    while at < len(turn.written):
        size = 1 if single else rng.choice((1, 2, 3, 5, 8, 20, 200))
        events += parser.feed(turn.written[at : at + size])
        at += size
    return collect([*events, *parser.finish()])


def collect(events: Sequence[OutputEvent]) -> Parts:
    """The events put together; arguments are parsed where they can be."""
    reasoning = text = ""
    calls: list[list[Any]] = []
    for event in events:
        match event:
            case ReasoningText(piece):
                reasoning += piece
            case ContentText(piece):
                text += piece
            case ToolCallStart(index, name):
                assert index == len(calls), "calls are numbered in their order"
                calls.append([name, ""])
            case ToolCallArguments(index, piece):
                assert index == len(calls) - 1, "arguments belong to the last call"
                calls[index][1] += piece
    for call in calls:
        with contextlib.suppress(ValueError):
            call[1] = json.loads(call[1])
    return Parts(reasoning, text, tuple((name, arguments) for name, arguments in calls))


def check_turns(family: Family, seed: int, count: int) -> tuple[int, list[str]]:
    """How many turns were read, and what was wrong with some of them."""
    rng = random.Random(seed)
    read, wrong = 0, []
    for turn in make_turns(family, seed, count):
        found = read_turn(family, turn, rng, single=read % 5 == 0)
        read += 1
        if found != turn.wanted:
            wrong.append(f"{family.name}: {turn.written!r} is not {found!r}")
    return read, wrong
